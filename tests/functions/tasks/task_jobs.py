"""Functions that tasks of tests run."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path


def square(n: int) -> int:
    return n * n


def join(*parts: memoryview, sep: str = "") -> bytes:
    return sep.encode().join(bytes(part) for part in parts)


def fail(text: str = "seven is no colour") -> None:
    raise ValueError(text)


def flaky(counter: str, until: int) -> int:
    """Fails until it has run so many times."""
    with Path(counter).open("a") as file:
        file.write("x")
    runs = len(Path(counter).read_text())
    if runs < until:
        raise RuntimeError(f"run {runs}")
    return runs


def nothing() -> None:
    return None


def odd() -> object:
    return object()


def large(n: int) -> bytes:
    return hashlib.sha256(str(n).encode()).digest() * 8192


def forever() -> None:
    while True:
        time.sleep(0.01)


def blocked(seconds: float) -> None:
    time.sleep(seconds)


def die_once(marker: str) -> str:
    """Kills its process, unless an earlier run did."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def slow(n: int, seconds: float, runs: str) -> int:
    """Notes that it ran, and in which process."""
    with Path(runs).open("a") as file:
        file.write(f"{n} {os.getpid()}\n")
    time.sleep(seconds)
    return n * n
