"""Estimate of the size of the next object from the last ones: a mean that is robust against single large objects."""

from __future__ import annotations

import math
from collections import deque

SEEN = 32
"""Number of sizes remembered, hence of objects after which the estimate has followed a real change."""
CLIP = 4
"""A size counts at most this many times the median."""


class SizeEstimate:
    """Mean of the last 32 sizes, each clipped to four times their median.

    One sample 1,000 times as large as the rest thus raises the estimate by a tenth; an unclipped mean would go up
    thirtyfold and stop all prefetching meanwhile.

    Args:
        guess_nbytes: estimate before any size was seen.
    """

    def __init__(self, guess_nbytes: int) -> None:
        self.nbytes = guess_nbytes
        """Bytes to reserve."""
        self._seen: deque[int] = deque(maxlen=SEEN)

    def saw(self, nbytes: int) -> None:
        """Records the size of an object."""
        self._seen.append(nbytes)
        ordered = sorted(self._seen)
        highest = CLIP * ordered[(len(ordered) - 1) // 2]
        self.nbytes = math.ceil(sum(min(size, highest) for size in ordered) / len(ordered))
