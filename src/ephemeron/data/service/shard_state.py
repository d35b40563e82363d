"""The state and the decisions of a shard: which samples are requested, which loader makes them, which are kept (DPFlow
section 4.3.4, figure 4-12).

    readers ── request, fetch, acknowledge ─▶ ShardState ◀─ report, tasks ── loaders
                                               │
              RemoteBuffer: samples that were requested and not acknowledged, in bytes
              Scheduler:    which loader loads which sample (QMOWS)
              Cache:        samples that are kept beyond that (NextUse), finished and half-finished
              held, kept:   the bytes, shared by buffer and cache

No thread, no socket, no clock of its own. The bytes are pickles that are never opened here.

A sample is named by (index, epoch, seed): equal keys mean equal bytes, for all jobs. A flow without random steps needs only the
index. A half-finished sample has passed the steps that are the same in every epoch, at least reading: a loader that gets one
need not fetch and decode it again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from ephemeron.data.cache import Announced, Cache, JobId, Joined, Left, NextUse
from ephemeron.data.scheduler import LoaderReply, LoaderReport, QueueOptions, RemoteBuffer, Scheduler, TaskFailure, TaskRetryPolicy


class _AlreadyDelivered(Exception):
    """The requested batch was acknowledged before."""


class SampleKey(NamedTuple):
    """Name of a sample: equal keys mean equal bytes."""

    sample: int
    """Its number in the dataset."""
    epoch: int = 0
    seed: int | None = None
    once: str = ""
    """Distinguishes it from all others: for samples that are drawn anew at each request."""


CacheKey: TypeAlias = tuple[Literal["whole", "half"], SampleKey | int]
"""A finished sample, or a half-finished one by its number in the dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SerializedSample:
    """A pickled sample, with its out-of-band memory."""

    buffers: tuple[Any, ...]
    nbytes: int
    cost_s: float = 0.0
    """Seconds to make it."""
    failed: bool = False
    """Whether an error is in place of the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of a task."""

    sample: SerializedSample
    half: SerializedSample | None = None
    """The half-finished sample, where it is worth keeping."""


