"""The fit of a pipeline over functions: each reads partitions and takes statistics, trees of functions merge them.

Statistics travel through the channel of the executor, a cache where it has one. Statistics of 32 partitions at a time reach the client,
which stores them, so that an interrupted fit repeats the partitions of unfinished groups only.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ephemeron.config.paths import AnyPath
from ephemeron.data.tables import TableDataset
from ephemeron.errors import JobError
from ephemeron.preparation.columns import from_table, length_of, taken
from ephemeron.preparation.hashing import HashSplit
from ephemeron.preparation.load_plan import OnError
from ephemeron.preparation.stages import Runner, State, runner
from ephemeron.preparation.statistics import REFUSED, Statistic, merge_statistics, read_statistics, statistic_document

if TYPE_CHECKING:
    from ephemeron.preparation.pipeline import Pipeline

GROUP = 32
"""Partitions whose statistics are stored as one."""
FAN_IN = 4


def observe_dataset(
    pipeline: Pipeline,
    end: int,
    dataset: TableDataset,
    *,
    split: HashSplit | None = None,
    pool: Runner | None = None,
    state: AnyPath | None = None,
    on_error: OnError = "fail",
) -> dict[str, Statistic]:
    """Statistics of all rows for the steps up to `end`.

    Args:
        pipeline: bound; steps before those are fitted.
        end: number of steps.
        dataset: to read.
        split: only training rows are observed.
        pool: see `Pipeline.fit`.
        state: where statistics of groups are stored; None: nowhere.
        on_error: whether rows that a fitted step refuses are an error, or are not observed.

    Raises:
        JobError: the split leaves no row for training.
    """
    if split is not None:
        split.check(dataset)
    rule = None if split is None else split.document()
    kept = None if state is None else State(state)
    prefix = f"fit/{pipeline.fitted_}/"
    known = {} if kept is None else {int(name): read_statistics(raw) for name, raw in kept.read_all(prefix).items()}
    indices = range(len(dataset.partitions))
    groups = {n: indices[at : at + GROUP] for n, at in enumerate(range(0, len(indices), GROUP))}
    items = {
        n: [{"url": dataset.url, "index": index, "pipeline": pipeline, "end": end, "split": rule, "on_error": on_error} for index in group]
        for n, group in groups.items()
        if n not in known
    }
    if items:
        with runner(pool, [item for group in items.values() for item in group]) as run:
            futures = {
                n: run.map_reduce(observe_partition, group, merge_statistics, chunksize=1, fan_in=FAN_IN) for n, group in items.items()
            }
            for n, future in futures.items():
                known[n] = future.result()
                if REFUSED in known[n]:
                    raise JobError(
                        f"{dataset.url}, {known[n][REFUSED]}",
                        remedy="mend it, scale the column first, or set on_error to skip or quarantine",
                    )
                if kept is not None:
                    kept.create(f"{prefix}{n:05d}", statistic_document(known[n]))
    if not known:
        return pipeline.observe(from_table(_empty(dataset), dataset.schema), end)
    return functools.reduce(merge_statistics, (known[n] for n in sorted(known)))


def observe_partition(item: dict[str, Any]) -> dict[str, Any]:
    """In a function: statistics of one partition; or at `REFUSED`, why there are none, since another try would find the same."""
    dataset = TableDataset.open(item["url"])
    pipeline: Pipeline = item["pipeline"]
    rows = from_table(dataset.read(item["index"]), dataset.schema)
    numbers = np.arange(length_of(rows)) + sum(part.rows for part in dataset.partitions[: item["index"]]) + 1
    if item["split"] is not None:
        split = HashSplit(**item["split"])
        train = ~split.is_test(rows, split.names(dataset.schema))
        rows, numbers = taken(rows, train), numbers[train]
    if pipeline.fitted_:
        refused = pipeline.apply_valid(rows, pipeline.fitted_).refused
        if refused and item["on_error"] == "fail":
            (column, reason), row = refused[min(refused)], numbers[min(refused)]
            return {REFUSED: f"row {row}, column {column}: {reason}"}
        rows = taken(rows, np.isin(np.arange(length_of(rows)), list(refused), invert=True)) if refused else rows
    return pipeline.observe(rows, item["end"])


def _empty(dataset: TableDataset) -> Any:
    from ephemeron.data.tables.arrow import schema_of

    return schema_of(dataset.schema).empty_table()
