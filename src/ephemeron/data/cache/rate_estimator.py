"""Estimate of a job's samples per second from the times of its accesses.

Jobs take samples by the batch: many at one instant, then nothing while they train. So a rate is samples over time
between instants, not between accesses, and both are forgotten exponentially (a job that shares its processor speeds up
and slows down within an epoch).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MEMORY = 256.0
"""Samples after which an observation counts 1/e as much."""

STALLED_AFTER = 4.0
"""Usual gaps between instants after which a silent job is thought to have stalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateState:
    """State of a `RateEstimator`, as it is stored."""

    memory: float
    count: float
    elapsed_s: float
    instants: float
    burst: int
    last_s: float | None


class RateEstimator:
    """Samples per second of one job.

    Args:
        memory: samples after which an observation counts 1/e as much.
    """

    __slots__ = ("_burst", "_count", "_elapsed_s", "_instants", "_memory", "last_s")

    def __init__(self, memory: float = MEMORY) -> None:
        self._memory = memory
        self._count = self._elapsed_s = self._instants = 0.0
        self._burst = 0
        self.last_s: float | None = None
        """When samples were taken last; None before the first."""

    def observe(self, now_s: float, samples: int = 1) -> None:
        """Records samples that were taken at `now_s`. Times before the last one count as the last one."""
        if self.last_s is not None and now_s > self.last_s:
            keep = self._memory / (self._memory + self._burst)
            self._elapsed_s = keep * self._elapsed_s + (now_s - self.last_s)
            self._count = keep * self._count + self._burst
            self._instants = keep * self._instants + 1
            self._burst = 0
        self._burst += samples
        self.last_s = now_s if self.last_s is None else max(self.last_s, now_s)

    @property
    def samples_per_s(self) -> float | None:
        """The rate, or None while there is only one instant to go by."""
        return self._count / self._elapsed_s if self._elapsed_s > 0 and self._count > 0 else None

    def counts_from_s(self, now_s: float) -> float:
        """The time from which to count on, at the rate, to the next samples: when samples were taken last, or now.

        A job that has been silent for much longer than usual has stalled, or ended without leaving. It is expected to stay
        silent for as long again: the time moves further into the future with every call.
        """
        if self.last_s is None:
            return now_s
        silent_s = now_s - self.last_s
        usual_s = self._elapsed_s / self._instants if self._instants else math.inf
        return now_s + silent_s if silent_s > STALLED_AFTER * usual_s else self.last_s

    def state(self) -> RateState:
        """The whole state."""
        return RateState(
            memory=self._memory,
            count=self._count,
            elapsed_s=self._elapsed_s,
            instants=self._instants,
            burst=self._burst,
            last_s=self.last_s,
        )

    @classmethod
    def from_state(cls, state: RateState) -> RateEstimator:
        """The inverse of `state`."""
        found = cls(state.memory)
        found._count, found._elapsed_s, found._instants = state.count, state.elapsed_s, state.instants
        found._burst, found.last_s = state.burst, state.last_s
        return found


def assumed_rate(own: RateEstimator, others: Iterable[RateEstimator]) -> float:
    """A job's rate, or while it is unknown the mean of the others' (DPFlow section 3.4.4), or 1 if all are unknown."""
    rate = own.samples_per_s
    if rate is not None:
        return rate
    known = [r for r in (other.samples_per_s for other in others) if r is not None]
    return sum(known) / len(known) if known else 1.0
