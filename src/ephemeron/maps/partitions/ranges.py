"""Which rows of a Parquet file are a partition: whole row groups that are in memory together, or a part of one that is too large. From metadata alone.

Parquet says how large columns are when they are encoded, and not what they are in memory: text that repeats takes a few bits per value. So a column counts
with the larger one of its encoded bytes and of its values: of fixed width, or of text as long as its shortest and longest value are on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ephemeron.data.tables.arrow import pyarrow

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_OF_DICTIONARY = 5
"""Bytes in memory for a byte of text in a dictionary, of which no more is known."""


class RowRange(NamedTuple):
    """Rows of a file."""

    first: int
    rows: int
    nbytes: int
    """In memory, about."""
    group: int
    """Number of the first of its row groups."""
    groups: int
    """Number of row groups."""
    is_part: bool = False
    """Whether it is a part of one row group."""


def ranges_of(metadata: Any, leaves: Sequence[int], *, most_bytes: int) -> Iterator[RowRange]:
    """Partitions of a file, in order; each has one row or more.

    Args:
        metadata: `pyarrow.parquet.FileMetaData`.
        leaves: numbers of the columns that are read.
        most_bytes: of a partition in memory, about.
    """
    first = rows = nbytes = begin = at = 0
    for n in range(metadata.num_row_groups):
        group = metadata.row_group(n)
        size = sum(_nbytes(group.column(leaf)) for leaf in leaves)
        if rows and nbytes + size > most_bytes:
            yield RowRange(first, rows, nbytes, begin, n - begin)
            rows = nbytes = 0
        if not rows:
            first, begin = at, n
        if size > most_bytes:
            parts = min(-(-size // most_bytes), group.num_rows)
            for k in range(parts):
                low, high = (group.num_rows * each // parts for each in (k, k + 1))
                yield RowRange(at + low, high - low, size * (high - low) // group.num_rows, n, 1, parts > 1)
        else:
            rows, nbytes = rows + group.num_rows, nbytes + size
        at += group.num_rows
    if rows:
        yield RowRange(first, rows, nbytes, begin, metadata.num_row_groups - begin)


def leaves_of(schema: Any, names: Sequence[str]) -> dict[str, range]:
    """Numbers of the columns of Parquet that a column of a table is stored in, by its name.

    Args:
        schema: `pyarrow.Schema` of the file.
        names: of columns.
    """
    found, first = {}, 0
    for field in schema:
        count = _leaves(field.type)
        if field.name in names:
            found[field.name] = range(first, first + count)
        first += count
    return found


def has_nulls(metadata: Any, leaf: int) -> bool:
    """Whether a column may have nulls, as far as the file says."""
    for n in range(metadata.num_row_groups):
        column = metadata.row_group(n).column(leaf)
        about = column.statistics if column.is_stats_set else None
        if about is None or not about.has_null_count or about.null_count:
            return True
    return False


def chunks_of(metadata: Any, found: RowRange, leaves: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Offset and bytes in the file of everything that a partition is read from."""
    for n in range(found.group, found.group + found.groups):
        for leaf in leaves:
            column = metadata.row_group(n).column(leaf)
            offsets = [column.data_page_offset, *([column.dictionary_page_offset] if column.has_dictionary_page else [])]
            yield min(offset for offset in offsets if offset is not None), column.total_compressed_size


def _leaves(kind: Any) -> int:
    types = pyarrow().types
    if isinstance(kind, pyarrow().BaseExtensionType):
        return _leaves(kind.storage_type)
    if types.is_dictionary(kind):
        return _leaves(kind.value_type)
    if types.is_map(kind):
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    if types.is_struct(kind):
        return sum(_leaves(kind.field(n).type) for n in range(kind.num_fields))
    return _leaves(kind.value_type) if hasattr(kind, "value_type") else 1


def _nbytes(column: Any) -> int:
    encoded, values = int(column.total_uncompressed_size), int(column.num_values)
    if column.physical_type in _WIDTHS:
        return max(encoded, values * _WIDTHS[column.physical_type])
    if not column.has_dictionary_page:
        return encoded
    try:
        about = column.statistics if column.is_stats_set else None
        lengths = [] if about is None or not about.has_min_max else [len(about.min), len(about.max)]
    except (TypeError, ValueError, NotImplementedError):  # decimals, and what Arrow does not read
        lengths = []
    if not lengths:
        return _OF_DICTIONARY * encoded
    return max(encoded, values * (4 + sum(lengths) // 2))
