"""Limits of solvers, by the clock or by counted work, with which results are reproducible."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """Limits of one call of `place`. With counted limits only, the same seed and one worker, results are reproducible; with a time limit they
    depend on the speed of the machine.

    Raises:
        JobError: a limit that is not above zero.
    """

    time_limit_s: float | None = 60.0
    """Limit of the whole call; None: counted limits only."""
    annealing_steps: int = 10_000_000
    """Placements and orders tried by annealing."""
    program_nodes: int = 10_000_000
    """Branches of each mixed-integer program (HiGHS)."""
    constraint_work: float = 1e9
    """CP-SAT's deterministic time, about seconds of an idle core."""
    workers: int = 1
    """Threads of CP-SAT. More than one finds more, but results are not reproducible."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "annealing_steps", "program_nodes", "constraint_work", "workers"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise JobError(f"budget: {name} = {value} should be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """Rest of a time limit."""

    end_s: float
    """End on the clock; infinite: no limit."""
    clock: Callable[[], float] = time.monotonic

    def left_s(self) -> float:
        return max(0.0, self.end_s - self.clock())

    def part(self, share: float) -> Timer:
        """A timer that ends when this share of what is left has passed."""
        now_s = self.clock()
        return Timer(end_s=now_s + share * max(0.0, self.end_s - now_s), clock=self.clock)


def timer(limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> Timer:
    """A timer that begins now."""
    return Timer(end_s=float("inf") if limit_s is None else clock() + limit_s, clock=clock)
