"""Batches from a service: requested ahead, each delivered once, whichever process dies meanwhile.

A chunk is divided by shards and requested in as many calls. A lost call is repeated: equal keys mean equal bytes, and only the
first answer counts. Large arrays come in shared memory where reader and shard are on one machine, and arrays of a batch are
adjacent there, so that stacking them copies nothing.
"""

from __future__ import annotations

import logging
import queue
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ephemeron.data.flow.backend import AnyLoading, Collate, Loaders
from ephemeron.data.flow.collate import Stacking
from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.flow.fork_pool import ChunkDone, Collated
from ephemeron.data.flow.sample_loader import SampleRequest, StageTimings
from ephemeron.data.flow.stream import BatchStream
from ephemeron.data.service.client import FlowClient, _Cancelled
from ephemeron.data.service.messages import (
    AnnounceRequest,
    ConsumerHeartbeat,
    JoinRequest,
    MarkRequest,
    ReaderRequest,
    ReadRequest,
    TraverseRequest,
)
from ephemeron.data.service.protocol import ANNOUNCE, HEARTBEAT_CONSUMER, HEARTBEAT_READER, JOIN, MARK, READ, TRAVERSE
from ephemeron.data.service.sample_codec import samples_in, unpack
from ephemeron.data.shuffle import Indices
from ephemeron.errors import EphemeronError, JobError, SampleFailed
from ephemeron.user_code import guarded

HEARTBEAT_S = 1.0
MOST_THREADS = 32
_log = logging.getLogger(__name__)
WAITING_S = 0.05
"""A trainer counts as waiting after this time without a chunk."""


class RemoteLoading:
    """Samples of a flow by their indices (index access, figure 4-9).

    Args:
        flow: that is read.
        client: of the service.
        samples: in the dataset.
    """

    def __init__(self, flow: FlowDescription, client: FlowClient, samples: int) -> None:
        self.flow, self.client = flow, client
        self.seconds = StageTimings()
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def load(self, items: Sequence[SampleRequest]) -> list[Any | SampleFailed]:
        """The samples of these items, in this order; in place of one that raises, the error."""
        out: list[Any] = [None] * len(items)
        groups: dict[tuple[int, int | None], list[int]] = {}
        for place, item in enumerate(items):
            groups.setdefault((item.epoch, item.seed), []).append(place)
        once = f"{secrets.token_hex(6)}"
        for (epoch, seed), places in groups.items():
            indices = np.array([items[place].index for place in places], dtype=np.int64)
            for shard, mine in by_shard(self.client.edges(), indices):
                consumer = f"once/{once}/{shard}"

                def read(generation: int, consumer: str = consumer, epoch: int = epoch, seed: int | None = seed) -> ReadRequest:
                    return ReadRequest(
                        generation=generation,
                        consumer=consumer,
                        job=once,
                        ticket=0,
                        after=None,
                        received=None,
                        epoch=epoch,
                        seed=seed,
                        once=once,
                    )

                reply, buffers = self.client.shard(shard, READ, read, [indices[mine]])
                self.client.remove_consumer(shard, consumer)
                for place, parts in zip(mine, samples_in(reply.counts, buffers), strict=True):
                    out[places[place]] = unpack([bytes(part) for part in parts])
        self.seconds.samples += len(items)
        return out


def by_shard(edges: Sequence[int], indices: Indices) -> list[tuple[int, Indices]]:
    """Which shards have some of these samples, and the places of those in the list."""
    shards = np.searchsorted(np.asarray(edges[1:]), indices, side="right")
    return [(int(shard), np.flatnonzero(shards == shard)) for shard in np.unique(shards)]


class RemoteLoaders(Loaders):
    """The loaders of a service.

    Args:
        client: of the flow.
        job: this job's name, the same for all its ranks.
    """

    def __init__(self, client: FlowClient, job: str) -> None:
        self.client, self.job = client, job
        self.count = 1
        """Loaders, at least one; the service decides how many."""

    def pool(self, loading: AnyLoading, collate: Collate, *, prefetch: int) -> RemotePool:
        return RemotePool(self.client, self.job, collate, prefetch=prefetch)

    def shared(self, stream: BatchStream, sampling: str, chosen: Indices | None) -> BatchStream:
        if sampling != "shared":
            return super().shared(stream, sampling, chosen)
        return SharedStream.of(stream, self.client, self.job, chosen)


