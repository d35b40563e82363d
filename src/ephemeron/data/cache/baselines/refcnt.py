"""RefCnt: evict what the fewest jobs still need, as Joader does."""

from __future__ import annotations

from ephemeron.data.cache.lookahead import LookaheadPolicy
from ephemeron.data.cache.policy import CachedItem, Group


class RefCnt(LookaheadPolicy):
    """Evicts what the fewest jobs still need in their present epochs; of several, what was used longest ago.

    It needs no announcements, only who has used what: the policy of Joader (NeurIPS 2022), as DPFlow compares with it.
    """

    def place(self, item: CachedItem) -> tuple[Group, float]:
        return None, -sum(future.awaits(item.key) for future in self.jobs.values())
