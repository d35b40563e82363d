"""Forecast of one job's accesses: an index from a key to its next use.

Positions are counted over all epochs since the job joined, so that a forecast of more than one epoch needs no special case: the
k-th access has position k, an announcement continues where the last one ended, and the sampling distance of equation 3-1 is a
subtraction. Every operation is O(1) per key that it names.

Estimate of a job's samples per second from the times of its accesses.

Jobs take samples by the batch: many at one instant, then nothing while they train. So a rate is samples over time
between instants, not between accesses, and both are forgotten exponentially (a job that shares its processor speeds up
and slows down within an epoch).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ephemeron.data.cache.events import Joined, Key
from ephemeron.errors import JobError


class Knowledge(IntEnum):
    """State of a key in the forecast of a job: the four parts of figure 3-15, and keys that the job does not use."""

    CERTAIN = 0
    """Announced: the position is known."""
    LIKELY = 1
    """Not announced yet, but named with a weight."""
    UNKNOWN = 2
    """Still to be used in this epoch, at an unknown position."""
    VISITED = 3
    """Used in this epoch: not before the next."""
    FOREIGN = 4
    """Not among the job's keys."""


class JobFuture:
    """The forecast of one job's accesses.

    Raises:
        JobError: the job has no keys, or a weight that is not positive.
    """

    def __init__(self, joined: Joined) -> None:
        if not joined.keys:
            raise JobError(f"job {joined.job!r} joined with no keys", remedy="leave out jobs that have no samples")
        if not joined.weight > 0:
            raise JobError(f"weight = {joined.weight!r} of job {joined.job!r} is not above 0", remedy="leave it at 1")
        self.keys = joined.keys if isinstance(joined.keys, range) else frozenset(joined.keys)
        self.size = len(self.keys)
        """N: samples per epoch."""
        self.weight = joined.weight
        self.accessed = 0
        """k: samples used since the job joined."""
        self.rate_estimator = RateEstimator()
        self._uses: dict[Key, deque[int]] = {}
        self._announced = 0
        self._visited: set[Key] = set()
        self._likely: dict[Key, float] = {}
        self._likely_ranks: dict[float, float] = {}
        self._likely_named = 1
        self._mean_likely = 0.5

    def announce(self, keys: Sequence[Key]) -> None:
        """Adds to the certain future."""
        for key in keys:
            self._uses.setdefault(key, deque()).append(self._announced)
            self._announced += 1
            self._likely.pop(key, None)

    def expect(self, weights: Mapping[Key, float]) -> set[Key]:
        """Replaces the likely future.

        Returns:
            The keys that are in the old one or in the new one.
        """
        old = set(self._likely)
        ahead = {k: w for k, w in weights.items() if w > 0 and k not in self._uses and k not in self._visited}
        self._likely = ahead
        self._likely_named = len(ahead) or 1
        levels: dict[float, int] = {}
        for weight in ahead.values():
            levels[weight] = levels.get(weight, 0) + 1
        self._likely_ranks = {mine: sum(count * weight / (weight + mine) for weight, count in levels.items()) for mine in levels}
        self._mean_likely = _mean_index(levels)
        return old | set(ahead)

    def access(self, key: Key, now_s: float) -> bool:
        """Records that the job used a key, announced or not, in any order.

        Returns:
            Whether an epoch ended with it.
        """
        uses = self._uses.get(key)
        if uses:
            uses.popleft()
            if not uses:
                del self._uses[key]
        self._likely.pop(key, None)
        self._visited.add(key)
        self.accessed += 1
        self._announced = max(self._announced, self.accessed)
        self.rate_estimator.observe(now_s)
        if self.accessed % self.size:
            return False
        self._visited.clear()
        return True

    def knows(self, key: Key) -> Knowledge:
        """State of a key in the forecast."""
        if key in self._uses:
            return Knowledge.CERTAIN
        if key in self._visited:
            return Knowledge.VISITED if key in self.keys else Knowledge.FOREIGN
        if key in self._likely:
            return Knowledge.LIKELY
        return Knowledge.UNKNOWN if key in self.keys else Knowledge.FOREIGN

    def awaits(self, key: Key) -> bool:
        """Whether the job has yet to use a key in this epoch."""
        return key in self.keys and key not in self._visited

    def position(self, key: Key) -> int | None:
        """Position of the next certain use of a key, counted from the job's first access; None: there is none."""
        uses = self._uses.get(key)
        return uses[0] if uses else None

    def outlook(self, key: Key) -> tuple[float, float] | None:
        """First and last possible position of the next use of a key, counted from the job's first access.

        They are equal where the position is known or estimated as one number. An unknown use is anywhere in the rest of the
        epoch, and that of a visited key in the next epoch, behind its announced part. None: the job does not use the key.
        """
        uses = self._uses.get(key)
        if uses:
            return uses[0], uses[0]
        if key not in self.keys:
            return None
        ends = self.accessed + self.left_in_epoch
        if key in self._visited:
            return max(ends, self._announced), ends + self.size
        if key in self._likely:
            at = self.accessed + self.likely_distance_of(key) - 1
            return at, at
        return min(self._announced + len(self._likely), ends), ends

    @property
    def left_in_epoch(self) -> int:
        """N - k: samples of this epoch that are still to be used, at least 1."""
        return self.size - self.accessed % self.size

    @property
    def certain(self) -> int:
        """|S_c|: samples announced and not yet used, of all epochs."""
        return self._announced - self.accessed

    @property
    def certain_in_epoch(self) -> int:
        """|S_c| as far as it belongs to this epoch."""
        return min(self.certain, self.left_in_epoch)

    @property
    def likely_distance(self) -> float:
        """Expected distance of the likely future as a whole (equation 3-2).

        The equation uses i both for the position of the job and for the place in the list; read with p̂_i counted from
        the job's position, it is Σ w_i · (|S_c| + i/m · (N - k - |S_c|)) with the heaviest first.
        """
        certain = self.certain_in_epoch
        return certain + self._mean_likely * (self.left_in_epoch - certain)

    @property
    def unknown_distance(self) -> float:
        """Expected distance of the unknown future (equation 3-3)."""
        ahead = min(self.certain_in_epoch + len(self._likely), self.left_in_epoch)
        return ahead + (self.left_in_epoch - ahead) / 2

    def likely_distance_of(self, key: Key) -> float:
        """Expected distance of one likely key; heavier ones come sooner, which equation 3-2 gives away.

        If samples are drawn one after another in proportion to their weights, key x comes before key y with
        probability w_x / (w_x + w_y), so the expected rank of y is the sum of that over all x.
        """
        drawn = len(self._likely) / self._likely_named
        return self.certain_in_epoch + 0.5 + self._likely_ranks[self._likely[key]] * drawn


def _mean_index(levels: Mapping[float, int]) -> float:
    """Σ w_i · i/m over a list of m weights that add up to 1, heaviest first, given how often each weight occurs."""
    named = sum(levels.values())
    total = sum(weight * count for weight, count in levels.items())
    at, mean = 0, 0.0
    for weight in sorted(levels, reverse=True):
        count = levels[weight]
        mean += weight / total * (count * at + count * (count + 1) / 2)
        at += count
    return mean / named if named else 0.5


# -- estimate of a job's samples per second from the times of its accesses ----------------------------------------


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
