"""Rate at which a job uses samples, estimated from the times of its accesses.

Jobs take samples by the batch: many at one instant, then none while they train. So a rate is samples over time
between instants, not between accesses, and both decay exponentially (a job that shares its processor speeds up
and slows down within an epoch).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

MEMORY = 256.0
"""Samples after which the weight of an observation has decayed to 1/e."""

STALLED_AFTER = 4.0
"""Number of usual gaps between instants after which a silent job is considered stalled."""


class RateEstimator:
    """Samples per second of one job.

    Args:
        memory: samples after which the weight of an observation has decayed to 1/e.
    """

    __slots__ = ("_burst", "_count", "_elapsed_s", "_instants", "_memory", "last_s")

    def __init__(self, memory: float = MEMORY) -> None:
        self._memory = memory
        self._count = self._elapsed_s = self._instants = 0.0
        self._burst = 0
        self.last_s: float | None = None
        """Time of the last access; None before the first."""

    def observe(self, now_s: float, samples: int = 1) -> None:
        """Records that `samples` were taken at `now_s`. If the clock runs backwards, the last time is kept."""
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
        """The rate, or None after fewer than two instants."""
        return self._count / self._elapsed_s if self._elapsed_s > 0 and self._count > 0 else None

    def counts_from_s(self, now_s: float) -> float:
        """Time from which the rate predicts the next samples: the last access, or later for a stalled job.

        A job that has been silent for much longer than usual has stalled, or ended without leaving. It is expected to
        be silent for as long again: that long from now, and later with each call.
        """
        if self.last_s is None:
            return now_s
        silent_s = now_s - self.last_s
        usual_s = self._elapsed_s / self._instants if self._instants else math.inf
        return now_s + silent_s if silent_s > STALLED_AFTER * usual_s else self.last_s

    def state_dict(self) -> dict[str, float | None]:
        """The whole state, as numbers."""
        return {
            "memory": self._memory, "count": self._count, "elapsed_s": self._elapsed_s, "instants": self._instants,
            "burst": self._burst, "last_s": self.last_s,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, float | None]) -> RateEstimator:
        """The estimator of a state from `state_dict`."""
        pace = cls(float(state["memory"] or MEMORY))
        pace._count = float(state["count"] or 0.0)
        pace._elapsed_s = float(state["elapsed_s"] or 0.0)
        pace._instants = float(state["instants"] or 0.0)
        pace._burst = int(state["burst"] or 0)
        pace.last_s = state["last_s"]
        return pace


def assumed_rate(own: RateEstimator, others: Iterable[RateEstimator]) -> float:
    """A job's rate, or while it is unknown the mean of the others (DPFlow section 3.4.4), or 1 if all are unknown."""
    rate = own.samples_per_s
    if rate is not None:
        return rate
    known = [r for r in (pace.samples_per_s for pace in others) if r is not None]
    return sum(known) / len(known) if known else 1.0
