"""Predictions of groups beside the rows of their table, in the order of the rows. Neither is in memory as a whole.

predictions by group ──number of the row──▶ spilled files of consecutive rows ──one at a time──▶ beside the rows, read once more
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.tables.arrow import pyarrow
from ephemeron.data.tables.table_file import table_written
from ephemeron.errors import JobError
from ephemeron.maps.frames import PREDICTION
from ephemeron.maps.groups.division import Spilled
from ephemeron.maps.groups.table_data import TableData

_ROWS, _MOST_FILES = 1 << 18, 128
_POSITION = "row"

Predicted = Callable[[], Iterable[tuple[NDArray[np.int64], bytes]]]
"""Gives the numbers of the rows of each group, from 0, and their predictions as a stream of Arrow; as often as it is called."""


def write_joined(data: TableData, rows: int, predicted: Predicted, out: Path) -> list[str]:
    """Writes a table with columns of predictions, null in rows that have none.

    Args:
        data: the table.
        rows: of it.
        predicted: the predictions.
        out: `.csv`, `.tsv` or `.parquet`.

    Returns:
        Names of these columns.

    Raises:
        JobError: predictions of two groups are of kinds that no column has together, or the table has changed.
    """
    pa = pyarrow()
    schema = _schema_of(data, predicted)
    size = max(_ROWS, -(-rows // _MOST_FILES))
    with tempfile.TemporaryDirectory(prefix="ephemeron-groups-") as folder:
        files = _spread(predicted, schema, size, Path(folder))
        columns, at, bucket, held = list(schema.names), 0, -1, pa.table({})
        with table_written(out, delimiter=data.delimiter) as written:
            for part in data.parts():
                while part.num_rows:
                    if at // size != bucket:
                        bucket = at // size
                        held = _in_order(files.get(bucket), schema, bucket * size, min(size, max(0, rows - bucket * size)))
                    low = at - bucket * size
                    beside = held.slice(low, part.num_rows)
                    here = part.slice(0, beside.num_rows)
                    if not here.num_rows:
                        raise _changed(data)
                    for name in columns:
                        here = here.append_column(name, beside.column(name))
                    written.write(here)
                    at, part = at + here.num_rows, part.slice(here.num_rows)
            if at != rows:
                raise _changed(data)
    return columns


def _changed(data: TableData) -> JobError:
    return JobError(f"{data.name} has changed meanwhile", remedy="give the command again")


def _schema_of(data: TableData, predicted: Predicted) -> Any:
    """`pyarrow.Schema` of all predictions together."""
    pa = pyarrow()
    found: dict[str, Any] = {}
    for _, stream in predicted():
        schema = pa.ipc.open_stream(pa.BufferReader(stream)).schema
        found.setdefault(schema.to_string(), schema)
    if not found:
        return pa.schema([(PREDICTION, pa.float64())])
    try:
        schema = pa.unify_schemas(list(found.values()), promote_options="permissive")
    except pa.ArrowException as e:
        raise JobError(
            f"predictions of groups have no types in common: {str(e).splitlines()[0]}", remedy="return the same kind for all groups"
        ) from None
    if twice := sorted(set(schema.names) & set(data.schema.names)):
        raise JobError(f"{data.name} has a column {twice[0]!r} already, which predictions would have", remedy="rename it")
    return pa.schema([(f.name, pa.float64() if pa.types.is_null(f.type) else f.type) for f in schema])


def _spread(predicted: Predicted, schema: Any, size: int, folder: Path) -> dict[int, Spilled]:
    pa = pyarrow()
    with_position = pa.schema([(_POSITION, pa.int64()), *schema])
    files: dict[int, Spilled] = {}
    for positions, stream in predicted():
        table = pa.ipc.open_stream(pa.BufferReader(stream)).read_all()
        whole = pa.Table.from_arrays([pa.array(positions), *_columns(table, schema)], schema=with_position)
        buckets = positions // size  # positions of a group are in order
        for bucket in np.unique(buckets).tolist():
            low, high = np.searchsorted(buckets, (bucket, bucket + 1))
            if bucket not in files:
                files[bucket] = Spilled(folder / f"{bucket}.arrow", with_position)
            files[bucket].add(whole.slice(low, high - low), set())
    for file in files.values():
        file.finish()
    return files


def _columns(table: Any, schema: Any) -> Iterator[Any]:
    pa = pyarrow()
    for field in schema:
        if field.name not in table.column_names:
            yield pa.nulls(table.num_rows, field.type)
            continue
        column = table.column(field.name)
        try:
            yield column.cast(field.type)
        except pa.ArrowException as e:  # such as a whole number that no float is
            raise JobError(
                f"predictions {field.name!r} of {column.type} cannot be {field.type}, as those of other groups are: {str(e).splitlines()[0]}",
                remedy="return the same kind for all groups",
            ) from None


def _in_order(file: Spilled | None, schema: Any, first: int, rows: int) -> Any:
    """Predictions of consecutive rows, null where there are none."""
    pa = pyarrow()
    if file is None:
        return pa.table([pa.nulls(rows, field.type) for field in schema], schema=schema)
    table = pa.concat_tables(file.parts())
    at = np.full(rows, -1, np.int64)
    at[table.column(_POSITION).to_numpy() - first] = np.arange(table.num_rows)
    return table.select(schema.names).take(pa.array(at, mask=at < 0))
