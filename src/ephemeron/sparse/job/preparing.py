"""Sparse jobs before their start: what cannot work is refused in one line, and the specification of the run is made."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron.data.sources.readers import read_options
from ephemeron.data.tables import TableDataset, csr_batch
from ephemeron.errors import DatasetError, DatasetNotFound, JobError
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.registry import CLOUDS
from ephemeron.prices import Prices
from ephemeron.sparse.job.programs import compression_of, fitted_to, model_of, optimizer_of
from ephemeron.sparse.models import Batch, SparseModel
from ephemeron.sparse.store.shard import TOKEN_VARIABLE
from ephemeron.sparse.training.minibatches import Schedule
from ephemeron.sparse.training.minibatches import part as samples_of
from ephemeron.sparse.training.run import check, initial_values
from ephemeron.training.driver.launching.admission import check_call
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.job import Configuration, Job, Target
from ephemeron.training.job.sparse_spec import SparseProgram
from ephemeron.training.worker.spec import RunSpec

_CHECKED_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetUrls:
    """`[data.options]` of a sparse job, for datasets that are no local folders."""

    train: str = ""
    """URL of the training data."""
    test: str = ""
    """URL of the test data; empty: there are none."""


def prepare(job: Job, configuration: Configuration, *, run_id: str, limits: Limits, prices: Prices, peer_timeout_s: float) -> Prepared:
    """Checks a sparse job, and makes the specification of its run. Nothing is started or stored.

    Raises:
        JobError, DatasetNotFound: what is wrong, in one line.
        PlanInfeasible: the platform does not have such functions.
        MissingExtra: pyarrow or SciPy is not installed.
    """
    assert job.sparse is not None
    c = dataclasses.replace(configuration, pattern="parameter-server", sync="asp", aggregators=0)
    train, test = urls_of(job)
    data, tests = opened_dataset(train), None if test is None else opened_dataset(test)
    spec = fitted_to(job.sparse, data)
    model = model_of(spec)
    optimizer_of(spec)
    compression_of(spec)
    _check_places(c, spec.store, train)
    schedule = Schedule(
        rows=tuple(p.rows for p in data.partitions), batch_size=c.batch_size, epochs=job.epochs, workers=c.workers, seed=job.seed
    )
    steps = sum(schedule.per_epoch(rank) for rank in range(c.workers))
    if steps < c.workers:
        raise JobError(
            f"{len(data)} rows are {steps} minibatches of {c.batch_size}, fewer than {c.workers} functions",
            remedy="use fewer workers or a smaller batch_size",
        )
    check(model, data, schedule)
    _check_rows(model, data)
    metrics = ("loss",) if tests is None else _check_rows(model, tests)
    run = RunSpec(
        run_id=run_id,
        name=job.name,
        model=Target(target=spec.model.target, options=spec.model.options),
        loss=Target(target=""),
        optimizer=Target(target=spec.optimizer.target, options=spec.optimizer.options),
        sparse=SparseProgram(spec=spec, dataset=data.url, test=None if tests is None else tests.url, rows=schedule.rows, metrics=metrics),
        configuration=c,
        epochs=job.epochs,
        seed=job.seed,
        dtype="float32",
        samples=len(data),
        prices=prices,
        budget_usd=job.limits.budget_usd,
        time_limit_s=job.limits.time_limit_s,
        peer_timeout_s=peer_timeout_s,
        test_samples=0 if tests is None else len(tests),
        shares_evaluations=True,
    )
    call = Call(run=run_id, rank=0, attempt=0, memory_mb=c.memory_mb, lifetime_s=c.function_timeout_s, channel=c.store, entry="sparse-part")
    check_call(call, workers=c.workers, limits=limits)
    return Prepared(job=job, spec=run, objects={}, model_bytes=_nbytes(model), test_samples=run.test_samples)


def schedule_of(spec: RunSpec) -> Schedule:
    """Which rows form which step of which function."""
    assert spec.sparse is not None
    c = spec.configuration
    return Schedule(rows=spec.sparse.rows, batch_size=c.batch_size, epochs=spec.epochs, workers=c.workers, seed=spec.seed)


def urls_of(job: Job) -> tuple[str, str | None]:
    """URLs of training and test data.

    Raises:
        JobError: the job names no prepared dataset.
    """
    data = job.data
    if data.source != "prepared" or data.flow is not None:
        raise JobError(
            f"{job.name}: a sparse model trains on a prepared dataset, and data.source = {data.flow or data.source!r}",
            remedy='say [data] source = "prepared", path = "prepared" (ephemeron prepare makes it)',
        )
    urls = read_options(data, DatasetUrls)
    if data.path is None:
        if not urls.train:
            raise JobError(f"{job.name}: data.path is missing", remedy="give the folder of a prepared dataset")
        return urls.train, urls.test or None
    if urls != DatasetUrls():
        raise JobError(f"{job.name}: data.path and data.options exclude each other", remedy="leave one out")
    if (data.path / "train").is_dir():
        return str(data.path / "train"), str(data.path / "test") if (data.path / "test").is_dir() else None
    return str(data.path), None


def opened_dataset(url: str) -> TableDataset:
    """A prepared dataset.

    Raises:
        JobError: there is none at this URL, or it is damaged.
    """
    try:
        return TableDataset.open(url)
    except (DatasetNotFound, DatasetError) as e:
        raise JobError(str(e)) from None


def _check_places(c: Configuration, store: Sequence[str], train: str) -> None:
    """Refuses functions that reach neither the shards nor the data."""
    if store and not os.environ.get(TOKEN_VARIABLE):
        raise JobError(f"sparse.store is given, and {TOKEN_VARIABLE} is not set", remedy="set it to the store's token")
    if c.platform not in CLOUDS:
        return
    if not store:
        raise JobError(
            f"functions on {c.platform} do not reach shards of this machine",
            remedy="start a store that they reach (ephemeron serve sparse), and give its addresses as sparse.store",
        )
    if "://" not in train or train.startswith("file:"):
        raise JobError(
            f"functions on {c.platform} do not reach {train}", remedy="prepare the dataset in an object store, and give data.options.train"
        )


def _check_rows(model: SparseModel, dataset: TableDataset) -> tuple[str, ...]:
    """Refuses features and labels of the first partition that the model does not take; returns the names of its metrics."""
    if not len(dataset):
        raise JobError(f"{dataset.url} has no rows", remedy="prepare it from data that has some")
    found: dict[str, None] = {}
    whole = Batch(*csr_batch(dataset.read(0)))
    for start in range(0, whole.samples, _CHECKED_ROWS):
        batch = samples_of(whole, start, min(start + _CHECKED_ROWS, whole.samples))
        rows = model.rows(batch)
        try:
            found |= dict.fromkeys(model.evaluate(batch, rows, initial_values(model, rows)))
        except JobError as e:
            raise JobError(f"{dataset.url}: {e.problem}", remedy=e.remedy) from None
    return tuple(found)


def _nbytes(model: SparseModel) -> int:
    return sum(4 * table.rows * table.width for table in model.tables.values())
