"""A run: shards of the store, functions that train through them, their replacements, and the result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ephemeron.blocking import run as blocking
from ephemeron.data.tables import TableDataset, csr_batch
from ephemeron.errors import JobError
from ephemeron.events import Traffic
from ephemeron.executor import FunctionExecutor
from ephemeron.sparse.models.base import Batch, Floats, Indices, SparseModel
from ephemeron.sparse.store import Compression, Initial, Optimizer, SparseStore, Sum
from ephemeron.sparse.store.journal import JournalOptions
from ephemeron.sparse.store.processes import ShardProcesses
from ephemeron.sparse.store.shard import TOKEN_VARIABLE, ShardOptions
from ephemeron.sparse.training.minibatches import Schedule
from ephemeron.sparse.training.minibatches import part as samples_of
from ephemeron.sparse.training.part import PHASES, Part, PartReport, train_part
from ephemeron.sparse.training.shares import PartEnd, PartTask, Shares, ShareWatcher

if TYPE_CHECKING:
    from ephemeron.executor.session import Bill

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
    model: SparseModel,
    dataset: TableDataset | str | Path,
    optimizer: Optimizer,
    *,
    test: TableDataset | str | Path | None = None,
    epochs: int = 1,
    batch_size: int = 1000,
    workers: int = 4,
    shards: int = 1,
    seed: int = 0,
    store: Sequence[str] = (),
    compression: Compression | None = None,
    executor: FunctionExecutor | None = None,
    function_s: float = 600.0,
    ring: int = 16,
    name: str = "sparse",
    channel: str | None = "",
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> SparseResult:
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
        channel: address of the channel where the shards that are started here keep a log, from which one that dies goes on, and a later
            call with the same `name`; empty: a temporary folder; None: none, and the death of a shard ends the run.
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
    data = opened(dataset)
    tests = None if test is None else opened(test)
    schedule = Schedule(rows=tuple(p.rows for p in data.partitions), batch_size=batch_size, epochs=epochs, workers=workers, seed=seed)
    check(model, data, schedule)

    async def train() -> SparseResult:
        async with served(shards, store, channel=channel, name=name) as at:
            with token_for_functions(at.token):
                pool = executor or FunctionExecutor("local", name="fit", max_workers=workers, retries=0, progress=False)
                try:
                    parts = [
                        Part(
                            run=name,
                            rank=rank,
                            attempt=0,
                            model=model,
                            dataset=data,
                            schedule=schedule,
                            addresses=at.addresses,
                            ring=ring,
                            time_s=function_s,
                            compression=compression or Compression(),
                        )
                        for rank in range(workers)
                    ]
                    async with await SparseStore.connect(at.addresses, at.token) as client:
                        await create_tables(client, model, optimizer, seed)
                        began = time.monotonic()
                        telling = _Telling(sum(schedule.count(rank) for rank in range(workers)), on_progress)
                        reports = await Shares(lambda part: pool.submit(train_part, part), client, parts, telling, at.check).trained()
                        seconds, bill = time.monotonic() - began, pool.bill()
                        weights = {table: await client.read(table) for table in model.tables}
                finally:
                    if executor is None:
                        await asyncio.to_thread(pool.shutdown, cancel_futures=True)
        metrics = {} if tests is None else evaluate(model, weights, tests)
        return SparseResult(
            model=model,
            weights=weights,
            metrics=metrics,
            steps=sum(r.steps for r in reports),
            seconds=seconds,
            samples=sum(r.samples for r in reports),
            parts=reports,
            bill=bill,
        )

    return blocking(lambda interrupts: train())


def evaluate(model: SparseModel, weights: Mapping[str, Floats], data: TableDataset | Iterable[Batch]) -> dict[str, float]:
    """Metrics over all rows of a dataset or of batches."""
    sums = evaluation_sums(model, weights, data)
    return {metric: total / max(count, 1.0) for metric, (total, count) in sums.items()}


def evaluation_sums(
    model: SparseModel, weights: Mapping[str, Floats], data: TableDataset | Iterable[Batch]
) -> dict[str, tuple[float, float]]:
    """By metric, its total over all rows of a dataset or of batches, and what to divide it by."""
    sums: dict[str, tuple[float, float]] = {}
    for batch in _batches(data) if isinstance(data, TableDataset) else data:
        rows = model.rows(batch)
        values = {name: weights[name][at] for name, at in rows.items()}
        for metric, (total, count) in model.evaluate(batch, rows, values).items():
            before = sums.get(metric, (0.0, 0.0))
            sums[metric] = before[0] + total, before[1] + count
    return sums


def _batches(dataset: TableDataset) -> Iterator[Batch]:
    for index in range(len(dataset.partitions)):
        whole = Batch(*csr_batch(dataset.read(index)))
        for start in range(0, whole.samples, _EVALUATION_ROWS):
            yield samples_of(whole, start, min(start + _EVALUATION_ROWS, whole.samples))


class _Telling(ShareWatcher):
    """Tells how far a run is."""

    def __init__(self, steps: int, on_progress: Callable[[Progress], None]) -> None:
        self._of, self._on_progress, self._lost = steps, on_progress, 0
        self._reports: dict[int, PartReport] = {}

    def ended(self, part: Part, task: PartTask, end: PartEnd, error: str) -> None:
        self._lost += end == "lost"

    def reported(self, reports: Sequence[PartReport]) -> None:
        self._reports |= {report.rank: report for report in reports}
        losses = [report.loss for report in self._reports.values() if report.steps]
        mean = sum(losses) / len(losses) if losses else 0.0
        steps = sum(report.steps for report in self._reports.values())
        self._on_progress(Progress(steps=steps, of=self._of, loss=mean, functions_lost=self._lost))


async def create_tables(store: SparseStore, model: SparseModel, optimizer: Optimizer, seed: int) -> None:
    """Makes the tables of a model, or finds them."""
    for name, table in model.tables.items():
        await store.create(
            name,
            table.rows,
            table.width,
            optimizer=Sum() if table.adds else optimizer,
            initial=Initial(value=table.value, std=table.std, seed=seed),
        )


def opened(dataset: TableDataset | str | Path) -> TableDataset:
    return dataset if isinstance(dataset, TableDataset) else TableDataset.open(str(dataset))


def check(model: SparseModel, data: TableDataset, schedule: Schedule) -> None:
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
    model.step(first, rows, initial_values(model, rows))


def initial_values(model: SparseModel, rows: Mapping[str, Indices]) -> dict[str, Floats]:
    """Rows of new tables, without noise."""
    tables = model.tables
    return {name: np.full((len(at), tables[name].width), tables[name].value, np.float32) for name, at in rows.items()}


# -- the store of a run -------------------------------------------------------------------------------------------


SNAPSHOT_S = 10.0
"""Seconds between snapshots, which replace the log: it has every gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where functions reach the store."""

    addresses: tuple[str, ...]
    token: str
    pids: Callable[[], Sequence[int]] = lambda: ()
    """Processes of the shards that were started here."""
    traffic: Callable[[], Traffic] = Traffic
    """Requests to the channel by the shards that were started here, so far."""
    check: Callable[[], None] = lambda: None
    """Raises the error for which a shard cannot be kept alive."""


@asynccontextmanager
async def served(shards: int, store: Sequence[str], *, channel: str | None = "", name: str, token: str = "") -> AsyncIterator[Served]:
    """Starts shards as processes of this machine unless a store is given, and ends them.

    Args:
        shards: number of them.
        store: addresses of a given one.
        channel: where they keep a log and snapshots; empty: in a temporary folder; None: nowhere.
        name: of the store in the channel.
        token: of shards that are started here; empty: a new one.
    """
    if store:
        yield Served(addresses=tuple(store), token=os.environ[TOKEN_VARIABLE])
        return
    async with contextlib.AsyncExitStack() as stack:
        if channel == "":
            channel = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ephemeron-sparse-"))).as_uri()
        token = token or secrets.token_hex(32)
        journal = JournalOptions(log=channel is not None, snapshot_s=SNAPSHOT_S)
        options = [ShardOptions(name=name, shard=shard, shards=shards, journal=journal) for shard in range(shards)]
        processes = ShardProcesses(options, token=token, channel=channel or "")
        addresses = await processes.start()
        stack.push_async_callback(processes.close)
        kept = asyncio.ensure_future(processes.wait())
        stack.callback(kept.cancel)

        def check() -> None:
            if kept.done() and not kept.cancelled():
                kept.result()

        yield Served(addresses=tuple(addresses), token=token, pids=lambda: processes.pids, check=check, traffic=lambda: processes.traffic)


@contextmanager
def token_for_functions(token: str) -> Iterator[None]:
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