@dataclass(slots=True)
class _Reader:
    """State of a reader beside that in the buffer."""

    job: str
    heard_at: float
    waiting: bool = False
    """Whether its trainer waits for a batch."""
    received: int = -1
    """The last batch that it has acknowledged."""
    announced: int = -1
    """The last batch that was announced to the cache."""
    fetched: set[int] = field(default_factory=set)
    """Batches that were handed out; the reply may have been lost."""
    lacking: dict[int, set[SampleKey]] = field(default_factory=dict)
    """Missing samples of each batch."""
    names: dict[int, tuple[SampleKey, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Future:
    """Samples that a job has announced."""

    epochs: list[int] = field(default_factory=list)
    keys: frozenset[CacheKey] = frozenset()
    """Keys in the cache that are the same in every epoch."""
    ordered: bool = True
    """Whether the order of an epoch is known when it begins; else it is that of the requests."""


class ShardState:
    """The state of a shard.

    Args:
        random: whether samples differ between epochs.
        halves: whether half-finished samples are the same in every epoch, so that they may be kept.
        buffer_nbytes: limit for samples that were requested and not acknowledged.
        cache_nbytes: limit for samples that are kept beyond that; 0: none are.
        options: of QMOWS.
        policy: how often a sample may kill its loader.
        failed_sample: makes the error that is delivered in place of such a sample.
        detach: copies a sample that is to be kept out of the memory that it arrived in.
    """

    def __init__(
        self,
        *,
        random: bool,
        halves: bool = True,
        buffer_nbytes: int,
        cache_nbytes: int,
        options: QueueOptions | None = None,
        policy: TaskRetryPolicy | None = None,
        failed_sample: Callable[[SampleKey, str], SerializedSample],
        detach: Callable[[SerializedSample], SerializedSample] = lambda packed: packed,
    ) -> None:
        self.random, self.halves = random, random and halves
        self._detach = detach
        self.scheduler: Scheduler[SampleKey] = Scheduler(options)
        self.buffer: RemoteBuffer[SampleKey] = RemoteBuffer(limit_nbytes=buffer_nbytes)
        self._cache_policy = NextUse(cost_aware=True)
        self.cache = Cache(cache_nbytes, self._cache_policy) if cache_nbytes else None
        self.hits = self.half_hits = self.loaded = 0
        """Samples found in the cache, found half-finished, and loaded from the beginning."""
        self._policy = policy or TaskRetryPolicy(retries=2)
        self._failed_sample = failed_sample
        self._readers: dict[str, _Reader] = {}
        self._held: dict[SampleKey, SerializedSample] = {}
        self._kept: dict[Hashable, SerializedSample] = {}
        self._failures: dict[SampleKey, SerializedSample] = {}
        self._awaited: dict[SampleKey, set[tuple[str, int]]] = {}
        self._sent_tasks: dict[str, set[SampleKey]] = {}
        self._futures: dict[str, _Future] = {}
        self.ready: set[tuple[str, int]] = set()
        """Batches that have become complete since the caller cleared this set."""

    def key(self, sample: int, epoch: int, seed: int | None, once: str = "") -> SampleKey:
        """The key of a sample: the same for all epochs and seeds where nothing is random (steps are seeded all the same)."""
        return SampleKey(sample, epoch, seed, once) if self.random or once else SampleKey(sample, 0, 0)

    # -- readers ------------------------------------------------------------------------------------------

    def request(self, consumer: str, job: str, ticket: int, names: Sequence[SampleKey], *, now: float) -> bool:
        """Requests a batch for a reader; repeating it is harmless. Returns whether the batch is complete.

        Batches should be requested in order: a late one is expensive, and may make others incomplete again.

        Raises:
            _AlreadyDelivered: the reader has acknowledged it.
        """
        reader = self._readers.setdefault(consumer, _Reader(job, now))
        reader.heard_at = now
        if ticket <= reader.received:
            raise _AlreadyDelivered(f"batch {ticket} of {consumer} was acknowledged")
        if ticket not in reader.names:
            later = {t: reader.names[t] for t in sorted(reader.names) if t > ticket}
            if later:  # the buffer needs them in order: later ones are announced again behind this one
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
        """Whether a batch was requested or acknowledged."""
        known, reader = self.buffer.announced(consumer), self._readers.get(consumer)
        return (reader is not None and ticket <= reader.received) or (bool(known) and ticket <= known[-1])

    def next_batch(self, consumer: str) -> int | None:
        """The consumer's next batch; None: it has requested none."""
        known = self.buffer.announced(consumer)
        return known[0] if known else None

    def fetch(self, consumer: str, ticket: int, *, now: float) -> list[SerializedSample] | None:
        """The samples of a batch, in the requested order; None while one is missing, or after it was acknowledged.

        The samples stay until `acknowledge`, so that a lost reply can be repeated.
        """
        reader = self._readers.get(consumer)
        if reader is None or ticket not in reader.names or reader.lacking[ticket]:
            return None
        names = reader.names[ticket]
        if self.cache is not None and ticket not in reader.fetched:
            reader.fetched.add(ticket)
            for name in names:
                for job, key in self._uses(reader.job, name):
                    self.cache.lookup(job, key, now_s=now)
        return [self._held[name] for name in names]

    def acknowledge(self, consumer: str, ticket: int) -> None:
        """Records that a reader has all batches up to and including this one."""
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
        """Records that a reader is alive. False: the reader is unknown."""
        reader = self._readers.get(consumer)
        if reader is not None:
            reader.heard_at, reader.waiting = now, waiting
        return reader is not None

    def remove_reader(self, consumer: str) -> None:
        """Removes a reader and its requests."""
        reader = self._readers.pop(consumer, None)
        if reader is None:
            return
        self._withdraw(consumer, reader)
        if all(other.job != reader.job for other in self._readers.values()):
            self._forget_job(reader.job)
        self.schedule()

    def silent_readers(self, lease_s: float, *, now: float) -> tuple[str, ...]:
        """Readers without a heartbeat or request for that long."""
        return tuple(name for name, reader in self._readers.items() if now - reader.heard_at > lease_s)

    @property
    def readers(self) -> int:
        return len(self._readers)

    @property
    def waiting(self) -> int:
        """Readers whose trainer waits for a batch."""
        return sum(reader.waiting for reader in self._readers.values())

    def announce(self, job: str, epoch: int, seed: int | None, indices: Sequence[int], *, ordered: bool = True) -> None:
        """Announces the samples that a job will use in an epoch. Repetitions, from its other ranks, are ignored.

        Args:
            ordered: whether it uses them in this order; False: the order is drawn as it goes.
        """
        if self.cache is None or not len(indices):
            return
        future = self._futures.setdefault(job, _Future())
        if future.epochs and epoch <= future.epochs[-1]:
            return
        future.epochs.append(epoch)
        future.ordered = ordered
        names: list[CacheKey] = [("whole", self.key(i, epoch, seed)) for i in indices]
        if not self.random:
            self._announce_repeated(job, future, names)
            return
        self.cache.observe(Joined(job=(job, epoch), keys=names))  # useful to jobs of the same seed in this epoch only
        if ordered:
            self.cache.observe(Announced(job=(job, epoch), keys=names))
        while len(future.epochs) > 2:  # the epoch before the present one is complete
            self.cache.observe(Left(job=(job, future.epochs.pop(0))))
        if self.halves:
            self._announce_repeated(job, future, [("half", i) for i in indices])

    def _announce_repeated(self, job: str, future: _Future, keys: list[CacheKey]) -> None:
        """Announces samples that are the same in every epoch: the order of one epoch follows that of the one before."""
        assert self.cache is not None
        if future.keys != frozenset(keys):  # the first epoch, or the one after an epoch that was resumed in the middle
            if future.keys:
                self.cache.observe(Left(job=job))
            future.keys = frozenset(keys)
            self.cache.observe(Joined(job=job, keys=future.keys))
        if future.ordered:
            self.cache.observe(Announced(job=job, keys=keys))

    # -- loaders ------------------------------------------------------------------------------------------

    def add_loader(self, loader: str, *, now: float) -> None:
        """Adds a loader."""
        self.scheduler.add_loader(loader, now=now)
        self._sent_tasks[loader] = set()

    def report(
        self, loader: str, report: LoaderReport[SampleKey], results: Mapping[SampleKey, LoadResult], *, now: float
    ) -> LoaderReply[SampleKey]:
        """Takes the results of a loader, and returns its queue of tasks.

        Args:
            loader: its name.
            report: which tasks are done.
            results: of `report.done`.
            now: on the caller's clock.
        """
        reply = self.scheduler.sync(loader, report, now=now)
        for name in reply.accepted:
            self._store_result(name, results[name])
        self._store_failures(reply.failures)
        if reply.rejoin:
            self.add_loader(loader, now=now)
        self.schedule()
        return reply

    def tasks(self, loader: str, reply: LoaderReply[SampleKey]) -> list[tuple[SampleKey, SerializedSample | None]]:
        """The queue in a reply; with each task that is new to the loader its half-finished sample, if that is kept."""
        sent = self._sent_tasks.get(loader, set())
        out: list[tuple[SampleKey, SerializedSample | None]] = []
        for name in reply.tasks:
            half = self._kept.get(("half", name.sample)) if name not in sent else None
            self.half_hits += half is not None
            out.append((name, half))
        self._sent_tasks[loader] = set(reply.tasks)
        return out

    def remove_loader(self, loader: str) -> None:
        """Removes a loader that has shut down; its tasks are given to others."""
        self.scheduler.remove_loader(loader)
        self._sent_tasks.pop(loader, None)

    def fail_loader(self, loader: str) -> None:
        """Removes a loader that has died; its tasks are suspected of that."""
        self._store_failures(self.scheduler.fail_loader(loader))
        self._sent_tasks.pop(loader, None)
        self.schedule()

    def is_busy(self, loader: str) -> bool:
        """Whether a loader may be working on a sample."""
        state = self.scheduler.loaders.get(loader)
        return state is not None and bool(state.in_hand)

    def tick(self, *, now: float) -> tuple[str, ...]:
        """Gives up silent loaders, and returns their names."""
        losses = self.scheduler.tick(now=now)
        for loader in losses.loaders:
            self._sent_tasks.pop(loader, None)
        self._store_failures(losses.failures)
        if losses.loaders:
            self.schedule()
        return losses.loaders

    @property
    def wants_half(self) -> bool:
        """Whether half-finished samples are kept."""
        return self.cache is not None and self.halves

    # -- inside -------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Submits the samples that may be loaded now, and takes those that are in the cache."""
        while names := self.buffer.admit():
            wanted = []
            for name in names:
                found = self._failures.get(name) or self._kept.get(("whole", name))
                if found is None:
                    wanted.append(name)
                else:
                    self.hits += not found.failed
                    self._arrived(name, found)
            self.scheduler.submit(wanted, policy=self._policy)

    def _store_result(self, name: SampleKey, result: LoadResult) -> None:
        self.loaded += 1
        self._arrived(name, result.sample)
        if self.cache is not None and result.half is not None and self.halves:
            self._keep(("half", name.sample), result.half)

    def _is_wanted_later(self, name: SampleKey, thing: SerializedSample) -> bool:
        """Whether a sample that leaves the buffer will be used again: in a later epoch, or by another job in this one."""
        if self.cache is None or thing.failed or name.once:
            return False
        if not self.random:
            return True
        key = ("whole", name)
        jobs = [(job, name.epoch) for job in self._futures]
        return any(job in self._cache_policy.jobs and self._cache_policy.jobs[job].awaits(key) for job in jobs)

    def _keep(self, key: CacheKey, thing: SerializedSample) -> None:
        assert self.cache is not None
        admission = self.cache.admit(key, nbytes=max(1, thing.nbytes), cost_s=thing.cost_s)
        for old in admission.evicted:
            self._kept.pop(old, None)
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

    def _drop(self, names: Iterable[SampleKey]) -> None:
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
        missing = self.buffer.missing(consumer, ticket)
        reader.lacking[ticket] = set(missing)
        for name in set(names):
            self._awaited.setdefault(name, set()).add((consumer, ticket))
        if not missing:
            self.ready.add((consumer, ticket))
        future = self._futures.get(reader.job)
        if self.cache is not None and future is not None and not future.ordered and ticket > reader.announced:
            reader.announced = ticket
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
        reader.fetched.discard(ticket)
        self.ready.discard((consumer, ticket))

    def _store_failures(self, failures: Iterable[TaskFailure[SampleKey]]) -> None:
        for failure in failures:
            name = failure.key
            self._failures[name] = self._failed_sample(name, failure.reason)
            self._arrived(name, self._failures[name])

    def _prioritise(self, consumer: str, ticket: int) -> None:
        lacking = self._readers[consumer].lacking.get(ticket, ())
        self.scheduler.submit([name for name in lacking if name in self.scheduler.tasks], urgent=True)

    # -- events for the cache -----------------------------------------------------------------------------

    def _uses(self, job: str, name: SampleKey) -> list[tuple[JobId, CacheKey]]:
        """The accesses that a sample is to the cache: job, or job and epoch, and key."""
        if not self.random:
            return [(job, ("whole", name))]
        whole: list[tuple[JobId, CacheKey]] = [((job, name.epoch), ("whole", name))]
        return [*whole, (job, ("half", name.sample))] if self.halves else whole

    def _forget_job(self, job: str) -> None:
        future = self._futures.pop(job, None)
        if future is None or self.cache is None:
            return
        self.cache.observe(Left(job=job))
        if self.random:
            for epoch in future.epochs:
                self.cache.observe(Left(job=(job, epoch)))
