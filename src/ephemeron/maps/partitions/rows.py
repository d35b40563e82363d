"""What a function of the user returns for a partition, as rows of one table; and the types that its columns have there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ephemeron.data.tables.arrow import cast_columns, pyarrow
from ephemeron.errors import UserError
from ephemeron.maps.frames import as_column

_KINDS = "return a pandas or Polars frame, an Arrow table, or a dict of arrays"


def to_rows(value: Any) -> Any:
    """Rows that a function returned, as a `pyarrow.Table` with `stored_types`. A named index of pandas is a column, another one is none.

    Raises:
        UserError: it is no frame, or its columns have no type, or the same name.
    """
    pa = pyarrow()
    try:
        table = _as_table(value)
        names = table.column_names
        if twice := next((name for n, name in enumerate(names) if name in names[:n]), None):
            raise UserError(f"the function returned two columns {twice!r}: give each its own name")
        return conformed(table, stored_types(table.schema))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        why = "; ".join(str(each).splitlines()[0] for each in e.args if str(each))
        raise UserError(f"the function returned a {type(value).__name__}, which is no table: {why}") from None


def _as_table(value: Any) -> Any:
    pa = pyarrow()
    root = type(value).__module__.partition(".")[0]
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if isinstance(value, Mapping):
        return pa.table({str(name): _named_column(str(name), each) for name, each in value.items()})
    if root == "polars" and hasattr(value, "to_arrow") and hasattr(value, "columns"):
        return pa.table(value.to_arrow())
    if root == "pandas" and hasattr(value, "columns"):
        return _of_pandas(value)
    raise UserError(f"the function returned a {type(value).__name__}, which is no frame: {_KINDS}")


def _named_column(name: str, values: Any) -> Any:
    try:
        return as_column(values)
    except (pyarrow().ArrowException, TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"column {name!r}: {e.args[0] if e.args else type(e).__name__}") from None


def _of_pandas(frame: Any) -> Any:
    if frame.columns.nlevels > 1:
        raise UserError("the columns of the frame have several levels, which a table has not: join their names")
    named = [name for name in frame.index.names if name is not None]
    if named:
        frame = frame.reset_index(level=named)
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    return pyarrow().Table.from_pandas(frame, preserve_index=False).replace_schema_metadata()


def as_parquet(table: Any) -> bytes:
    """A table as a file.

    Raises:
        UserError: Parquet has no such columns.
    """
    pa = pyarrow()
    from pyarrow import parquet

    file = pa.BufferOutputStream()
    try:
        parquet.write_table(table, file, compression="zstd")
    except pa.ArrowException as e:
        raise UserError(f"Parquet cannot have what the function returned: {str(e).splitlines()[0]}") from None
    return bytes(file.getvalue().to_pybytes())


# -- types --------------------------------------------------------------------------------------------------------


def stored_types(schema: Any) -> Any:
    """A `pyarrow.Schema` with one type for what is the same for users: categories are their values, and text, bytes and lists are never "large"."""
    pa = pyarrow()
    return pa.schema([pa.field(field.name, _stored(field.type)) for field in schema])


def _stored(kind: Any) -> Any:
    pa = pyarrow()
    types = pa.types
    if types.is_dictionary(kind):
        return _stored(kind.value_type)
    if types.is_large_string(kind) or str(kind) == "string_view":
        return pa.string()
    if types.is_large_binary(kind) or str(kind) == "binary_view":
        return pa.binary()
    if types.is_struct(kind):
        return pa.struct([pa.field(kind.field(n).name, _stored(kind.field(n).type)) for n in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(_stored(kind.key_type), _stored(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_stored(kind.value_type), kind.list_size)
    if hasattr(kind, "value_type") and not isinstance(kind, pa.BaseExtensionType):
        return pa.list_(_stored(kind.value_type))
    return kind


def conformed(table: Any, schema: Any) -> Any:
    """A table with the columns of a schema, in its order.

    Raises:
        UserError: a column cannot be of its type there; names both.
    """
    return cast_columns(table, schema, lambda name, kind, wanted, why: UserError(f"column {name!r} of {kind} cannot be {wanted}: {why}"))
