"""The port of replacement policies, and the ranking that all policies here share.

A policy only ranks. It neither holds objects nor counts bytes (`Cache` does), so that the same policy serves a dictionary in
memory, a folder or a shard of a service, and a test can compare it with Belady's optimum.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ephemeron.data.cache.events import Event, Key

BINS_PER_OCTAVE = 4
"""Resolution of values: objects within 2^(1/4) (19 %) of each other count as the same."""

_LEAST_COST_S = 1e-9
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedItem:
    """An object in the cache."""

    key: Key
    nbytes: int
    """Bytes that it occupies."""
    cost_s: float
    """Seconds that it takes to make it again."""


class CachePolicy(ABC):
    """Ranks the objects of one cache by how little would be lost with them.

    Order of calls: `observe(Accessed)` comes before the `admit` that the access leads to. `admit` makes an object a
    candidate, `evict` ends that; in between `hold` and `release` alternate. All calls but `victim`
    are commands and return nothing; `victim` changes nothing that can be observed. A policy is deterministic: it has
    neither clock nor random state, and ties are broken by the order of calls.

    The object that was just admitted is a candidate like the others. If it is named first, it is not worth caching.
    """

    @abstractmethod
    def observe(self, event: Event) -> None:
        """Takes an event of a job. Events of a job come between its `Joined` and its `Left`; those of other jobs are ignored."""

    @abstractmethod
    def admit(self, item: CachedItem) -> None:
        """An object is in the cache now. It was not before."""

    @abstractmethod
    def evict(self, key: Key) -> None:
        """An object is no longer in the cache. It was before, held or not."""

    @abstractmethod
    def hold(self, key: Key) -> None:
        """Excludes an object from being named until it is released. Its rank among the others is kept."""

    @abstractmethod
    def release(self, key: Key) -> None:
        """The object may be named again."""

    @abstractmethod
    def victim(self) -> Key | None:
        """The object to evict next, or None if all are held. Asking twice gives the same answer."""


Group: TypeAlias = Hashable


class RankedPolicy(CachePolicy):
    """A policy by scores that change only when something happens to an object, up to terms that many objects share.

    Distances shrink with every access, so sorting by them would mean to score the whole cache each time. But they shrink
    together: objects are put into groups in which the order never changes, each a heap with lazy deletion, and only the
    heads of the groups are compared. A subclass says where an object belongs (`place`) and what the head of a group is
    worth now (`loss`). Cost: O(log n) for a touched object, O(groups) for a victim, O(n) for `refresh`, which
    subclasses ask for at most once for every so many accesses.
    """

    def __init__(self) -> None:
        self._items: dict[Key, CachedItem] = {}
        self._touched: dict[Key, int] = {}
        self._touches = 0
        self._held: set[Key] = set()
        self._groups: dict[Group, LazyHeap] = {}
        self._where: dict[Key, Group] = {}
        self._stale = False

    @abstractmethod
    def place(self, item: CachedItem) -> tuple[Group, float]:
        """The group of an object and its score in it. The largest is named first; of equals, what was touched first."""

    def standing(self, group: Group, score: float) -> float:
        """Score of the head of a group among the heads of all groups: the largest is named. A single group needs none."""
        return score

    def tolerance(self, score: float) -> float:
        """Largest change of a score since it was computed for which the object is named without scoring it again."""
        return _TOLERANCE * max(1.0, abs(score))

    def admit(self, item: CachedItem) -> None:
        self._items[item.key] = item
        self._touches += 1
        self._touched[item.key] = self._touches
        self._put(item)

    def evict(self, key: Key) -> None:
        del self._items[key], self._touched[key]
        self._held.discard(key)
        self._take(key)

    def hold(self, key: Key) -> None:
        self._held.add(key)
        self._take(key)

    def release(self, key: Key) -> None:
        self._held.discard(key)
        if not self._stale:
            self._put(self._items[key])

    def victim(self) -> Key | None:
        if self._stale:
            self._rebuild()
        while True:
            key = self._head()
            if key is None or self._settled(key):
                return key
            self._put(self._items[key])

    def touch(self, key: Key) -> None:
        """Scores one object again after an event; among equals it is named last."""
        item = self._items.get(key)
        if item is not None:
            self._touches += 1
            self._touched[key] = self._touches
            if key not in self._held and not self._stale:
                self._put(item)

    def touch_all(self, keys: Iterable[Key]) -> None:
        """Scores several objects again, all at once if that is cheaper. Recency stays as it is."""
        resident = [key for key in keys if key in self._items and key not in self._held]
        if 4 * len(resident) > len(self._items):
            self.refresh()
        elif not self._stale:
            for key in resident:
                self._put(self._items[key])

    def refresh(self) -> None:
        """Scores all objects again before the next victim is named."""
        self._stale = True

    def _rebuild(self) -> None:
        self._stale = False
        self._groups.clear()
        self._where.clear()
        for key, item in self._items.items():
            if key not in self._held:
                self._put(item)

    def _put(self, item: CachedItem) -> None:
        group, score = self.place(item)
        if self._where.get(item.key, group) != group:
            self._take(item.key)
        self._where[item.key] = group
        heap = self._groups.get(group)
        if heap is None:
            heap = self._groups[group] = LazyHeap()
        heap.put(item.key, score, self._touched[item.key])

    def _take(self, key: Key) -> None:
        if key in self._where:
            group = self._where.pop(key)
            heap = self._groups[group]
            heap.discard(key)
            if not heap:
                del self._groups[group]

    def _head(self) -> Key | None:
        best, most = None, -math.inf
        for group, heap in self._groups.items():
            key, score = heap.head()
            standing = self.standing(group, score)
            if best is None or standing > most:
                best, most = key, standing
        return best

    def _settled(self, key: Key) -> bool:
        """Whether an object's group and score are still current; its next use may have come closer or been dropped since."""
        group, score = self.place(self._items[key])
        if group != self._where[key]:
            return False
        before = self._groups[group].score(key)
        return score == before or abs(score - before) <= self.tolerance(score)


