"""What a function does in a load of Parquet: it reads row groups, and creates the partitions that are made of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ephemeron.config.typed import build, plain
from ephemeron.data.catalog.files import FileReader
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.tables import TableWriter
from ephemeron.data.tables.arrow import is_index, pyarrow, schema_of
from ephemeron.data.tables.dataset import encode_table
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError
from ephemeron.preparation.load_part import SHOWN, Receipt, reject_lines
from ephemeron.preparation.load_plan import Layout, LoadPlan, OnError, Piece, Reject, Source, invalid_rows, prefix_of, variant_of
from ephemeron.preparation.stages import State
from ephemeron.preparation.values import arrow_kind, coded_texts, floats


def parquet_file(source: Source) -> Any:
    """The file, opened; only what is asked for is read."""
    pyarrow()
    from pyarrow import parquet

    reader = FileReader(open_files(source.root), source.path, length=source.nbytes)
    return parquet.ParquetFile(io.BufferedReader(reader, 1 << 16))


def load_parquet_parts(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Loads parts that begin in one row group.

    Args:
        item: `plan` of these parts alone; `out`, URL of the dataset; number of the `attempt`; `indices` of the parts.

    Returns:
        A `Receipt` for each.
    """
    plan = build(LoadPlan, item["plan"], where="plan")
    groups = _Groups(plan)
    try:
        return [_load(plan, item, index, pieces, groups) for index, pieces in zip(item["indices"], plan.parts, strict=True)]
    except JobError as e:  # a mistake of the user's, which another try would repeat
        return [_plain(Receipt(refused=str(e))) for _ in plan.parts]


