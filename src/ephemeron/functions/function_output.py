"""Output of a function's code: redirected to the log of its invocation, and its warnings to the run's events.

File descriptors 1 and 2 are redirected, so that the log also has the output of C libraries and child processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ephemeron.events import Event, Note

MOST_WARNINGS = 20
"""Different texts that one invocation emits."""
_LONGEST = 500


@contextlib.contextmanager
def printed_to(path: Path | None) -> Iterator[None]:
    """Standard output and standard error go into a file; None, or a file that cannot be opened: unchanged."""
    try:
        log = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        log = None
    if log is None:
        yield
        return
    before = [os.dup(fd) for fd in (1, 2)]
    try:
        for fd in (1, 2):
            os.dup2(log, fd)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed by the user, or the disk is full
                stream.flush()
        for fd, old in zip((1, 2), before, strict=True):
            os.dup2(old, fd)
            os.close(old)
        os.close(log)


@contextlib.contextmanager
def warnings_emitted(emit: Callable[[Event], None], now: Callable[[], float]) -> Iterator[None]:
    """Warnings are printed as always, and each text is emitted once. Inside a running event loop.

    Args:
        emit: takes the event, on the loop's thread.
        now: seconds of the run.
    """
    loop, said, show = asyncio.get_running_loop(), set[str](), warnings.showwarning

    def shown(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        show(message, category, filename, lineno, file, line)
        words = " ".join(str(message).split())[:_LONGEST]
        text = f"{category.__name__}: {words} ({os.path.basename(filename)}, line {lineno})"
        if file is None and text not in said and len(said) < MOST_WARNINGS:
            said.add(text)
            with contextlib.suppress(RuntimeError):  # the invocation has ended
                loop.call_soon_threadsafe(emit, Note(t=now(), level="warning", text=text))

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = show
