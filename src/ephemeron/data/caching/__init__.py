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

from ephemeron.data.caching.alsd import ALSD
from ephemeron.data.caching.belady import Belady
from ephemeron.data.caching.cache import Admission, Cache
from ephemeron.data.caching.events import Accessed, Announced, Event, JobId, Joined, Key, Left, Likely
from ephemeron.data.caching.foresight import RefCnt
from ephemeron.data.caching.future import JobFuture, Knowledge
from ephemeron.data.caching.history import LFU, LRU, MinIO
from ephemeron.data.caching.nextuse import NextUse
from ephemeron.data.caching.pace import Pace
from ephemeron.data.caching.policy import CachePolicy, Item
from ephemeron.data.caching.replay import replay

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
    "Event",
    "Item",
    "JobFuture",
    "JobId",
    "Joined",
    "Key",
    "Knowledge",
    "Left",
    "Likely",
    "MinIO",
    "NextUse",
    "Pace",
    "RefCnt",
    "replay",
]
