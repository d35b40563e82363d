"""Batches in the stream's order, loaded ahead, each sample exactly once per epoch (DPFlow, sections 3.3.2 and 3.4.2).

The loader has PyTorch's interface: `len` is that of an epoch, each `for` is an epoch, and it has the attributes that frameworks
read of a `DataLoader` (`dataset`, `sampler`, `batch_sampler`, ...). It is not a subclass: frameworks would rebuild it and distribute
its samples to ranks a second time. State and resumption are those of torchdata's `StatefulDataLoader` (`cursor`).

Loaded and delivered batches are two positions in the same stream. Only the second one is state: a checkpoint taken after any batch
resumes with the next one, and batches that had been loaded ahead are loaded again.

Position at which an iteration of a loader begins, or continues after a resume. Pure; exactly as torchdata's `StatefulDataLoader`.

- Every iteration is an epoch: the one after the epoch before, even if that was left early, unless a state was loaded or an
  epoch was set.
- An epoch begins with its first batch, not with `iter`, so that an unused iterator takes no epoch away.
- The state is that of the latest iteration, also after it was left, so that another process can continue there. After the last
  batch, but before the loop has noticed the end, no batch of that epoch is left in the state.
- Setting the epoch that comes next anyway changes nothing: the position of a loaded state is kept.

The order of a loader's samples for training frameworks: `loader.sampler` and `loader.batch_sampler`.

Lightning and Hugging Face's `Trainer` set the epoch through them.
"""

from __future__ import annotations

import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ephemeron.data.flow.backend import LoaderBackend
from ephemeron.data.flow.collate import Collator, Stacking
from ephemeron.data.flow.epoch import Epoch, FlowCounters, LoaderOptions
from ephemeron.data.flow.sample_view import FlowDataset, SampleView, process_group
from ephemeron.data.flow.stream import BatchStream, EpochIndex, SeededCollate
from ephemeron.data.scheduler import PrefetchWindow
from ephemeron.errors import JobError, LoadersLost
from ephemeron.units import MB

_log = logging.getLogger(__name__)
_POLICY = re.compile(r"fail|skip|retry:(\d+)")


