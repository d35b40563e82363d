"""Where the tiles of a matrix are, and what the matrix looks like: enough for a function to read or write any of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ephemeron.config.typed import Count
from ephemeron.errors import JobError
from ephemeron.functions.tasks.object_places import placed

Structure: TypeAlias = Literal["full", "lower", "upper", "lower band", "upper band", "diagonal"]
Shape: TypeAlias = tuple[int, int]
_DIAGONALS: dict[Structure, tuple[int | None, int | None]] = {
    "full": (None, None),
    "lower": (None, 0),
    "upper": (0, None),
    "lower band": (-1, 0),
    "upper band": (0, 1),
    "diagonal": (0, 0),
}
"""First and last diagonal of tiles that are stored; a diagonal's number is that of the column minus that of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix of which each tile is an object, or a view of one whose borders are borders of tiles."""

    store: str
    """Address of the channel."""
    name: str
    """The tile (i, j) is the object `NAME/GENERATION.i.j`, or `NAME/i.j` where there is no generation."""
    rows: Count
    """Of the matrix, or of the view."""
    columns: Count
    tile_rows: Count
    """Of each tile but those at the lower border."""
    tile_columns: Count
    dtype: str
    """Name of a NumPy type."""
    structure: Structure = "full"
    """`lower`: tiles above the diagonal are zero, and are not stored; `lower band`: those far below it neither, only the next to it."""
    first_row: int = 0
    """First tile of the view, in tiles of what is stored."""
    first_column: int = 0
    transposed: bool = False
    """Rows of the view are columns of what is stored."""
    conjugated: bool = False
    """Values of the view are conjugates of what is stored."""
    generation: str = ""
    """Drawn whenever values are stored under a name that does not follow from them: what is stored there later, after a deletion, has
    other keys, and so has everything that is computed from it. Empty: the name says which values these are."""

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def tiles(self) -> Shape:
        """Number of tiles along rows and columns."""
        return -(-self.rows // self.tile_rows), -(-self.columns // self.tile_columns)

    def indices(self) -> Iterator[tuple[int, int]]:
        """Of all tiles, row by row."""
        down, across = self.tiles
        return ((i, j) for i in range(down) for j in range(across))

    def tile_shape(self, i: int, j: int) -> Shape:
        """Rows and columns of a tile; those at the borders may be smaller."""
        return (min(self.tile_rows, self.rows - i * self.tile_rows), min(self.tile_columns, self.columns - j * self.tile_columns))

    def is_stored(self, i: int, j: int) -> bool:
        """Whether the tile has an object; else it is zero."""
        i, j = self._origin(i, j)
        first, last = _DIAGONALS[self.structure]
        return (first is None or j - i >= first) and (last is None or j - i <= last)

    @property
    def prefix(self) -> str:
        """With which the keys of its tiles begin."""
        return f"{self.name}/{self.generation}." if self.generation else f"{self.name}/"

    def key(self, i: int, j: int) -> str:
        """Of the object of a tile, as in `object_places`."""
        i, j = self._origin(i, j)
        return placed(self.store, f"{self.prefix}{i}.{j}")

    def slices(self, i: int, j: int) -> tuple[slice, slice]:
        """Where a tile is in the matrix."""
        rows, columns = self.tile_shape(i, j)
        top, left = i * self.tile_rows, j * self.tile_columns
        return slice(top, top + rows), slice(left, left + columns)

    @property
    def T(self) -> StoredMatrix:
        """The transpose, of the same objects."""
        return dataclasses.replace(
            self,
            rows=self.columns,
            columns=self.rows,
            tile_rows=self.tile_columns,
            tile_columns=self.tile_rows,
            transposed=not self.transposed,
        )

    @property
    def H(self) -> StoredMatrix:
        """The adjoint, of the same objects."""
        return dataclasses.replace(self.T, conjugated=not self.conjugated)

    def seen(self, tile: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """A stored tile as the view has it."""
        if self.transposed:
            tile = tile.T
        return tile.conj() if self.conjugated else tile

    def part(self, rows: slice, columns: slice) -> StoredMatrix:
        """A view of some rows and columns.

        Args:
            rows, columns: without a step; they begin at borders of tiles, and end there or at the border of the matrix.

        Raises:
            JobError: the borders are not those of tiles.
        """
        top, bottom = _borders(rows, self.rows, self.tile_rows, what="rows")
        left, right = _borders(columns, self.columns, self.tile_columns, what="columns")
        down, across = top // self.tile_rows, left // self.tile_columns
        if self.transposed:
            down, across = across, down
        return dataclasses.replace(
            self, rows=bottom - top, columns=right - left, first_row=self.first_row + down, first_column=self.first_column + across
        )

    def _origin(self, i: int, j: int) -> tuple[int, int]:
        if self.transposed:
            i, j = j, i
        return i + self.first_row, j + self.first_column


@dataclass(frozen=True, slots=True, kw_only=True)
class TileFamily:
    """Tiles of any shapes with any number of indices."""

    store: str
    """Address of the channel."""
    name: str = ""
    """The tile (i, j, k) is the object `NAME/i.j.k`."""

    def key(self, index: tuple[int, ...]) -> str:
        """Of the object of a tile."""
        return placed(self.store, f"{self.name}/{'.'.join(map(str, index))}")


Tiles: TypeAlias = StoredMatrix | TileFamily
"""What a program reads or writes."""


def bounds(wanted: slice, size: int, *, what: str) -> tuple[int, int]:
    """First row or column of a range, and the one behind its last.

    Raises:
        JobError: it is empty, or has a step.
    """
    first, last, step = wanted.indices(size)
    if step != 1 or last <= first:
        raise JobError(f"{what} {wanted} of {size} select nothing, or have a step", remedy="give a range of neighbours")
    return first, last


def are_borders(first: int, last: int, size: int, tile: int) -> bool:
    """Whether a range begins at the border of a tile, and ends at one or at that of the matrix."""
    return not first % tile and (not last % tile or last == size)


def _borders(wanted: slice, size: int, tile: int, *, what: str) -> tuple[int, int]:
    first, last = bounds(wanted, size, what=what)
    if not are_borders(first, last, size, tile):
        raise JobError(f"{what} {first}:{last} do not begin and end where tiles of {tile} do", remedy=f"use multiples of {tile}")
    return first, last
