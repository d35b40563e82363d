"""What a shard decides and keeps: who wants which sample, who loads it, what stays (DPFlow section 4.3.4, figure 4-12).

    readers ── want, give, received ─▶ Core ◀─ report, tasks ── loaders
                                        │
              RemoteBuffer: what was announced and is not received, in bytes
              Scheduler:    which loader loads what (QMOWS)
              Cache:        what is kept beyond that (NextUse), finished samples and half-finished ones
              held, kept:   the bytes, shared by buffer and cache

No thread, no socket, no clock of its own. The bytes are pickles that are never opened here.

A sample is named by (index, epoch, seed): equal names mean equal bytes, whichever job asks. A flow without random steps
needs only the index. Half-finished is a sample that has passed the steps that are the same in every epoch, at least
the reading: a loader that is given one need not fetch and decode it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ephemeron.data.cache import Announced, Cache, Joined, Left, NextUse
from ephemeron.data.scheduler import (
    LoaderReply,
    LoaderReport,
    QueueOptions,
    RemoteBuffer,
    Scheduler,
    TaskFailure,
    TaskRetryPolicy,
)


class AlreadyDelivered(Exception):
    """What is asked for is a thing of the past."""


class SampleKey(NamedTuple):
    """Of a sample."""

    sample: int
    """Its number in the dataset."""
    epoch: int = 0
    seed: int | None = None
    once: str = ""
    """Makes it different from all others: for samples that are to be drawn anew each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SerializedSample:
    """A sample as it travels: its pickle, and the memory that stands out of it."""

    buffers: tuple[Any, ...]
    nbytes: int
    cost_s: float = 0.0
    """What it took to make, or would take to make again."""
    failed: bool = False
    """It is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What a loader made of a task."""

    sample: SerializedSample
    half: SerializedSample | None = None
    """Half-finished, where that is worth keeping."""


