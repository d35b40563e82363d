"""Rows in memory as transforms see them: a mapping from names to columns of NumPy arrays.

    numeric, label    array of numbers, NaN where a value is absent
    categorical       `Categories`: codes and the distinct texts that they stand for
    sparse            `SparseRows`: compressed rows

Only `from_table` and `to_table` need pyarrow; the rest is what inference with a saved pipeline needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.tables.arrow import INDICES, VALUES, pyarrow, schema_of
from ephemeron.data.tables.batches import csr_batch
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, eq=False)
class Categories:
    """A categorical column."""

    codes: NDArray[np.int64]
    """Per row: which of `values`; -1: absent."""
    values: Sequence[str]
    """Distinct texts."""

    def __len__(self) -> int:
        return len(self.codes)

    def tolist(self) -> list[str | None]:
        """The text of each row."""
        return [None if code < 0 else self.values[code] for code in self.codes]


@dataclass(frozen=True, slots=True, eq=False)
class SparseRows:
    """Sparse features in compressed rows."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]
    values: NDArray[np.float32]
    width: int
    """Features."""

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def toarray(self) -> NDArray[np.float32]:
        """As a dense array [rows, width]."""
        dense = np.zeros((len(self), self.width), np.float32)
        dense[np.repeat(np.arange(len(self)), np.diff(self.indptr)), self.indices] = self.values
        return dense


ColumnData: TypeAlias = "NDArray[Any] | Categories | SparseRows"
Rows: TypeAlias = Mapping[str, ColumnData]


def from_table(table: Any, columns: Sequence[Column]) -> dict[str, ColumnData]:
    """The columns of a `pyarrow.Table`.

    Args:
        table: with the fields of the columns.
        columns: which ones.
    """
    pa = pyarrow()
    rows: dict[str, ColumnData] = {}
    for column in columns:
        if column.kind == "sparse":
            parts = table.select([column.name + INDICES, column.name + VALUES]).combine_chunks()
            batch = csr_batch(parts)
            rows[column.name] = SparseRows(batch.indptr, batch.indices, batch.values, column.width)
            continue
        field = table.column(column.name)
        array = field.chunk(0) if field.num_chunks == 1 else field.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        if column.kind == "categorical":
            encoded = array.dictionary_encode()
            codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
            rows[column.name] = Categories(codes, encoded.dictionary.to_pylist())
        else:
            rows[column.name] = array.to_numpy(zero_copy_only=False)
    return rows


def to_table(rows: Rows, columns: Sequence[Column]) -> Any:
    """The inverse of `from_table`: a `pyarrow.Table` with the schema of the columns."""
    pa = pyarrow()
    schema, arrays = schema_of(columns), []
    for column in columns:
        data = rows[column.name]
        if isinstance(data, SparseRows):
            offsets = pa.array(data.indptr.astype(np.int32))
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(data.indices)))
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(data.values)))
        elif isinstance(data, Categories):
            codes = pa.array(data.codes, pa.int32(), mask=data.codes < 0)
            texts = pa.array(list(data.values), pa.string())
            arrays.append(pa.DictionaryArray.from_arrays(codes, texts).cast(pa.string()))
        else:
            field = schema.field(column.name)
            arrays.append(pa.array(data, from_pandas=True).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def from_mapping(data: Mapping[str, Any], columns: Sequence[Column]) -> dict[str, ColumnData]:
    """Rows that a caller has: a sequence, an array or one value for each column.

    Args:
        data: by name; what no column names is left out. None and NaN are absent values.
        columns: all in `data`.

    Raises:
        JobError: a column is of another length, or holds text instead of numbers.
    """
    rows: dict[str, ColumnData] = {}
    lengths: dict[str, int] = {}
    for column in columns:
        rows[column.name] = _column(data[column.name], column)
        lengths[column.name] = len(rows[column.name])
    if len(set(lengths.values())) > 1:
        raise JobError(f"columns have different numbers of rows: {lengths}")
    return rows


def _column(values: Any, column: Column) -> ColumnData:
    if isinstance(values, (Categories, SparseRows)):
        return values
    if column.kind == "sparse":
        raise JobError(f"column {column.name} is sparse", remedy="give SparseRows")
    listed = [values] if isinstance(values, (str, int, float)) or values is None else list(values)
    if column.kind == "categorical":
        texts = [None if v is None or v != v else str(v) for v in listed]
        values_of = {text: n for n, text in enumerate(dict.fromkeys(t for t in texts if t is not None))}
        return Categories(np.array([-1 if t is None else values_of[t] for t in texts], np.int64), list(values_of))
    try:
        return np.array([np.nan if v is None else float(v) for v in listed], np.float64)
    except (TypeError, ValueError) as e:
        raise JobError(f"column {column.name} should have numbers: {e}") from None


def taken(rows: Rows, chosen: NDArray[np.bool_]) -> dict[str, ColumnData]:
    """The rows where a mask is true."""
    found: dict[str, ColumnData] = {}
    for name, data in rows.items():
        if isinstance(data, Categories):
            found[name] = Categories(data.codes[chosen], data.values)
        elif isinstance(data, SparseRows):
            lengths = np.diff(data.indptr)
            entries = np.repeat(chosen, lengths)
            indptr = np.concatenate([[0], np.cumsum(lengths[chosen])]).astype(np.int64)
            found[name] = SparseRows(indptr, data.indices[entries], data.values[entries], data.width)
        else:
            found[name] = data[chosen]
    return found


def length_of(rows: Rows) -> int:
    """Number of rows."""
    return len(next(iter(rows.values()))) if rows else 0
