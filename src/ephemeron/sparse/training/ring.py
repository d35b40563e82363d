"""Minibatches loaded ahead by a thread, as many as a ring buffer holds (Cirrus, survey 2.2, figure 5)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from ephemeron.data.tables import TableDataset, csr_batch
from ephemeron.sparse.models.base import Batch
from ephemeron.sparse.training.minibatches import Minibatch, Schedule

_PARTITIONS = 2
"""Partitions of which a function keeps the rows."""


class Ring:
    """A context manager, and an iterator over minibatches in their order.

    Args:
        dataset: with one sparse column.
        schedule: of the run.
        rank: of the function.
        after: its first step.
        size: minibatches that are kept ready; 0: each is loaded when it is asked for.
    """

    def __init__(self, dataset: TableDataset, schedule: Schedule, rank: int, *, after: int = 0, size: int = 16) -> None:
        self._loaded = self._load(dataset, schedule, schedule.steps(rank, after))
        self._ready: queue.Queue[tuple[Minibatch, Batch] | BaseException | None] = queue.Queue(max(1, size))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="minibatches", daemon=True) if size else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        while self._thread is not None and self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def __iter__(self) -> Iterator[tuple[Minibatch, Batch]]:
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

    @staticmethod
    def _load(
        dataset: TableDataset, schedule: Schedule, steps: Iterator[Minibatch]
    ) -> Iterator[tuple[Minibatch, Batch]]:
        tables: dict[tuple[int, int], Batch] = {}
        for step in steps:
            place = step.epoch, step.partition
            whole = tables.get(place)
            if whole is None:
                while len(tables) >= _PARTITIONS:
                    del tables[next(iter(tables))]
                whole = tables[place] = Batch(
                    *csr_batch(dataset.read(step.partition), schedule.order(step.epoch, step.partition))
                )
            yield step, part(whole, step.start, step.stop)


def part(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` − 1, without copying."""
    low, high = batch.indptr[start], batch.indptr[stop]
    labels = None if batch.labels is None else batch.labels[start:stop]
    return Batch(batch.indptr[start : stop + 1] - low, batch.indices[low:high], batch.values[low:high], labels)
