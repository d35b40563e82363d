"""`prepare`: a recipe carried out, stage by stage; each stage goes on where an earlier attempt ended.

source ──load──▶ OUT/raw ──fit──▶ pipeline ──apply──▶ OUT/train, OUT/test
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ephemeron.config.typed import plain
from ephemeron.data.formats.lines import mark_of
from ephemeron.data.tables import TableDataset
from ephemeron.data.tables.arrow import schema_of
from ephemeron.data.tables.dataset import encode_table
from ephemeron.errors import BudgetReached, DatasetNotFound, JobError
from ephemeron.events import Traffic
from ephemeron.executor import FunctionExecutor
from ephemeron.functions.entries import PRELOADS
from ephemeron.preparation.applying import apply_to_dataset
from ephemeron.preparation.columns import from_table, to_table
from ephemeron.preparation.hashing import HashSplit
from ephemeron.preparation.load_plan import LoadPlan, OnError
from ephemeron.preparation.loading import load
from ephemeron.preparation.parquet import parquet_file, valid_rows
from ephemeron.preparation.pipeline import Pipeline
from ephemeron.preparation.recipe import Recipe
from ephemeron.preparation.stages import State
from ephemeron.preparation.text_rows import SAMPLE_BYTES, CsvParser, LibsvmParser, csv_sample
from ephemeron.preparation.transforms import FeatureHasher
from ephemeron.prices import Prices
from ephemeron.runs.predictions import Basis, Prediction, invocations_for, measured_now, price_basis
from ephemeron.units import human_count, human_seconds


@dataclass(slots=True, kw_only=True)
class Stage:
    """A part of a preparation."""

    name: str
    stored: int
    """Partitions, or groups of them, that an earlier attempt had finished."""
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Prepared:
    """What a preparation has made."""

    name: str
    out: str
    datasets: dict[str, TableDataset] = field(default_factory=dict)
    """`raw`; `train`, and `test` where there is a split."""
    pipeline: Pipeline | None = None
    stages: list[Stage] = field(default_factory=list)
    predicted: PreparationEstimate | None = None
    seconds: float = 0.0
    bill: Any = None
    """Of the functions; None: none were started."""

    @property
    def rejected(self) -> int:
        """Rows that were left out, by the load or by a step."""
        return sum(dataset.manifest.rejected for dataset in self.datasets.values())

    @property
    def dropped(self) -> int:
        """Rows that `drop_missing` left out."""
        return sum(dataset.manifest.dropped for dataset in self.datasets.values())

    def document(self) -> dict[str, Any]:
        """As JSON."""
        hashers = [step for step in (self.pipeline.steps if self.pipeline else ()) if isinstance(step, FeatureHasher)]
        predicted = self.predicted
        return {
            "name": self.name,
            "out": self.out,
            "rows": len(self.datasets["raw"]),
            "rejected": self.rejected,
            "dropped": self.dropped,
            "datasets": {
                name: {
                    "url": one.url,
                    "rows": len(one),
                    "partitions": len(one.partitions),
                    "nbytes": sum(p.nbytes for p in one.partitions),
                    "version": one.version,
                }
                for name, one in self.datasets.items()
            },
            "pipeline": None if self.pipeline is None else self.pipeline.version_,
            "sizes": {} if self.pipeline is None else self.pipeline.sizes_,
            "collisions": sum(hasher.collisions_ for hasher in hashers) if hashers else None,
            "stages": [{"stage": s.name, "stored": s.stored, "seconds": round(s.seconds, 3)} for s in self.stages],
            "seconds": round(self.seconds, 3),
            "cost_usd": 0.0 if self.bill is None else self.bill.cost_usd,
            "invocations": 0 if self.bill is None else self.bill.invocations,
            "gb_seconds": 0.0 if self.bill is None else round(self.bill.gb_seconds, 6),
            "predicted": None
            if predicted is None
            else {"seconds": round(predicted.seconds, 3), "cost_usd": predicted.cost_usd, "tasks": predicted.tasks},
            "prices": None if self.bill is None else self.bill.prices,
        }


def prepare(
    recipe: Recipe,
    *,
    progress: bool | None = None,
    on_predicted: Callable[[PreparationEstimate], None] = lambda _: None,
    settings: Any = None,
    prices_file: Any = None,
    labels: Mapping[str, str] | None = None,
) -> Prepared:
    """Carries a recipe out, or what is left of it.

    Args:
        recipe: see `load_recipe`.
        progress: show a progress bar; None: on a terminal.
        on_predicted: called before functions start.
        settings: of a cloud; see `FunctionExecutor`.
        prices_file: price file instead of the built-in prices.
        labels: see `FunctionExecutor`.

    Raises:
        JobError: the recipe, a column or a row is wrong, or `out` holds what another recipe made.
        BudgetReached: the predicted or the real cost reaches `budget_usd`.
        TaskFailed: a function failed in every try.
    """
    began = time.monotonic()
    made = Prepared(name=recipe.name, out=recipe.out)
    pipeline, split, plan = _checked(recipe)
    steps = {"steps": [dict(raw) for raw in recipe.steps], "split": None if split is None else split.document()}
    fits = f"{recipe.out}/fits/{xxhash.xxh3_64_hexdigest(json.dumps([steps, plain(plan)], sort_keys=True).encode())}"
    with _pool(recipe, progress=progress, settings=settings, prices_file=prices_file, labels=labels) as pool:
        if not _is_there(f"{recipe.out}/raw"):
            made.predicted = predict(plan, pipeline, prices=pool.prices, memory_mb=pool.memory_mb, workers=pool.max_workers)
            on_predicted(made.predicted)
            budget_usd = recipe.run.budget_usd
            if budget_usd is not None and made.predicted.cost_usd > budget_usd:
                raise JobError(
                    f"the preparation is predicted to cost ${made.predicted.cost_usd:.6f}, above budget_usd = {budget_usd:g}",
                    remedy="raise it, or prepare less",
                )
        with _stage(made, "load", f"{recipe.out}/raw", "loaded/"):
            raw = load(plan, f"{recipe.out}/raw", pool=pool, name=f"{recipe.name}/raw")
            made.datasets["raw"] = raw
        if pipeline is not None:
            with _stage(made, "fit", fits, "fit/"):
                _fit(pipeline, raw, split, fits, pool, recipe.on_error)
        made.pipeline = pipeline
        if pipeline is not None or split is not None:
            for side in ("train", "test") if split is not None else ("train",):
                with _stage(made, side, f"{recipe.out}/{side}", "done/"):
                    made.datasets[side] = apply_to_dataset(
                        pipeline,
                        raw,
                        f"{recipe.out}/{side}",
                        pool=pool,
                        partition_mb=recipe.partition_mb,
                        split=split,
                        side="all" if split is None else side,
                        name=f"{recipe.name}/{side}",
                        on_error=recipe.on_error,
                    )
    made.bill = pool.bill()
    made.seconds = time.monotonic() - began
    return made


def dry_run(recipe: Recipe, *, settings: Any = None, prices_file: Any = None) -> Prediction:
    """Checks a recipe as `prepare` does, and says what it will take.

    Args:
        recipe, settings, prices_file: as for `prepare`.

    Raises:
        JobError: the recipe, a column or a row is wrong.
    """
    pipeline, _, plan = _checked(recipe)
    is_there = _is_there(f"{recipe.out}/raw")
    with _pool(recipe, progress=False, settings=settings, prices_file=prices_file) as pool:
        p = None if is_there else predict(plan, pipeline, prices=pool.prices, memory_mb=pool.memory_mb, workers=pool.max_workers)
        found = Prediction(
            kind="tasks",
            name=f"prepare {recipe.name}",
            platform=pool.platform,
            seconds=None if p is None else p.seconds,
            cost_usd=None if p is None else p.cost_usd,
            quota_mb=pool.memory_mb,
            functions=min(pool.max_workers, len(plan.parts)),
            invocations=None if p is None else invocations_for(p.functions, p.seconds, pool.function_timeout_s),
            rests_on=()
            if p is None
            else (measured_now("a sample of the source, parsed and transformed on this machine"), START, price_basis(pool.prices)),
            notes=(f"{recipe.out}/raw is there already: only what is left is done, which is not predicted",) if is_there else (),
            details={"out": recipe.out, "partitions": len(plan.parts), "tasks": None if p is None else p.tasks},
            rows=(("work", f"{human_count(p.tasks, 'task')}, {human_seconds(p.compute_s)} of all functions together"),) if p else (),
        )
    return found.within(budget_usd=recipe.run.budget_usd)


def _checked(recipe: Recipe) -> tuple[Pipeline | None, HashSplit | None, LoadPlan]:
    """Pipeline, split and plan of a recipe, bound to the columns of its source."""
    pipeline, split, plan = recipe.pipeline(), recipe.hash_split(), recipe.plan()
    if pipeline is not None:
        pipeline.bind(plan.columns)
    if split is not None:
        split.names(plan.columns)
    return pipeline, split, plan


def _pool(
    recipe: Recipe, *, progress: bool | None, settings: Any, prices_file: Any, labels: Mapping[str, str] | None = None
) -> FunctionExecutor:
    run = recipe.run
    return FunctionExecutor(
        run.platform,
        name="prepare",
        memory_mb=run.memory_mb,
        max_workers=run.max_workers,
        channel=run.channel,
        function_timeout_s=run.function_timeout_s,
        budget_usd=run.budget_usd,
        progress=progress,
        prices_file=prices_file,
        settings=settings,
        preload=PRELOADS["prepare"] if run.platform == "local" else (),
        labels=labels,
    )


def _fit(pipeline: Pipeline, raw: TableDataset, split: Any, fits: str, pool: FunctionExecutor, on_error: OnError) -> None:
    """Fits, or takes the fitted pipeline of an earlier attempt."""
    state = State(fits)
    stored = state.read("pipeline")
    if stored is None:
        pipeline.fit(raw, split=split, pool=pool, state=fits, on_error=on_error)
        stored = state.create("pipeline", pipeline.document())
    found = Pipeline.from_document(stored)
    pipeline.steps, pipeline.schema_in_, pipeline.fitted_ = found.steps, found.schema_in_, found.fitted_


def _is_there(url: str) -> bool:
    try:
        TableDataset.open(url)
    except DatasetNotFound:
        return False
    return True


@contextlib.contextmanager
def _stage(made: Prepared, name: str, url: str, prefix: str) -> Iterator[None]:
    stage = Stage(name=name, stored=_count(url, prefix))
    made.stages.append(stage)
    began = time.monotonic()
    try:
        yield
    except (KeyboardInterrupt, BudgetReached) as e:
        e.add_note(f"{name}: {_count(url, prefix)} parts are stored; the same command goes on from them")
        raise
    finally:
        stage.seconds = time.monotonic() - began


def _count(url: str, prefix: str) -> int:
    """Receipts in the state of a dataset."""
    return sum(prefix in name for name in State(url).names(""))


# -- time and cost of a preparation before it starts --------------------------------------------------------------


START_S = 1.5
"""Of a function, imports included."""
START = Basis(source="assumed", what=f"functions start in {START_S:g} s with one vCPU and are as fast as this machine per vCPU")
MB_PER_VCPU = 1769
_REQUESTS = 12
"""Requests for a task: its lease and result, its objects, the receipt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationEstimate:
    """What a preparation is expected to take."""

    tasks: int
    compute_s: float
    """Of all functions together."""
    seconds: float
    cost_usd: float
    functions: int
    """At once."""


