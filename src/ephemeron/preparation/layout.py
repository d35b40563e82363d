"""What the columns of a source are: which kind each has, which is the label, and which rows are invalid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from ephemeron.config.typed import Typed, near
from ephemeron.data.formats.cells import check_names
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import JobError

LabelKind = Literal["binary", "class", "real"]
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")
MOSTLY = 0.9
"""A column is numeric if at least this share of the values of the sample are numbers, and none is a name of digits, such as 007 (see
`data.formats.cells`); values that are no numbers are then invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Typed):
    """How the columns of CSV and Parquet are read."""

    label: str | None = None
    """Column with the label; None: there is none."""
    label_kind: LabelKind = "binary"
    """`binary`: 0 or 1; `class`: whole numbers from 0; `real`: any number."""
    columns: Mapping[str, Literal["numeric", "categorical", "ignore"]] = field(default_factory=dict)
    """Kinds of columns; those of the others follow from the values."""
    missing: tuple[str, ...] = MISSING
    """CSV: texts of absent values."""
    delimiter: str = ","
    """CSV: one character."""
    header: bool = True
    """CSV: whether files begin with the names of columns."""
    names: tuple[str, ...] = ()
    """CSV without a header: names of the columns."""

    def __post_init__(self) -> None:
        Typed.__post_init__(self)
        if len(self.delimiter.encode()) != 1 or self.delimiter in '"\n\r':
            raise JobError(f"delimiter = {self.delimiter!r} should be one character, and no quote")

    def schema(self, names: Sequence[str], numeric: Mapping[str, bool], *, where: str) -> tuple[Column, ...]:
        """The columns of a dataset.

        Args:
            names: of the source's columns, in order.
            numeric: whether a column that has no kind here has numbers.
            where: name of the source, for errors.

        Raises:
            JobError: a column is unknown or named twice, or none is left.
        """
        check_names(names, where)
        for name in [*self.columns, *([] if self.label is None else [self.label])]:
            if name not in names:
                raise JobError(f"{where} has no column {name!r}", remedy=near(name, names, what="columns"))
        found = []
        for name in names:
            kind = self.columns.get(name) or ("numeric" if numeric[name] else "categorical")
            if name == self.label:
                found.append(label_column(name, self.label_kind))
            elif kind == "numeric":
                found.append(Column(name=name, kind="numeric", dtype="float64"))
            elif kind == "categorical":
                found.append(Column(name=name, kind="categorical", dtype="string"))
        if not found:
            raise JobError(f"{where}: no column is left")
        return tuple(found)


def label_column(name: str, kind: LabelKind) -> Column:
    """The column of a label."""
    dtype: Any = {"binary": "float32", "class": "int32", "real": "float64"}[kind]
    return Column(name=name, kind="label", dtype=dtype)


class Reject(NamedTuple):
    """An invalid row."""

    line: int
    """Counted from 0 within the part that was parsed; of a Parquet file: row."""
    column: str
    """Empty: the row as a whole."""
    reason: str
    text: str
    """The row itself."""


class Parsed(NamedTuple):
    """Rows of a part of a source."""

    table: Any
    """`pyarrow.Table`, with numbers as float64 and the label not yet converted."""
    rejects: list[Reject]
    width: int = 1
    """Sparse features: the greatest index, and 1."""


def invalid_rows(table: Any, columns: Sequence[Column], label_kind: LabelKind) -> dict[int, tuple[str, str]]:
    """Column and reason of rows whose values are of the right type and yet not allowed: infinite numbers, wrong labels."""
    found: dict[int, tuple[str, str]] = {}
    for column in columns:
        if column.kind not in ("numeric", "label"):
            continue
        values = table.column(column.name).to_numpy().astype(np.float64, copy=False)
        for row in np.flatnonzero(np.isinf(values)):
            found.setdefault(int(row), (column.name, "is infinite"))
        if column.kind != "label":
            continue
        for row in np.flatnonzero(np.isnan(values)):
            found.setdefault(int(row), (column.name, "is absent, and every row needs a label"))
        if label_kind == "binary":
            wrong, reason = (values != 0) & (values != 1), "is no binary label: 0 or 1"
        elif label_kind == "class":
            wrong, reason = ((values < 0) | (values != np.floor(values)) | (values > 2**31 - 1), "is no class: a whole number from 0")
        else:
            continue
        for row in np.flatnonzero(wrong & ~np.isnan(values)):
            found.setdefault(int(row), (column.name, f"{values[row]:g} {reason}"))
    return found
