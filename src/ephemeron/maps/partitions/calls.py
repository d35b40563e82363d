"""The function of the user, called with a partition in a function of a platform, which writes what it returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import DamagedObject, UserError
from ephemeron.functions.tasks.item_calls import WithData
from ephemeron.maps.frames import Frame, to_frame
from ephemeron.maps.outputs import ItemObjects
from ephemeron.maps.parquet_rows import ParquetRows, opened
from ephemeron.maps.partitions.rows import as_parquet, conformed, stored_types, to_rows

_BATCH_ROWS = 65_536


class PartitionCall(NamedTuple):
    """How a function is called with partitions: the same for all of them. It is sent as a plain tuple."""

    columns: tuple[str, ...]
    nulls: tuple[str, ...]
    """Those of whole numbers and truth values that may have a null in some partition."""
    frame: Frame
    has_key: bool
    """Whether it has an argument `key`."""
    out: str
    """Folder or prefix that its rows are written to; empty: they are not."""
    code: str
    """Version of the function."""


class PartitionItem(NamedTuple):
    """A partition. It is sent as a plain tuple."""

    key: str
    file: str
    """Path or URL."""
    identity: str
    """Of the file, see `Files.identity`."""
    first: int
    rows: int
    group: int
    groups: int
    """Number of row groups that have these rows, from `group` on."""
    is_part: bool
    """Whether it is a part of one row group."""
    name: str
    """Of the file that is written."""
    schema: bytes
    """`pyarrow.Schema` of the columns, serialised; empty: they are as in the file."""
    call: tuple[Any, ...]
    """A `PartitionCall`."""


def call_partition(function: Callable[..., Any], item: tuple[Any, ...], *, rng: Any = None) -> WithData:
    """Calls `function(partition)`, and writes the rows that it returns.

    Returns:
        What is recorded, and the schema of the rows; empty: there are neither rows nor columns, and no file.

    Raises:
        UserError: it returned no rows, they cannot be stored, or the file has changed since.
        DamagedObject: the file is damaged or gone.
    """
    partition = PartitionItem(*item)
    call = PartitionCall(*partition.call)
    named: dict[str, Any] = {} if rng is None else {"rng": rng}
    if call.has_key:
        named["key"] = partition.key
    table = to_rows(function(to_frame(read_partition(partition), call.frame, call.nulls), **named))
    if not table.num_columns:
        return WithData({"rows": 0, "file": None}, b"")
    data = as_parquet(table)
    if call.out:
        ItemObjects(f"{call.out}/{{key}}").put(partition.name, data)
    return WithData({"rows": table.num_rows, "file": partition.name, "nbytes": len(data)}, table.schema.serialize().to_pybytes())


def read_partition(partition: PartitionItem) -> Any:
    """Rows of a partition, as a `pyarrow.Table`. Of a part of a row group no more is decoded at a time than some thousand rows.

    Raises:
        UserError: the file has changed since.
        DamagedObject: it is damaged or gone; names it.
    """
    pa = pyarrow()
    call = PartitionCall(*partition.call)
    root, _, name = partition.file.rpartition("/")
    if run(open_files(root or "/").identity(name)) != partition.identity:
        raise UserError(f"{partition.file} has changed meanwhile: give the command again")
    try:
        file = opened(partition.file, partition.identity, in_pieces=partition.is_part)
        if partition.is_part:
            table = pa.Table.from_batches(list(_batches(file, partition, call.columns)))
        else:
            numbers = list(range(partition.group, partition.group + partition.groups))
            table = file.parquet.read_row_groups(numbers, columns=list(call.columns)).select(call.columns)
    except (OSError, pa.ArrowException) as e:  # what Parquet says of damage
        raise DamagedObject(f"{partition.file} cannot be read: {str(e).splitlines()[0]}", key=partition.file) from None
    return conformed(table, pa.ipc.read_schema(pa.BufferReader(partition.schema)) if partition.schema else stored_types(table.schema))


def _batches(file: ParquetRows, partition: PartitionItem, columns: tuple[str, ...]) -> Iterator[Any]:
    at = int(file.begins[partition.group])
    for batch in file.parquet.iter_batches(_BATCH_ROWS, row_groups=[partition.group], columns=list(columns)):
        low, high = max(partition.first, at), min(partition.first + partition.rows, at + batch.num_rows)
        if low < high:
            yield batch.select(columns).slice(low - at, high - low)
        at += batch.num_rows
        if at >= partition.first + partition.rows:
            return
