"""Columns of a prepared dataset as types of Arrow.

Kind and width of a column are metadata of its field, so that a table describes itself. Sparse features are two columns,
`NAME.indices` (list of int64) and `NAME.values` (list of float32); the indices of a row are sorted and unique. A vector, such as a
one-hot one, is a list of fixed size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.tables.manifest import Column
from ephemeron.errors import MissingExtra

INDICES, VALUES = ".indices", ".values"


def pyarrow(extra: str = "preparation") -> Any:
    """The module.

    Args:
        extra: of this package that installs it.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
    except ModuleNotFoundError:
        raise MissingExtra("pyarrow", extra) from None
    return pyarrow


def is_index(name: str) -> bool:
    """Whether a column is an index of pandas that has no name, which files and tables keep beside the columns."""
    return re.fullmatch(r"__index_level_\d+__", name) is not None


def schema_of(columns: Sequence[Column]) -> Any:
    """The `pyarrow.Schema` of columns."""
    pa = pyarrow()
    fields = []
    for column in columns:
        about = {"kind": column.kind, "width": str(column.width)}
        if column.kind == "sparse":
            fields.append(pa.field(column.name + INDICES, pa.list_(pa.int64()), metadata=about))
            fields.append(pa.field(column.name + VALUES, pa.list_(_value_type(column)), metadata=about))
        elif column.kind == "vector":
            fields.append(pa.field(column.name, pa.list_(_value_type(column), column.width), metadata=about))
        else:
            fields.append(pa.field(column.name, _value_type(column), metadata=about))
    return pa.schema(fields)


def columns_of(schema: Any) -> tuple[Column, ...]:
    """The columns that a `pyarrow.Schema` made by `schema_of` describes.

    Raises:
        KeyError: a field has no description.
    """
    pa = pyarrow()
    found = []
    for field in schema:
        about = field.metadata or {}
        kind, width = about[b"kind"].decode(), int(about[b"width"])
        if kind == "sparse":
            if field.name.endswith(VALUES):
                dtype = _dtype(pa, field.type.value_type)
                found.append(Column(name=field.name.removesuffix(VALUES), kind="sparse", dtype=dtype, width=width))
        else:
            value_type = field.type.value_type if kind == "vector" else field.type
            found.append(Column(name=field.name, kind=kind, dtype=_dtype(pa, value_type), width=width))
    return tuple(found)


def _value_type(column: Column) -> Any:
    pa = pyarrow()
    return {"float64": pa.float64, "float32": pa.float32, "int64": pa.int64, "int32": pa.int32, "string": pa.string}[column.dtype]()


def _dtype(pa: Any, type_: Any) -> Any:
    return {pa.float64(): "float64", pa.float32(): "float32", pa.int64(): "int64", pa.int32(): "int32", pa.string(): "string"}[type_]


# -- rows of a partition as arrays of NumPy -----------------------------------------------------------------------


class CsrBatch(NamedTuple):
    """Sparse features of rows, and their labels."""

    indptr: NDArray[np.int64]
    """Row i has the entries `indptr[i]` to `indptr[i + 1]`."""
    indices: NDArray[np.int64]
    """Sorted and unique in a row."""
    values: NDArray[np.float32]
    labels: NDArray[Any] | None
    """As they are stored; None: the table has none."""


