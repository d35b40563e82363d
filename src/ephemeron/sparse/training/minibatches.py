"""Which rows form which step of which function: arithmetic on the sizes of partitions, the seed and the epoch.

An epoch has the partitions in a random order and the rows of each in a random order, cut into minibatches. Each function has a run of
neighbouring minibatches, so that it reads hardly more partitions than its share.

Minibatches loaded ahead by a thread, as many as a ring buffer holds (Cirrus, survey 2.2, figure 5).

The thread also finds the rows that the model needs for each of them, so that a step begins with the request for these. The next
partition is read while minibatches are cut from the one before.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.tables import TableDataset, csr_batch
from ephemeron.sparse.models.base import Batch, Indices, scipy_sparse


class Minibatch(NamedTuple):
    """One step of one function."""

    step: int
    """Number among the steps of this function, over all epochs."""
    epoch: int
    partition: int
    start: int
    """First and last + 1 of the places in the epoch's order of the partition's rows."""
    stop: int
    last: bool = False
    """Whether it is the function's last one of the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The minibatches of a run."""

    rows: tuple[int, ...]
    """Of each partition."""
    batch_size: int
    epochs: int
    workers: int
    seed: int = 0

    def epoch(self, epoch: int, rank: int) -> Sequence[tuple[int, int, int]]:
        """Partition, start and stop of a function's minibatches of an epoch, in their order."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        every = [
            (int(p), start, min(start + self.batch_size, self.rows[p])) for p in order for start in range(0, self.rows[p], self.batch_size)
        ]
        first, stop = (len(every) * r // self.workers for r in (rank, rank + 1))
        return every[first:stop]

    def steps(self, rank: int, after: int = 0) -> Iterator[Minibatch]:
        """Minibatches of a function from a step on."""
        step = 0
        for epoch in range(self.epochs):
            parts = self.epoch(epoch, rank)
            for number, (partition, start, stop) in enumerate(parts, 1):
                if step >= after:
                    yield Minibatch(step, epoch, partition, start, stop, number == len(parts))
                step += 1

    def per_epoch(self, rank: int) -> int:
        """Steps of a function in each epoch."""
        total = sum(-(-rows // self.batch_size) for rows in self.rows)
        return total * (rank + 1) // self.workers - total * rank // self.workers

    def count(self, rank: int) -> int:
        """Steps of a function."""
        return self.epochs * self.per_epoch(rank)

    def order(self, epoch: int, partition: int) -> NDArray[np.int64]:
        """Rows of a partition in their order of an epoch."""
        return np.random.default_rng([self.seed, epoch, partition]).permutation(self.rows[partition])


# -- minibatches loaded ahead by a thread -------------------------------------------------------------------------


_PARTITIONS = 2
"""Partitions of which a function keeps the rows."""


class Loaded(NamedTuple):
    """A minibatch that is ready."""

    step: Minibatch
    batch: Batch
    rows: Mapping[str, Indices]
    """Rows that the model needs for it, by table."""


class Ring:
    """A context manager, and an iterator over minibatches in their order.

    Args:
        dataset: with one sparse column.
        schedule: of the run.
        rank: of the function.
        rows: rows that a model needs for a batch.
        after: the function's first step.
        size: minibatches that are kept ready; 0: each is loaded when it is asked for.
    """

    def __init__(
        self,
        dataset: TableDataset,
        schedule: Schedule,
        rank: int,
        rows: Callable[[Batch], Mapping[str, Indices]],
        *,
        after: int = 0,
        size: int = 16,
    ) -> None:
        self._dataset, self._schedule, self._rows = dataset, schedule, rows
        self._partitions: dict[int, Future[_Partition]] = {}
        """By number, the one that was used last at the end."""
        self._loaded = self._load(schedule.steps(rank, after))
        self._ready: queue.Queue[Loaded | BaseException | None] = queue.Queue(max(1, size))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="minibatches", daemon=True) if size else None
        self._reader = ThreadPoolExecutor(1, "partitions") if size else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        while self._thread is not None and self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)
        if self._reader is not None:
            self._reader.shutdown()

    def __iter__(self) -> Iterator[Loaded]:
        if self._thread is None:
            yield from self._loaded
            return
        while True:
            found = self._ready.get()
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found

    def _fill(self) -> None:
        try:
            for item in self._loaded:
                self._ready.put(item)
                if self._over.is_set():
                    return
            self._ready.put(None)
        except BaseException as e:  # noqa: BLE001 - raised where the minibatch is asked for
            self._ready.put(e)

    def _load(self, steps: Iterator[Minibatch]) -> Iterator[Loaded]:
        groups = itertools.groupby(steps, key=lambda step: (step.epoch, step.partition))
        parts = ((epoch, partition, list(group)) for (epoch, partition), group in groups)
        part = next(parts, None)
        while part is not None:
            epoch, number, minibatches = part
            reading = self._partition(number)
            part = next(parts, None)
            if part is not None and self._reader is not None:
                self._partition(part[1])
            partition, order = reading.result(), self._schedule.order(epoch, number)
            for step in minibatches:
                batch = partition.batch(order[step.start : step.stop])
                yield Loaded(step, batch, self._rows(batch))

    def _partition(self, number: int) -> Future[_Partition]:
        """The rows of a partition, which are read by then or being read."""
        found = self._partitions.pop(number, None)
        if found is None and self._reader is not None:
            found = self._reader.submit(self._read, number)
        elif found is None:
            found = Future()
            found.set_result(self._read(number))
        self._partitions[number] = found
        while len(self._partitions) > _PARTITIONS:
            del self._partitions[next(iter(self._partitions))]
        return found

    def _read(self, number: int) -> _Partition:
        return _Partition(Batch(*csr_batch(self._dataset.read(number))))


class _Partition:
    """Rows of a partition, from which minibatches are cut: 39,000 entries in 0.07 ms of CPU time.

    Args:
        whole: all rows.
    """

    def __init__(self, whole: Batch) -> None:
        shape = whole.samples, int(whole.indices.max(initial=0)) + 1
        self._matrix = scipy_sparse().csr_array((whole.values, whole.indices, whole.indptr), shape=shape)
        self._labels = whole.labels

    def batch(self, rows: Indices) -> Batch:
        """Some rows, in this order."""
        part = self._matrix[rows]
        labels = None if self._labels is None else self._labels[rows]
        return Batch(part.indptr.astype(np.int64), part.indices.astype(np.int64), part.data, labels)


def part(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` − 1, without copying."""
    low, high = batch.indptr[start], batch.indptr[stop]
    labels = None if batch.labels is None else batch.labels[start:stop]
    return Batch(batch.indptr[start : stop + 1] - low, batch.indices[low:high], batch.values[low:high], labels)
