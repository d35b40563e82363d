"""The plan of a load: which part of which file becomes which partition. It is stored before the first function starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ephemeron.config.typed import Count, Typed
from ephemeron.data.formats.records import CsvRecords, LineRecords, Records
from ephemeron.data.tables.manifest import Column
from ephemeron.preparation.layout import LabelKind, Layout
from ephemeron.preparation.sources import Source

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
