"""Shutdown of a process by a signal or by a thread of its own.

A `threading.Event` would deadlock: a signal handler that sets it while the main thread holds its lock waits for ever.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType


class ShutdownSignal:
    """Set by SIGTERM, SIGINT, or `set`. Made and waited for in the main thread.

    Args:
        signals: that end the process; their handlers are replaced.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write)
        for number in signals:
            signal.signal(number, _noted)

    def set(self) -> None:
        """Ends the wait; from any thread."""
        with suppress(BlockingIOError):  # the pipe is full of signals
            os.write(self._write, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits; whether it has been set."""
        return bool(select.select([self._read], [], [], timeout_s)[0])


def _noted(number: int, frame: FrameType | None) -> None:
    """Handler without effect: Python writes to the pipe for every signal with a handler."""
