"""Functions that `benchmarks.tasks` runs as tasks."""

from __future__ import annotations

import time


def pause(n: int, seconds: float) -> float:
    """Sleeps, and returns how long that took: on a busy machine longer than it should."""
    began = time.perf_counter()
    if seconds:
        time.sleep(seconds)
    return time.perf_counter() - began


def pause_of(arguments: tuple[int, float]) -> float:
    """The same for libraries that pass one argument."""
    return pause(*arguments)