class FlowLoader:
    """Batches of one epoch per iteration; the next iteration is the next epoch. From `FlowView.to_shuffled`."""

    timeout = 0
    pin_memory = False
    pin_memory_device = ""
    persistent_workers = False
    in_order = True
    generator = None
    worker_init_fn = None
    multiprocessing_context = None

    def __init__(
        self,
        read: SampleView,
        stream: BatchStream,
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        prefetch: int,
        prefetch_mb: float,
        on_error: str,
        progress: bool,
        alone: bool = False,
    ) -> None:
        matched = _POLICY.fullmatch(on_error)
        if matched is None:
            raise JobError(f"on_error = {on_error!r} is not known", remedy="use fail, skip or retry:N")
        if prefetch < 1:
            raise JobError(f"prefetch = {prefetch} should be at least 1 batch")
        self.read = read
        self.counters = FlowCounters(loaders=read.loaders.count)
        self._cursor = Cursor(stream)
        self._collate, self._prefetch, self._prefetch_bytes = collate_fn, prefetch, prefetch_mb * MB
        self._skip, self._retries, self._progress = on_error == "skip", int(matched[1] or 0), progress
        self._driven_from_outside, self._alone = False, alone
        self._began: float | None = None
        self._pools = _Pools()
        weakref.finalize(self, self._pools.close)  # also at exit of the program

    def __repr__(self) -> str:
        s = self._cursor.stream
        return (
            f"FlowLoader({self.read.loading.flow.name}: {s.samples} samples, {len(self)} batches of {s.batch_size}, "
            f"rank {s.rank} of {s.world_size}, remainder={s.remainder!r}, epoch {self.epoch})"
        )

    def __len__(self) -> int:
        """Batches of an epoch, for this rank as for every other; also when some of them have been delivered."""
        return self._cursor.stream.length

    @property
    def batches_left(self) -> int:
        """Batches of the state's epoch that are left to this rank."""
        return self._cursor.saved().steps_left()

    @property
    def epoch(self) -> int:
        """Epoch of the state: the one being read or left early, and the following one after its end."""
        return self._cursor.saved().epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration this epoch, from its beginning or from a loaded state of this epoch.

        Raises:
            JobError: not a whole number from 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise JobError(f"epoch = {epoch!r} should be a whole number from 0")
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Position of the next batch and identity of the samples, as JSON; equal for all ranks with equally many batches.

        Raises:
            JobError: another loader takes this one's batches with processes of its own, so the position is unknown.
        """
        if self._driven_from_outside and self.num_workers:
            raise JobError(
                "the epoch is read by a DataLoader that was made of this loader's batch_sampler, so its position is not known",
                remedy="resume with load_state_dict instead of skip_first_batches, or read with workers=0",
            )
        return {**self.read.fingerprint.to_json(), **self._cursor.saved().state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Makes the next iteration continue at a state, with any number of loaders and ranks and any batch size.

        Raises:
            JobError: the state is of another flow, version, dataset, subset or split, seed or order.
        """
        self.read.fingerprint.check(state)
        stream = self._cursor.stream.copy()
        stream.load_state_dict(state)
        self._cursor.load(stream)
        _log.info("flow %s resumes in epoch %d", self.read.loading.flow.name, stream.epoch)
        self._driven_from_outside = False

    def __iter__(self) -> Iterator[Any]:
        if self._began is None:
            self._began = time.perf_counter()
        whole, iteration, pool, shown = False, None, None, None
        try:
            if self.read.loaders.count:
                pool = self._pools.lend(self._pool)
            iteration, start = self._begin()  # last: a failure to start loaders consumes no epoch
            self._driven_from_outside = False
            if self._progress:
                shown = _bar(self, start)
            for value, stream in Epoch(self._terms, start, pool):
                self._cursor.delivered(iteration, stream)
                self.counters.lost_loaders = self._pools.lost
                if shown is not None:
                    shown.advance()
                yield value
                if pool is not None and not self._pools.lends(pool):
                    raise LoadersLost("the loader was closed while it was being read; begin another iteration")
                self.counters.elapsed_s = time.perf_counter() - self._began
            whole = True
        finally:
            if iteration is not None:
                self._cursor.ended(iteration, whole=whole)
                _log.debug("an iteration of flow %s %s", self.read.loading.flow.name, "is over" if whole else "was left")
            if pool is not None:
                self._pools.take_back(pool)
            if shown is not None:
                shown.stop()

    def close(self) -> None:
        """Ends the loader processes; the next iteration starts new ones."""
        self._pools.close()

    def __enter__(self) -> FlowLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- attributes of a DataLoader -----------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""
        return self._cursor.stream.batch_size

    @property
    def drop_last(self) -> bool:
        """True if an incomplete last step is left out."""
        return self._cursor.stream.remainder == "drop"

    @property
    def num_workers(self) -> int:
        """Loader processes that this process starts."""
        return self.read.loaders.processes

    @property
    def prefetch_factor(self) -> int | None:
        """Batches that a `DataLoader` made of this one would load ahead for each of its workers."""
        return 2 if self.num_workers else None

    @property
    def share(self) -> int:
        """Samples of an epoch for this rank, including repeated ones."""
        return self._cursor.stream.share

    @cached_property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """Makes a batch of a list of samples, with the batch's random numbers if the samples are those of `dataset`."""
        return SeededCollate(self._collator)

    @cached_property
    def dataset(self) -> FlowDataset:
        """All samples of the view by their place in it, with the loader's seed."""
        return self.read.to_mapped(seed=self._cursor.stream.seed)

    @cached_property
    def sampler(self) -> FlowSampler:
        """This rank's order."""
        return FlowSampler(self)

    @cached_property
    def batch_sampler(self) -> FlowBatchSampler:
        """This rank's order, in batches."""
        return FlowBatchSampler(self, self.sampler)

    def begin_epoch(self) -> Iterator[list[EpochIndex]]:
        """The loader's next epoch as lists of samples, for another loader that loads them."""
        iteration, stream = self._begin()
        stream = stream.begin(stream.epoch)
        self._driven_from_outside = True
        while (indices := stream.next()) is not None:
            self._cursor.delivered(iteration, stream.copy())
            yield [EpochIndex(int(i), stream.epoch) for i in indices]
        self._cursor.ended(iteration, whole=True)

    def _begin(self) -> tuple[int, BatchStream]:
        group = process_group()
        if self._alone and group is not None and group[1] > 1:
            raise JobError(
                f"this loader was made before the process group of {group[1]} ranks, and would give the same batches to all",
                remedy="pass rank and world_size to to_shuffled (0 and 1 for one rank), or create the loader after the process group",
            )
        return self._cursor.begin()

    # -- for its iterations -------------------------------------------------------------------------------

    @cached_property
    def _collator(self) -> Collator:
        return Collator(Stacking() if self._collate is None else self._collate)  # imports PyTorch, if it is there

    @cached_property
    def _terms(self) -> LoaderOptions:
        return LoaderOptions(
            read=self.read,
            collator=self._collator,
            window=PrefetchWindow(batches=self._prefetch, limit_bytes=self._prefetch_bytes),
            skip=self._skip,
            retries=self._retries,
            counters=self.counters,
        )

    def _pool(self) -> LoaderBackend:
        collate = None if self.read.maps_here else self._collator.function
        return self.read.loaders.pool(self.read.loading, collate, prefetch=self._prefetch)


