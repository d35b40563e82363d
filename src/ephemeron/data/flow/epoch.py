"""One iteration over a flow's loader: an epoch, or the rest of one, loaded ahead and delivered in order.

Each iteration has a window and loader processes of its own, so that concurrent iterations do not share state, and an abandoned one
loses only the batches that it had under way.

Time by stage: how long the trainer waited, and which stage limits the flow. Pure.

Loaders work in parallel, so a stage limits the flow if it takes the largest part of the loaders' time while the trainer waits; if
the trainer hardly waits, no stage does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from ephemeron.data.flow.backend import LoaderBackend
from ephemeron.data.flow.collate import Collator, collated
from ephemeron.data.flow.fork_pool import ChunkDone, Collated
from ephemeron.data.flow.sample_loader import COLLATE, NETWORK, READ, SampleRequest, StageTimings
from ephemeron.data.flow.sample_view import SampleView
from ephemeron.data.flow.stream import BatchStream
from ephemeron.data.randomness import kept
from ephemeron.data.scheduler import PrefetchWindow
from ephemeron.errors import SampleFailed

_log = logging.getLogger(__name__)
CHUNK = 16
"""Samples that a loader gets at a time, at most."""


@dataclass(slots=True, kw_only=True)
class LoaderOptions:
    """Options and counters that all iterations of a loader share."""

    read: SampleView
    collator: Collator
    window: PrefetchWindow
    """Bound on batches loaded ahead."""
    skip: bool
    """Whether samples that failed are skipped."""
    retries: int
    counters: FlowCounters
    chunks: int = 0
    """Number of submitted chunks, which numbers the next one."""


@dataclass(slots=True)
class _Batch:
    """A batch that is being loaded."""

    indices: Sequence[int]
    stream: BatchStream
    """Position after this batch."""
    results: list[Any]
    missing: int
    nbytes: int = 0
    collated: Collated | None = None
    """The batch, if its loader has collated it."""


@dataclass(slots=True)
class Epoch:
    """Batches of one iteration.

    Args:
        terms: of the loader.
        stream: its beginning; it is consumed.
        pool: loads ahead, for this iteration alone; None: batches are loaded on request.
    """

    terms: LoaderOptions
    stream: BatchStream
    pool: LoaderBackend | None
    batches: deque[_Batch] = field(default_factory=deque)
    """Batches that are loaded ahead, in order."""
    nbytes: int = 0
    """Bytes of results that have arrived and not been delivered."""
    _places: dict[int, tuple[_Batch, int]] = field(default_factory=dict)
    """Batch of each chunk under way, and the chunk's first place in it."""

    def __iter__(self) -> Iterator[tuple[Any, BatchStream]]:
        """Batches, each with the position of the stream after its delivery.

        Raises:
            SampleFailed: a sample cannot be loaded, and may not be skipped.
            LoadersLost: loader processes die repeatedly, or the loader was closed.
        """
        self._announce()
        counters = self.terms.counters
        while True:
            began = time.perf_counter()
            self.plan()
            if not self.batches:
                return
            batch = self.batches.popleft()
            while batch.missing:
                self._take(self._await())
                self.plan()
            value = self._value(batch)
            counters.waited_s += time.perf_counter() - began
            counters.batches += 1
            self.nbytes -= batch.nbytes
            yield value, batch.stream

    def _announce(self) -> None:
        """Announces the samples of this epoch and of the next one to the loaders."""
        if self.pool is None:
            return
        stream, indices = self.stream.copy(), self.terms.read.indices
        at, seed, ordered = stream.epoch, stream.seed, stream.ordered
        self.pool.announce(at, seed, lambda: indices(stream.rest()), ordered=ordered)
        self.pool.announce(at + 1, seed, lambda: indices(stream.following()), ordered=ordered)

    def plan(self) -> None:
        """Requests batches up to the limits; the next one always."""
        while self._has_room():
            indices = self.stream.next()
            if indices is None:
                return
            batch = _Batch([int(i) for i in indices], self.stream.copy(), [None] * len(indices), len(indices))
            self.batches.append(batch)
            # A batch that is mapped here cannot be collated there: then loaders share it, and it comes sooner.
            size = CHUNK if self.terms.read.maps_here or self.pool is None else len(indices)
            for start in range(0, len(indices), max(1, size)):
                self._submit(batch, start, batch.indices[start : start + size])
            if self.pool is None:
                return  # there is no loading ahead

    def _has_room(self) -> bool:
        window = self.terms.window
        complete = [batch.nbytes for batch in self.batches if not batch.missing]
        window.usual_bytes = max(complete, default=window.usual_bytes)
        under_way = len(self.batches) - len(complete)
        return window.has_room(held=len(complete), under_way=under_way, held_bytes=self.nbytes)

    def _submit(self, batch: _Batch, start: int, indices: Sequence[int]) -> None:
        number, self.terms.chunks = self.terms.chunks, self.terms.chunks + 1
        self._places[number] = (batch, start)
        if self.pool is not None:
            self.pool.submit(number, self._items(indices, batch.stream))

    def _items(self, indices: Sequence[int], stream: BatchStream) -> list[SampleRequest]:
        return [SampleRequest(index=self.terms.read.index(i), epoch=stream.epoch, seed=stream.seed) for i in indices]

    def _await(self) -> ChunkDone:
        if self.pool is not None:
            return self.pool.result()
        number = next(iter(self._places))
        batch, start = self._places[number]
        later = [s for n, (b, s) in self._places.items() if b is batch and n > number]
        end = min(later, default=len(batch.indices))
        loading = self.terms.read.loading
        loading.seconds = type(loading.seconds)()
        results = loading.load(self._items(batch.indices[start:end], batch.stream))
        return ChunkDone(number, results, loading.seconds, 0)

    def _take(self, done: ChunkDone) -> None:
        batch, start = self._places.pop(done.chunk)
        batch.nbytes += done.nbytes
        self.nbytes += done.nbytes
        self.terms.counters.loading.merge(done.seconds)
        if isinstance(done.results, Collated):
            batch.collated, batch.missing = done.results, 0
            return
        batch.results[start : start + len(done.results)] = done.results
        batch.missing -= len(done.results)

    def _value(self, batch: _Batch) -> Any:
        if not batch.indices:
            return None
        counters = self.terms.counters
        if batch.collated is not None:
            counters.samples += batch.collated.samples
            return batch.collated.value
        samples = self._settle(batch)
        began = time.perf_counter()
        items = self._items(batch.indices, batch.stream)
        value = collated(samples, self.terms.collator, self.terms.read.loading.flow, items, pairs=False)
        counters.loading.add(COLLATE, time.perf_counter() - began)
        counters.samples += len(samples)
        return value

    def _settle(self, batch: _Batch) -> list[Any]:
        """The samples of a batch after the error policy, mapped by the functions of `local_map`.

        Raises:
            SampleFailed: a sample failed and may not be skipped, or all of them failed.
        """
        terms, out, failed = self.terms, [], None
        items = self._items(batch.indices, batch.stream)
        with kept() if terms.read.maps_here else nullcontext():
            for item, loaded in zip(items, batch.results, strict=True):
                result, tries = loaded, 0
                while isinstance(result, SampleFailed) and tries < terms.retries:
                    tries += 1
                    terms.counters.retried += 1
                    _log.debug("sample %d is loaded again: %s", item.index, result)
                    (result,) = terms.read.loading.load([item])
                if isinstance(result, SampleFailed):
                    failed = result
                    if not terms.skip:
                        raise result
                    terms.counters.skipped += 1
                    _log.debug("sample %d is skipped: %s", item.index, result)
                    continue
                out.append(terms.read.mapped_here(result, item))
        if failed is not None and not out:
            raise failed
        return out


