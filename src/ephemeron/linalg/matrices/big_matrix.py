"""`BigMatrix`: a matrix of any size, stored as tiles, with the manners of a NumPy array."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ephemeron.blocking import run as blocking
from ephemeron.config.paths import home
from ephemeron.errors import JobError
from ephemeron.linalg.matrices import tile_store
from ephemeron.linalg.matrices.stored import Shape, StoredMatrix
from ephemeron.linalg.matrices.tile_format import DTYPES
from ephemeron.linalg.matrices.tile_size import tile_size

if TYPE_CHECKING:
    from ephemeron.linalg.execution.report import LinalgReport

_DEFAULT_WORKERS = 2
TileFunction = Callable[[slice, slice], npt.NDArray[Any]]


class BigMatrix:
    """A matrix of which each tile is an object of a store. It never changes.

    Args:
        stored: where its tiles are.
        report: of the computation that made it; None: it was not computed.
    """

    __array_priority__ = 100.0  # `array @ matrix` is the matrix's

    def __init__(self, stored: StoredMatrix, report: LinalgReport | None = None) -> None:
        self.stored, self.report = stored, report

    # -- making one

    @classmethod
    def from_numpy(
        cls, a: npt.ArrayLike, *, tile: int | Shape | None = None, store: str | None = None, name: str | None = None
    ) -> BigMatrix:
        """Stores an array.

        Args:
            a: two dimensions; a vector becomes one column. float32, float64, complex64 or complex128; integers become float64.
            tile: rows and columns of a tile, or one number for both; None: chosen from size and type.
            store: address of a channel, such as `file:///folder` or `s3://bucket/prefix`; None: a folder of this user.
            name: under which it is stored; None: one that is new. A run can be resumed by another process only if its inputs have
                names.

        Raises:
            JobError: it is no matrix of numbers, is empty, or the name is taken.
        """
        array = _checked(np.asarray(a))
        return cls.from_function(
            lambda rows, columns: array[rows, columns],
            array.shape,
            dtype=array.dtype,
            tile=tile,
            store=store,
            name=name,
        )

    @classmethod
    def from_npy(cls, path: str | Path, **options: Any) -> BigMatrix:
        """Stores the array of an NPY file, of which one tile after another is read; options as for `from_numpy`.

        Raises:
            JobError: the file cannot be read, or as for `from_numpy`.
        """
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as e:
            raise JobError(f"{path} cannot be read as an NPY file: {e}") from None
        return cls.from_numpy(array, **options)

    @classmethod
    def from_function(
        cls, function: TileFunction, shape: Shape, *, dtype: npt.DTypeLike = "float64", tile: int | Shape | None = None,
        store: str | None = None, name: str | None = None,
    ) -> BigMatrix:  # fmt: skip
        """Stores what a function gives for the rows and columns of each tile.

        Args:
            function: called with two slices, returns an array of their shape.
            shape: rows and columns.
            dtype, tile, store, name: as for `from_numpy`.
        """
        kind = np.dtype(dtype).name
        if kind not in DTYPES:
            raise JobError(f"matrices of {kind} are not supported", remedy=f"convert it to one of {', '.join(DTYPES)}")
        rows, columns = shape
        if rows < 1 or columns < 1:
            raise JobError(f"a matrix of shape {rows} x {columns} has no values")
        tile_rows, tile_columns = _tile_shape(tile, shape, np.dtype(kind).itemsize)
        stored = StoredMatrix(
            store=store or default_store(), name=name or f"matrix-{uuid.uuid4().hex[:16]}", rows=rows, columns=columns,
            dtype=kind, tile_rows=tile_rows, tile_columns=tile_columns,
        )  # fmt: skip

        def one(i: int, j: int) -> npt.NDArray[np.generic]:
            found = np.asarray(function(*stored.slices(i, j)), dtype=kind)
            if found.shape != stored.tile_shape(i, j):
                raise JobError(f"the function gave {found.shape} for tile {i}, {j}, which is {stored.tile_shape(i, j)}")
            return found

        async def write() -> None:
            async with tile_store.opened(stored.store) as channel:
                await tile_store.write(channel, stored, one)

        blocking(lambda interrupts: write())
        return cls(stored)

    @classmethod
    def open(cls, store: str, name: str) -> BigMatrix:
        """A matrix that was stored before.

        Raises:
            JobError: there is none of that name.
        """

        async def find() -> StoredMatrix | None:
            async with tile_store.opened(store) as channel:
                return await tile_store.described(channel, store, name)

        found = blocking(lambda interrupts: find())
        if found is None:
            raise JobError(f"{store} has no matrix {name!r}, or it was not written to its end")
        return cls(found)

    # -- what it is

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its values."""
        return np.dtype(self.stored.dtype)

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def tile(self) -> Shape:
        """Rows and columns of a tile."""
        return self.stored.tile_rows, self.stored.tile_columns

    @property
    def T(self) -> BigMatrix:
        """The transpose: a view."""
        return BigMatrix(self.stored.T)

    @property
    def H(self) -> BigMatrix:
        """The adjoint (conjugate transpose): a view."""
        return BigMatrix(self.stored.H)

    def __matmul__(self, other: BigMatrix) -> BigMatrix:
        """The product, computed by functions of this machine; `linalg.matmul` takes an executor."""
        from ephemeron.linalg.operations import matmul

        return matmul(self, other)

    def __getitem__(self, index: slice | tuple[slice, slice]) -> BigMatrix:
        """Rows and columns whose borders are those of tiles: a view.

        Raises:
            JobError: they are not.
        """
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        if not (isinstance(rows, slice) and isinstance(columns, slice)):
            raise JobError(f"{index!r} selects single rows or columns", remedy="take ranges, or to_numpy() first")
        return BigMatrix(self.stored.part(rows, columns))

    def __len__(self) -> int:
        return self.stored.rows

    def __repr__(self) -> str:
        s = self.stored
        return (
            f"<BigMatrix {s.rows} x {s.columns}, {s.dtype}, tiles of {s.tile_rows} x {s.tile_columns}, "
            f"{s.name} in {s.store}>"
        )

    # -- reading it

    def to_numpy(self) -> npt.NDArray[Any]:
        """All of it, in memory: shape [rows, columns].

        Raises:
            JobError: a tile is missing.
        """

        async def read() -> npt.NDArray[np.generic]:
            async with tile_store.opened(self.stored.store) as channel:
                return await tile_store.read(channel, self.stored)

        return blocking(lambda interrupts: read())

    def to_npy(self, path: str | Path) -> None:
        """Writes it to an NPY file, one tile after another.

        Raises:
            JobError: a tile is missing, or the file cannot be written.
        """

        async def write(file: npt.NDArray[Any]) -> None:
            async with tile_store.opened(self.stored.store) as channel:
                for i, j in self.stored.indices():
                    file[self.stored.slices(i, j)] = await tile_store.read_tile(channel, self.stored, i, j)

        try:
            file = np.lib.format.open_memmap(path, mode="w+", dtype=self.dtype, shape=self.shape)
        except OSError as e:
            raise JobError(f"{path} cannot be written: {e}") from None
        blocking(lambda interrupts: write(file))
        file.flush()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.to_numpy() if dtype is None else self.to_numpy().astype(dtype)

    def delete(self) -> None:
        """Removes its tiles; views of it are gone, too."""

        async def remove() -> None:
            async with tile_store.opened(self.stored.store) as channel:
                await tile_store.delete(channel, self.stored.name)

        blocking(lambda interrupts: remove())


def default_store() -> str:
    """Address of the folder for matrices of this user."""
    folder = home() / "matrices"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve().as_uri()


def _checked(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise JobError(f"an array with {array.ndim} dimensions is no matrix", remedy="give one with two")
    if array.dtype.kind in "iub":
        array = array.astype("float64")
    if array.dtype.name not in DTYPES:
        raise JobError(
            f"matrices of {array.dtype} are not supported", remedy=f"convert it to one of {', '.join(DTYPES)}"
        )
    return array


def _tile_shape(tile: int | Shape | None, shape: Shape, itemsize: int) -> Shape:
    if tile is None:
        tile = tile_size(*shape, itemsize, workers=_DEFAULT_WORKERS)
    rows, columns = (tile, tile) if isinstance(tile, int) else tile
    if rows < 1 or columns < 1:
        raise JobError(f"tiles of {rows} x {columns} have no values", remedy="use 1 and more")
    return rows, columns
