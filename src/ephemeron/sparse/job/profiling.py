"""Measures a sparse job on this machine: some hundred real steps of one function, at three batch sizes, through real shards.

CPU times of loading and of the gradient are those of this process; CPU times of the function and of the shards are their own, so
that other work on the machine hardly changes them. Times of starts are by the clock, on the machine as it is. A run has one shard, and
once two, which gives the cost of a further shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron import blocking
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import build, plain
from ephemeron.data.tables import TableDataset, csr_batch
from ephemeron.errors import FunctionFailed, JobError
from ephemeron.events import Loaded, Progress
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.local import LocalPlatform, default_limits
from ephemeron.prices import load_prices
from ephemeron.runs import folders
from ephemeron.runs.client_run import ClientRun
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.runs.profiles import keep, profiling
from ephemeron.sparse.job.driving import PRELOADED
from ephemeron.sparse.job.evaluation import read
from ephemeron.sparse.job.function import ENTRY, SparsePartRequest
from ephemeron.sparse.job.prediction import CACHED_PARTITIONS, RunCosts, SparseCell, SparseProfile
from ephemeron.sparse.job.preparing import prepare
from ephemeron.sparse.job.programs import model_of, optimizer_of
from ephemeron.sparse.models import Batch, SparseModel
from ephemeron.sparse.models.base import Floats
from ephemeron.sparse.store import SparseStore
from ephemeron.sparse.store.functions import token_of
from ephemeron.sparse.training.minibatches import Ring, Schedule
from ephemeron.sparse.training.minibatches import part as samples_of
from ephemeron.sparse.training.part import PHASES, PartReport
from ephemeron.sparse.training.run import create_tables, initial_values, served
from ephemeron.training.job import Configuration, Job
from ephemeron.training.job.sparse_spec import BATCH_SIZE, SparseProgram
from ephemeron.training.profiling.store import this_machine

OnProgress = Callable[[str], None]
STEPS = 200
"""Of each measurement, at least; functions report every hundred."""
LEAST_EPOCH = 8
"""Steps of an epoch, so that reports at its end are few."""
_MOST_EPOCHS = 30
_EVALUATED_ROWS = 4096


def measure(
    job: Job, *, limits: Limits | None = None, on_progress: OnProgress = lambda text: None, out: Path | None = None
) -> SparseProfile:
    """Measures a sparse job on this machine.

    Args:
        job: with a table `[sparse]`.
        limits: of functions; None: those of this machine.
        on_progress: told what is measured.
        out: file to which the profile is written, too; the folder of its run has it anyway.

    Raises:
        JobError: the job is refused, or its data are too few to measure.
        FunctionFailed: a function ended badly.
        MissingExtra: pyarrow or SciPy is not installed.
    """
    assert job.sparse is not None
    limits = limits or default_limits()
    load = os.getloadavg()[0]
    batch = int(job.run.get("batch_size", BATCH_SIZE))  # type: ignore[call-overload]
    memory_mb = min(int(limits.mb_per_vcpu), limits.memory_max_mb)
    c = Configuration(workers=1, batch_size=batch, memory_mb=memory_mb, function_timeout_s=limits.lifetime_s).resolved()
    program = prepare(job, c, run_id="profile", limits=limits, prices=load_prices("objects", servers=True), peer_timeout_s=20.0).spec.sparse
    assert program is not None
    dataset = TableDataset.open(program.dataset)
    model = model_of(program.spec)
    rows = program.rows[:CACHED_PARTITIONS]
    on_progress("loading and computing")
    partition_row_s = _decoding(dataset)
    loaded = {size: _local_costs(dataset, model, rows, size, job.seed) for size in batches(sum(rows), batch)}
    test = None if program.test is None else TableDataset.open(program.test)
    evaluation_row_s = 0.0 if test is None else _evaluating(model, test)

    async def probed() -> SparseProfile:
        async with _Probe.started(job.name, program, model, rows, job.seed, limits, memory_mb, on_progress) as probe:
            cells, run = await probe.measured(loaded, partition_row_s, evaluation_row_s)
            profile = SparseProfile(
                job=job.name,
                program=f"{program.spec.model.target}, {program.spec.optimizer.target}, {dataset.url}",
                machine=this_machine(),
                measured_on=datetime.date.today().isoformat(),
                load_average=round(load, 2),
                cells=tuple(cells),
                run=run,
            )
            keep(probe.run, profile, out)
            return profile

    return blocking.run(lambda _: probed())


def batches(rows: int, batch: int) -> tuple[int, ...]:
    """The batch sizes to measure: that of the job, a quarter and four times of it, as far as there are rows.

    Raises:
        JobError: there are too few rows.
    """
    top = min(4 * batch, rows // LEAST_EPOCH)
    if top < 2:
        raise JobError(f"{rows} rows are too few to measure a sparse job", remedy=f"prepare {2 * LEAST_EPOCH} or more")
    return tuple(sorted({max(1, top // 16), max(1, top // 4), top}))


@dataclass(frozen=True, slots=True)
class _Local:
    """Means of the minibatches of an epoch: CPU seconds and rows."""

    load_s: float
    compute_s: float
    rows: float


def _decoding(dataset: TableDataset) -> float:
    """CPU seconds to read and decode a row; the second reading counts."""
    for _ in range(2):
        began = time.process_time()
        whole = Batch(*csr_batch(dataset.read(0)))
        spent = time.process_time() - began
    return spent / max(1, whole.samples)


def _local_costs(dataset: TableDataset, model: SparseModel, rows: tuple[int, ...], size: int, seed: int) -> _Local:
    """Loads and computes the minibatches of the second epoch, whose partitions are in memory."""
    schedule = Schedule(rows=rows, batch_size=size, epochs=2, workers=1, seed=seed)
    load: list[float] = []
    compute: list[float] = []
    found: list[int] = []
    with Ring(dataset, schedule, 0, model.rows, size=0) as ring:
        began = time.process_time()
        for step, batch, needed in itertools.islice(ring, schedule.per_epoch(0) + STEPS):
            at = time.process_time()
            values = initial_values(model, needed)
            ready = time.process_time()
            model.step(batch, needed, values, step.step)
            if step.epoch:
                load.append(at - began)
                compute.append(time.process_time() - ready)
                found.append(sum(len(index) for index in needed.values()))
            began = time.process_time()
    return _Local(float(np.mean(load)), float(np.mean(compute)), float(np.mean(found)))


def _evaluating(model: SparseModel, test: TableDataset) -> float:
    """CPU seconds to read and evaluate a row of the test data."""
    began = time.process_time()
    whole = Batch(*csr_batch(test.read(0)))
    read_s = (time.process_time() - began) / max(1, whole.samples)
    batch = samples_of(whole, 0, min(_EVALUATED_ROWS, whole.samples))
    for _ in range(2):
        began = time.process_time()
        rows = model.rows(batch)
        model.evaluate(batch, rows, initial_values(model, rows))
        spent = time.process_time() - began
    return read_s + spent / batch.samples


@dataclass(slots=True, kw_only=True)
class _Probe:
    """A platform of its own, on which one function at a time trains."""

    platform: LocalPlatform
    run: ClientRun
    program: SparseProgram
    model: SparseModel
    rows: tuple[int, ...]
    seed: int
    limits: Limits
    memory_mb: int
    on_progress: OnProgress
    key: SigningKey = field(default_factory=SigningKey.new)
    calls: int = 0

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        name: str,
        program: SparseProgram,
        model: SparseModel,
        rows: tuple[int, ...],
        seed: int,
        limits: Limits,
        memory_mb: int,
        on_progress: OnProgress,
    ) -> AsyncIterator[_Probe]:
        """Starts the platform, as a run; no object is left afterwards."""
        run_id = folders.new_run_id(f"profile-{name}")
        prices = load_prices("objects", servers=True)
        async with contextlib.AsyncExitStack() as stack:
            run = await stack.enter_async_context(profiling(run_id, name, prices=prices, memory_mb=memory_mb, servers=1))
            platform = await LocalPlatform.start(run.folder.path, limits=limits, env=PRELOADED)
            stack.push_async_callback(platform.shutdown)

            def tell(text: str) -> None:
                run.say(text)
                on_progress(text)

            yield cls(
                platform=platform,
                run=run,
                program=program,
                model=model,
                rows=rows,
                seed=seed,
                limits=limits,
                memory_mb=memory_mb,
                on_progress=tell,
            )

    @property
    def folder(self) -> RunFolder:
        """Of the run."""
        return self.run.folder

    @property
    def origin(self) -> float:
        """Unix time of t = 0 in its events."""
        return self.run.header.started_at

    async def measured(
        self, loaded: dict[int, _Local], partition_row_s: float, evaluation_row_s: float
    ) -> tuple[list[SparseCell], RunCosts]:
        """All cells, and what a run costs beside its steps."""
        cells: list[SparseCell] = []
        launches: list[float] = []
        first: _Timing | None = None
        read_s = 0.0
        for shards, sizes in ((1, tuple(loaded)), (2, (max(loaded),))):
            began = time.monotonic()
            name = f"store-{shards}"
            address = (self.folder.path / "objects").resolve().as_uri()
            async with (
                served(shards, (), channel=address, name=name, token=token_of(self.key.text)) as at,
                await SparseStore.connect(at.addresses, at.token) as store,
            ):
                await create_tables(store, self.model, optimizer_of(self.program.spec), self.seed)
                launches.append(time.monotonic() - began)
                for size in sizes:
                    self.on_progress(f"steps of {size} samples, {shards} shard{'s' * (shards > 1)}")
                    cell, timing = await self._cell(size, shards, loaded[size], store, at.addresses)
                    cells.append(cell)
                    first = first or timing
                began = time.monotonic()
                tables: dict[str, Floats] = await read(store, self.model)
                read_s = max(read_s, time.monotonic() - began) if tables else read_s
        assert first is not None
        return cells, RunCosts(
            launch_s=max(launches),
            start_s=first.start_s,
            start_cpu_s=first.start_cpu_s,
            exit_s=first.exit_s,
            partition_row_s=partition_row_s,
            read_s=read_s,
            evaluation_row_s=evaluation_row_s,
        )

    async def _cell(
        self, size: int, shards: int, local: _Local, store: SparseStore, addresses: tuple[str, ...]
    ) -> tuple[SparseCell, _Timing]:
        """One function, from its call to its end.

        Raises:
            FunctionFailed: it ended badly.
        """
        per_epoch = sum(-(-rows // size) for rows in self.rows)
        epochs = min(_MOST_EPOCHS, 1 + -(-STEPS // per_epoch))
        attempt, self.calls = self.calls, self.calls + 1
        request = SparsePartRequest(
            program=dataclasses.replace(self.program, rows=self.rows, spec=dataclasses.replace(self.program.spec, store=())),
            batch_size=size,
            epochs=epochs,
            workers=1,
            seed=self.seed,
            addresses=addresses,
            session="profile",
        )
        call = Call(
            run=f"profile-{shards}-{size}",
            rank=0,
            attempt=attempt,
            memory_mb=self.memory_mb,
            lifetime_s=self.limits.lifetime_s,
            channel=(self.folder.path / "objects").resolve().as_uri(),
            entry=ENTRY,
            origin=self.origin,
            key=self.key.text,
            request=plain(request),
        )
        before, invoked = await _cpu_s(store), time.time() - self.origin
        outcome = await (await self.platform.invoke(call)).wait()
        ended, shard_s = time.time() - self.origin, (await _cpu_s(store) - before) / shards
        value: Any = outcome.value
        if outcome.status != "ok" or value.get("outcome") != "finished":
            text = value.get("problem") or outcome.error.strip().rpartition("\n")[2] or outcome.status
            raise FunctionFailed(f"a function of the profile: {text}", rank=0, attempt=attempt)
        report = build(PartReport, value["report"], where="report of a function")
        mine = [event for event in events_of(self.folder) if getattr(event, "attempt", None) == attempt]
        reports = [event for event in mine if isinstance(event, Progress)]
        begun = next(event.t for event in mine if isinstance(event, Loaded))
        steps = reports[-1].iteration - reports[0].iteration
        function_s = max(0.0, (reports[-1].cpu_s or 0.0) - (reports[0].cpu_s or 0.0)) / max(1, steps)
        cell = SparseCell(
            batch_size=size,
            shards=shards,
            steps=report.steps,
            rows=local.rows,
            load_cpu_s=local.load_s,
            compute_cpu_s=local.compute_s,
            function_cpu_s=function_s,
            shard_cpu_s=shard_s / report.steps,
            step_us={phase: round(1e6 * report.seconds[phase] / report.steps, 1) for phase in PHASES},
        )
        start_cpu_s = max(0.0, (reports[0].cpu_s or 0.0) - function_s * (reports[0].iteration + 1))
        return cell, _Timing(max(0.0, begun - invoked), start_cpu_s, max(0.0, ended - reports[-1].t))


@dataclass(frozen=True, slots=True)
class _Timing:
    """Start and end of a function."""

    start_s: float
    start_cpu_s: float
    exit_s: float


async def _cpu_s(store: SparseStore) -> float:
    """CPU seconds of all shards so far."""
    return sum(status.cpu_s for status in await store.status())