def value_bin(item: CachedItem, *, cost_aware: bool) -> int:
    """A whole number for bytes occupied per second of work saved, so that groups can be formed by it.

    What to evict is what occupies most bytes for the longest time per second of preprocessing that it saves:
    bytes · distance / cost. Without costs every object counts the same, so that equal costs change nothing, and with
    equal sizes only the distance is left, as in DPFlow.
    """
    cost_s = max(item.cost_s, _LEAST_COST_S) if cost_aware else 1.0
    return round(BINS_PER_OCTAVE * math.log2(max(item.nbytes, 1) / cost_s))


def bin_scale(number: int) -> float:
    """Bytes per second of work in the middle of a bin."""
    return float(2.0 ** (number / BINS_PER_OCTAVE))


# -- A heap whose entries can be changed --------------------------------------------------------------------------


class LazyHeap:
    """Largest score first; among equals the smallest tie-break. At most twice as many entries as keys, and 64."""

    __slots__ = ("_entries", "_live")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Key]] = []
        self._live: dict[Key, tuple[float, int, Key]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def put(self, key: Key, score: float, tie_break: int) -> None:
        """Adds a key or moves it. Two keys never have the same tie-break, so keys need no order."""
        entry = (-score, tie_break, key)
        if self._live.get(key) == entry:
            return
        self._live[key] = entry
        heapq.heappush(self._entries, entry)
        if len(self._entries) > 2 * len(self._live) + 64:
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)

    def discard(self, key: Key) -> None:
        """Takes a key out, if it is in."""
        self._live.pop(key, None)

    def score(self, key: Key) -> float:
        """The score of a key.

        Raises:
            KeyError: it is not in the heap.
        """
        return -self._live[key][0]

    def head(self) -> tuple[Key, float]:
        """The key with the largest score, and that score.

        Raises:
            IndexError: the heap is empty.
        """
        while True:
            entry = self._entries[0]
            if self._live.get(entry[2]) is entry:
                return entry[2], -entry[0]
            heapq.heappop(self._entries)
