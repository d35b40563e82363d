"""Replacement policies to compare `NextUse` with. No product path imports them.

    recency   LRU, LFU, MinIO: policies that know nothing of the future
    refcnt    RefCnt: the policy of Joader
    alsd      ALSD: the policy of DPFlow, as published
    belady    Belady: the optimum, with the whole order of accesses given
    replay    runs a sequence of events through a cache and counts hits

`benchmarks/caching.py` measures all of them.
"""

from ephemeron.data.cache.baselines.alsd import ALSD
from ephemeron.data.cache.baselines.belady import Belady
from ephemeron.data.cache.baselines.recency import LFU, LRU, MinIO
from ephemeron.data.cache.baselines.refcnt import RefCnt
from ephemeron.data.cache.baselines.replay import replay

__all__ = ["ALSD", "LFU", "LRU", "Belady", "MinIO", "RefCnt", "replay"]
