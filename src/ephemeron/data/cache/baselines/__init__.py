"""Replacement policies to compare `NextUse` with. No product path imports them.

    LRU, LFU, MinIO   policies that know nothing of the future
    RefCnt            the policy of Joader
    ALSD              the policy of DPFlow, as published
    Belady            the optimum, with the whole order of accesses given
    replay            runs a sequence of events through a cache and counts hits

`benchmarks/caching.py` measures all of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from ephemeron.data.cache.access_forecast import JobFuture, Knowledge
from ephemeron.data.cache.cache import Cache
from ephemeron.data.cache.events import Accessed, Event, Key
from ephemeron.data.cache.nextuse import LookaheadPolicy
from ephemeron.data.cache.policy import CachedItem, Group, RankedPolicy, bin_scale, value_bin


class ALSD(LookaheadPolicy):
    """Evicts the longest weighted average of estimated sampling distances.

    The distance of a sample in one job's sequence is exact where the sequence is drawn, and estimated by three rules where
    it is not; over several jobs the distances are averaged with weights α, and the longest average is evicted:

        d̂ = N            used in this epoch                          d̄ = Σ_j α_j · d̂_j      (3-5)
            p - k        certain future, at position p      (3-1)
            d̂_uc         likely future, one number for all  (3-2)
            d̂_uk         unknown future, one number for all (3-3)

    The average is what keeps ALSD from the optimum: Belady's rule asks when a sample is used next by *any* job, which is the
    minimum over jobs. A sample that one job needs at once and three need in a thousand steps has a longer average than one
    that all need in five hundred steps, and is evicted although it is worth keeping. `NextUse` asks for the minimum and has
    the same interface; ALSD is here because it is the published method, and to be compared with.

    Exact, without scoring the whole cache: d̂ consists of a part that never changes (Σ α_j p_j over the jobs that announced
    the sample) and a part that is the same for all samples of which the jobs know the same kind of thing. There is a heap
    for each combination that occurs, 2^jobs of them for samplers that draw whole epochs, and at most one per object.

    A sample that is none of a job's counts as used in its epoch (distance N): the paper has no such samples.

    Args:
        cost_aware: multiply distances by bytes per second of preprocessing. If all cost the same, that changes nothing.
    """

    def __init__(self, *, cost_aware: bool = False) -> None:
        super().__init__()
        self.cost_aware = cost_aware

    def place(self, item: CachedItem) -> tuple[Group, float]:
        total = sum(future.weight for future in self.jobs.values())
        known, score = [], 0.0
        for future in self.jobs.values():
            knowledge = future.knows(item.key)
            known.append(knowledge)
            if knowledge is Knowledge.CERTAIN:
                position = future.position(item.key)
                assert position is not None
                score += future.weight / total * (position + 1)
        return (value_bin(item, cost_aware=self.cost_aware), tuple(known)), score

    def standing(self, group: Group, score: float) -> float:
        assert isinstance(group, tuple)
        number, known = group
        total = sum(future.weight for future in self.jobs.values())
        for knowledge, future in zip(known, self.jobs.values(), strict=True):
            score += future.weight / total * _shared(knowledge, future)
        return bin_scale(number) * score


def _shared(knowledge: Knowledge, future: JobFuture) -> float:
    """The part of a distance that is the same for all samples of which the same kind of thing is known."""
    if knowledge is Knowledge.CERTAIN:
        return -future.accessed
    if knowledge is Knowledge.LIKELY:
        return future.likely_distance
    if knowledge is Knowledge.UNKNOWN:
        return future.unknown_distance
    return future.size


# -- belady's optimum (1966) --------------------------------------------------------------------------------------


class Belady(RankedPolicy):
    """Evicts what is used last in an order that is given beforehand.

    Offline, hence no policy to run but the bar to measure the others by. Optimal in hits for objects of equal size, with or
    without admission of everything; for unequal sizes the problem is NP-hard and bytes times distance is a good rule.

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


# -- policies that use no announced order: LRU, LFU and MinIO -----------------------------------------------------


class LRU(RankedPolicy):
    """Evicts what was used longest ago.

    The worst policy for an epoch: the sample used longest ago comes next.
    """

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

    CoorDL (VLDB 2021). Nothing is ever replaced, which costs nothing and gives a hit rate of exactly the cached share in every epoch after the
    first; without a cache shared among jobs that know their order it is hard to beat.

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


# -- refCnt: evict what the fewest jobs still need, as Joader does ------------------------------------------------


class RefCnt(LookaheadPolicy):
    """Evicts what the fewest jobs still need in their present epochs; of several, what was used longest ago.

    It needs no announcements, only who has used what: the policy of Joader (NeurIPS 2022), as DPFlow compares with it.
    """

    def place(self, item: CachedItem) -> tuple[Group, float]:
        return None, -sum(future.awaits(item.key) for future in self.jobs.values())


# -- simulation of a cache ----------------------------------------------------------------------------------------


def replay(
    cache: Cache, events: Iterable[Event], *, nbytes: Callable[[Key], int] = lambda key: 1, cost_s: Callable[[Key], float] = lambda key: 1.0
) -> list[bool]:
    """Runs events through a cache in order; what it misses is offered to it at once, unpinned.

    Args:
        cache: usually empty.
        events: of the jobs, in order.
        nbytes: the size of each object in bytes.
        cost_s: seconds that each object takes to make.

    Returns:
        For each `Accessed` whether it was a hit.
    """
    hits: list[bool] = []
    for event in events:
        if isinstance(event, Accessed):
            hit = cache.lookup(event.job, event.key, now_s=event.now_s)
            hits.append(hit)
            if not hit:
                cache.admit(event.key, nbytes=nbytes(event.key), cost_s=cost_s(event.key))
        else:
            cache.observe(event)
    return hits


__all__ = ["ALSD", "LFU", "LRU", "Belady", "MinIO", "RefCnt", "replay"]
