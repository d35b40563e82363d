"""What a process waits for that is told to end, by a signal or by a thread of its own.

A `threading.Event` will not do: a handler that sets it, in the moment in which the main thread holds its lock, waits for ever.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType


class ShutdownSignal:
    """SIGTERM, SIGINT, or `set`. Made and waited for in the main thread.

    Args:
        signals: that mean the end; their handlers are replaced.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write)
        for number in signals:
            signal.signal(number, _noted)

    def set(self) -> None:
        """From any thread."""
        with suppress(BlockingIOError):  # then it has been said often enough
            os.write(self._write, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has been told, at last."""
        return bool(select.select([self._read], [], [], timeout_s)[0])


def _noted(number: int, frame: FrameType | None) -> None:
    """Python writes to the pipe by itself, for signals that have a handler."""
