"""Policies that use no announced order: LRU, LFU and MinIO.

LRU is the worst policy for an epoch: the sample used longest ago comes next. MinIO (CoorDL, VLDB 2021)
never replaces anything, which costs nothing and gives a hit rate of exactly the cached share in every epoch after the
first; without a cache shared among jobs that know their order it is hard to beat.
"""

from __future__ import annotations

import math

from ephemeron.data.cache.events import Accessed, Event, Key
from ephemeron.data.cache.policy import CachedItem, Group, RankedPolicy


class LRU(RankedPolicy):
    """Evicts what was used longest ago."""

    def observe(self, event: Event) -> None:
        if isinstance(event, Accessed):
            self.touch(event.key)

    def place(self, item: CachedItem) -> tuple[Group, float]:
        return None, 0.0


class LFU(RankedPolicy):
    """Evicts what was used least often since it came into the cache; of several, what was used longest ago.

    The newcomer has been used only once and would always be the victim, so it is spared until the next one comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[Key, int] = {}
        self._newest: Key | None = None

    def observe(self, event: Event) -> None:
        if isinstance(event, Accessed) and event.key in self._uses:
            self._uses[event.key] += 1
            self.touch(event.key)

    def admit(self, item: CachedItem) -> None:
        spared, self._newest = self._newest, item.key
        self._uses[item.key] = 1
        super().admit(item)
        self.touch_all([spared])

    def evict(self, key: Key) -> None:
        super().evict(key)
        del self._uses[key]

    def place(self, item: CachedItem) -> tuple[Group, float]:
        return None, -math.inf if item.key == self._newest else -self._uses[item.key]


class MinIO(RankedPolicy):
    """Never gives up what it has: the newcomer is the victim.

    Only if the newcomer is held (a job is being served with it) and there is no room, the newest of the others is evicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._came: dict[Key, int] = {}
        self._admissions = 0

    def observe(self, event: Event) -> None:
        pass

    def admit(self, item: CachedItem) -> None:
        self._admissions += 1
        self._came[item.key] = self._admissions
        super().admit(item)

    def evict(self, key: Key) -> None:
        super().evict(key)
        del self._came[key]

    def place(self, item: CachedItem) -> tuple[Group, float]:
        return None, self._came[item.key]
