"""Time and cost of a preparation before it starts: a sample of the source is parsed and transformed here, and its time is scaled up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ephemeron.data.formats.lines import mark_of
from ephemeron.data.tables.arrow import schema_of
from ephemeron.data.tables.writer import encode_table
from ephemeron.events import Traffic
from ephemeron.preparation.columns import from_table, to_table
from ephemeron.preparation.csv_text import SAMPLE_BYTES, CsvParser, csv_sample
from ephemeron.preparation.libsvm_text import LibsvmParser
from ephemeron.preparation.load_parquet_part import parquet_file, valid_rows
from ephemeron.preparation.load_plan import LoadPlan
from ephemeron.preparation.pipeline import Pipeline
from ephemeron.prices import Prices
from ephemeron.runs.predictions import Basis

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
            if copy.fitted_ < len(copy.steps):
                for end in copy.passes():
                    copy.conclude(end, copy.observe(rows, end))
            else:
                encode_table(to_table(copy.apply_valid(rows)[0], copy.schema_out_), copy.schema_out_)
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