def csr_batch(table: Any, rows: slice | NDArray[Any] | None = None) -> CsrBatch:
    """Sparse features of rows in compressed form, without copying where rows follow each other.

    Args:
        table: a partition with one sparse column, as `TableDataset.read` returns it.
        rows: numbers of rows, or a slice of step 1; None: all.

    Raises:
        ValueError: the table has no sparse column, or more than one.
    """
    sparse = [name.removesuffix(INDICES) for name in table.column_names if name.endswith(INDICES)]
    if len(sparse) != 1:
        raise ValueError(f"the table has {len(sparse) or 'no'} sparse columns: {', '.join(table.column_names)}")
    lists = _whole(table.column(sparse[0] + INDICES))
    offsets = _numpy(lists.offsets).astype(np.int64)  # of this array, where it is a slice
    all_indices = _numpy(lists.values)
    all_values = _numpy(_whole(table.column(sparse[0] + VALUES)).values)
    labels = labels_of(table, rows)
    if rows is None or isinstance(rows, slice):
        begin, end, step = (rows or slice(None)).indices(len(lists))
        if step != 1:
            raise ValueError(f"a slice of step {step}")
        end = max(begin, end)
        low, high = offsets[begin], offsets[end]
        return CsrBatch(offsets[begin : end + 1] - low, all_indices[low:high], all_values[low:high], labels)
    chosen = np.asarray(rows, np.int64)
    lengths = offsets[chosen + 1] - offsets[chosen]
    indptr = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    at = np.arange(indptr[-1]) + np.repeat(offsets[chosen] - indptr[:-1], lengths)
    return CsrBatch(indptr, all_indices[at], all_values[at], labels)


def dense_batch(table: Any, rows: slice | NDArray[Any] | None = None) -> tuple[NDArray[np.float64], NDArray[Any] | None]:
    """Numeric columns and vectors of rows as an array [rows, columns] in their order, absent values as NaN, and the labels."""
    chosen = slice(None) if rows is None else rows
    columns = [_column(table, name, kind) for name, kind in _kinds(table).items() if kind in ("numeric", "vector")]
    dense = np.column_stack(columns) if columns else np.empty((table.num_rows, 0))
    return dense[chosen].astype(np.float64, copy=False), labels_of(table, rows)


def columns_batch(table: Any, rows: slice | NDArray[Any] | None = None) -> tuple[dict[str, NDArray[Any]], NDArray[Any] | None]:
    """Columns of rows by name: numeric ones float64 [rows], absent values as NaN, codes int64 [rows], vectors float32 [rows, entries];
    and the labels."""
    chosen = slice(None) if rows is None else rows
    kinds = {name: kind for name, kind in _kinds(table).items() if kind in ("numeric", "ordinal", "vector")}
    return {name: _column(table, name, kind)[chosen] for name, kind in kinds.items()}, labels_of(table, rows)


def _kinds(table: Any) -> dict[str, str]:
    return {field.name: (field.metadata or {}).get(b"kind", b"").decode() for field in table.schema}


def _column(table: Any, name: str, kind: str) -> NDArray[Any]:
    if kind == "vector":
        return vectors_of(table.column(name))
    return _numpy(_whole(table.column(name))).astype(np.int64 if kind == "ordinal" else np.float64)


def vectors_of(column: Any) -> NDArray[np.float32]:
    """A vector column of a table as an array [rows, entries]."""
    whole = _whole(column)
    return _numpy(whole.flatten()).astype(np.float32).reshape(len(whole), whole.type.list_size)


def labels_of(table: Any, rows: slice | NDArray[Any] | None = None) -> NDArray[Any] | None:
    """The label of each row; None: the table has none."""
    for field in table.schema:
        if (field.metadata or {}).get(b"kind") == b"label":
            return _numpy(_whole(table.column(field.name)))[slice(None) if rows is None else rows]
    return None


def beyond_float32(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether float32 makes each of them infinite (or it is), or 0 though it is not."""
    with np.errstate(over="ignore", under="ignore"):
        made = numbers.astype(np.float32)
    beyond: NDArray[np.bool_] = np.isinf(made) | ((made == 0) & (numbers != 0))
    return beyond


def _whole(column: Any) -> Any:
    """A column as one array; without copying where it is one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _numpy(array: Any) -> NDArray[Any]:
    found: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return found


def cast_columns(table: Any, schema: Any, refused: Callable[[str, Any, Any, str], Exception]) -> Any:
    """A table with the columns of a schema, in its order.

    Args:
        table: has all of them.
        schema: of the result.
        refused: makes the error of a column that cannot be of its type there, from its name, its type, that type and what Arrow says.
    """
    pa = pyarrow()
    columns = []
    for field in schema:
        column = table.column(field.name)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as e:
                raise refused(field.name, column.type, field.type, str(e).splitlines()[0]) from None
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)
