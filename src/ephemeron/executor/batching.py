"""How many tasks are published together, and how far ahead: decided from what tasks have taken so far. Pure.

A batch costs some requests whatever it holds, so tasks of milliseconds go together; a task of seconds goes alone, so that no function
idles while another one has several. What is known is known of one function of the user's: until its first task has ended, its tasks go
alone, and only as many are published as keep all functions busy.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

BATCH_S = 0.5
"""Seconds of computing in a batch."""
LEAST_S = 0.05
"""The same in the last batches, which are spread over all functions: less would cost more in requests than it saves."""
MOST_IN_BATCH = 200
AHEAD = 4
"""Batches per function that are published and have no result yet."""


@dataclass(slots=True)
class Batching:
    """State of one executor's batching."""

    workers: int
    """Functions that may run at once."""
    most: int = MOST_IN_BATCH
    """Tasks of a batch."""
    _outstanding: Counter[str] = field(default_factory=Counter)
    """Tasks that are published and have no result, by what they call."""
    _recent: dict[str, deque[float]] = field(default_factory=dict)
    """Seconds of computing of the latest tasks, by what they call."""

    def published(self, function: str, tasks: int = 1) -> None:
        """So many tasks that call the same have been published."""
        self._outstanding[function] += tasks

    def done(self, function: str, compute_s: float | None) -> None:
        """A task has ended, after so many seconds of computing; None: it has no result."""
        self._outstanding[function] -= 1
        if compute_s is not None:
            self._recent.setdefault(function, deque(maxlen=101)).append(compute_s)

    def per_batch(self, function: str, seconds: float = BATCH_S) -> int:
        """Number of tasks of one function that take so long together."""
        recent = self._recent.get(function)
        if not recent:
            return 1
        typical_s = max(statistics.median(recent), 1e-6)
        return max(1, min(self.most, round(seconds / typical_s)))

    def sizes(self, functions: Iterable[str], waiting: int) -> list[int]:
        """Sizes of the batches that are to be published now, smaller ones towards the end of all tasks.

        Args:
            functions: what the waiting tasks call, in their order.
            waiting: number of them.
        """
        known: dict[str, tuple[float, int]] = {}
        room, sizes, size, filled = 0.0, [], 0, 0.0
        for n, function in enumerate(functions):
            if function not in known:
                known[function] = 1 / self.per_batch(function), self.per_batch(function, LEAST_S)
            share, least = known[function]
            if not n:
                room = self._room(function)
                if room < min(1.0, waiting * share) - _LITTLE:  # no whole batch fits
                    return []
            is_enough = size >= max(least, -(-waiting // (2 * self.workers)))  # the last tasks are spread over all functions
            if size and (is_enough or filled + share > 1 + _LITTLE):
                sizes.append(size)
                waiting, size, filled = waiting - size, 0, 0.0
            if room < share - _LITTLE:
                break
            size, filled, room = size + 1, filled + share, room - share
        return [*sizes, size] if size else sizes

    def _room(self, function: str) -> float:
        """Batches that may be published now."""
        outstanding = sum(count / self.per_batch(each) for each, count in self._outstanding.items() if count)
        return self.workers * (AHEAD if function in self._recent else 2) - outstanding


_LITTLE = 1e-6
"""Shares of batches are sums of fractions."""
