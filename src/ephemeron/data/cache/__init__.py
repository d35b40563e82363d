"""Which prepared samples to keep when jobs share a cache and their future is drawn (DPFlow section 3.4.3).

    events      what jobs tell a cache: joined, announced, likely, accessed, left
    policy      the port: rank objects, name a victim; and the ranking by groups of heaps
    cache       capacity in bytes, reference counts, what goes
    future      index of one job's future; pace: how fast a job is
    history     LRU, LFU, MinIO: policies without foresight
    foresight   policies with: RefCnt;  alsd: the paper's;  nextuse: ours;  belady: the optimum, offline
    replay      tell a cache a whole story and count hits

Pure: no clock, no random state, no I/O, and nothing but the standard library. With four jobs, half of the samples
cached and equal speeds `NextUse` hits 64.8 % of first epochs and 76.5 % of later ones, which is the optimum; ALSD 62.6 and
71.4 %, LRU 37.7 and 41.7 % (`benchmarks/caching.py`).
"""

from ephemeron.data.cache.access_forecast import JobFuture, Knowledge
from ephemeron.data.cache.alsd import ALSD
from ephemeron.data.cache.belady import Belady
from ephemeron.data.cache.cache import Admission, Cache
from ephemeron.data.cache.cache_simulator import replay
from ephemeron.data.cache.events import Accessed, Announced, Event, JobId, Joined, Key, Left, Likely
from ephemeron.data.cache.history import LFU, LRU, MinIO
from ephemeron.data.cache.lookahead import RefCnt
from ephemeron.data.cache.nextuse import NextUse
from ephemeron.data.cache.policy import CachedItem, CachePolicy
from ephemeron.data.cache.rate_estimator import RateEstimator

__all__ = [
    "ALSD",
    "LFU",
    "LRU",
    "Accessed",
    "Admission",
    "Announced",
    "Belady",
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
    "MinIO",
    "NextUse",
    "RateEstimator",
    "RefCnt",
    "replay",
]
