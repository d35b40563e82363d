"""Digests of rows: equal for rows of equal columns, types and values in equal order, however they were stored and in whichever parts they come.

Each column is one or two sequences of bytes, for which the rows of a group are a range: values of fixed width, or lengths and bytes of text; and the
positions of nulls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.tables.arrow import pyarrow

DIGEST_BYTES = 16
_LISTED_BYTES = 64
"""Of a value of a nested column in memory, about."""


@dataclass(frozen=True, slots=True)
class _Column:
    """Rows of one column as bytes."""

    nulls: NDArray[np.int64]
    """Positions, in order."""
    width: int = 0
    """Bytes of each value; 0: they have no fixed width."""
    data: memoryview | bytes = b""
    """Values, or texts one after the other."""
    ends: NDArray[np.int64] | None = None
    """Of each text, after that of the one before the first; None: of fixed width."""


class DigestedColumns:
    """A table, ready for digests of ranges of its rows.

    Args:
        table: `pyarrow.Table`.
    """

    def __init__(self, table: Any) -> None:
        self.columns = [_as_bytes(column.combine_chunks()) for column in table.columns]

    def nbytes(self, first: int, end: int) -> int:
        """Bytes of rows in memory."""
        rows = end - first
        return sum(c.width * rows if c.ends is None else int(c.ends[end] - c.ends[first]) + 8 * rows for c in self.columns)


class RowDigest:
    """Digest of the rows of a group, which may come in parts.

    Args:
        schema: of the columns.
    """

    def __init__(self, schema: Any) -> None:
        self._signature = "\0".join(f"{field.name}\0{str(field.type).removeprefix('large_')}" for field in schema)
        self._parts = [(_new(), _new(), _new()) for _ in schema]
        self._rows = 0

    def add(self, columns: DigestedColumns, first: int, end: int) -> RowDigest:
        """Adds a range of rows."""
        for column, (values, lengths, nulls) in zip(columns.columns, self._parts, strict=True):
            if column.ends is None:
                values.update(column.data[first * column.width : end * column.width])
            else:
                ends = column.ends[first : end + 1]
                values.update(column.data[ends[0] : ends[-1]])
                lengths.update(np.diff(ends).data)
            if len(column.nulls):
                low, high = np.searchsorted(column.nulls, (first, end))
                nulls.update((column.nulls[low:high] - first + self._rows).data)
        self._rows += end - first
        return self

    def digest(self) -> bytes:
        """Of all rows: 16 bytes."""
        found = _new(f"{self._rows}\0{self._signature}".encode())
        for part in self._parts:
            for each in part:
                found.update(each.digest())
        return bytes(found.digest())


def digest_of_rows(table: Any) -> bytes:
    """Digest of a whole table."""
    return RowDigest(table.schema).add(DigestedColumns(table), 0, table.num_rows).digest()


def _new(data: bytes = b"") -> Any:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)


def _as_bytes(array: Any) -> _Column:
    pa = pyarrow()
    types, kind = pa.types, array.type
    nulls = np.empty(0, np.int64)
    if array.null_count:
        nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).astype(np.int64)
    if types.is_null(kind):
        return _Column(nulls)
    if types.is_boolean(kind):
        return _Column(nulls, 1, memoryview(array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint8)))
    if types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
        return _Column(nulls, *_fixed(array, nulls))
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        if array.null_count:
            array = array.fill_null("" if types.is_string(kind) or types.is_large_string(kind) else b"")
        offsets = np.frombuffer(array.buffers()[1], np.int64 if "large" in str(kind) else np.int32)
        ends = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
        return _Column(nulls, data=memoryview(array.buffers()[2] or b""), ends=ends)
    return _listed(array.to_pylist(), nulls)


def _fixed(array: Any, nulls: NDArray[np.int64]) -> tuple[int, memoryview]:
    width = array.type.bit_width // 8
    every = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * width : (array.offset + len(array)) * width]
    if len(nulls):
        every = every.copy()
        every.reshape(-1, width)[nulls] = 0  # what is stored there says nothing
    return width, every.data


def _listed(values: Sequence[Any], nulls: NDArray[np.int64]) -> _Column:
    """Values of lists, structs and others."""
    texts = [repr(value).encode() for value in values]
    return _Column(nulls, data=memoryview(b"".join(texts)), ends=np.cumsum([0, *map(len, texts)], dtype=np.int64))
