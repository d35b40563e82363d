"""Rows of a group, where a function of the user is called with it. Groups that are read one after the other are often in one row group of one
file, which is kept in memory meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import DamagedObject
from ephemeron.maps.groups.row_digests import DigestedColumns, RowDigest
from ephemeron.maps.parquet_rows import ParquetRows, opened

_MOST_HELD = 32 << 20
"""Bytes of row groups that are kept."""


_held: OrderedDict[tuple[str, int], Any] = OrderedDict()


def read_group(file: str, first: int, rows: int, *, digest: bytes, columns: Sequence[str], key: str) -> Any:
    """Rows of a group, as a `pyarrow.Table` with all columns of its file.

    Args:
        file: path or URL.
        first, rows: in the file.
        digest: of the rows.
        columns: those that have the digest.
        key: of the group, for messages.

    Raises:
        DamagedObject: the rows are not those that were stored, or not there; names the file.
    """
    parts = list(_parts(file, first, rows, key))
    table = pyarrow().concat_tables(parts).combine_chunks()
    found = RowDigest(table.select(columns).schema).add(DigestedColumns(table.select(columns)), 0, table.num_rows)
    if found.digest() != digest:
        raise _damaged(file, key)
    return table


def stream_group(file: str, first: int, rows: int, *, digest: bytes, columns: Sequence[str], key: str) -> Iterator[Any]:
    """The same in parts, of which one is in memory at a time.

    Raises:
        DamagedObject: see `read_group`; behind the last part.
    """
    found: RowDigest | None = None
    for part in _parts(file, first, rows, key):
        kept = part.select(columns).combine_chunks()
        found = found or RowDigest(kept.schema)
        found.add(DigestedColumns(kept), 0, kept.num_rows)
        yield part
    if found is None or found.digest() != digest:
        raise _damaged(file, key)


def read_column(place: str, name: str) -> Any:
    """A column of a file of groups.

    Raises:
        DamagedObject: it is not there; names the file.
    """
    try:
        return ParquetRows(place).parquet.read(columns=[name]).column(0)
    except (OSError, pyarrow().ArrowException):
        raise DamagedObject("the rows of groups are damaged or gone: delete that file, and give the command again", key=place) from None


def _parts(place: str, first: int, rows: int, key: str) -> Iterator[Any]:
    pa = pyarrow()
    try:
        file = opened(place)
        for n in file.row_groups(first, rows):
            begin = int(file.begins[n])
            low, high = max(first, begin), min(first + rows, int(file.begins[n + 1]))
            yield _row_group(file, n).slice(low - begin, high - low)
    except (OSError, pa.ArrowException):  # what Parquet says of damage
        raise _damaged(place, key) from None


def _row_group(file: ParquetRows, n: int) -> Any:
    key = file.place, n
    if key not in _held:
        table = file.parquet.read_row_group(n)
        while _held and sum(each.nbytes for each in _held.values()) + table.nbytes > _MOST_HELD:
            _held.popitem(last=False)
        _held[key] = table
    _held.move_to_end(key)
    return _held[key]


def _damaged(place: str, key: str) -> DamagedObject:
    return DamagedObject(
        f"the rows of group {key} are damaged or gone: delete that file, and give the command again with --retry-failed", key=place
    )
