"""Rows as functions of users want them, and what they return as columns or rows."""

from __future__ import annotations

import importlib.util
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import JobError, UserError

Frame = Literal["pandas", "polars", "arrow", "numpy"]
FRAMES: tuple[Frame, ...] = ("pandas", "polars", "arrow", "numpy")
PREDICTION = "prediction"
"""Name of the column of an array of predictions, and beginning of those of its columns."""
MODULES = {"pandas": "pandas", "polars": "polars", "arrow": "pyarrow", "numpy": "numpy"}
_BEGINNINGS = (("pd.", "pandas"), ("pandas.", "pandas"), ("pl.", "polars"), ("polars.", "polars"), ("pa.", "arrow"), ("pyarrow.", "arrow"))
_DICTS = ("dict", "Mapping", "typing.Mapping", "collections.abc.Mapping", "Dict", "typing.Dict")


def frame_of(function: Callable[..., Any], given: str | None, *, parameter: int = 0, otherwise: Frame | None = None) -> Frame:
    """What a function wants rows as.

    Args:
        function: the user's.
        given: by the user; None: by the annotation of its parameter.
        parameter: that takes the rows.
        otherwise: where there is no annotation; None: pandas if it is installed, else Arrow.

    Raises:
        JobError: there is no such kind, or its package is not installed.
    """
    if given is not None and given not in FRAMES:
        raise JobError(f"rows cannot be given as {given!r}", remedy=f"use one of {', '.join(FRAMES)}")
    found = given or _annotated(function, parameter) or otherwise
    if found is None:
        return "pandas" if _is_installed("pandas") else "arrow"
    if not _is_installed(MODULES[found]):
        raise JobError(f"rows are to be given as {found}, which is not installed", remedy=f"run: pip install {MODULES[found]}")
    return found


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _annotated(function: Callable[..., Any], parameter: int) -> Frame | None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if len(parameters) <= parameter:
        return None
    name, hint = parameters[parameter].name, parameters[parameter].annotation
    try:
        hint = typing.get_type_hints(inspect.unwrap(function)).get(name, hint)
    except Exception:  # noqa: BLE001 - names of the user's that are for type checkers alone
        pass
    return _of_hint(hint)


def _of_hint(hint: Any) -> Frame | None:
    if isinstance(hint, str):
        text = hint.partition("[")[2].rstrip("]") if hint.partition("[")[0].rpartition(".")[2] in ("Iterator", "Iterable") else hint
        text = text.strip()
        if text.partition("[")[0] in _DICTS:
            return "numpy"
        return cast("Frame | None", next((frame for beginning, frame in _BEGINNINGS if text.startswith(beginning)), None))
    if inspect.isclass(origin := typing.get_origin(hint) or hint):
        if issubclass(origin, Mapping):
            return "numpy"
        root = origin.__module__.partition(".")[0]
        if root == "collections":  # of parts of a group
            return _of_hint(next(iter(typing.get_args(hint)), None))
        return cast("Frame | None", {"pandas": "pandas", "polars": "polars", "pyarrow": "arrow"}.get(root))
    return None


def to_frame(table: Any, frame: Frame, nulls: Sequence[str]) -> Any:
    """Rows as a table of a library, or as a dict of arrays.

    Args:
        table: `pyarrow.Table`.
        frame: of which library.
        nulls: columns that have a null in some group or partition: pandas and NumPy have one type for them in all, float64 for whole numbers.
    """
    if frame == "arrow":
        return table
    if frame == "polars":
        import polars

        return polars.from_arrow(table)
    pa = pyarrow()
    odd = []
    for name in nulls:
        kind = table.schema.field(name).type
        if pa.types.is_integer(kind):
            at = table.column_names.index(name)
            table = table.set_column(at, name, table.column(name).cast(pa.float64(), safe=False))
        elif pa.types.is_boolean(kind):
            odd.append(name)
    if frame == "numpy":
        arrays = {name: column.to_numpy(zero_copy_only=False) for name, column in zip(table.column_names, table.columns, strict=True)}
        return {**arrays, **{name: arrays[name].astype(object) for name in odd}}
    found = table.to_pandas(ignore_metadata=True)
    for name in odd:
        found[name] = found[name].astype(object)
    return found


def key_of(table: Any, by: Sequence[str]) -> dict[str, Any]:
    """Values of the by-columns of a group."""
    return {name: table.column(name)[0].as_py() for name in by}


# -- predictions --------------------------------------------------------------------------------------------------


def to_columns(value: Any, rows: int, taken: Sequence[str]) -> Any:
    """What a function predicts for the rows of a group, as a `pyarrow.Table`.

    Args:
        value: an array or a list with a value per row, or with columns of them; a frame, an Arrow table, or a dict of arrays.
        rows: of the group.
        taken: columns of the table, which predictions cannot be.

    Raises:
        UserError: it is none of these, or has another number of rows.
    """
    pa = pyarrow()
    try:
        table = _as_table(value)
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"the predictions are a {type(value).__name__}, which is no column: {str(e).splitlines()[0]}") from None
    if table.num_rows != rows:
        raise UserError(f"there are {table.num_rows} predictions for {rows} rows")
    if twice := sorted(set(table.column_names) & set(taken)):
        raise UserError(f"the predictions have a column {twice[0]!r}, which the table has: give it another name")
    return table


def _as_table(value: Any) -> Any:
    pa = pyarrow()
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, Mapping):
        return pa.table({str(name): as_column(each) for name, each in value.items()})
    if hasattr(value, "columns") and hasattr(value, "to_arrow"):
        return pa.table(value.to_arrow())
    if hasattr(value, "columns"):
        return pa.Table.from_pandas(value, preserve_index=False).replace_schema_metadata()
    if getattr(value, "ndim", 1) == 2:
        array = np.asarray(value)
        if array.shape[1] == 1:
            return pa.table({PREDICTION: pa.array(array[:, 0])})
        return pa.table({f"{PREDICTION}_{n}": pa.array(np.ascontiguousarray(array[:, n])) for n in range(array.shape[1])})
    return pa.table({PREDICTION: as_column(value)})


def as_column(value: Any) -> Any:
    """Values as a `pyarrow.Array`.

    Raises:
        pyarrow.ArrowException, TypeError, ValueError: they are none.
    """
    pa = pyarrow()
    if hasattr(value, "to_arrow"):
        value = value.to_arrow()
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return value
    return pa.array(value, from_pandas=type(value).__module__.partition(".")[0] == "pandas")