@dataclass(slots=True)
class _RemoteChunk:
    number: int
    epoch: int
    indices: Indices
    missing: int
    parts: list[Any] = field(default_factory=list)
    """Per sample its buffers."""
    seconds: StageTimings = field(default_factory=StageTimings)
    nbytes: int = 0
    failed: bool = False


@dataclass(slots=True)
class _Ask:
    chunk: _RemoteChunk
    shard: int
    places: Indices
    after: int | None
    seed: int | None


class RemotePool:
    """Requests chunks in threads that wait for shards.

    Args:
        client: of the flow.
        job: its name.
        collate: makes a batch of each chunk, in a thread, if it is the default; else chunks stay lists of samples.
        prefetch: chunks that will be under way at a time.
    """

    def __init__(self, client: FlowClient, job: str, collate: Collate, *, prefetch: int) -> None:
        self.lost = self.under_way = 0
        self._client, self._job = client, job
        # A random one draws from generators of this process, which the trainer uses meanwhile: only the trainer may call it.
        self._collate = collate if isinstance(collate, Stacking) else None
        self._consumer = f"{job}/{secrets.token_hex(4)}"
        self._edges = client.edges()
        self._asks: queue.Queue[_Ask | None] = queue.Queue()
        self._results: queue.Queue[ChunkDone | BaseException] = queue.Queue()
        self._last: dict[int, int] = {}
        self._open: dict[int, set[int]] = {}
        """Requested chunks of each shard that have not arrived."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._waiting_since: float | None = None
        shards = len(self._edges) - 1
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(MOST_THREADS, prefetch * shards))]
        self._threads.append(threading.Thread(target=self._beat, daemon=True))
        for thread in self._threads:
            thread.start()
        self._leave = weakref.finalize(self, _leave, self._over, client, self._consumer)  # also when the program ends

    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        indices = np.array([item.index for item in items], dtype=np.int64)
        parts = by_shard(self._edges, indices)
        chunk = _RemoteChunk(number, items[0].epoch if items else 0, indices, len(parts), [None] * len(items))
        self.under_way += 1
        for shard, places in parts:
            with self._lock:
                self._open.setdefault(shard, set()).add(number)
                after, self._last[shard] = self._last.get(shard), number
            self._asks.put(_Ask(chunk, shard, places, after, items[0].seed))
        if not parts:
            self._finish(chunk)

    def announce(self, epoch: int, seed: int, order: Callable[[], Indices], *, ordered: bool) -> None:
        def request(generation: int) -> AnnounceRequest:
            return AnnounceRequest(generation=generation, job=self._job, epoch=epoch, seed=seed, ordered=ordered)

        indices = order().astype(np.int64)
        for shard, places in by_shard(self._edges, indices):
            self._client.shard(shard, ANNOUNCE, request, [indices[places]])

    def result(self) -> ChunkDone:
        self._waiting_since = time.monotonic()
        try:
            found = self._results.get()
        finally:
            self._waiting_since = None
        if isinstance(found, BaseException):
            raise found
        self.under_way -= 1
        return found

    def close(self) -> None:
        if self._over.is_set():
            return
        self._over.set()
        _log.debug("reader %s ends", self._consumer)
        for _ in self._threads:
            self._asks.put(None)
        if not sys.is_finalizing():
            self._client.deregister(self._consumer)
        self._leave.detach()  # it holds the client, and so the frames in which a connection of the client was lost

    # -- threads ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._over.is_set() and (ask := self._asks.get()) is not None:
            try:
                self._read(ask)
            except _Cancelled:
                return
            except BaseException as e:  # noqa: BLE001 - it is raised where the caller sees it
                self._results.put(e)
                return

    def _read(self, ask: _Ask) -> None:
        chunk, shard = ask.chunk, ask.shard

        def request(generation: int) -> ReadRequest:
            return ReadRequest(
                generation=generation,
                consumer=self._consumer,
                job=self._job,
                ticket=chunk.number,
                after=ask.after,
                received=self._received(shard),
                epoch=chunk.epoch,
                seed=ask.seed,
                once="",
            )

        indices = [chunk.indices[ask.places]]
        reply, buffers = self._client.shard(shard, READ, request, indices, over=self._over.is_set)
        for place, parts in zip(ask.places, samples_in(reply.counts, buffers), strict=True):
            chunk.parts[place] = parts
        with self._lock:
            self._open[shard].discard(chunk.number)
            for stage, seconds in reply.seconds.items():
                chunk.seconds.add(stage, seconds)
            chunk.seconds.samples += len(ask.places)
            chunk.nbytes += sum(memoryview(b).nbytes for b in buffers)
            chunk.failed |= bool(reply.failed)
            chunk.missing -= 1
            complete = chunk.missing == 0
        if complete:
            del buffers
            self._finish(chunk)
        if self._asks.empty():
            # No later call acknowledges this answer, and the memory that it holds in the shard may block all the others.
            self._heartbeat(shard)

    def _received(self, shard: int) -> int:
        """The last chunk before which all chunks have arrived."""
        with self._lock:
            still_open = self._open.get(shard)
            return min(still_open) - 1 if still_open else self._last.get(shard, -1)

    def _heartbeat(self, shard: int) -> None:
        since = self._waiting_since
        waiting = since is not None and time.monotonic() - since > WAITING_S

        def request(generation: int) -> ConsumerHeartbeat:
            return ConsumerHeartbeat(generation=generation, consumer=self._consumer, waiting=waiting, received=self._received(shard))

        self._client.shard(shard, HEARTBEAT_CONSUMER, request, over=self._over.is_set)

    def _finish(self, chunk: _RemoteChunk) -> None:
        samples: Any = [unpack(parts) for parts in chunk.parts]
        chunk.parts.clear()
        if self._collate is not None and samples and not chunk.failed:
            try:
                with guarded():
                    samples = Collated(self._collate.in_place(samples), len(samples))
            except Exception:  # noqa: BLE001 - it is raised again where the caller sees it
                pass
        self._results.put(ChunkDone(chunk.number, samples, chunk.seconds, chunk.nbytes))

    def _beat(self) -> None:
        first = True  # at once, or a service with a short idle_s ends the flow before it knows of this reader
        while not self._over.wait(0.0 if first else HEARTBEAT_S):
            first = False
            try:
                request = ReaderRequest(reader=self._consumer)
                found = self._client.router(HEARTBEAT_READER, request, timeout_s=HEARTBEAT_S, over=self._over.is_set)
                self._client.observe_generation(found.generation, over=self._over.is_set)
                for shard in range(len(self._edges) - 1):
                    self._heartbeat(shard)
            except (EphemeronError, _Cancelled) as e:
                _log.debug("a heartbeat of reader %s failed: %s", self._consumer, e)  # threads that read raise the error


def _leave(over: threading.Event, client: FlowClient, consumer: str) -> None:
    if not over.is_set():
        over.set()
        client.deregister(consumer)


# -- A batch stream whose order a service draws for all jobs together (traversal access ---------------------------


AHEAD = 8
"""Batches drawn at a time; they are fixed from then on."""


class _Drawn:
    """Batches that the service has drawn for this rank; shared by all copies of the stream."""

    def __init__(self, client: FlowClient, job: str, chosen: Indices | None) -> None:
        self.client, self.job, self.chosen = client, job, chosen
        self.batches: dict[tuple[int, int], Indices] = {}
        self.left: dict[int, int] = {}
        self.joined: str | None = None
        self.reader = secrets.token_hex(8)
        self.lock = threading.Lock()
        places = None if chosen is None else {int(index): place for place, index in enumerate(chosen)}
        self.place_of = places

    def anew(self) -> _Drawn:
        """A new state of the same job, as for a job that resumes."""
        return _Drawn(self.client, self.job, self.chosen)

    def positions(self, indices: Sequence[int]) -> Indices:
        places = indices if self.place_of is None else [self.place_of[index] for index in indices]
        return np.array(places, dtype=np.intp)


@dataclass(slots=True, kw_only=True)
class SharedStream(BatchStream):
    """One rank's batches, in an order that is as random as its own would be and shares as much as possible with other jobs."""

    drawn: _Drawn = field(repr=False)
    resumed: str = ""
    """Samples that had been used of the epoch in which it was resumed (`MarkReply.consumed`)."""

    @classmethod
    def of(cls, stream: BatchStream, client: FlowClient, job: str, chosen: Indices | None) -> SharedStream:
        """The shared stream in place of an own one that has not begun."""
        if not stream.shuffle:
            raise JobError("sampling = 'shared' with shuffle = False", remedy="leave one of them out")
        return cls(
            samples=stream.samples,
            batch_size=stream.batch_size,
            seed=stream.seed,
            rank=stream.rank,
            world_size=stream.world_size,
            remainder=stream.remainder,
            epoch=stream.epoch,
            drawn=_Drawn(client, job, chosen),
        )

    def copy(self) -> SharedStream:
        return replace(self)

    @property
    def ordered(self) -> bool:
        return False

    def rest(self) -> Indices:
        """All samples, in no particular order."""
        return np.arange(self.samples)

    def following(self) -> Indices:
        return np.arange(self.samples)

    def steps_left(self) -> int:
        if self.epoch not in self.drawn.left:
            self._fetch()
        return self.drawn.left[self.epoch] - self.steps

    def next(self) -> Indices | None:
        if self.steps_left() == 0:
            return None
        key = (self.epoch, self.steps)
        if key not in self.drawn.batches:
            self._fetch()
        self.steps += 1
        for old in [k for k in self.drawn.batches if k < (self.epoch, self.steps - 2 * AHEAD - 64)]:
            self.drawn.batches.pop(old, None)
        return self.drawn.batches[key]

    def begin(self, epoch: int) -> SharedStream:
        """The stream at the beginning of an epoch. Draws continue only from the end of an epoch to the next one.

        In all other cases the service treats this as another job, as it does after a resumption: for the service, an epoch that
        was left before its end is not over.
        """
        if epoch == self.epoch and self.steps == 0 and not self.resumed:
            return self.copy()
        if epoch == self.epoch + 1 and self.drawn.joined is not None and self.steps_left() == 0:
            return replace(self, epoch=epoch, steps=0)
        return replace(self, epoch=epoch, steps=0, resumed="", drawn=self.drawn.anew())

    def state_dict(self) -> dict[str, object]:
        """The position as JSON; the same for every rank that has taken as many batches."""
        self._join()
        mark = self.drawn.client.router(MARK, MarkRequest(job=self._name, epoch=self.epoch, steps=self.steps))
        return {
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": "shared",
            "epoch": self.epoch,
            "consumed": mark.consumed,
            "count": mark.count,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        for key, mine in (("samples", self.samples), ("seed", self.seed), ("shuffle", "shared")):
            if state.get(key) != mine:
                raise JobError(
                    f"the state has {key} = {state.get(key)!r}, this stream has {mine!r}",
                    remedy="resume with the dataset, seed and sampling that the state was saved with",
                )
        epoch = state.get("epoch")
        if not isinstance(epoch, int) or "consumed" not in state:
            raise JobError(f"the state has epoch = {epoch!r}", remedy="load a result of state_dict(), unchanged")
        self.epoch, self.steps = epoch, 0
        self.resumed = str(state["consumed"])
        self.drawn = self.drawn.anew()

    @property
    def _name(self) -> str:
        """Name of the job at the service. A resumed job gets another one, so that late requests do not disturb it."""
        assert self.drawn.joined is not None
        return self.drawn.joined

    def _join(self) -> None:
        drawn = self.drawn
        with drawn.lock:
            if drawn.joined is not None:
                return
            request = JoinRequest(
                job=drawn.job,
                rank=self.rank,
                reader=drawn.reader,
                samples=self.samples,
                seed=self.seed,
                batch=self.batch_size,
                world_size=self.world_size,
                remainder=self.remainder,
                epoch=self.epoch,
                consumed=self.resumed,
            )
            buffers = [] if drawn.chosen is None else [np.asarray(drawn.chosen, dtype=np.int64)]
            drawn.joined = drawn.client.router(JOIN, request, buffers).job

    def _fetch(self) -> None:
        self._join()
        request = TraverseRequest(job=self._name, rank=self.rank, epoch=self.epoch, sequence=self.steps, acked=0, count=AHEAD)
        found = self.drawn.client.router(TRAVERSE, request)
        for ahead, indices in enumerate(found.batches):
            self.drawn.batches[self.epoch, self.steps + ahead] = self.drawn.positions(indices)
        self.drawn.left[self.epoch] = found.left
