"""Replacement policies to compare `NextUse` with. No product path imports them.

    LRU, LFU, MinIO   policies that know nothing of the future
    RefCnt            the policy of Joader
    ALSD              the policy of DPFlow, as published
    Belady            the optimum, with the whole order of accesses given
    replay            runs a sequence of events through a cache and counts hits

`benchmarks/caching.py` measures all of them.
"""

from ephemeron.data.cache.baselines.policies import ALSD, LFU, LRU, Belady, MinIO, RefCnt, replay

__all__ = ["ALSD", "LFU", "LRU", "Belady", "MinIO", "RefCnt", "replay"]
