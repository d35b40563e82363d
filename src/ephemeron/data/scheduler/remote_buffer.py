"""The service's prefetch buffer, with back-pressure in bytes (DPFlow section 3.4.2, algorithms 3.8 and 3.9; 4.3.4).

The thesis counts batches: each trainer has P_R of them loaded ahead. Samples differ in size by orders of magnitude,
so a count of batches does not bound memory. Here the limit is in bytes. Sizes are unknown until an object arrives: a
load reserves a running estimate, and the actual size replaces it on arrival. P_R is how far ahead the caller announces.

Deviations from the printed algorithms, where these leave a case open:

- 3.8 waits for each load, and 3.9 finds every object present. Here `announce` only records the objects that will be
  wanted, `admit` returns those that may be loaded now, and `missing` those that a batch still lacks.
- 3.9 gives up its reference as it reads, so a lost reply loses the data. Here reading has no side effect,
  and `release` follows once the consumer is known to have the batch.
- Where one job's objects fill the buffer, 3.8 never ends for the others. Here each consumer (one rank of one job)
  is entitled to its next batch, also beyond the limit; others' prefetched objects are evicted for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic

from ephemeron.data.scheduler.local_buffer import SizeEstimate
from ephemeron.data.scheduler.tasks import K
from ephemeron.errors import JobError


@dataclass(slots=True, eq=False)
class _Object(Generic[K]):
    key: K
    references: set[tuple[str, int]] = field(default_factory=set)
    """References: consumer and ticket. The reference count is their number."""
    entitled: int = 0
    """Number of consumers whose next batch contains it."""
    nbytes: int | None = None
    """Actual size, once known; kept after the object was dropped."""
    reserved: int | None = None
    """Bytes reserved for it. None: no load is under way."""
    present: bool = False

    @property
    def idle(self) -> bool:
        """True if the object is neither present nor being loaded."""
        return not self.present and self.reserved is None


@dataclass(slots=True, eq=False)
class _Consumer(Generic[K]):
    order: int
    batches: dict[int, tuple[K, ...]] = field(default_factory=dict)
    """Announced and not released, by ticket; the first is the next batch."""
    pending: list[tuple[int, int, K]] = field(default_factory=list)
    """A heap of (ticket, place, key) of everything that may still have to be loaded."""

    @property
    def head(self) -> int:
        return next(iter(self.batches), 0)


class RemoteBuffer(Generic[K]):
    """Objects shared by the consumers of a service: references to them, which may be loaded, which are evicted.

    The caller holds the bytes. Methods that return keys name objects that are *gone*: the caller drops their bytes and
    the scheduler forgets them; they are admitted again when their turn comes.

    Bounds, with `next` the bytes of all objects in some consumer's next batch:

        buffered            ≤ max(limit, next)
        buffered + reserved ≤ limit after a prefetched object was admitted or kept

    so one sample 1,000 times as large as the rest overshoots by no more than itself, only while it is in a consumer's
    next batch; the number of consumers is limited by the caller. An object that is too large to be prefetched is
    refused before its bytes are read: call `arrived` with the length in the message's header. Bytes that loaders
    still hold are in their memory, not in this one; bytes that a cache shares count here all the same.

    Args:
        limit_nbytes: bytes buffered and requested.
        guess_nbytes: assumed size of an object before any was seen.

    Raises:
        JobError: the limit is not positive.
    """

    def __init__(self, *, limit_nbytes: int, guess_nbytes: int = 1 << 20) -> None:
        if limit_nbytes <= 0:
            raise JobError(f"limit_nbytes = {limit_nbytes} of a prefetch buffer is not above 0", remedy="give a limit above 0")
        self.limit_nbytes = limit_nbytes
        self.buffered_nbytes = 0
        self.reserved_nbytes = 0
        self.size = SizeEstimate(guess_nbytes)
        self._objects: dict[K, _Object[K]] = {}
        self._consumers: dict[str, _Consumer[K]] = {}
        self._joined = 0

    def announce(self, consumer: str, ticket: int, keys: Iterable[K]) -> None:
        """Announces a consumer's batch (algorithm 3.8). Repeating it changes nothing.

        Args:
            consumer: one rank of one job.
            ticket: orders the consumer's batches; larger than those it announced before and has not released.
            keys: the batch's samples, in any order; a key may come twice.

        Raises:
            ValueError: a later batch is in the buffer already.
        """
        if consumer not in self._consumers:
            self._joined += 1
            self._consumers[consumer] = _Consumer(order=self._joined)
        entry = self._consumers[consumer]
        if ticket in entry.batches:
            return
        if entry.batches and ticket < next(reversed(entry.batches)):
            raise ValueError(f"batch {ticket} of {consumer} was announced after a later one; `remove_consumer` and start again")
        entry.batches[ticket] = batch = tuple(dict.fromkeys(keys))
        for place, key in enumerate(batch):
            thing = self._objects.setdefault(key, _Object(key=key))
            thing.references.add((consumer, ticket))
            heappush(entry.pending, (ticket, place, key))
        if len(entry.batches) == 1:
            self._entitle(entry, 1)

    def admit(self) -> tuple[K, ...]:
        """Objects that may be loaded now, most urgent first: all that next batches lack, then what the limit allows.

        Prefetching advances evenly: the consumer with the fewest batches ahead comes first, and one whose next
        object does not fit is skipped.
        """
        granted = [self._reserve(thing) for entry in self._consumers.values() for thing in self._next_lacking(entry)]
        entries = [entry for entry in self._consumers.values() if entry.pending]
        waiting = [(entry.pending[0][0] - entry.head, entry.order, entry) for entry in entries]
        heapify(waiting)
        large: list[tuple[_Consumer[K], tuple[int, int, K]]] = []
        while waiting and self._charged < self.limit_nbytes:
            _, order, entry = heappop(waiting)
            want = heappop(entry.pending)
            thing = self._objects[want[2]]
            if thing.idle and self._charged + self._need(thing) > self.limit_nbytes:
                if thing.nbytes is None:
                    heappush(entry.pending, want)
                    continue
                large.append((entry, want))  # known not to fit; a later one may
            elif thing.idle:
                granted.append(self._reserve(thing))
            if entry.pending:
                heappush(waiting, (entry.pending[0][0] - entry.head, order, entry))
        for entry, want in large:
            heappush(entry.pending, want)
        return tuple(granted)

    def arrived(self, key: K, nbytes: int) -> tuple[K, ...]:
        """Records an object that was loaded, or found in a cache. Returns the evicted objects, possibly this one.

        Args:
            key: of the object.
            nbytes: its size; 0: it has failed for good, which counts as present.
        """
        thing = self._objects.get(key)
        if thing is None or thing.present:
            return () if thing else (key,)
        self._unreserve(thing)
        thing.nbytes = nbytes
        if nbytes:
            self.size.saw(nbytes)
        if not thing.entitled and self._charged + nbytes > self.limit_nbytes:
            self._requeue(thing)
            return (key,)
        thing.present = True
        self.buffered_nbytes += nbytes
        return self._make_room()

    def missing(self, consumer: str, ticket: int) -> tuple[K, ...]:
        """Objects that a batch still lacks; none: it can be delivered (algorithm 3.9). Reading releases nothing.

        Raises:
            KeyError: it was not announced, or released.
        """
        return tuple(key for key in self._consumers[consumer].batches[ticket] if not self._objects[key].present)

    def release(self, consumer: str, ticket: int) -> tuple[K, ...]:
        """Releases a consumer's batches up to and including `ticket`. Returns the objects that are gone."""
        entry = self._consumers.get(consumer)
        if entry is None or not entry.batches or ticket < entry.head:
            return ()
        self._entitle(entry, -1)
        gone: list[K] = []
        for old in [t for t in entry.batches if t <= ticket]:
            for key in entry.batches.pop(old):
                thing = self._objects[key]
                thing.references.discard((consumer, old))
                if not thing.references:
                    gone.append(key)
                    self._drop(thing)
                    del self._objects[key]
        entry.pending = sorted(want for want in entry.pending if want[0] > ticket)
        self._entitle(entry, 1)
        return (*gone, *self._make_room())

    def remove_consumer(self, consumer: str) -> tuple[K, ...]:
        """Removes a consumer that has ended, or restarts its epoch, with its announcements. Returns the objects that are gone."""
        entry = self._consumers.get(consumer)
        gone = self.release(consumer, next(reversed(entry.batches))) if entry and entry.batches else ()
        self._consumers.pop(consumer, None)
        return gone

    def announced(self, consumer: str) -> tuple[int, ...]:
        """Tickets that a consumer announced and did not release, in order."""
        entry = self._consumers.get(consumer)
        return tuple(entry.batches) if entry else ()

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken. O(all objects and references)."""
        things = self._objects.values()
        assert self.buffered_nbytes == sum(thing.nbytes or 0 for thing in things if thing.present)
        assert self.reserved_nbytes == sum(thing.reserved or 0 for thing in things)
        following = sum(thing.nbytes or 0 for thing in things if thing.present and thing.entitled)
        assert self.buffered_nbytes <= max(self.limit_nbytes, following), "the bound on memory"
        references: dict[K, set[tuple[str, int]]] = {}
        for name, entry in self._consumers.items():
            assert list(entry.batches) == sorted(entry.batches)
            for ticket, keys in entry.batches.items():
                for key in keys:
                    references.setdefault(key, set()).add((name, ticket))
                    thing = self._objects[key]
                    assert not thing.idle or (ticket, keys.index(key), key) in entry.pending, f"{key} is never loaded"
        assert references == {key: thing.references for key, thing in self._objects.items()}, "references are exact"
        for key, thing in self._objects.items():
            heads = [entry.batches[entry.head] for entry in self._consumers.values() if entry.batches]
            assert thing.entitled == sum(key in head for head in heads)
            assert not (thing.present and thing.reserved is not None)

    def _entitle(self, entry: _Consumer[K], by: int) -> None:
        for key in entry.batches.get(entry.head, ()):
            self._objects[key].entitled += by

    def _next_lacking(self, entry: _Consumer[K]) -> list[_Object[K]]:
        wanted = []
        while entry.pending and entry.pending[0][0] == entry.head:
            wanted.append(self._objects[heappop(entry.pending)[2]])
        return [thing for thing in wanted if thing.idle]

    @property
    def _charged(self) -> int:
        return self.buffered_nbytes + self.reserved_nbytes

    def _need(self, thing: _Object[K]) -> int:
        return self.size.nbytes if thing.nbytes is None else thing.nbytes

    def _reserve(self, thing: _Object[K]) -> K:
        thing.reserved = self._need(thing)
        self.reserved_nbytes += thing.reserved
        return thing.key

    def _unreserve(self, thing: _Object[K]) -> None:
        self.reserved_nbytes -= thing.reserved or 0
        thing.reserved = None

    def _drop(self, thing: _Object[K]) -> None:
        self._unreserve(thing)
        if thing.present:
            self.buffered_nbytes -= thing.nbytes or 0
            thing.present = False

    def _requeue(self, thing: _Object[K]) -> None:
        for consumer, ticket in thing.references:
            entry = self._consumers[consumer]
            want = (ticket, entry.batches[ticket].index(thing.key), thing.key)
            if want not in entry.pending:
                heappush(entry.pending, want)

    def _make_room(self) -> tuple[K, ...]:
        """Evicts the objects that are needed last until the bound holds. Rare: estimates were wrong, or a large object was next."""
        if self.buffered_nbytes <= self.limit_nbytes:
            return ()
        ahead = {name: entry.head for name, entry in self._consumers.items()}
        spare = [thing for thing in self._objects.values() if thing.present and thing.nbytes and not thing.entitled]
        spare.sort(key=lambda thing: min(ticket - ahead[name] for name, ticket in thing.references))
        gone = []
        while spare and self.buffered_nbytes > self.limit_nbytes:
            thing = spare.pop()
            self._drop(thing)
            self._requeue(thing)
            gone.append(thing.key)
        return tuple(gone)
