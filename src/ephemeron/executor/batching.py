"""How many tasks are published together, and how far ahead: decided from what tasks have taken so far. Pure.

A batch costs some requests whatever it holds, so tasks of milliseconds go together; a task of seconds goes alone, so that no function
idles while another one has several. Until the first task has ended nothing is known, and only as many are published as keep all
functions busy.
"""

from __future__ import annotations

import statistics
from collections import deque
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
    outstanding: int = 0
    """Tasks that are published and have no result."""
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=101))

    def done(self, compute_s: float | None) -> None:
        """A task has ended, after so many seconds of computing; None: it has no result."""
        self.outstanding -= 1
        if compute_s is not None:
            self._recent.append(compute_s)

    @property
    def per_batch(self) -> int:
        """Number of tasks in the next batches."""
        return self._of(BATCH_S)

    def _of(self, seconds: float) -> int:
        """Number of tasks that take so long."""
        if not self._recent:
            return 1
        typical_s = max(statistics.median(self._recent), 1e-6)
        return max(1, min(self.most, round(seconds / typical_s)))

    def to_publish(self, waiting: int) -> int:
        """How many of the waiting tasks are to be published now."""
        size, room = self.per_batch, self.workers * (AHEAD if self._recent else 2)
        free = room * size - self.outstanding
        if free < min(size, waiting):  # no whole batch fits
            return 0
        # The last tasks are spread over all functions.
        return min(waiting, free)

    def sizes(self, count: int, waiting: int) -> list[int]:
        """Sizes of the batches for so many tasks, of which `waiting` are left in all: smaller ones towards the end."""
        left, sizes, most, least = count, [], self.per_batch, self._of(LEAST_S)
        while left:
            fair = max(least, -(-waiting // (2 * self.workers)))
            size = min(left, most, fair)
            sizes.append(size)
            left -= size
            waiting -= size
        return sizes
