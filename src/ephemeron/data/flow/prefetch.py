"""Batches of given samples: the next ones are loaded while the present one is used, bounded in bytes.

`FlowLoader` chooses its samples itself. Here the caller does (a job's sampler), and may go anywhere: back after a failure, or on to
other batch sizes. Three load strategies:

Forked    loaders are forked from this process (`LoaderPool`); steps run there, with random numbers of their own
Threaded  samples are fetched in a thread, steps run in the calling thread: for object stores, where loaders would need one more
          process to read for them. Steps may not run in a thread: they draw from the process's global generators, as the model does
Inline    everything on request: where time is virtual, or processes are not wanted
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ephemeron.data.batch_source import TrainingBatch
from ephemeron.data.flow.collate import Collate, Collator, Stacking, as_pair, collated
from ephemeron.data.flow.fork_pool import ChunkDone, Collated, LoaderPool
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest, StageTimings
from ephemeron.data.scheduler import PrefetchWindow
from ephemeron.errors import SampleFailed
from ephemeron.units import MB

_RETRY = re.compile(r"retry:(\d+)")
_log = logging.getLogger(__name__)


class LoadStrategy(ABC):
    """The port of load strategies. Each number that was submitted comes back once, in any order."""

    ahead: int = 0
    """Batches to submit beyond the one that is waited for."""

    @abstractmethod
    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        """Starts loading a batch. Earlier ones come first."""

    @abstractmethod
    def result(self) -> ChunkDone:
        """The next loaded batch; waits for it.

        Raises:
            LoadersLost: it cannot be loaded, and no other could.
        """

    def close(self) -> None:
        """Cancels the batches under way. Idempotent."""


class Inline(LoadStrategy):
    """Loads in the calling thread, on request."""

    def __init__(self, loading: SampleLoader) -> None:
        self._loading = loading
        self._todo: deque[tuple[int, Sequence[SampleRequest]]] = deque()

    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        self._todo.append((number, items))

    def result(self) -> ChunkDone:
        number, items = self._todo.popleft()
        return ChunkDone(number, self._loading.load(items), StageTimings(), 0)


class Threaded(LoadStrategy):
    """Fetches in a thread; the steps run in the calling thread."""

    ahead = 1

    def __init__(self, loading: SampleLoader) -> None:
        self._loading = loading
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ephemeron-fetch")
        self._todo: deque[tuple[int, Sequence[SampleRequest], Future[list[Any]]]] = deque()

    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        self._todo.append((number, items, self._thread.submit(self._loading.fetch, items)))

    def result(self) -> ChunkDone:
        number, items, fetched = self._todo.popleft()
        raws = fetched.result()
        return ChunkDone(number, self._loading.map(items, raws), StageTimings(), sum(map(_nbytes, raws)))

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class Forked(LoadStrategy):
    """Loads in loader processes. Make it before this process computes anything in threads."""

    def __init__(self, loading: SampleLoader, loaders: int, collate: Collate) -> None:
        self._pool = LoaderPool(loading, loaders, collate=collate)
        self.ahead = loaders + 1

    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        self._pool.submit(number, items)

    def result(self) -> ChunkDone:
        return self._pool.result()

    def close(self) -> None:
        self._pool.close()


@dataclass(slots=True)
class _Coming:
    """A batch that was submitted."""

    number: int
    items: Sequence[SampleRequest]
    done: ChunkDone | None = None


@dataclass(slots=True, kw_only=True)
class Prefetcher:
    """Batches by iteration. Not thread-safe.

    Args:
        loading: the flow with its dataset.
        strategy: the load strategy.
        collate: makes a batch of samples; the same as in the strategy, if that collates.
        on_error: `fail`, `skip`, or `retry:N` and then fail.
        pairs: whether every batch is to be a pair of inputs and targets.
        prefetch_bytes: limit of what is loaded ahead; the next batch is loaded in any case.
    """

    loading: SampleLoader
    strategy: LoadStrategy
    collate: Collate = field(default_factory=Stacking)
    on_error: str = "fail"
    prefetch_bytes: float = 64 * MB
    pairs: bool = True
    _coming: dict[int, _Coming] = field(default_factory=dict)
    _dropped: set[int] = field(default_factory=set)
    _following: int = 0
    _collator: Collator | None = None
    _window: PrefetchWindow = field(init=False)

    def __post_init__(self) -> None:
        self._window = PrefetchWindow(batches=self.strategy.ahead, limit_bytes=self.prefetch_bytes, unmeasured=1)

    def get(self, iteration: int, wanted: Callable[[int], Sequence[SampleRequest] | None]) -> TrainingBatch:
        """The batch of an iteration; starts loading the following ones.

        Args:
            iteration: any.
            wanted: the samples of an iteration; None: there is no such iteration, so that it is not loaded ahead.

        Raises:
            SampleFailed: a sample cannot be loaded, and may not be skipped; or samples cannot be collated.
            LoadersLost: loader processes keep dying.
        """
        self._forget(iteration, wanted)
        self._submit(iteration, wanted)
        self._plan(iteration, wanted)
        coming = self._coming[iteration]
        while coming.done is None:
            self._take(self.strategy.result())
            self._plan(iteration, wanted)
        del self._coming[iteration]
        return self._settle(coming.items, coming.done)

    def close(self) -> None:
        """Cancels the batches under way."""
        self.strategy.close()

    def _forget(self, iteration: int, wanted: Callable[[int], Sequence[SampleRequest] | None]) -> None:
        """Drops batches that the caller does not need any more."""
        for i, coming in list(self._coming.items()):
            if not iteration <= i <= iteration + self.strategy.ahead or coming.items != wanted(i):
                del self._coming[i]
                if coming.done is None:
                    self._dropped.add(coming.number)

    def _submit(self, iteration: int, wanted: Callable[[int], Sequence[SampleRequest] | None]) -> None:
        items = wanted(iteration)
        if iteration in self._coming or items is None:
            return
        coming = self._coming[iteration] = _Coming(self._following, items)
        if not items:
            coming.done = ChunkDone(self._following, [], StageTimings(), 0)
            return
        self._following += 1
        self.strategy.submit(coming.number, items)

    def _plan(self, iteration: int, wanted: Callable[[int], Sequence[SampleRequest] | None]) -> None:
        for later in range(1, self.strategy.ahead + 1):
            if iteration + later not in self._coming and self._has_room(iteration):
                self._submit(iteration + later, wanted)

    def _has_room(self, iteration: int) -> bool:
        """True if another batch may be loaded ahead of the requested one."""
        later = [coming.done for i, coming in self._coming.items() if i > iteration]
        complete = [done.nbytes for done in later if done is not None]
        return self._window.has_room(held=len(complete), under_way=len(later) - len(complete), held_bytes=sum(complete))

    def _take(self, done: ChunkDone) -> None:
        if done.chunk in self._dropped:
            self._dropped.remove(done.chunk)
            return
        self._window.usual_bytes = max(self._window.usual_bytes or 1, done.nbytes)
        next(c for c in self._coming.values() if c.number == done.chunk and c.items).done = done

    def _settle(self, items: Sequence[SampleRequest], done: ChunkDone) -> TrainingBatch:
        if isinstance(done.results, Collated):
            value = done.results.value
            return TrainingBatch(as_pair(value) if self.pairs else value, done.results.samples)
        samples, skipped, failure = [], 0, ""
        retry = _RETRY.fullmatch(self.on_error)
        for item, result in zip(items, done.results, strict=True):
            tries = int(retry[1]) if retry else 0
            while isinstance(result, SampleFailed) and tries:
                tries -= 1
                _log.debug("sample %d is loaded again: %s", item.index, result)
                (result,) = self.loading.load([item])
            if not isinstance(result, SampleFailed):
                samples.append(result)
            elif self.on_error == "skip":
                skipped, failure = skipped + 1, str(result)
                _log.debug("sample %d is skipped: %s", item.index, result)
            else:
                raise result
        if not samples:
            return TrainingBatch(None, 0, skipped, failure)
        if self._collator is None:
            self._collator = Collator(self.collate)
        batch = collated(samples, self._collator, self.loading.flow, items, pairs=self.pairs)
        return TrainingBatch(batch, len(samples), skipped, failure)


def load_strategy(loading: SampleLoader, *, loaders: int, own_process: bool, collate: Collate) -> LoadStrategy:
    """The load strategy for this process.

    Args:
        loaders: processes; 0: none.
        own_process: whether this process may fork and start threads.
        collate: makes batches, in loaders.
    """
    if not own_process or loaders == 0:
        return Inline(loading)
    from ephemeron.data.catalog import DatasetReader

    in_store = isinstance(loading.dataset, DatasetReader) and not loading.dataset.is_local
    if in_store and loading.reads_are_pure:  # reads that draw must not do so in a thread beside the model
        return Threaded(loading)
    return Forked(loading, loaders, collate)


def _nbytes(sample: Any) -> int:
    """Bytes of the arrays and texts in a sample, about."""
    if isinstance(sample, (tuple, list)):
        return sum(map(_nbytes, sample))
    if isinstance(sample, dict):
        return sum(map(_nbytes, sample.values()))
    if isinstance(sample, (bytes, str)):
        return len(sample)
    return int(getattr(sample, "nbytes", np.dtype(np.float64).itemsize))
