"""Metrics of a sparse run at the ends of its epochs, as events: the client evaluates, while functions go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ephemeron.data.tables import TableDataset
from ephemeron.events import Evaluated, Event, Measured
from ephemeron.sparse.models import SparseModel
from ephemeron.sparse.models.base import Floats
from ephemeron.sparse.store import SparseStore
from ephemeron.sparse.training.minibatches import Schedule
from ephemeron.sparse.training.part import PartReport
from ephemeron.sparse.training.run import evaluation_sums

Sums = Mapping[str, tuple[float, float]]


class Evaluations:
    """Evaluates the tables each time that all functions have passed the end of an epoch.

    Without test data, `loss` is the mean over the samples of the epoch, each before the step of its minibatch (progressive
    validation).

    Args:
        model: of the run.
        schedule: of the run.
        test: test data; None: there are none.
        store: the client's connection.
        emit: hands an event to the run.
        now: seconds of the run.
        after: epochs that were evaluated before.
    """

    def __init__(
        self,
        model: SparseModel,
        schedule: Schedule,
        test: TableDataset | None,
        store: SparseStore,
        emit: Callable[[Event], Awaitable[None]],
        now: Callable[[], float],
        *,
        after: int = 0,
    ) -> None:
        self._model, self._schedule, self._test, self._store = model, schedule, test, store
        self._emit, self._now = emit, now
        self._due = self._done = after
        self._losses: dict[int, tuple[float, int]] = {}
        self._changed = asyncio.Event()
        self.metrics: dict[str, float | None] = {}
        """Of the last evaluation."""

    def reported(self, reports: Sequence[PartReport]) -> None:
        """Takes reports of all shares that have one."""
        s = self._schedule
        if len(reports) < s.workers:
            return
        passed = min(report.steps // s.per_epoch(report.rank) for report in reports)
        for epoch in range(self._due, passed):
            parts = [report.epochs[epoch] for report in reports]
            self._losses[epoch] = sum(total for total, _ in parts), sum(samples for _, samples in parts)
        if passed > self._due:
            self._due = passed
            self._changed.set()

    async def run(self) -> None:
        """Evaluates whenever something is due, until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.complete()

    async def complete(self) -> None:
        """Evaluates what is due."""
        while self._done < self._due:
            await self._evaluate(self._done)
            self._done += 1

    async def _evaluate(self, epoch: int) -> None:
        iteration = (epoch + 1) * max(self._schedule.per_epoch(rank) for rank in range(self._schedule.workers))
        sums: Sums
        if self._test is None:
            sums, samples = {"loss": self._losses[epoch]}, self._losses[epoch][1]
        else:
            weights = await read(self._store, self._model)
            sums, samples = (await asyncio.to_thread(evaluation_sums, self._model, weights, self._test), len(self._test))
        self.metrics = {name: total / max(count, 1.0) for name, (total, count) in sums.items()}
        t = self._now()
        for event in (
            Evaluated(t=t, rank=0, attempt=0, epoch=epoch + 1, iteration=iteration, samples=samples, sums=dict(sums)),
            Measured(t=t, rank=0, attempt=0, epoch=epoch + 1, iteration=iteration, metrics=dict(self.metrics)),
        ):
            await self._emit(event)


async def read(store: SparseStore, model: SparseModel) -> dict[str, Floats]:
    """All tables of a model."""
    return {name: await store.read(name) for name in model.tables}
