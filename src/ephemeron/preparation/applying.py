"""The application of a pipeline to a dataset over functions: each makes partitions of equal size of the new dataset.

The rows of the old dataset are cut into as many ranges as the new one has partitions, so that these have `partition_mb` each. A
function reads the partitions that its range touches, keeps the rows of its side of the split, changes them, and creates its
partition; the receipt that it creates afterwards says what was stored. What has a receipt is not made again.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

from ephemeron.config.paths import AnyPath, located
from ephemeron.config.typed import Typed, build, plain
from ephemeron.data.catalog.loop import run as loop_run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.tables import TableDataset, TableWriter
from ephemeron.data.tables.arrow import pyarrow, schema_of
from ephemeron.data.tables.dataset import encode_table
from ephemeron.data.tables.manifest import Partition
from ephemeron.errors import DatasetNotFound, JobError
from ephemeron.preparation.columns import from_table, taken, to_table
from ephemeron.preparation.hashing import HashSplit
from ephemeron.preparation.load_plan import OnError
from ephemeron.preparation.stages import Runner, State, runner

if TYPE_CHECKING:
    from ephemeron.preparation.pipeline import Pipeline

Side = Literal["all", "train", "test"]

PARTITION_MB = 10.0
_SAMPLE = 4096
_CLOSE = 1.35
"""Partitions are made of one old one each, if their sizes are within this factor of what was asked for."""


def apply_to_dataset(
    pipeline: Pipeline | None,
    dataset: TableDataset,
    out: AnyPath,
    *,
    pool: Runner | None = None,
    partition_mb: float = PARTITION_MB,
    split: HashSplit | None = None,
    side: Side = "all",
    name: str | None = None,
    on_error: OnError = "fail",
) -> TableDataset:
    """A new dataset of changed rows.

    Args:
        pipeline: fitted; None: rows stay as they are.
        dataset: to read.
        out: folder or URL of the new dataset. One that is unfinished there is finished, if it is of the same pipeline and data.
        pool: see `Pipeline.fit`.
        partition_mb: size of a partition.
        split: divides the rows.
        side: which rows are wanted.
        name: of the new dataset; None: that of the old one.
        on_error: what to do with rows with numbers that a step would make infinite, or 0 though they are not: refuse, naming the first;
            leave them out; or leave them out and write their numbers, with the reasons, to `rejected.jsonl` beside the dataset.

    Raises:
        JobError: `out` holds something else, the split leaves no row for training, or a step refuses a row.
        DatasetDamaged: a partition is absent after all.
        TaskFailed: a function failed in every try.
    """
    if partition_mb <= 0:
        raise JobError(f"partition_mb = {partition_mb} is not above 0")
    if split is not None and side != "all":
        split.check(dataset)
    document = None if pipeline is None else pipeline.document()
    ranges = row_ranges(pipeline, dataset, partition_mb, split, side)
    rule = None if split is None or side == "all" else {**split.document(), "side": side}
    plan = {"from": dataset.version, "pipeline": _digest(document), "split": rule, "ranges": ranges}
    out = located(out)
    state = State(out)
    columns = dataset.schema if pipeline is None else pipeline.schema_out_
    content = None if pipeline is None else pipeline.to_bytes()
    if state.create("plan", plan) != plan:
        raise JobError(f"{out} holds what was prepared from other data or steps", remedy="delete it, or name another folder")
    try:
        found = TableDataset.open(out).check()
    except DatasetNotFound:
        pass
    else:
        if found.manifest.rejected and on_error == "fail":
            raise JobError(
                f"{out} was made without {found.manifest.rejected} rows that a step refuses",
                remedy="set on_error as it was, or name another folder",
            )
        return found
    receipts = {int(at): build(_Made, raw, where="receipt") for at, raw in state.read_all("done/").items()}
    for one in receipts.values():
        _refuse(one, dataset, on_error)
    item: dict[str, Any] = {"url": dataset.url, "out": out, "pipeline": pipeline, "split": rule, "on_error": on_error}
    items: list[dict[str, Any]] = [{**item, "index": n, "rows": rows} for n, rows in enumerate(ranges) if n not in receipts]
    with runner(pool, items) as run:
        for task, raw in zip(items, run.map(apply_to_range, items), strict=True):
            receipts[task["index"]] = build(_Made, raw, where="receipt")
            _refuse(receipts[task["index"]], dataset, on_error)
    made = [receipts[n] for n in range(len(ranges))]
    rejects = [reject for one in made for reject in one.rejects]
    if rejects and on_error == "quarantine":
        lines = [json.dumps({"row": row, "column": column, "reason": reason}) + "\n" for row, column, reason in rejects]
        loop_run(open_files(out).create("rejected.jsonl", "".join(lines).encode()))
    parts = [one.partition for one in made if one.partition is not None]
    return TableWriter(out, columns).finish(
        name or dataset.manifest.name,
        parts,
        source=dataset.manifest.source,
        pipeline=content,
        rejected=len(rejects),
        dropped=sum(one.dropped for one in made),
        delimiter=dataset.manifest.delimiter,
        missing=dataset.manifest.missing,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made(Typed):
    """What became of a range of rows."""

    partition: Partition | None = None
    """None: rows are refused, and that is an error."""
    rejects: tuple[tuple[int, str, str], ...] = ()
    """Rows that are left out: number in the old dataset, from 1, column and reason."""
    dropped: int = 0
    """Rows that a step drops."""


def _refuse(made: _Made, dataset: TableDataset, on_error: OnError) -> None:
    """Raises for the first row that was left out, if that is an error."""
    if made.rejects and on_error == "fail":
        row, column, reason = made.rejects[0]
        raise JobError(
            f"{dataset.url}, row {row}, column {column}: {reason}",
            remedy="mend it, scale the column first, or set on_error to skip or quarantine",
        )


def apply_to_range(item: dict[str, Any]) -> dict[str, Any]:
    """In a function: makes one partition and its receipt."""
    dataset = TableDataset.open(item["url"])
    pipeline: Pipeline | None = item["pipeline"]
    rows = from_table(read_rows(dataset, *item["rows"]), dataset.schema)
    numbers = np.arange(*item["rows"]) + 1
    if (rule := item["split"]) is not None:
        split = HashSplit(rule["test_fraction"], key=rule["key"], seed=rule["seed"])
        chosen = split.is_test(rows, split.names(dataset.schema)) == (rule["side"] == "test")
        rows, numbers = taken(rows, chosen), numbers[chosen]
    columns, refused, dropped = dataset.schema, dict[int, tuple[str, str]](), 0
    if pipeline is not None:
        (rows, left, refused), columns = pipeline.apply_valid(rows), pipeline.schema_out_
        dropped = len(numbers) - len(left) - len(refused)
    rejects = tuple((int(numbers[row]), *refused[row]) for row in sorted(refused))
    if rejects and item["on_error"] == "fail":
        failed: dict[str, Any] = plain(_Made(rejects=rejects[:1]))
        return failed
    made = TableWriter(item["out"], columns).write(item["index"], to_table(rows, columns))
    receipt = plain(_Made(partition=made, rejects=rejects, dropped=dropped))
    found: dict[str, Any] = State(item["out"]).create(f"done/{item['index']:05d}", receipt)
    return found


def read_rows(dataset: TableDataset, begin: int, end: int) -> Any:
    """Rows `begin` to `end` of a dataset as one `pyarrow.Table`; only partitions that have some of them are read."""
    starts = [0, *accumulate(part.rows for part in dataset.partitions)]
    tables = []
    for index in range(max(0, bisect_right(starts, begin) - 1), len(dataset.partitions)):
        if starts[index] >= end:
            break
        low, high = max(begin, starts[index]), min(end, starts[index + 1])
        if low < high:
            tables.append(dataset.read(index).slice(low - starts[index], high - low))
    return pyarrow().concat_tables(tables) if tables else schema_of(dataset.schema).empty_table()


def row_ranges(
    pipeline: Pipeline | None, dataset: TableDataset, partition_mb: float, split: HashSplit | None, side: Side
) -> list[list[int]]:
    """Ranges of rows of the dataset of which the new partitions are made: as many as their size, known from a sample, needs."""
    total = len(dataset)
    if not total:
        return []
    first = next(n for n, part in enumerate(dataset.partitions) if part.rows)
    rows = from_table(dataset.read(first).slice(0, _SAMPLE), dataset.schema)
    count = min(_SAMPLE, dataset.partitions[first].rows)
    columns = dataset.schema if pipeline is None else pipeline.schema_out_
    nbytes = len(encode_table(to_table(rows if pipeline is None else pipeline.apply_valid(rows).rows, columns), columns))
    share = 1.0 if split is None or side == "all" else split.test_fraction if side == "test" else 1 - split.test_fraction
    wanted = max(1.0, total * nbytes / count * share / (partition_mb * 1e6))
    parts = dataset.partitions
    if 1 / _CLOSE <= wanted / len(parts) <= _CLOSE:
        ends = [0, *accumulate(part.rows for part in parts)]
    else:
        ends = [int(end) for end in np.linspace(0, total, max(1, round(wanted)) + 1).round()]
    return [[begin, end] for begin, end in pairwise(ends)]


def _digest(document: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())
