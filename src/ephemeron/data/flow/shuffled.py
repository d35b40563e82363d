"""Batches in the stream's order, loaded ahead, each sample exactly once per epoch (DPFlow, sections 3.3.2 and 3.4.2).

What is loaded ahead and what has been delivered are two positions in the same stream. Only the second one is state: a
checkpoint taken after any batch resumes with the next one, and whatever had been loaded ahead is loaded again.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ephemeron.data.flow.collate import Stacking
from ephemeron.data.flow.counters import Counters
from ephemeron.data.flow.loaders import Pool
from ephemeron.data.flow.loading import COLLATE, Item
from ephemeron.data.flow.pool import Collated, Done
from ephemeron.data.flow.stream import Stream
from ephemeron.errors import JobError, SampleFailed
from ephemeron.units import MB

if TYPE_CHECKING:
    from ephemeron.data.flow.read import DataLoadFlowRead

_POLICY = re.compile(r"fail|skip|retry:(\d+)")
CHUNK = 16
"""Most samples that a loader gets at a time."""

UNKNOWN = 2
"""Batches under way at most while nobody knows how large they are."""


@dataclass(slots=True)
class _Batch:
    """One that is on its way."""

    indices: Sequence[int]
    stream: Stream
    """As it is once this batch has been delivered."""
    results: list[Any]
    missing: int
    nbytes: int = 0
    collated: Collated | None = None
    """Put together by its loader."""


@dataclass(slots=True)
class _Window:
    """What is loaded ahead, in order."""

    batches: deque[_Batch] = field(default_factory=deque)
    places: dict[int, tuple[_Batch, int]] = field(default_factory=dict)
    """Of chunks under way: their batch, and where in it they begin."""
    nbytes: int = 0
    """Of results that have arrived and not been delivered."""


class ShuffledFlow:
    """Batches of one epoch per iteration; the next iteration is the next epoch. From `DataLoadFlowRead.to_shuffled`."""

    def __init__(
        self, read: DataLoadFlowRead, stream: Stream, *, collate_fn: Callable[[list[Any]], Any] | None, prefetch: int,
        prefetch_mb: float, on_error: str, progress: bool,
    ) -> None:  # fmt: skip
        matched = _POLICY.fullmatch(on_error)
        if matched is None:
            raise JobError(f"on_error = {on_error!r} is not known", remedy="use fail, skip or retry:N")
        if prefetch < 1:
            raise JobError(f"prefetch = {prefetch} should be at least 1 batch")
        self.read = read
        self.counters = Counters(loaders=read.loaders.count)
        self._stream = stream
        self._collate = collate_fn
        self._prefetch, self._most_bytes = prefetch, prefetch_mb * MB
        self._usual_bytes: int | None = None
        """Of a batch, by the latest that were complete; None before the first."""
        self._skip, self._retries = on_error == "skip", int(matched[1] or 0)
        self._loads_ahead, self._progress = read.loaders.count > 0, progress
        self._pool: Pool | None = None
        self._began: float | None = None
        self._iteration = self._following = self._lost = 0

    def __len__(self) -> int:
        """Batches of this epoch that are left for this rank."""
        return self._stream.steps_left()

    @property
    def epoch(self) -> int:
        """That the next batch belongs to; the following one, once an epoch has been delivered."""
        return self._stream.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begins the given epoch with the next iteration."""
        self._stream.next_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins. JSON-able, and the same for all ranks that have had as many batches."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was called, with any number of loaders and ranks and any batch size.

        Raises:
            JobError: the state is of other data, another seed or another order.
        """
        self._stream.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        mine = self._iteration
        shown = _bar(self) if self._progress else None
        try:
            for batch in self._batches(mine):
                if shown is not None:
                    shown.advance()
                yield batch
            self._stream.next_epoch()
        finally:
            if shown is not None:
                shown.stop()

    def close(self) -> None:
        """Ends the loader processes; another iteration starts new ones."""
        if self._pool is not None:
            self._lost += self._pool.lost
            self._pool.close()
            self._pool = None

    def __enter__(self) -> ShuffledFlow:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self.close()

    # -- loading ahead ------------------------------------------------------------------------------------

    def _batches(self, mine: int) -> Iterator[Any]:
        if self._collate is None:
            self._collate = Stacking()  # imports PyTorch, which is nobody's waiting
        ahead = self._stream.copy()
        window = _Window()
        if self._pool is not None and self._pool.under_way:
            self.close()  # what an iteration that was left has under way is of no use
        if self._loads_ahead and self._pool is None:
            collate = None if self.read.maps_here else self._collate
            self._pool = self.read.loaders.pool(self.read.loading, collate, prefetch=self._prefetch)
        if self._pool is not None:
            stream, indices = self._stream.copy(), self.read.indices
            self._pool.foresee(self.epoch, stream.seed, lambda: indices(stream.rest()), ordered=stream.ordered)
            self._pool.foresee(self.epoch + 1, stream.seed, lambda: indices(stream.following()), ordered=stream.ordered)
        while True:
            began = time.perf_counter()
            self._began = began if self._began is None else self._began
            self._plan(ahead, window)
            if not window.batches:
                return
            batch = window.batches.popleft()
            while batch.missing:
                self._take(self._await(window), window)
                self._plan(ahead, window)
            value = self._value(batch)
            self.counters.waited_s += time.perf_counter() - began
            self.counters.batches += 1
            if self._pool is not None:
                self.counters.lost_loaders = self._lost + self._pool.lost
            window.nbytes -= batch.nbytes
            if mine != self._iteration:
                raise JobError("another iteration over this flow has begun", remedy="iterate once at a time")
            self._stream = batch.stream
            yield value
            self.counters.elapsed_s = time.perf_counter() - self._began

    def _value(self, batch: _Batch) -> Any:
        if not batch.indices:
            return None
        if batch.collated is not None:
            self.counters.samples += batch.collated.samples
            return batch.collated.value
        samples = self._settle(batch)
        began = time.perf_counter()
        assert self._collate is not None
        value = self._collate(samples)
        self.counters.loading.add(COLLATE, time.perf_counter() - began)
        self.counters.samples += len(samples)
        return value

    def _plan(self, ahead: Stream, window: _Window) -> None:
        """Hands out batches up to the limits; the next one always."""
        while len(window.batches) < self._prefetch and (not window.batches or self._room(window)):
            indices = ahead.next()
            if indices is None:
                return
            batch = _Batch([int(i) for i in indices], ahead.copy(), [None] * len(indices), len(indices))
            window.batches.append(batch)
            # What is mapped here cannot be put together there: then loaders share a batch, and it comes sooner.
            size = CHUNK if self.read.maps_here or not self._loads_ahead else len(indices)
            for start in range(0, len(indices), max(1, size)):
                self._submit(window, batch, start, batch.indices[start : start + size])
            if not self._loads_ahead:
                return  # nothing loads meanwhile

    def _room(self, window: _Window) -> bool:
        """Whether results that are here, and those to come at their usual size, leave room for another batch."""
        done = [b for b in window.batches if not b.missing]
        if done:
            self._usual_bytes = max(b.nbytes for b in done)
        if self._usual_bytes is None:
            return len(window.batches) < UNKNOWN
        return window.nbytes + self._usual_bytes * (len(window.batches) - len(done) + 1) <= self._most_bytes

    def _submit(self, window: _Window, batch: _Batch, start: int, indices: Sequence[int]) -> None:
        number, self._following = self._following, self._following + 1
        window.places[number] = (batch, start)
        if self._pool is not None:
            self._pool.submit(number, self._items(indices, batch.stream.epoch))

    def _items(self, indices: Sequence[int], epoch: int) -> list[Item]:
        return [Item(index=self.read.index(i), epoch=epoch, seed=self._stream.seed) for i in indices]

    def _await(self, window: _Window) -> Done:
        if self._pool is not None:
            return self._pool.result()
        number = next(iter(window.places))
        batch, start = window.places[number]
        later = [s for n, (b, s) in window.places.items() if b is batch and n > number]
        end = min(later, default=len(batch.indices))
        loading = self.read.loading
        loading.seconds = type(loading.seconds)()
        results = loading.load(self._items(batch.indices[start:end], batch.stream.epoch))
        return Done(number, results, loading.seconds, 0)

    def _take(self, done: Done, window: _Window) -> None:
        batch, start = window.places.pop(done.chunk)
        batch.nbytes += done.nbytes
        window.nbytes += done.nbytes
        self.counters.loading.merge(done.seconds)
        if isinstance(done.results, Collated):
            batch.collated, batch.missing = done.results, 0
            return
        batch.results[start : start + len(done.results)] = done.results
        batch.missing -= len(done.results)

    def _settle(self, batch: _Batch) -> list[Any]:
        """The batch's samples after the policy for those that failed, mapped by what is to be done here.

        Raises:
            SampleFailed: one that may not be skipped, or all of them.
        """
        out, failed = [], None
        for place, result in enumerate(batch.results):
            tries = 0
            while isinstance(result, SampleFailed) and tries < self._retries:
                tries += 1
                self.counters.retried += 1
                (result,) = self.read.loading.load(self._items([batch.indices[place]], batch.stream.epoch))
            if isinstance(result, SampleFailed):
                failed = result
                if not self._skip:
                    raise result
                self.counters.skipped += 1
                continue
            out.append(self.read.mapped_here(result))
        if failed is not None and not out:
            raise failed
        return out


class _bar:
    """A progress bar over the batches of an epoch, on standard error."""

    def __init__(self, flow: ShuffledFlow) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._flow = flow
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("waiting {task.fields[waiting]:.0%}"), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=len(flow), epoch=flow.epoch, waiting=0.0)
        self._progress.start()

    def advance(self) -> None:
        self._progress.update(self._task, advance=1, waiting=self._flow.counters.waiting)

    def stop(self) -> None:
        self._progress.stop()
