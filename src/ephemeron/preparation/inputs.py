"""What a caller gives to `fit` and `transform`, as rows, and rows as what the caller gave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.data.tables.arrow import INDICES, VALUES, columns_of, pyarrow
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError
from ephemeron.preparation.columns import Categories, ColumnData, Rows, SparseRows, from_mapping, from_table, to_table
from ephemeron.preparation.values import has_text


@dataclass(frozen=True, slots=True)
class Presented:
    """Rows that a caller gave."""

    rows: dict[str, ColumnData]
    columns: tuple[Column, ...]
    returned: Callable[[Rows, Sequence[Column]], Any]
    """Turns changed rows into what the caller gave."""


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
        return Presented(from_mapping(data, found), found, lambda rows, columns: _frame(rows, columns, index))
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


def _stacked(rows: Rows, columns: Sequence[Column]) -> Any:
    given = [column for column in columns if column.name in rows]
    if all(column.kind == "numeric" for column in given):
        return np.column_stack([np.asarray(rows[column.name]) for column in given])
    return _mapping(rows, columns)


def _mapping(rows: Rows, columns: Sequence[Column]) -> dict[str, Any]:
    return {name: data.tolist() if isinstance(data, Categories) else data for name, data in rows.items()}


def _as_table(data: Any) -> tuple[Any, Callable[[Rows, Sequence[Column]], Any]]:
    """A table, or a record batch as a table; and what makes such a thing again."""
    pa = pyarrow()

    def batch(rows: Rows, columns: Sequence[Column]) -> Any:
        made = _table(rows, columns).combine_chunks()
        return pa.RecordBatch.from_arrays([pa.concat_arrays(one.chunks) for one in made.columns], schema=made.schema)

    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data]), batch
    return data, _table


def _table(rows: Rows, columns: Sequence[Column]) -> Any:
    return to_table(rows, [column for column in columns if column.name in rows])


def _columns_of_frame(frame: Any) -> dict[str, Any]:
    """Columns of a data frame by name."""
    names = [str(name) for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise JobError(f"the data frame has two columns {twice[0]!r}", remedy="rename or drop one")
    return {name: frame.iloc[:, n] for n, name in enumerate(names)}


def _frame(rows: Rows, columns: Sequence[Column], index: Any) -> Any:
    """A data frame. A sparse column is two, as in a table: arrays of NumPy per row in `NAME.indices` and `NAME.values`."""
    pandas: Any = sys.modules["pandas"]
    made: dict[str, Any] = {}
    for name in (column.name for column in columns if column.name in rows):
        data = rows[name]
        if isinstance(data, SparseRows):
            for suffix, entries in ((INDICES, data.indices), (VALUES, data.values)):
                of_rows = np.split(entries, data.indptr[1:-1]) if len(data) else []
                made[name + suffix] = pandas.Series(of_rows, index, dtype=object)
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
