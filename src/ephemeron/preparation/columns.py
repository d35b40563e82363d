"""Rows in memory as transforms see them: a mapping from names to columns of NumPy arrays.

    numeric, label    array of numbers, NaN where a value is absent
    categorical       `Categories`: codes and the distinct texts that they stand for
    ordinal           array of int64: a code for each row
    vector            array of float32 [rows, entries]
    sparse            `SparseRows`: compressed rows

Only `from_table` and `to_table` need pyarrow; the rest is what inference with a saved pipeline needs.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import near
from ephemeron.data.tables.arrow import INDICES, VALUES, columns_of, csr_batch, pyarrow, schema_of, vectors_of
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError
from ephemeron.preparation.values import InvalidValue, coded_texts, floats, has_text


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
    rows: dict[str, ColumnData] = {}
    for column in columns:
        if column.kind == "sparse":
            parts = table.select([column.name + INDICES, column.name + VALUES]).combine_chunks()
            batch = csr_batch(parts)
            rows[column.name] = SparseRows(batch.indptr, batch.indices, batch.values, column.width)
        elif column.kind == "vector":
            rows[column.name] = vectors_of(table.column(column.name))
        else:
            rows[column.name] = column_of(table.column(column.name), column)
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
        elif column.kind == "vector":
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(data.ravel(), pa.float32()), column.width))
        else:
            field = schema.field(column.name)
            arrays.append(pa.array(data, from_pandas=True).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def from_mapping(data: Mapping[str, Any], columns: Sequence[Column]) -> dict[str, ColumnData]:
    """Rows that a caller has: a sequence, an array or one value for each column.

    Args:
        data: by name; what no column names is left out. None, NaN and NA are absent values (`preparation.values`).
        columns: all in `data`.

    Raises:
        JobError: a column is of another length, or a value is not of its kind.
    """
    rows: dict[str, ColumnData] = {}
    lengths: dict[str, int] = {}
    for column in columns:
        rows[column.name] = column_of(data[column.name], column)
        lengths[column.name] = len(rows[column.name])
    if len(set(lengths.values())) > 1:
        raise JobError(f"columns have different numbers of rows: {lengths}")
    return rows


def column_of(values: Any, column: Column) -> ColumnData:
    """A column that a caller has.

    Args:
        values: a sequence, an array of NumPy, pandas or Arrow, or one value; `Categories` and `SparseRows` stay what they are.
        column: its name and kind.

    Raises:
        JobError: a value is not of the column's kind, or float64 does not hold it; names column and row.
    """
    if isinstance(values, (Categories, SparseRows)):
        return values
    if column.kind == "sparse":
        raise JobError(f"column {column.name} is sparse", remedy="give SparseRows")
    if column.kind == "categorical":
        try:
            return Categories(*coded_texts(values))
        except InvalidValue as e:
            raise JobError(f"column {column.name} should have categories; row {e.row}: {e}", remedy="convert it to text") from None
    if column.kind == "vector":
        vectors = np.asarray(values, np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != column.width:
            raise JobError(f"column {column.name} has the shape {list(vectors.shape)}", remedy=f"give [rows, {column.width}]")
        return vectors
    numbers, wrong = floats(values)
    if column.kind == "ordinal" and not wrong:
        valid = (numbers >= 0) & (numbers < column.width) & (numbers == np.floor(numbers))
        wrong = {int(row): f"{numbers[row]:g} is no code from 0 to {column.width - 1}" for row in np.flatnonzero(~valid)[:1]}
    if wrong:
        row = min(wrong)
        raise JobError(f"column {column.name} should have numbers; row {row}: {wrong[row]}")
    return numbers.astype(np.int64) if column.kind == "ordinal" else numbers


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


def chosen(schema: Sequence[Column], names: Sequence[str] | None, kinds: Sequence[str], *, step: str) -> list[str]:
    """Names of columns of some kinds.

    Raises:
        JobError: a column is unknown or of another kind.
    """
    known = {column.name: column for column in schema}
    if names is None:
        found = [column.name for column in schema if column.kind in kinds]
        if not found:
            raise JobError(f"{step}: there is no {' or '.join(kinds)} column among {', '.join(known)}")
        return found
    for name in names:
        if name not in known:
            raise JobError(f"{step}: unknown column {name}", remedy=near(name, known, what="columns"))
        if known[name].kind not in kinds:
            raise JobError(f"{step}: column {name} is {known[name].kind}", remedy=f"name {' or '.join(kinds)} columns")
    return list(names)


def names_of(given: Any, what: str) -> list[str]:
    """A list of names of columns that a caller gave.

    Raises:
        JobError: it is no list, or holds something else.
    """
    if isinstance(given, str):
        raise JobError(f"{what} = {given!r} is text", remedy=f"write [{given!r}]")
    listed = list(given) if isinstance(given, Iterable) else [given]
    wrong = [name for name in listed if not isinstance(name, str)]
    if wrong or not isinstance(given, Iterable):
        raise JobError(f"{what} = {given!r} is no list of names", remedy='write ["NAME", …]')
    return [str(name) for name in listed]


def whole(given: Any, what: str) -> int:
    """A whole number that a caller gave, of Python's or NumPy's integers.

    Raises:
        JobError: it is none.
    """
    try:
        return operator.index(given)
    except TypeError:
        raise JobError(f"{what} = {given!r} is no whole number") from None


# -- what a caller gives to `fit` and `transform`, as rows, and rows as what the caller gave ----------------------


@dataclass(frozen=True, slots=True)
class Presented:
    """Rows that a caller gave."""

    rows: dict[str, ColumnData]
    columns: tuple[Column, ...]
    returned: Callable[[Rows, Sequence[Column], NDArray[np.int64]], Any]
    """Turns changed rows into what the caller gave; of rows that are left of those, given by their numbers."""


def presented(data: Any, columns: Sequence[Column] | None, needed: Collection[str] = ()) -> Presented:
    """Rows of a table, a mapping, a data frame or an array.

    Args:
        data: a `pyarrow.Table` or `RecordBatch`; a mapping from names to sequences, arrays or single values; a pandas data frame; an array
            [rows, columns].
        columns: that are wanted; None: all, with kinds by their values.
        needed: names of those that may not be missing.

    Raises:
        JobError: a column is missing, or the data is of another type.
    """
    if isinstance(data, np.ndarray):
        return _array(data, None if columns is None else [column for column in columns if column.name in needed])
    if type(data).__module__.startswith("pyarrow") and hasattr(data, "column_names"):
        table, returned = _as_table(data)
        found = tuple(columns) if columns is not None else _columns_of_table(table)
        found = _there(found, {name.removesuffix(VALUES) for name in table.column_names}, needed)
        return Presented(from_table(table, found), found, returned)
    if "pandas" in sys.modules and isinstance(data, sys.modules["pandas"].DataFrame):
        index, data = data.index, _columns_of_frame(data)
        found = tuple(columns) if columns is not None else tuple(_column(*one) for one in data.items())
        found = _there(found, data.keys(), needed)
        return Presented(from_mapping(data, found), found, lambda rows, columns, left: _frame(rows, columns, index[left]))
    if not isinstance(data, Mapping):
        raise JobError(
            f"{type(data).__name__} has no columns that are known here",
            remedy="give a dataset, a table of Arrow, a data frame of pandas, a mapping from names to columns or an array",
        )
    data = {name: list(values) if hasattr(values, "__next__") else values for name, values in data.items()}
    found = tuple(columns) if columns is not None else tuple(_column(*one) for one in data.items())
    found = _there(found, data.keys(), needed)
    return Presented(from_mapping(data, found), found, _mapping)


def _there(columns: Sequence[Column], given: Collection[str], needed: Collection[str]) -> tuple[Column, ...]:
    """Columns that a caller gave; refuses, if one is missing that is needed."""
    for column in columns:
        if column.name in needed and column.name not in given:
            raise JobError(f"column {column.name} is missing", remedy=f"give {', '.join(sorted(needed))}")
    return tuple(column for column in columns if column.name in given)


def _array(data: Any, columns: Sequence[Column] | None) -> Presented:
    if data.ndim != 2:
        raise JobError(f"the array has {data.ndim} dimensions", remedy="give [rows, columns]")
    made = [Column(name=f"x{n}", kind="numeric", dtype="float64") for n in range(data.shape[1])]
    found = made if columns is None else list(columns)
    if len(found) != data.shape[1]:
        raise JobError(f"the array has {data.shape[1]} columns, and {len(found)} were fitted: {[c.name for c in found]}")
    return Presented(from_mapping({c.name: data[:, n] for n, c in enumerate(found)}, found), tuple(found), _stacked)


def _stacked(rows: Rows, columns: Sequence[Column], left: NDArray[np.int64]) -> Any:
    given = [column for column in columns if column.name in rows]
    if all(column.kind in ("numeric", "ordinal", "vector") for column in given):
        return np.column_stack([np.asarray(rows[column.name]) for column in given])
    return _mapping(rows, columns, left)


def _mapping(rows: Rows, columns: Sequence[Column], left: NDArray[np.int64]) -> dict[str, Any]:
    return {name: data.tolist() if isinstance(data, Categories) else data for name, data in rows.items()}


def _as_table(data: Any) -> tuple[Any, Callable[[Rows, Sequence[Column], NDArray[np.int64]], Any]]:
    """A table, or a record batch as a table; and what makes such a thing again."""
    pa = pyarrow()

    def batch(rows: Rows, columns: Sequence[Column], left: NDArray[np.int64]) -> Any:
        made = _table(rows, columns, left).combine_chunks()
        return pa.RecordBatch.from_arrays([pa.concat_arrays(one.chunks) for one in made.columns], schema=made.schema)

    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data]), batch
    return data, _table


def _table(rows: Rows, columns: Sequence[Column], left: NDArray[np.int64]) -> Any:
    return to_table(rows, [column for column in columns if column.name in rows])


def _columns_of_frame(frame: Any) -> dict[str, Any]:
    """Columns of a data frame by name."""
    names = [str(name) for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise JobError(f"the data frame has two columns {twice[0]!r}", remedy="rename or drop one")
    return {name: frame.iloc[:, n] for n, name in enumerate(names)}


def _frame(rows: Rows, columns: Sequence[Column], index: Any) -> Any:
    """A data frame. A sparse column is two, as in a table: arrays of NumPy per row in `NAME.indices` and `NAME.values`; a vector is an
    array per row."""
    pandas: Any = sys.modules["pandas"]
    made: dict[str, Any] = {}
    for name in (column.name for column in columns if column.name in rows):
        data = rows[name]
        if isinstance(data, SparseRows):
            for suffix, entries in ((INDICES, data.indices), (VALUES, data.values)):
                of_rows = np.split(entries, data.indptr[1:-1]) if len(data) else []
                made[name + suffix] = pandas.Series(of_rows, index, dtype=object)
        elif not isinstance(data, Categories) and data.ndim == 2:
            made[name] = pandas.Series(list(data), index, dtype=object)
        else:
            made[name] = pandas.Series(data.tolist() if isinstance(data, Categories) else data, index)
    return pandas.DataFrame(made, index=index)


def _column(name: str, values: Any) -> Column:
    return Column(name=name, kind="categorical", dtype="string") if has_text(values) else Column(name=name, kind="numeric", dtype="float64")


def _columns_of_table(table: Any) -> tuple[Column, ...]:
    try:
        return columns_of(table.schema)
    except KeyError:  # not a partition of a dataset
        return tuple(_column(name, table.column(name)) for name in table.column_names)
