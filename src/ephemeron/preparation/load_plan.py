"""The plan of a load: which part of which file becomes which partition. It is stored before the first function starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np

from ephemeron.config.paths import AnyPath
from ephemeron.config.typed import Count, Typed, near
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import find_files, open_files
from ephemeron.data.formats.records import CsvRecords, LineRecords, Records, check_names
from ephemeron.data.tables.manifest import Column
from ephemeron.errors import FileVersionChanged, JobError

LabelKind = Literal["binary", "class", "real"]
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")
MOSTLY = 0.9
"""A column is numeric if at least this share of the values of the sample are numbers, and none is a name of digits, such as 007 (see
`data.formats.records`); values that are no numbers are then invalid."""


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


# -- load plan ----------------------------------------------------------------------------------------------------


OnError = Literal["fail", "skip", "quarantine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of a file."""

    file: int
    """Number of the file."""
    begin: int
    """First byte; Parquet: first row of the row group."""
    end: int
    group: int = 0
    """Parquet: row group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan(Typed):
    """How files become a dataset."""

    format: Literal["csv", "libsvm", "parquet"]
    sources: tuple[Source, ...]
    columns: tuple[Column, ...]
    """Of the dataset."""
    parts: tuple[tuple[Piece, ...], ...]
    """What each partition is made of."""
    on_error: OnError = "fail"
    layout: Layout = field(default_factory=Layout)
    names: tuple[str, ...] = ()
    """CSV: all columns of the files."""
    label_kind: LabelKind = "binary"
    """LIBSVM."""
    zero_based: bool = False
    """LIBSVM."""
    n_features: Count | None = None
    """LIBSVM."""

    group_rows: tuple[tuple[int, ...], ...] = ()
    """Parquet: for each file, rows before each row group."""

    def of_parts(self, indices: Sequence[int]) -> LoadPlan:
        """The plan of some parts alone, with the files that they need."""
        files = sorted({piece.file for n in indices for piece in self.parts[n]})
        parts = tuple(tuple(replace(piece, file=files.index(piece.file)) for piece in self.parts[n]) for n in indices)
        return replace(self, sources=tuple(self.sources[file] for file in files), parts=parts, group_rows=())

    def records(self) -> Records:
        """Where records begin and end."""
        return CsvRecords(self.layout.delimiter) if self.format == "csv" else LineRecords()


def equal_parts(sizes: Sequence[int], count: int) -> tuple[tuple[Piece, ...], ...]:
    """Files, end to end, cut into parts of equal size.

    Args:
        sizes: bytes of each file.
        count: parts, at most as many as there are bytes.
    """
    total = sum(sizes)
    count = max(1, min(count, total))
    parts: list[tuple[Piece, ...]] = []
    file, at = 0, 0
    for n in range(count):
        left = total * (n + 1) // count - total * n // count
        pieces = []
        while left:
            taken = min(left, sizes[file] - at)
            pieces.append(Piece(file=file, begin=at, end=at + taken))
            at, left = at + taken, left - taken
            if at == sizes[file]:
                file, at = file + 1, 0
        parts.append(tuple(pieces))
    return tuple(parts)


def prefix_of(attempt: int) -> str:
    """Prefix of the names of what an attempt to load knows."""
    return "" if attempt == 1 else f"{attempt}/"


def variant_of(attempt: int, variant: str = "") -> str:
    """Part of the names of partitions."""
    return ("" if attempt == 1 else str(attempt)) + variant


# -- files that are loaded: a path, a glob, a folder, or the same in an object store ------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file as it was when it was listed."""

    root: str
    """URL of its folder or bucket."""
    path: str
    nbytes: Count
    identity: str

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{self.root}/{self.path}"

    @property
    def name(self) -> str:
        """Its name in messages: a path of this machine, or a URL."""
        local = self.root.startswith("file://")
        return f"{unquote(self.root.removeprefix('file://'))}/{self.path}" if local else self.url

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the file, fewer where it ends earlier.

        Raises:
            JobError: it is not the file that was listed.
        """
        files = open_files(self.root)
        pin = self.identity if self.identity.startswith("etag:") else None
        try:
            (data,) = run(files.fetch([FileRange(self.path, offset, length, pin)]))
        except FileNotFoundError:
            raise JobError(f"{self.name} has disappeared since the preparation began") from None
        except FileVersionChanged:
            raise JobError(f"{self.name} has changed since the preparation began", remedy="prepare into another folder") from None
        return data

    def check(self) -> None:
        """Refuses a file that has changed since it was listed.

        Raises:
            JobError: it has.
        """
        if identity_of(open_files(self.root), self.path) != self.identity:
            raise JobError(f"{self.name} has changed since the preparation began", remedy="prepare into another folder")


def identity_of(files: Files, path: str) -> str:
    """ETag, or time of change."""
    return run(files.identity(path)) or ""


def listed(place: AnyPath, *, endings: Sequence[str]) -> list[Source]:
    """The files of a path, a pattern, a folder, or a URL of these, in the order of their names; see `data.catalog.files`.

    What exists under the name is that file or folder, also where the name has a `[` or a `*` in it.

    Args:
        place: such as `data/*.csv`, `s3://bucket/prefix/part-*.csv`.
        endings: of the files of a folder that are wanted.

    Raises:
        JobError: there is none, or one is empty.
        DatasetUnreachable: the store fails.
    """
    files, sizes = find_files(place, tuple(endings))
    if not sizes:
        raise JobError(f"{place} names no file", remedy=f"give a file, a glob, or a folder of {', '.join(endings)} files")
    found = []
    for name in sizes:
        source = Source(root=files.url, path=name, nbytes=max(1, sizes[name]), identity=identity_of(files, name))
        if name.lower().endswith((".gz", ".bz2", ".xz", ".zst", ".zip")):
            raise JobError(f"{source.name} is compressed, so no part of it can be read alone", remedy="unpack it first")
        if not sizes[name]:
            raise JobError(f"{source.name} is empty")
        found.append(source)
    return found