def predict(plan: LoadPlan, pipeline: Pipeline | None, *, prices: Prices, memory_mb: int, workers: int) -> PreparationEstimate:
    """The estimate. It assumes that the sample is like the rest, and functions with this machine's speed per vCPU.

    Args:
        plan: of the load.
        pipeline: unfitted.
        prices: of functions and objects.
        memory_mb: of a function.
        workers: functions at once.
    """
    load, share = _sampled(plan)
    began = time.perf_counter()
    table = load()
    per_pass = [time.perf_counter() - began]
    if pipeline is not None and table.num_rows:
        rows = from_table(table, plan.columns)
        pipeline.bind(plan.columns)
        copy = Pipeline.from_document(pipeline.document())
        for _ in range(2):  # fit, then application
            began = time.perf_counter()
            with contextlib.suppress(JobError):  # of a sample that lacks what the whole may have, such as any value of a column
                if copy.fitted_ < len(copy.steps):
                    for end in copy.passes():
                        copy.conclude(end, copy.observe(rows, end))
                else:
                    encode_table(to_table(copy.apply_valid(rows).rows, copy.schema_out_), copy.schema_out_)
            per_pass.append(time.perf_counter() - began)
    tasks = len(plan.parts) * len(per_pass)
    compute_s = sum(per_pass) / share * max(1.0, MB_PER_VCPU / memory_mb)
    used = min(workers, len(plan.parts))
    starts_s = START_S * max(1.0, MB_PER_VCPU / memory_mb)
    nbytes = sum(source.nbytes for source in plan.sources)
    traffic = Traffic(puts=tasks * _REQUESTS // 2, gets=tasks * _REQUESTS // 2, bytes_up=nbytes, bytes_down=nbytes * len(per_pass))
    cost = prices.functions_usd((compute_s + used * starts_s) * memory_mb / 1024, used) + prices.storage_usd(traffic)
    return PreparationEstimate(tasks=tasks, compute_s=compute_s, seconds=starts_s + compute_s / used, cost_usd=cost, functions=used)


def _sampled(plan: LoadPlan) -> tuple[Callable[[], Any], float]:
    """A function that loads a sample as a function does, and the sample's share of the source."""
    first, total = plan.sources[0], sum(source.nbytes for source in plan.sources)
    if plan.format == "parquet":
        names = [column.name for column in plan.columns]
        with parquet_file(first) as file:
            batch = next(file.iter_batches(batch_size=8192, columns=names))
            rows = max(1, file.metadata.num_rows)
        share = batch.num_rows / rows * first.nbytes / total

        def load() -> Any:
            from ephemeron.data.tables.arrow import pyarrow

            return _encoded(valid_rows(pyarrow().Table.from_batches([batch]).select(names), plan)[0], plan)

        return load, share
    sample = first.read(0, SAMPLE_BYTES)
    if plan.format == "csv":
        text = csv_sample(sample, plan.layout, where=first.name)
    else:
        text = sample[mark_of(sample, first.name) : sample.rfind(b"\n") + 1]
    parser = (
        CsvParser(plan.layout, plan.names, plan.columns)
        if plan.format == "csv"
        else LibsvmParser(plan.label_kind, zero_based=plan.zero_based, n_features=plan.n_features)
    )
    return lambda: _encoded(parser.parse(text).table, plan), max(1, len(text)) / total


def _encoded(table: Any, plan: LoadPlan) -> Any:
    table = table.cast(schema_of(plan.columns))
    encode_table(table, plan.columns)
    return table
