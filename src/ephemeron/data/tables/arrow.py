"""Columns of a prepared dataset as types of Arrow.

Kind and width of a column are metadata of its field, so that a table describes itself. Sparse features are two columns,
`NAME.indices` (list of int64) and `NAME.values` (list of float32); the indices of a row are sorted and unique.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ephemeron.data.tables.manifest import Column
from ephemeron.errors import MissingExtra

INDICES, VALUES = ".indices", ".values"


def pyarrow() -> Any:
    """The module.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
    except ModuleNotFoundError:
        raise MissingExtra("pyarrow", "preparation") from None
    return pyarrow


def schema_of(columns: Sequence[Column]) -> Any:
    """The `pyarrow.Schema` of columns."""
    pa = pyarrow()
    fields = []
    for column in columns:
        about = {"kind": column.kind, "width": str(column.width)}
        if column.kind == "sparse":
            fields.append(pa.field(column.name + INDICES, pa.list_(pa.int64()), metadata=about))
            fields.append(pa.field(column.name + VALUES, pa.list_(_value_type(column)), metadata=about))
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
            found.append(Column(name=field.name, kind=kind, dtype=_dtype(pa, field.type), width=width))
    return tuple(found)


def _value_type(column: Column) -> Any:
    pa = pyarrow()
    return {"float64": pa.float64, "float32": pa.float32, "int64": pa.int64, "int32": pa.int32, "string": pa.string}[column.dtype]()


def _dtype(pa: Any, type_: Any) -> Any:
    return {pa.float64(): "float64", pa.float32(): "float32", pa.int64(): "int64", pa.int32(): "int32", pa.string(): "string"}[type_]