class _Pools:
    """Backends of one loader: an idle one, which the next iteration takes over, and those of iterations under way."""

    def __init__(self) -> None:
        self._idle: LoaderBackend | None = None
        self._lent: list[LoaderBackend] = []
        self._lost, self._pid = 0, os.getpid()

    @property
    def lost(self) -> int:
        """Loaders that died."""
        return self._lost + sum(pool.lost for pool in self._all())

    def lend(self, make: Callable[[], LoaderBackend]) -> LoaderBackend:
        """A pool for one iteration alone."""
        pool, self._idle = self._idle or make(), None
        self._lent.append(pool)
        return pool

    def lends(self, pool: LoaderBackend) -> bool:
        """True while an iteration may still use the pool."""
        return pool in self._lent

    def take_back(self, pool: LoaderBackend) -> None:
        """Takes a backend back from an iteration that is over. Closes it if it still has chunks under way."""
        if not self.lends(pool):
            return  # closed in the meantime
        self._lent.remove(pool)
        if pool.under_way or self._idle is not None:
            self._end(pool)
        else:
            self._idle = pool

    def close(self) -> None:
        """Ends all of them, unless this process was forked from the one that started them."""
        if os.getpid() == self._pid:
            for pool in self._all():
                self._end(pool)
        self._idle, self._lent = None, []

    def _all(self) -> list[LoaderBackend]:
        return [*self._lent, *([] if self._idle is None else [self._idle])]

    def _end(self, pool: LoaderBackend) -> None:
        self._lost += pool.lost
        pool.close()


class _bar:
    """A progress bar over the batches of an iteration, on standard error."""

    def __init__(self, loader: FlowLoader, start: BatchStream) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._counters = loader.counters
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("waiting {task.fields[waiting]:.0%}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=start.steps_left(), epoch=start.epoch, waiting=0.0)
        self._progress.start()

    def advance(self) -> None:
        self._progress.update(self._task, advance=1, waiting=self._counters.waiting)

    def stop(self) -> None:
        self._progress.stop()


# -- position at which an iteration of a loader begins ------------------------------------------------------------


@dataclass(slots=True)
class Cursor:
    """The epochs of one loader.

    Args:
        stream: start of the first iteration.
    """

    stream: BatchStream
    """Position of the latest iteration, or the beginning of the first one."""
    _pending: BatchStream | None = field(init=False)
    """Beginning of the next iteration; None: that of epoch number `_following`."""
    _following: int = field(init=False)
    _latest: int = 0
    """Number of the iteration to which `stream` belongs."""
    _under_way: bool = False

    def __post_init__(self) -> None:
        self._pending, self._following = self.stream, self.stream.epoch + 1

    def begin(self) -> tuple[int, BatchStream]:
        """The next iteration: its number, and a stream of its own."""
        self.stream = self._next()
        self._pending, self._following = None, self.stream.epoch + 1
        self._latest, self._under_way = self._latest + 1, True
        return self._latest, self.stream.copy()

    def delivered(self, iteration: int, stream: BatchStream) -> None:
        """Records the position of an iteration after a batch."""
        if iteration == self._latest:
            self.stream = stream

    def ended(self, iteration: int, *, whole: bool) -> None:
        """Records the end of an iteration: the loop has noticed its end (`whole`), or has left it."""
        if iteration != self._latest:
            return
        self._under_way = False
        if whole:
            self._pending = self._next()

    def saved(self) -> BatchStream:
        """Position at which a loader of the state continues."""
        if self._pending is None or (self._under_way and self.stream.steps_left() > 0):
            return self.stream
        return self._pending

    def load(self, stream: BatchStream) -> None:
        """Sets the beginning of the next iteration; those under way do not count any more."""
        self.stream = self._pending = stream
        self._latest, self._under_way = self._latest + 1, False

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration begin with this epoch."""
        if self._pending is None or self._pending.epoch != epoch:
            self._pending = self.stream.begin(epoch)

    def _next(self) -> BatchStream:
        return self.stream.begin(self._following) if self._pending is None else self._pending


# -- the order of a loader's samples for training frameworks ------------------------------------------------------


class EpochSource(Protocol):
    """The subset of a `FlowLoader` that its samplers use."""

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""

    @property
    def drop_last(self) -> bool:
        """True if an incomplete last step is left out."""

    @property
    def share(self) -> int:
        """Samples of an epoch for this rank."""

    def __len__(self) -> int:
        """Batches of an epoch."""

    def begin_epoch(self) -> Iterator[list[EpochIndex]]:
        """The next epoch as lists of samples."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""


class FlowSampler:
    """This rank's samples of an epoch. Each iteration begins the loader's next epoch, from its first sample."""

    def __init__(self, loader: EpochSource) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.share

    def __iter__(self) -> Iterator[EpochIndex]:
        for batch in self._loader.begin_epoch():
            yield from batch

    def set_epoch(self, epoch: int) -> None:
        """See `FlowLoader.set_epoch`."""
        self._loader.set_epoch(epoch)


class FlowBatchSampler:
    """This rank's batches of an epoch, as lists of samples. Each iteration begins the loader's next epoch, from its first batch."""

    def __init__(self, loader: EpochSource, sampler: FlowSampler) -> None:
        self._loader = loader
        self.sampler = sampler
        """The same samples, one by one."""

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""
        return self._loader.batch_size

    @property
    def drop_last(self) -> bool:
        """True if an incomplete last step is left out."""
        return self._loader.drop_last

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[EpochIndex]]:
        return (batch for batch in self._loader.begin_epoch() if batch)

    def set_epoch(self, epoch: int) -> None:
        """See `FlowLoader.set_epoch`."""
        self._loader.set_epoch(epoch)