# -- time by stage ------------------------------------------------------------------------------------------------


HARDLY = 0.05
"""Part of the time up to which waiting does not matter."""


@dataclass(slots=True)
class FlowCounters:
    """Counters of the iterations over a flow, so far."""

    batches: int = 0
    samples: int = 0
    """Samples delivered."""
    skipped: int = 0
    """Samples that failed and were skipped."""
    retried: int = 0
    lost_loaders: int = 0
    """Loader processes that died; the samples that they were loading were loaded again."""
    waited_s: float = 0.0
    """Time that the trainer waited for batches."""
    elapsed_s: float = 0.0
    """Time since the first request, the trainer's own work included."""
    loading: StageTimings = field(default_factory=StageTimings)
    """Time of all loaders together, by stage."""
    loaders: int = 0

    @property
    def waiting(self) -> float:
        """Share of the elapsed time that the trainer waited."""
        return self.waited_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def bound_by(self) -> str | None:
        """The stage that takes most of the loaders' time, if the trainer waits; None: the trainer is the limit."""
        if self.waiting <= HARDLY or not self.loading.by_stage:
            return None
        return max(self.loading.by_stage, key=lambda stage: self.loading.by_stage[stage])

    def advice(self) -> str:
        """Advice in one sentence."""
        stage = self.bound_by()
        if stage is None:
            return f"The trainer waited {self.waiting:.0%} of the time: loading does not hold it up."
        part = self.loading.by_stage[stage] / max(sum(self.loading.by_stage.values()), 1e-12)
        head = f"The trainer waited {self.waiting:.0%} of the time; {stage!r} takes {part:.0%} of loading: "
        if stage == READ:
            return head + "add loaders (reading waits for the store), or move the data closer."
        if stage == COLLATE:
            return head + "simplify collate_fn, or collate to one array per batch."
        if stage == NETWORK:
            return head + "send less: map to smaller dtypes, or run loaders closer."
        return head + "add loaders, make that step cheaper, or mark it can-cache if it draws no random numbers."

    def to_dict(self) -> dict[str, object]:
        """The counters as JSON, rounded."""
        return {
            "batches": self.batches,
            "samples": self.samples,
            "skipped": self.skipped,
            "retried": self.retried,
            "lost_loaders": self.lost_loaders,
            "loaders": self.loaders,
            "waited_s": round(self.waited_s, 6),
            "elapsed_s": round(self.elapsed_s, 6),
            "waiting": round(self.waiting, 4),
            "bound_by": self.bound_by(),
            "stages_s": {k: round(v, 6) for k, v in sorted(self.loading.by_stage.items())},
            "advice": self.advice(),
        }