@dataclass(slots=True)
class _Reader:
    """A consumer, as far as the buffer does not know it."""

    job: str
    heard_at: float
    waiting: bool = False
    """Its trainer has nothing to do."""
    received: int = -1
    """The last batch that it has for good."""
    told: int = -1
    """The last batch of which the cache knows."""
    given: set[int] = field(default_factory=set)
    """Batches that were handed out, perhaps in vain."""
    lacking: dict[int, set[SampleKey]] = field(default_factory=dict)
    """What is not here yet of its batches."""
    names: dict[int, tuple[SampleKey, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Future:
    """What a job has said it will use."""

    epochs: list[int] = field(default_factory=list)
    keys: frozenset[tuple[str, Any]] = frozenset()
    """Of the cache, the same in every epoch."""
    ordered: bool = True
    """Whether the order of an epoch is known when it begins; else it is as batches are asked for."""


class ShardState:
    """The state of a shard.

    Args:
        random: whether samples differ between epochs.
        halves: whether half-finished ones do not, so that they may be kept.
        buffer_nbytes: for samples that were asked for and are not received.
        cache_nbytes: for what is kept beyond that; 0: nothing is.
        options: of QMOWS.
        policy: how often a sample may kill its loader.
        failed_sample: makes the error that is delivered in place of such a sample.
        detach: makes a sample that is to be kept independent of the memory that it came in.
    """

    def __init__(
        self, *, random: bool, halves: bool = True, buffer_nbytes: int, cache_nbytes: int, options: QueueOptions | None = None,
        policy: TaskRetryPolicy | None = None, failed_sample: Callable[[SampleKey, str], SerializedSample],
        detach: Callable[[SerializedSample], SerializedSample] = lambda packed: packed,
    ) -> None:  # fmt: skip
        self.random, self.halves = random, random and halves
        self._detach = detach
        self.scheduler = Scheduler(options)
        self.buffer = RemoteBuffer(limit_nbytes=buffer_nbytes)
        self._cache_policy = NextUse(cost_aware=True)
        self.cache = Cache(cache_nbytes, self._cache_policy) if cache_nbytes else None
        self.hits = self.half_hits = self.loaded = 0
        """Samples found in the cache, found half-finished, and loaded from the beginning."""
        self._policy = policy or TaskRetryPolicy(retries=2)
        self._failed_sample = failed_sample
        self._readers: dict[str, _Reader] = {}
        self._held: dict[SampleKey, SerializedSample] = {}
        self._kept: dict[tuple[str, Any], SerializedSample] = {}
        self._failures: dict[SampleKey, SerializedSample] = {}
        self._awaited: dict[SampleKey, set[tuple[str, int]]] = {}
        self._sent_tasks: dict[str, set[SampleKey]] = {}
        self._futures: dict[str, _Future] = {}
        self.ready: set[tuple[str, int]] = set()
        """Batches that have become complete, until the caller takes note."""

    def key(self, sample: int, epoch: int, seed: int | None, once: str = "") -> SampleKey:
        """Of a sample, for whoever asks so: where nothing is random, the same for all (and seeded, as steps draw then)."""
        return SampleKey(sample, epoch, seed, once) if self.random or once else SampleKey(sample, 0, 0)

    # -- readers ------------------------------------------------------------------------------------------

    def request(self, consumer: str, job: str, ticket: int, names: Sequence[SampleKey], *, now: float) -> bool:
        """A reader asks for a batch, perhaps again. Returns whether it is all here.

        Batches should be asked for in order; one that comes late costs, and may make others incomplete again.

        Raises:
            Over: the reader has it already.
        """
        reader = self._readers.setdefault(consumer, _Reader(job, now))
        reader.heard_at = now
        if ticket <= reader.received:
            raise AlreadyDelivered(f"batch {ticket} of {consumer} was received")
        if ticket not in reader.names:
            later = {t: reader.names[t] for t in sorted(reader.names) if t > ticket}
            if later:  # the buffer wants them in order: those go, and come again behind this one
                for each in reader.names.keys() - later.keys():
                    later[each] = reader.names[each]
                self._withdraw(consumer, reader)
            for each, its in sorted({**later, ticket: tuple(names)}.items()):
                self._announce_batch(consumer, reader, each, its)
        self.schedule()
        if ticket == self.next_batch(consumer):
            self._prioritise(consumer, ticket)
        return not reader.lacking[ticket]

    def is_announced(self, consumer: str, ticket: int) -> bool:
        """Whether a batch was asked for, or is over."""
        known, reader = self.buffer.announced(consumer), self._readers.get(consumer)
        return (reader is not None and ticket <= reader.received) or (bool(known) and ticket <= known[-1])

    def next_batch(self, consumer: str) -> int | None:
        """The consumer's next batch."""
        known = self.buffer.announced(consumer)
        return known[0] if known else None

    def fetch(self, consumer: str, ticket: int, *, now: float) -> list[SerializedSample] | None:
        """The samples of a batch, in the order asked for; None while something is missing or it is over."""
        reader = self._readers.get(consumer)
        if reader is None or ticket not in reader.names or reader.lacking[ticket]:
            return None
        names = reader.names[ticket]
        if self.cache is not None and ticket not in reader.given:
            reader.given.add(ticket)
            for name in names:
                for job, key in self._uses(reader.job, name):
                    self.cache.lookup(job, key, now_s=now)
        return [self._held[name] for name in names]

    def acknowledge(self, consumer: str, ticket: int) -> None:
        """A reader has everything up to and including this batch."""
        reader = self._readers.get(consumer)
        if reader is None:
            return
        reader.received = max(reader.received, ticket)
        for old in [t for t in reader.names if t <= ticket]:
            self._forget_batch(consumer, reader, old)
        self._drop(self.buffer.release(consumer, ticket))
        self.schedule()
        if (head := self.next_batch(consumer)) is not None:
            self._prioritise(consumer, head)

    def heartbeat(self, consumer: str, *, waiting: bool, now: float) -> bool:
        """A reader lives. False: it is not known here."""
        reader = self._readers.get(consumer)
        if reader is not None:
            reader.heard_at, reader.waiting = now, waiting
        return reader is not None

    def remove_reader(self, consumer: str) -> None:
        """A reader has ended."""
        reader = self._readers.pop(consumer, None)
        if reader is None:
            return
        self._withdraw(consumer, reader)
        if all(other.job != reader.job for other in self._readers.values()):
            self._forget_job(reader.job)
        self.schedule()

    def silent_readers(self, lease_s: float, *, now: float) -> tuple[str, ...]:
        """Readers that were not heard of for that long."""
        return tuple(name for name, reader in self._readers.items() if now - reader.heard_at > lease_s)

    @property
    def readers(self) -> int:
        return len(self._readers)

    @property
    def waiting(self) -> int:
        """Readers whose trainer stands still."""
        return sum(reader.waiting for reader in self._readers.values())

    def announce(
        self, job: str, epoch: int, seed: int | None, indices: Sequence[int], *, ordered: bool = True
    ) -> None:  # fmt: skip
        """A job will use these samples in an epoch. Said by each of its ranks, heard once.

        Args:
            ordered: in this order; False: in one that is drawn as it goes.
        """
        if self.cache is None or not len(indices):
            return
        future = self._futures.setdefault(job, _Future())
        if future.epochs and epoch <= future.epochs[-1]:
            return
        future.epochs.append(epoch)
        future.ordered = ordered
        names = [("whole", self.key(i, epoch, seed)) for i in indices]
        if not self.random:
            self._announce_repeated(job, future, names)
            return
        self.cache.observe(Joined(job=(job, epoch), keys=names))  # of use to jobs of the same seed in this epoch only
        if ordered:
            self.cache.observe(Announced(job=(job, epoch), keys=names))
        while len(future.epochs) > 2:  # of the epoch before the present one nothing is to come
            self.cache.observe(Left(job=(job, future.epochs.pop(0))))
        if self.halves:
            self._announce_repeated(job, future, [("half", i) for i in indices])

    def _announce_repeated(self, job: str, future: _Future, keys: list[tuple[str, Any]]) -> None:
        """What is the same in every epoch: one epoch's order follows the other."""
        assert self.cache is not None
        if future.keys != frozenset(keys):  # the first, or the one after an epoch that was resumed in its middle
            if future.keys:
                self.cache.observe(Left(job=job))
            future.keys = frozenset(keys)
            self.cache.observe(Joined(job=job, keys=future.keys))
        if future.ordered:
            self.cache.observe(Announced(job=job, keys=keys))

    # -- loaders ------------------------------------------------------------------------------------------

    def add_loader(self, loader: str, *, now: float) -> None:
        """A loader is there."""
        self.scheduler.add_loader(loader, now=now)
        self._sent_tasks[loader] = set()

    def report(
        self, loader: str, report: LoaderReport, results: Mapping[SampleKey, LoadResult], *, now: float
    ) -> LoaderReply:
        """A loader brings results and asks for tasks.

        Args:
            results: of `report.done`.
        """
        reply = self.scheduler.sync(loader, report, now=now)
        accepted: Any = reply.accepted
        for name in accepted:
            self._store_result(name, results[name])
        self._store_failures(reply.failures)
        if reply.rejoin:
            self.add_loader(loader, now=now)
        self.schedule()
        return reply

    def tasks(self, loader: str, reply: LoaderReply) -> list[tuple[SampleKey, SerializedSample | None]]:
        """The queue in a reply, and with each task that is new to the loader its half-finished sample, if it is kept."""
        sent = self._sent_tasks.get(loader, set())
        out = []
        for name in reply.tasks:
            half = self._kept.get(("half", name.sample)) if name not in sent else None  # type: ignore[attr-defined]
            self.half_hits += half is not None
            out.append((name, half))
        self._sent_tasks[loader] = set(reply.tasks)  # type: ignore[arg-type]
        return out  # type: ignore[return-value]

    def remove_loader(self, loader: str) -> None:
        """A loader ended in good order."""
        self.scheduler.remove_loader(loader)
        self._sent_tasks.pop(loader, None)

    def fail_loader(self, loader: str) -> None:
        """A loader died."""
        self._store_failures(self.scheduler.fail_loader(loader))
        self._sent_tasks.pop(loader, None)
        self.schedule()

    def is_busy(self, loader: str) -> bool:
        """Whether a loader may have samples in hand."""
        state = self.scheduler.loaders.get(loader)
        return state is not None and bool(state.in_hand)

    def tick(self, *, now: float) -> tuple[str, ...]:
        """Gives up silent loaders, and names them."""
        losses = self.scheduler.tick(now=now)
        for loader in losses.loaders:
            self._sent_tasks.pop(loader, None)
        self._store_failures(losses.failures)
        if losses.loaders:
            self.schedule()
        return losses.loaders

    @property
    def wants_half(self) -> bool:
        """Whether half-finished samples are of use."""
        return self.cache is not None and self.halves

    # -- inside -------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Sends for everything that may be loaded now."""
        while names := self.buffer.admit():
            wanted = []
            for name in names:
                found = self._failures.get(name) or self._kept.get(("whole", name))  # type: ignore[call-overload]
                if found is None:
                    wanted.append(name)
                else:
                    self.hits += not found.failed
                    self._arrived(name, found)  # type: ignore[arg-type]
            self.scheduler.submit(wanted, policy=self._policy)

    def _store_result(self, name: Any, result: LoadResult) -> None:
        self.loaded += 1
        self._arrived(name, result.sample)
        if self.cache is not None and result.half is not None and self.halves:
            self._keep(("half", name.sample), result.half)

    def _is_wanted_later(self, name: SampleKey, thing: SerializedSample) -> bool:
        """Whether a sample that leaves the buffer will be used again: in every epoch, or by another job in this one."""
        if self.cache is None or thing.failed or name.once:
            return False
        if not self.random:
            return True
        key = ("whole", name)
        jobs = [(job, name.epoch) for job in self._futures]
        return any(job in self._cache_policy.jobs and self._cache_policy.jobs[job].awaits(key) for job in jobs)

    def _keep(self, key: tuple[str, Any], thing: SerializedSample) -> None:
        assert self.cache is not None
        admission = self.cache.admit(key, nbytes=max(1, thing.nbytes), cost_s=thing.cost_s)
        for old in admission.evicted:
            self._kept.pop(old, None)  # type: ignore[call-overload]
        if admission.admitted and key not in self._kept:
            self._kept[key] = self._detach(thing)

    def _arrived(self, name: SampleKey, thing: SerializedSample) -> None:
        gone = self.buffer.arrived(name, max(1, thing.nbytes))
        if name not in gone:
            self._held[name] = thing
            for consumer, ticket in self._awaited.get(name, ()):
                lacking = self._readers[consumer].lacking[ticket]
                lacking.discard(name)
                if not lacking:
                    self.ready.add((consumer, ticket))
        self._drop(gone)

    def _drop(self, names: Iterable[Any]) -> None:
        for name in names:
            thing = self._held.pop(name, None)
            if thing is not None and self._is_wanted_later(name, thing):
                self._keep(("whole", name), thing)
            for consumer, ticket in self._awaited.get(name, ()):
                self._readers[consumer].lacking[ticket].add(name)
                self.ready.discard((consumer, ticket))
        self.scheduler.forget(names)

    def _announce_batch(self, consumer: str, reader: _Reader, ticket: int, names: tuple[SampleKey, ...]) -> None:
        self.buffer.announce(consumer, ticket, names)
        reader.names[ticket] = names
        missing: Any = self.buffer.missing(consumer, ticket)
        reader.lacking[ticket] = set(missing)
        for name in set(names):
            self._awaited.setdefault(name, set()).add((consumer, ticket))
        if not missing:
            self.ready.add((consumer, ticket))
        future = self._futures.get(reader.job)
        if self.cache is not None and future is not None and not future.ordered and ticket > reader.told:
            reader.told = ticket
            uses = [use for name in names for use in self._uses(reader.job, name)]
            for who in dict.fromkeys(job for job, _ in uses):
                self.cache.observe(Announced(job=who, keys=[key for job, key in uses if job == who]))

    def _withdraw(self, consumer: str, reader: _Reader) -> None:
        for ticket in list(reader.names):
            self._forget_batch(consumer, reader, ticket)
        self._drop(self.buffer.remove_consumer(consumer))

    def _forget_batch(self, consumer: str, reader: _Reader, ticket: int) -> None:
        for name in set(reader.names.pop(ticket)):
            places = self._awaited[name]
            places.discard((consumer, ticket))
            if not places:
                del self._awaited[name]
        del reader.lacking[ticket]
        reader.given.discard(ticket)
        self.ready.discard((consumer, ticket))

    def _store_failures(self, failures: Iterable[TaskFailure]) -> None:
        for failure in failures:
            name: Any = failure.key
            self._failures[name] = self._failed_sample(name, failure.reason)
            self._arrived(name, self._failures[name])

    def _prioritise(self, consumer: str, ticket: int) -> None:
        lacking = self._readers[consumer].lacking.get(ticket, ())
        self.scheduler.submit([name for name in lacking if name in self.scheduler.tasks], urgent=True)

    # -- what the cache is told ---------------------------------------------------------------------------

    def _uses(self, job: str, name: SampleKey) -> list[tuple[Any, tuple[str, Any]]]:
        if not self.random:
            return [(job, ("whole", name))]
        whole: list[tuple[Any, tuple[str, Any]]] = [((job, name.epoch), ("whole", name))]
        return [*whole, (job, ("half", name.sample))] if self.halves else whole

    def _forget_job(self, job: str) -> None:
        future = self._futures.pop(job, None)
        if future is None or self.cache is None:
            return
        self.cache.observe(Left(job=job))
        if self.random:
            for epoch in future.epochs:
                self.cache.observe(Left(job=(job, epoch)))
