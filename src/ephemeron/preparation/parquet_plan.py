"""The plan of a load of Parquet: which rows of which row groups become which partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ephemeron.data.tables.arrow import pyarrow, schema_of
from ephemeron.data.tables.manifest import Column
from ephemeron.data.tables.writer import encode_table
from ephemeron.errors import JobError
from ephemeron.preparation.layout import Layout
from ephemeron.preparation.load_parquet_part import parquet_file, typed
from ephemeron.preparation.load_plan import LoadPlan, OnError, Piece
from ephemeron.preparation.sources import Source
from ephemeron.preparation.values import arrow_kind

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