class _Groups:
    """Row groups; the latest one is kept."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan, self._key = plan, (-1, -1)
        self._table: Any = None

    def rows(self, piece: Piece) -> Any:
        """Rows of a piece."""
        if self._key != (piece.file, piece.group):
            names = [column.name for column in self._plan.columns]
            with parquet_file(self._plan.sources[piece.file]) as file:
                self._key, self._table = ((piece.file, piece.group), file.read_row_group(piece.group, columns=names).select(names))
        return self._table.slice(piece.begin, piece.end - piece.begin)


def typed(table: Any, columns: Sequence[Column]) -> tuple[Any, dict[int, tuple[str, str]]]:
    """Rows with numbers as float64, absent ones null, and categories as their canonical text (`preparation.values`).

    Returns:
        The table; and by row, the column and reason of a number that float64 does not hold.
    """
    pa = pyarrow()
    made, wrong = {}, dict[int, tuple[str, str]]()
    for column in columns:
        values = table.column(column.name)
        if column.kind == "categorical":
            codes, texts = coded_texts(values)
            taken = pa.array(codes, pa.int32(), mask=codes < 0)
            made[column.name] = pa.DictionaryArray.from_arrays(taken, pa.array(texts, pa.string())).cast(pa.string())
            continue
        numbers, reasons = floats(values)
        made[column.name] = pa.array(numbers, pa.float64(), from_pandas=True)
        for row, reason in reasons.items():
            wrong.setdefault(row, (column.name, reason))
    return pa.table(made), wrong


def valid_rows(table: Any, plan: LoadPlan) -> tuple[Any, list[Reject]]:
    """Rows of a file as `typed` gives them, and those that are invalid."""
    pa = pyarrow()
    made, bad = typed(table, plan.columns)
    bad = {**invalid_rows(made, plan.columns, plan.layout.label_kind), **bad}
    if not bad:
        return made, []
    rejects = [Reject(row, *bad[row], json.dumps(table.slice(row, 1).to_pylist()[0], default=str)) for row in sorted(bad)]
    return made.filter(pa.array(np.isin(np.arange(table.num_rows), list(bad), invert=True))), rejects


def _load(plan: LoadPlan, item: dict[str, Any], index: int, pieces: Sequence[Piece], groups: _Groups) -> dict[str, Any]:
    pa = pyarrow()
    out, prefix = item["out"], prefix_of(item["attempt"])
    tables, rejects = [], list[tuple[int, Reject]]()
    for n, piece in enumerate(pieces):
        table, bad = valid_rows(groups.rows(piece), plan)
        tables.append(table)
        rejects += [(n, reject) for reject in bad]
    first = tuple((n, r.line, r.column, r.reason) for n, r in rejects[:SHOWN])
    if rejects and plan.on_error == "fail":
        return _plain(Receipt(rejected=len(rejects), first=first))
    for source in {plan.sources[piece.file] for piece in pieces}:
        source.check()
    if rejects and plan.on_error == "quarantine":
        run(open_files(out).create(f"state/{prefix}rejected/{index:05d}.jsonl", reject_lines(rejects)))
    made = TableWriter(out, plan.columns).write(
        index, pa.concat_tables(tables).cast(schema_of(plan.columns)), variant=variant_of(item["attempt"])
    )
    receipt = Receipt(partition=made, rejected=len(rejects), first=first)
    found: dict[str, Any] = State(out).create(f"{prefix}loaded/{index:05d}", _plain(receipt))
    return found


def _plain(receipt: Receipt) -> dict[str, Any]:
    found: dict[str, Any] = plain(receipt)
    return found


# -- the plan of a load of Parquet: which rows of which row groups become which partition -------------------------


_SAMPLE = 4096


def parquet_plan(sources: Sequence[Source], layout: Layout, partition_mb: float, on_error: OnError) -> LoadPlan:
    """The plan, from the footers of the files and a few rows.

    Raises:
        JobError: a file is no Parquet, has other columns than the first one, or columns of other kinds than numbers and texts.
    """
    if partition_mb <= 0:
        raise JobError(f"partition_mb = {partition_mb} is not above 0")
    pa = pyarrow()
    groups: list[tuple[int, ...]] = []
    first: Any = None
    columns: tuple[Column, ...] = ()
    row_bytes = 0.0
    for source in sources:
        try:
            opened = parquet_file(source)
        except pa.ArrowInvalid as e:
            raise JobError(f"{source.name} is no Parquet file: {str(e).partition(chr(10))[0]}") from None
        with opened as file:
            schema = file.schema_arrow
            if first is None:
                first, columns = schema, _columns(schema, layout, source)
                row_bytes = _row_bytes(file, columns)
            for column in columns:
                at = schema.get_field_index(column.name)
                if at < 0 or schema.field(at).type != first.field(column.name).type:
                    found = "lacks" if at < 0 else f"has {schema.field(at).type} as"
                    raise JobError(
                        f"{source.name} {found} column {column.name}, which is {first.field(column.name).type} in {sources[0].name}"
                    )
            metadata = file.metadata
            groups.append(tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)))
    total = sum(map(sum, groups))
    if not total:
        raise JobError(f"{sources[0].name} has no rows")
    count = max(1, round(total * row_bytes / (partition_mb * 1e6)))
    starts = tuple(tuple(sum(rows[:n]) for n in range(len(rows))) for rows in groups)
    return LoadPlan(
        format="parquet",
        sources=tuple(sources),
        columns=columns,
        parts=_cut(groups, total, count),
        on_error=on_error,
        layout=layout,
        group_rows=starts,
    )


def _columns(schema: Any, layout: Layout, source: Source) -> tuple[Column, ...]:
    numeric = {}
    unnamed: dict[str, Literal["ignore"]] = {name: "ignore" for name in schema.names if is_index(name) and name != layout.label}
    layout = replace(layout, columns={**unnamed, **layout.columns})
    for field in schema:
        kind = arrow_kind(field.type)
        if kind is None and layout.columns.get(field.name) != "ignore":
            raise JobError(
                f"{source.name}: column {field.name} is {field.type}, neither numbers nor text", remedy='set it to "ignore", or convert it'
            )
        if kind == "categorical" and layout.columns.get(field.name) == "numeric":
            raise JobError(f"{source.name}: column {field.name} is text, and should be numeric", remedy="convert it")
        numeric[field.name] = kind == "numeric"
    return layout.schema(schema.names, numeric, where=source.name)


def _row_bytes(file: Any, columns: Sequence[Column]) -> float:
    """Bytes of a row in a partition, by the first rows of a file."""
    pa = pyarrow()
    names = [column.name for column in columns]
    batch = next(file.iter_batches(batch_size=_SAMPLE, columns=names), None)
    if batch is None or not batch.num_rows:
        return 100.0
    table, _ = typed(pa.Table.from_batches([batch]).select(names), columns)
    float_label = [Column(name=c.name, kind=c.kind, dtype="float64") if c.kind == "label" else c for c in columns]
    nbytes = len(encode_table(table.cast(schema_of(float_label)), float_label))
    return nbytes / int(batch.num_rows)


def _cut(groups: Sequence[Sequence[int]], total: int, count: int) -> tuple[tuple[Piece, ...], ...]:
    """Rows of all groups, end to end, cut into parts of equal size."""
    order = [(file, group, rows) for file, sizes in enumerate(groups) for group, rows in enumerate(sizes) if rows]
    parts, at, used = [], 0, 0
    for n in range(min(count, total)):
        left = total * (n + 1) // min(count, total) - total * n // min(count, total)
        pieces = []
        while left:
            file, group, rows = order[at]
            taken = min(left, rows - used)
            pieces.append(Piece(file=file, group=group, begin=used, end=used + taken))
            used, left = used + taken, left - taken
            if used == rows:
                at, used = at + 1, 0
        parts.append(tuple(pieces))
    return tuple(parts)
