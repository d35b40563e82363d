"""Where the tiles of a matrix are, and what the matrix looks like: enough for a function to read or write any of them."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ephemeron.communication.channels.base import Buffer
from ephemeron.config.typed import Count
from ephemeron.errors import CorruptMessage, JobError
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


# -- A tile as bytes ----------------------------------------------------------------------------------------------


_HEADER_BYTES = 256
DTYPES = ("float32", "float64", "complex64", "complex128")


def encode_tile(tile: npt.NDArray[np.generic]) -> list[Buffer]:
    """Header and values in one buffer, a copy: what stores, caches and tasks that follow take without another one.

    Args:
        tile: of any shape with at most two dimensions.
    """
    is_fortran = tile.flags.f_contiguous and not tile.flags.c_contiguous
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(tile.dtype), "fortran_order": is_fortran, "shape": tile.shape}
    np.lib.format.write_array_header_1_0(header, described)
    made = np.empty(header.tell() + tile.nbytes, np.uint8)
    made[: header.tell()] = np.frombuffer(header.getbuffer(), np.uint8)
    if tile.size:
        values = tile.T if is_fortran else tile
        np.copyto(made[header.tell() :].view(tile.dtype).reshape(values.shape), values)
    return [made.data]


def decode_tile(data: memoryview, *, key: str = "") -> npt.NDArray[np.generic]:
    """The tile, as a read-only view of the bytes.

    Args:
        data: what `encode_tile` gave.
        key: of the object, for errors.

    Raises:
        CorruptMessage: it is no tile.
    """
    head = io.BytesIO(bytes(data[:_HEADER_BYTES]))
    try:
        if np.lib.format.read_magic(head) != (1, 0):
            raise ValueError("another version of the format")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(head)
        if dtype.hasobject:
            raise ValueError("a tile holds numbers")
        values = np.frombuffer(data, dtype=dtype, offset=head.tell())
        tile: npt.NDArray[np.generic] = values.reshape(shape, order="F" if is_fortran else "C")
    except ValueError as e:
        raise CorruptMessage(f"not a tile: {e}", key=key) from None
    return tile


# -- size of tiles ------------------------------------------------------------------------------------------------


_MULTIPLE, _LEAST = 8, 64
"""Of which sizes are multiples, and the smallest one."""
_CONFLICTS = 256
"""No size is a multiple of it: rows of such a tile compete for the same lines of the processor's cache (OpenBLAS takes a tenth longer for tiles of
1,024 rows than for those of 1,000, QR of a tile a quarter)."""
_TILES_IN_MEMORY = 12
"""Of one task, of those that are fetched ahead, written, and kept."""
_WORTH = 10
"""A task computes so many times as long as its requests take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpeed:
    """What a function can do, for the choice of a tile size."""

    flops: float = 3e10
    """Floating-point operations of a matrix product in a second, in float64 on one vCPU."""
    bytes_per_s: float = 1e9
    """To and from the store."""
    task_s: float = 0.004
    """Seconds of requests for one task."""
    memory_bytes: float = 1.769e9
    tiles: int = 24
    """For each function, where the matrix is large enough."""


LOCAL = FunctionSpeed(task_s=0.007, tiles=12)
"""A function of this machine: its own CPU time pays for requests, so that fewer and larger tiles are quicker. By the schedules that
`prediction` makes for Cholesky, QR and products of 4,000 and 8,000 rows on two functions, four or five rows of tiles are the quickest."""
CLOUD = FunctionSpeed(flops=3e10, bytes_per_s=7.5e7, task_s=0.1)
"""A function of one vCPU and an object store, by the order of magnitude of AWS's documentation: 75 MB/s, eight requests of some 12 ms."""


def tile_size(rows: int, columns: int, itemsize: int, *, workers: int, speed: FunctionSpeed = LOCAL) -> int:
    """Rows and columns of square tiles for a matrix.

    Compute time of a product of tiles, 2 b³ / flops, is at least the time to read two and write one, 3 b² itemsize / bandwidth, and
    `_WORTH` times the time of its requests; twelve tiles fit into memory; within that, every function has `speed.tiles` tiles where
    the matrix is large enough, so that factorisations, whose work shrinks, keep all of them busy. Tiles are about equal: the last row
    of them is no narrow rest.

    Args:
        rows, columns: of the matrix.
        itemsize: bytes of a value.
        workers: functions.
        speed: of one of them.
    """
    for_transfers = 1.5 * itemsize * speed.flops / speed.bytes_per_s
    for_requests: float = (0.5 * _WORTH * speed.task_s * speed.flops) ** (1 / 3)
    for_memory = math.sqrt(speed.memory_bytes / (_TILES_IN_MEMORY * itemsize))
    for_parallelism = math.sqrt(rows * columns / (speed.tiles * workers))
    wanted: float = max(min(max(for_transfers, for_requests, for_parallelism), for_memory), float(_LEAST))
    longest = max(rows, columns)
    equal = longest / max(1, round(longest / wanted))
    size: int = _MULTIPLE * math.ceil(equal / _MULTIPLE)
    if size > for_memory:
        size = max(_LEAST, _MULTIPLE * math.floor(for_memory / _MULTIPLE))
    if size > _CONFLICTS and size % _CONFLICTS == 0:
        size += _MULTIPLE if size + _MULTIPLE <= for_memory else -_MULTIPLE
    return min(size, longest)
