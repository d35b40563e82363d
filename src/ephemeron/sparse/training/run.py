"""A run: shards of the store, functions that train through them, their replacements, and the result."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ephemeron.blocking import run as blocking
from ephemeron.config.typed import build
from ephemeron.data.tables import TableDataset, csr_batch
from ephemeron.errors import JobError, RunFailed
from ephemeron.executor import FunctionExecutor
from ephemeron.sparse.models.base import Batch, Floats, SparseModel
from ephemeron.sparse.store import Compression, Initial, Optimizer, SparseStore, Sum
from ephemeron.sparse.store.processes import ShardProcesses
from ephemeron.sparse.store.shard import TOKEN_VARIABLE, ShardOptions
from ephemeron.sparse.training.minibatches import Schedule
from ephemeron.sparse.training.part import PHASES, Part, PartReport, progress_key, train_part
from ephemeron.sparse.training.ring import part as samples_of

if TYPE_CHECKING:
    from ephemeron.executor.futures import TaskFuture
    from ephemeron.executor.session import Bill

_log = logging.getLogger(__name__)

LOOK_S = 0.2
_MOST_LOSSES = 20
"""Functions of one share that may be lost."""
_EVALUATION_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseResult:
    """What a run has made."""

    model: SparseModel
    weights: Mapping[str, Floats]
    """By table, float32[rows, width]."""
    metrics: Mapping[str, float]
    """Of the test data; empty without any."""
    steps: int
    samples: int
    seconds: float
    """From the first function's start to the last one's end."""
    parts: Sequence[PartReport]
    """By rank."""
    bill: Bill

    @property
    def step_us(self) -> Mapping[str, float]:
        """Mean microseconds of a step by phase: `get_minibatch`, `get_model`, `compute`, `send_gradient`."""
        return {p: 1e6 * sum(part.seconds[p] for part in self.parts) / max(1, self.steps) for p in PHASES}

    def predict(self, batch: Batch) -> Any:
        """Predictions for a batch; see the model."""
        rows = self.model.rows(batch)
        return self.model.predict(batch, rows, {name: self.weights[name][at] for name, at in rows.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    steps: int
    of: int
    loss: float
    """Mean over the last steps of all functions."""
    functions_lost: int


def fit(
    model: SparseModel, dataset: TableDataset | str | Path, optimizer: Optimizer, *, test: TableDataset | str | Path | None = None,
    epochs: int = 1, batch_size: int = 1000, workers: int = 4, shards: int = 1, seed: int = 0, store: Sequence[str] = (),
    compression: Compression | None = None, executor: FunctionExecutor | None = None, function_s: float = 600.0, ring: int = 16,
    name: str = "sparse", on_progress: Callable[[Progress], None] = lambda progress: None,
) -> SparseResult:  # fmt: skip
    """Trains a model by asynchronous SGD.

    Args:
        model: whose tables are created in the store.
        dataset: prepared, with one sparse column; its URL, or opened.
        optimizer: of the store, applied at the shards.
        test: data that the result is evaluated on.
        epochs: passes over the data.
        batch_size: samples of a step of one function.
        workers: functions.
        shards: processes of this machine that hold the tables, where no store is given.
        seed: of the order of samples, and of initial values.
        store: addresses of the shards of a store that functions reach, `HOST:PORT`; its token is in `EPHEMERON_SPARSE_TOKEN`. Tables of an
            earlier run with the same `name` go on.
        compression: of gradients.
        executor: where functions run; None: on this machine.
        function_s: seconds after which a function hands its share over to another one.
        ring: minibatches that a function loads ahead; 0: none.
        name: of the run in the store.
        on_progress: called about every 0.2 s.

    Raises:
        JobError: an argument, a feature or a label is wrong.
        MissingExtra: pyarrow or SciPy is not installed.
        DatasetNotFound: there is no such dataset.
        RunFailed: functions of one share were lost again and again.
    """
    for what, value in {"epochs": epochs, "batch_size": batch_size, "workers": workers, "shards": shards}.items():
        if value < 1:
            raise JobError(f"{what} = {value} is below 1", remedy="give a positive number")
    if store and not os.environ.get(TOKEN_VARIABLE):
        raise JobError(f"store is given, and {TOKEN_VARIABLE} is not set", remedy="set it to the token of the store")
    data = _opened(dataset)
    tests = None if test is None else _opened(test)
    schedule = Schedule(
        rows=tuple(p.rows for p in data.partitions), batch_size=batch_size, epochs=epochs, workers=workers, seed=seed
    )
    _try(model, data, schedule)

    async def train() -> SparseResult:
        async with _served(shards, store) as (addresses, token):
            with _token_for_functions(token):
                pool = executor or FunctionExecutor("local", max_workers=workers, retries=0, progress=False)
                try:
                    parts = [
                        Part(
                            run=name, rank=rank, attempt=0, model=model, dataset=data, schedule=schedule,
                            addresses=tuple(addresses), ring=ring, time_s=function_s, compression=compression or Compression(),
                        )
                        for rank in range(workers)
                    ]  # fmt: skip
                    async with await SparseStore.connect(addresses, token) as client:
                        await _create(client, model, optimizer, seed)
                        began = time.monotonic()
                        reports = await _Run(pool, client, parts, on_progress).finished()
                        seconds, bill = time.monotonic() - began, pool.bill()
                        weights = {table: await client.read(table) for table in model.tables}
                finally:
                    if executor is None:
                        await asyncio.to_thread(pool.shutdown, cancel_futures=True)
        metrics = {} if tests is None else evaluate(model, weights, tests)
        return SparseResult(
            model=model, weights=weights, metrics=metrics, steps=sum(r.steps for r in reports), seconds=seconds,
            samples=sum(r.samples for r in reports), parts=reports, bill=bill,
        )  # fmt: skip

    return blocking(lambda interrupts: train())


def evaluate(model: SparseModel, weights: Mapping[str, Floats], dataset: TableDataset) -> dict[str, float]:
    """Metrics over all rows of a dataset."""
    sums: dict[str, tuple[float, float]] = {}
    for batch in _batches(dataset):
        rows = model.rows(batch)
        values = {name: weights[name][at] for name, at in rows.items()}
        for metric, (total, count) in model.evaluate(batch, rows, values).items():
            before = sums.get(metric, (0.0, 0.0))
            sums[metric] = before[0] + total, before[1] + count
    return {metric: total / max(count, 1.0) for metric, (total, count) in sums.items()}


def _batches(dataset: TableDataset) -> Iterator[Batch]:
    for index in range(len(dataset.partitions)):
        whole = Batch(*csr_batch(dataset.read(index)))
        for start in range(0, whole.samples, _EVALUATION_ROWS):
            yield samples_of(whole, start, min(start + _EVALUATION_ROWS, whole.samples))


class _Run:
    """The functions of a run."""

    def __init__(
        self, pool: FunctionExecutor, store: SparseStore, parts: list[Part], on_progress: Callable[[Progress], None]
    ) -> None:
        self._pool, self._store, self._on_progress = pool, store, on_progress
        self._parts, self._lost = parts, [0] * len(parts)
        self._of = sum(part.schedule.count(part.rank) for part in parts)

    async def finished(self) -> list[PartReport]:
        """Starts all functions, and those that go on for them; returns the last report of each share."""
        running = {part.rank: self._pool.submit(train_part, part) for part in self._parts}
        reports: dict[int, PartReport] = {}
        while running:
            await asyncio.sleep(LOOK_S)
            for rank, future in list(running.items()):
                if future.done():
                    found = self._ended(rank, future)
                    if found is None or not found.finished:
                        running[rank] = self._next(rank)
                    else:
                        reports[rank] = found
                        del running[rank]
            await self._tell()
        return [reports[part.rank] for part in self._parts]

    def _ended(self, rank: int, future: TaskFuture) -> PartReport | None:
        """Its report; None: it was lost.

        Raises:
            JobError: the fault is the user's.
            RunFailed: too many were lost.
        """
        error = future.exception()
        if error is None:
            report: PartReport = future.result()
            return report
        if isinstance(error.__cause__, JobError):
            raise error.__cause__
        self._lost[rank] += 1
        if self._lost[rank] > _MOST_LOSSES:
            cause = f"share {rank}: {self._lost[rank]} functions were lost, the last one by: {error}"
            raise RunFailed(self._parts[rank].run, [cause]) from error
        _log.warning("share %d: its function was lost, another one goes on (%s)", rank, error)
        return None

    def _next(self, rank: int) -> TaskFuture:
        part = self._parts[rank] = replace(self._parts[rank], attempt=self._parts[rank].attempt + 1)
        return self._pool.submit(train_part, part)

    async def _tell(self) -> None:
        found = [await self._store.get(progress_key(part.run, part.rank)) for part in self._parts]
        reports = [build(PartReport, json.loads(data), where="progress") for data in found if data is not None]
        losses = [report.loss for report in reports if report.steps]
        mean = sum(losses) / len(losses) if losses else 0.0
        steps = sum(report.steps for report in reports)
        self._on_progress(Progress(steps=steps, of=self._of, loss=mean, functions_lost=sum(self._lost)))


async def _create(store: SparseStore, model: SparseModel, optimizer: Optimizer, seed: int) -> None:
    for name, table in model.tables.items():
        await store.create(
            name, table.rows, table.width, optimizer=Sum() if table.adds else optimizer,
            initial=Initial(value=table.value, std=table.std, seed=seed),
        )  # fmt: skip


@asynccontextmanager
async def _served(shards: int, store: Sequence[str]) -> AsyncIterator[tuple[list[str], str]]:
    """Addresses and token of the given store, or of shards that are started here."""
    if store:
        yield list(store), os.environ[TOKEN_VARIABLE]
        return
    token = secrets.token_hex(32)
    processes = ShardProcesses([ShardOptions(shard=shard, shards=shards) for shard in range(shards)], token=token)
    addresses = await processes.start()
    try:
        yield addresses, token
    finally:
        await processes.close()


@contextmanager
def _token_for_functions(token: str) -> Iterator[None]:
    """Local functions inherit the variable; those of clouds are given it when they are deployed."""
    before = os.environ.get(TOKEN_VARIABLE)
    os.environ[TOKEN_VARIABLE] = token
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TOKEN_VARIABLE, None)
        else:
            os.environ[TOKEN_VARIABLE] = before


def _opened(dataset: TableDataset | str | Path) -> TableDataset:
    return dataset if isinstance(dataset, TableDataset) else TableDataset.open(str(dataset))


def _try(model: SparseModel, data: TableDataset, schedule: Schedule) -> None:
    """One step on the first minibatch, before anything is started.

    Raises:
        JobError: the model does not take the data.
    """
    if not len(data):
        raise JobError(f"{data.url} has no rows", remedy="prepare it from data that has some")
    try:
        whole = Batch(*csr_batch(data.read(0)))
    except ValueError as e:
        raise JobError(f"{data.url}: {e}", remedy="prepare it with one sparse column") from None
    first = samples_of(whole, 0, min(schedule.batch_size, whole.samples))
    rows = model.rows(first)
    values = {
        name: np.full((len(at), model.tables[name].width), model.tables[name].value, np.float32)
        for name, at in rows.items()
    }
    model.step(first, rows, values)
