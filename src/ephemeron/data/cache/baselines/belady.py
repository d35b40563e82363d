"""Belady's optimum (1966): with the whole order of accesses known, evict what is used last.

Offline, hence no policy to run but the bar to measure the others by. Optimal in hits for objects of equal size, with or
without admission of everything; for unequal sizes the problem is NP-hard and bytes times distance is a good rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from ephemeron.data.cache.events import Accessed, Event, Key
from ephemeron.data.cache.policy import CachedItem, Group, RankedPolicy, bin_scale, value_bin


class Belady(RankedPolicy):
    """Evicts what is used last in an order that is given beforehand.

    Args:
        order: the key of every access of every job, in the order in which the cache will see them.
        cost_aware: multiply distances by bytes per second of preprocessing.

    Raises:
        ValueError: from `observe`, when an access is not the one that the order says.
    """

    def __init__(self, order: Iterable[Key], *, cost_aware: bool = False) -> None:
        super().__init__()
        self.cost_aware = cost_aware
        self._at = 0
        self._uses: dict[Key, deque[int]] = {}
        for at, key in enumerate(order):
            self._uses.setdefault(key, deque()).append(at)

    def observe(self, event: Event) -> None:
        if not isinstance(event, Accessed):
            return
        uses = self._uses.get(event.key)
        if not uses or uses[0] != self._at:
            raise ValueError(f"access {self._at} is of {event.key!r}, which is not what the given order says")
        uses.popleft()
        self._at += 1
        self.touch(event.key)

    def place(self, item: CachedItem) -> tuple[Group, float]:
        uses = self._uses.get(item.key)
        return value_bin(item, cost_aware=self.cost_aware), uses[0] if uses else math.inf

    def standing(self, group: Group, score: float) -> float:
        assert isinstance(group, int)
        return bin_scale(group) * (score - self._at)
