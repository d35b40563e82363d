"""Functions of `benchmarks.durable_map`. The file is copied into a folder of its own, from which all sides import it, as a user's module would be."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence


def empty(n: int) -> int:
    """Does nothing."""
    return n


def busy(task: Sequence[float]) -> float:
    """Computes for so many seconds of CPU time. The task is its number and the seconds."""
    ends_at = time.thread_time() + task[1]
    while time.thread_time() < ends_at:
        pass
    return task[0]


def sleep(task: Sequence[float]) -> float:
    """Sleeps so many seconds. The task is its number and the seconds."""
    time.sleep(task[1])
    return task[0]


def reverse(data: bytes) -> bytes:
    """As many bytes as it is given."""
    return data[::-1]


def logged(key: str, seconds: float, log: str) -> dict[str, str]:
    """Sleeps, and says in a log when it begins and ends: kind, key, process, monotonic time."""
    _append(log, f"begin {key} {os.getpid()} {time.monotonic()}\n")
    time.sleep(seconds)
    _append(log, f"end {key} {os.getpid()} {time.monotonic()}\n")
    return {"key": key}


def nothing(item: dict[str, object]) -> None:
    """Does nothing, with an item that has a key."""


def _append(log: str, line: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())  # in one piece, beside those of other processes
    finally:
        os.close(file)
