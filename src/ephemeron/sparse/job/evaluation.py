"""Metrics of a sparse run at the ends of its epochs, as events: the client evaluates, while functions go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.tables import TableDataset
from ephemeron.errors import UserError
from ephemeron.events import Evaluated, Event, Measured
from ephemeron.runs import folders
from ephemeron.runs.folders import RunFolder
from ephemeron.sparse.job.programs import model_of
from ephemeron.sparse.models import Batch, SparseModel
from ephemeron.sparse.models.base import Floats
from ephemeron.sparse.store import SparseStore
from ephemeron.sparse.training.minibatches import Schedule
from ephemeron.sparse.training.part import PartReport
from ephemeron.sparse.training.run import evaluate, evaluation_sums, opened
from ephemeron.training.driver.records import run_spec
from ephemeron.training.driver.trained import record_of

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


# -- A trained sparse model ---------------------------------------------------------------------------------------


class SparseRowsLike(Protocol):
    """Sparse rows: row i has the entries `indptr[i]` to `indptr[i + 1]`."""

    @property
    def indptr(self) -> NDArray[np.int64]: ...
    @property
    def indices(self) -> NDArray[np.int64]: ...
    @property
    def values(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSparseModel:
    """A model and its tables."""

    model: SparseModel
    weights: Mapping[str, Floats]
    """By table, float32[rows, width]."""

    def predict(self, rows: SparseRowsLike) -> NDArray[np.float64]:
        """Predictions for rows in compressed form: a `Batch`, or the sparse column that `Pipeline.transform` gives; see the model."""
        batch = Batch(rows.indptr, rows.indices, rows.values)
        needed = self.model.rows(batch)
        return self.model.predict(batch, needed, {name: self.weights[name][at] for name, at in needed.items()})

    def evaluate(self, dataset: TableDataset | str | Path) -> dict[str, float]:
        """Metrics over all rows of a prepared dataset.

        Raises:
            DatasetNotFound: there is no such dataset.
            JobError: the model does not take its features or labels.
        """
        return evaluate(self.model, self.weights, opened(dataset))

    def evaluate_rows(self, parts: Iterable[tuple[SparseRowsLike, NDArray[np.float32]]]) -> dict[str, float]:
        """Metrics over sparse rows and their labels, part by part.

        Raises:
            JobError: the model does not take its features or labels.
        """
        return evaluate(self.model, self.weights, (Batch(rows.indptr, rows.indices, rows.values, labels) for rows, labels in parts))


def trained_model(run: str | Path) -> TrainedSparseModel:
    """The model that a run has trained, or a stopped one has trained so far.

    Args:
        run: its name, the beginning of it, or `last`; or its folder.

    Raises:
        RunNotFound: there is no such run.
        UserError: it is not of a sparse job, or has no weights.
    """
    from safetensors.numpy import load_file

    folder = RunFolder(run) if isinstance(run, Path) else folders.find(run, kinds=folders.MODELS)
    spec = run_spec(record_of(folder))
    if spec.sparse is None:
        raise UserError(f"run {folder.run_id} is not of a sparse job; its model is that of result.model()")
    if not folder.weights.exists():
        raise UserError(f"run {folder.run_id} has no weights: it has neither finished nor was it stopped")
    return TrainedSparseModel(model=model_of(spec.sparse.spec), weights=load_file(str(folder.weights)))
