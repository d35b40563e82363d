"""RefCnt: evict the object that the fewest jobs still need, as in Joader."""

from __future__ import annotations

from ephemeron.data.cache.lookahead import LookaheadPolicy
from ephemeron.data.cache.policy import CachedItem, Group


class RefCnt(LookaheadPolicy):
    """Evicts the object that the fewest jobs still need in their current epochs; among equals, the least recently used.

    It needs no announcements, only the accesses: the policy of Joader (NeurIPS 2022), as DPFlow compares with it.
    """

    def place(self, item: CachedItem) -> tuple[Group, float]:
        return None, -sum(future.awaits(item.key) for future in self.jobs.values())
