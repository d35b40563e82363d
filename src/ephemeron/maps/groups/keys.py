"""Keys of groups: the values of the by-columns as JSON, such as `["Berlin",17]`. A null is a value, as in pandas with `dropna=False`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import near
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import JobError

_ENCODER = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), default=lambda value: value.item() if hasattr(value, "item") else str(value)
)


class Codes(NamedTuple):
    """Which rows are of one group."""

    codes: NDArray[np.int64]
    """Number of the group of each row, from 0."""
    first: NDArray[np.int64]
    """A row of each group."""


def check_by(by: Sequence[str], schema: Any, where: str) -> None:
    """Refuses by-columns that are not there, or whose values tell no groups apart.

    Args:
        by: names of columns.
        schema: of the table, `pyarrow.Schema`.
        where: name of the table, for messages.

    Raises:
        JobError: names the column.
    """
    if not by:
        raise JobError("no by-columns are named", remedy="name one or more: --by store,sku")
    if twice := next((name for n, name in enumerate(by) if name in by[:n]), None):
        raise JobError(f"by-column {twice!r} is named twice")
    for name in by:
        if name not in schema.names:
            raise JobError(f"{where} has no column {name!r}", remedy=near(name, schema.names, what="its columns"))
        if not kind_of_key(schema.field(name).type):
            raise JobError(
                f"{where}: by-column {name} is {schema.field(name).type}, which tells no groups apart",
                remedy="use columns of numbers, text, truth values or dates",
            )


def kind_of_key(type_: Any) -> str:
    """What values of a by-column are; keys of two tables are comparable if it is the same. Empty: no key can have them."""
    types = pyarrow().types
    if types.is_integer(type_):
        return "whole numbers"
    if types.is_floating(type_):
        return "numbers"
    if types.is_string(type_) or types.is_large_string(type_):
        return "text"
    if types.is_boolean(type_):
        return "truth values"
    return str(type_) if types.is_temporal(type_) or types.is_decimal(type_) or types.is_null(type_) else ""


def codes_of(table: Any, by: Sequence[str], *, where: str, first_row: int = 0) -> Codes:
    """Groups of the rows of a table.

    Args:
        table: `pyarrow.Table`, with one row or more.
        by: columns whose values are the key.
        where: name of the table, for messages.
        first_row: number of its first row there, from 0.

    Raises:
        JobError: a number is NaN or infinite; names its row.
    """
    pa = pyarrow()
    combined = np.zeros(table.num_rows, np.int64)
    for name in by:
        column = table.column(name).combine_chunks()
        if pa.types.is_floating(column.type):
            column = _finite(column, name, where=where, first_row=first_row)
        if pa.types.is_null(column.type):
            continue
        encoded = pa.compute.dictionary_encode(column, null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        joint = combined * (len(encoded.dictionary) + 1) + codes
        combined = np.unique(joint, return_inverse=True)[1]  # small numbers again, so that products do not overflow
    _, first, codes = np.unique(combined, return_index=True, return_inverse=True)
    return Codes(codes.astype(np.int64), first.astype(np.int64))


def _finite(column: Any, name: str, *, where: str, first_row: int) -> Any:
    """A column of floats without -0.0.

    Raises:
        JobError: a value is NaN or infinite.
    """
    pc = pyarrow().compute
    bad = np.flatnonzero(pc.fill_null(pc.invert(pc.is_finite(column)), False).to_numpy(zero_copy_only=False))
    if len(bad):
        raise JobError(
            f"{where}, row {first_row + int(bad[0]) + 1}: {column[int(bad[0])].as_py()} of by-column {name!r} is no key",
            remedy="make it null, which is a key, or a number",
        )
    return pc.add(column, pyarrow().scalar(0.0, column.type))


def key_texts(rows: Any, by: Sequence[str]) -> list[str]:
    """The key of each row of a table, as JSON. Each value of a column is encoded once."""
    pa = pyarrow()
    columns = []
    for name in by:
        column = rows.column(name).combine_chunks()
        if pa.types.is_null(column.type):
            columns.append(np.full(len(column), "null", object))
            continue
        if pa.types.is_floating(column.type):
            column = pa.compute.add(column, pa.scalar(0.0, column.type))
        if pa.types.is_temporal(column.type) or pa.types.is_decimal(column.type):
            column = column.cast(pa.string())
        found = pa.compute.dictionary_encode(column, null_encoding="encode")
        texts = np.array([_ENCODER.encode(value) for value in found.dictionary.to_pylist()], object)
        columns.append(texts[found.indices.to_numpy(zero_copy_only=False)])
    return [f"[{','.join(values)}]" for values in zip(*columns, strict=True)]


def text_of(values: Sequence[Any]) -> str:
    """A key as text."""
    return _ENCODER.encode(list(values))


def match_key(text: str, known: frozenset[str], *, columns: int) -> str | None:
    """The key that a user has written: as it is in the table of results or, of one column, its value alone.

    Args:
        text: such as `["Berlin",17]`, `Berlin` or `17`.
        known: keys that there are.
        columns: number of by-columns.

    Returns:
        The key; None: there is no such one.
    """
    return next((form for form in _forms(text, columns) if form in known), None)


def _forms(text: str, columns: int) -> list[str]:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(value, list):
        return [text, text_of(value)]
    return [text, text_of([value]), text_of([text])] if columns == 1 else [text]


def chosen(given: Sequence[str], known: frozenset[str], *, columns: int) -> list[str]:
    """Keys that a user has written.

    Args:
        given, known, columns: see `match_key`.

    Raises:
        JobError: there is no such group; names those nearest.
    """
    found = []
    for text in given:
        match = match_key(text, known, columns=columns)
        if match is None:
            close = difflib.get_close_matches(_forms(text, columns)[-1], known, n=3)
            remedy = f"did you mean {' or '.join(close)}?" if close else 'write its values as JSON, such as ["Berlin",17]'
            raise JobError(f"there is no group {text:.80}", remedy=remedy)
        found.append(match)
    return found
