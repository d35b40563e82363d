"""Which prepared samples to keep when jobs share a cache and their access order is known (DPFlow section 3.4.3).

    events           messages from jobs to a cache: joined, announced, likely, accessed, left
    policy           the port: rank objects, name a victim; and the ranking by groups of heaps
    cache            capacity in bytes, reference counts, evictions
    access_forecast  what is known of one job's accesses, and how fast it is
    nextuse          NextUse: the policy of the data service
    baselines        policies to compare with: LRU, LFU, MinIO, RefCnt, ALSD, Belady

Pure: no clock, no random state, no I/O, and only the standard library. With four jobs, half of the samples cached and equal
speeds `NextUse` hits 64.8 % of first epochs and 76.5 % of later ones, which is the optimum; ALSD 62.6 and 71.4 %, LRU 37.7
and 41.7 % (`benchmarks/caching.py`).
"""

from ephemeron.data.cache.access_forecast import JobFuture, Knowledge, RateEstimator
from ephemeron.data.cache.cache import Admission, Cache
from ephemeron.data.cache.events import Accessed, Announced, Event, JobId, Joined, Key, Left, Likely
from ephemeron.data.cache.nextuse import NextUse
from ephemeron.data.cache.policy import CachedItem, CachePolicy

__all__ = [
    "Accessed",
    "Admission",
    "Announced",
    "Cache",
    "CachePolicy",
    "CachedItem",
    "Event",
    "JobFuture",
    "JobId",
    "Joined",
    "Key",
    "Knowledge",
    "Left",
    "Likely",
    "NextUse",
    "RateEstimator",
]
