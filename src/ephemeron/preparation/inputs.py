"""What a caller gives to `fit` and `transform`, as rows, and rows as what the caller gave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.data.tables.arrow import VALUES
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError
from ephemeron.preparation.columns import Categories, ColumnData, Rows, from_mapping, from_table, to_table


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
        data: a `pyarrow.Table`; a mapping from names to sequences or single values; a pandas data frame; an array [rows, columns].
        columns: that are wanted; None: all, with kinds by their values.
        needed: names of those that may not be missing.

    Raises:
        JobError: a column is missing, or the data is of another type.
    """
    if isinstance(data, np.ndarray):
        return _array(data, None if columns is None else [column for column in columns if column.name in needed])
    if type(data).__module__.startswith("pyarrow"):
        found = tuple(columns) if columns is not None else _columns_of_table(data)
        given = {name.removesuffix(VALUES) for name in data.column_names}
        found = _there(found, given, needed)
        return Presented(from_table(data, found), found, _table)
    if hasattr(data, "to_dict") and not isinstance(data, Mapping):
        data = {str(name): data[name].tolist() for name in data.columns}
    if not isinstance(data, Mapping):
        raise JobError(f"{type(data).__name__} has no columns", remedy="give a dataset, a table, a mapping or an array")
    found = tuple(columns) if columns is not None else tuple(_column(name, values) for name, values in data.items())
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
        raise JobError(
            f"the array has {data.shape[1]} columns, and {len(found)} were fitted: {[c.name for c in found]}"
        )
    return Presented(from_mapping({c.name: data[:, n] for n, c in enumerate(found)}, found), tuple(found), _stacked)


def _stacked(rows: Rows, columns: Sequence[Column]) -> Any:
    given = [column for column in columns if column.name in rows]
    if all(column.kind == "numeric" for column in given):
        return np.column_stack([np.asarray(rows[column.name]) for column in given])
    return _mapping(rows, columns)


def _mapping(rows: Rows, columns: Sequence[Column]) -> dict[str, Any]:
    return {name: data.tolist() if isinstance(data, Categories) else data for name, data in rows.items()}


def _table(rows: Rows, columns: Sequence[Column]) -> Any:
    return to_table(rows, [column for column in columns if column.name in rows])


def _column(name: str, values: Any) -> Column:
    listed = [values] if isinstance(values, (str, int, float)) else list(values)
    texts = any(isinstance(value, str) for value in listed)
    return (
        Column(name=name, kind="categorical", dtype="string")
        if texts
        else Column(name=name, kind="numeric", dtype="float64")
    )


def _columns_of_table(table: Any) -> tuple[Column, ...]:
    from ephemeron.data.tables.arrow import columns_of, pyarrow

    try:
        return columns_of(table.schema)
    except KeyError:  # not a partition of a dataset
        types = pyarrow().types
        return tuple(
            Column(name=field.name, kind="numeric", dtype="float64")
            if types.is_integer(field.type) or types.is_floating(field.type)
            else Column(name=field.name, kind="categorical", dtype="string")
            for field in table.schema
        )
