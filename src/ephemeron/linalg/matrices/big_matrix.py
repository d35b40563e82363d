"""`BigMatrix`: a matrix of any size, stored as tiles, with the manners of a NumPy array.

Operators and NumPy functions of matrices: each gives an expression, which is computed when it is read.

A matrix is a value, below whatever computes with it; the functions behind its operators are registered with the package, by name
(`linalg.__init__`), and imported when the first matrix is used in an expression.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ephemeron import linalg
from ephemeron.blocking import run as blocking
from ephemeron.config.paths import home
from ephemeron.errors import JobError
from ephemeron.linalg.matrices import files, lifetimes, tile_store
from ephemeron.linalg.matrices.stored import DTYPES, Shape, StoredMatrix, Structure, tile_size

if TYPE_CHECKING:
    from ephemeron.executor import FunctionExecutor
    from ephemeron.linalg.execution.program_data import LinalgReport

Operand: TypeAlias = "BigMatrix | npt.NDArray[Any]"


class Operators:
    """What `BigMatrix` has of arithmetic."""

    def __matmul__(self, other: Operand) -> BigMatrix:
        """The product, as an expression that is computed when it is read, or by `compute(executor=…)`."""
        found: BigMatrix = linalg.product(self, other)
        return found

    def __rmatmul__(self, other: Operand) -> BigMatrix:
        found: BigMatrix = linalg.product(other, self)
        return found

    def __add__(self, other: Operand) -> BigMatrix:
        """The sum, as an expression."""
        found: BigMatrix = linalg.total(self, other, 1.0, 1.0)
        return found

    def __radd__(self, other: Operand) -> BigMatrix:
        found: BigMatrix = linalg.total(other, self, 1.0, 1.0)
        return found

    def __sub__(self, other: Operand) -> BigMatrix:
        """The difference, as an expression."""
        found: BigMatrix = linalg.total(self, other, 1.0, -1.0)
        return found

    def __rsub__(self, other: Operand) -> BigMatrix:
        found: BigMatrix = linalg.total(other, self, 1.0, -1.0)
        return found

    def __mul__(self, factor: complex) -> BigMatrix:
        """The product with a number, as an expression."""
        found: BigMatrix = linalg.multiple(self, factor)
        return found

    __rmul__ = __mul__

    def __truediv__(self, divisor: complex) -> BigMatrix:
        """The quotient by a number, as an expression."""
        found: BigMatrix = linalg.multiple(self, 1 / divisor)
        return found

    def __eq__(self, other: object) -> bool:
        """Refused: matrices are not compared value by value, and comparing their names would be mistaken for it."""
        if other is None or isinstance(other, str):
            return False
        raise JobError("matrices cannot be compared with ==", remedy="compare to_numpy(), or use norm(A - B)")

    __hash__ = object.__hash__

    def sum(self, axis: int | None = None, *, executor: FunctionExecutor | None = None) -> Any:
        """Sum of the values; see `linalg.statistics.sum`."""
        return linalg.sum(self, axis, executor=executor)

    def mean(self, axis: int | None = None, *, executor: FunctionExecutor | None = None) -> Any:
        """Mean of the values; see `linalg.statistics.mean`."""
        return linalg.mean(self, axis, executor=executor)

    def std(self, axis: int | None = None, ddof: int = 0, *, executor: FunctionExecutor | None = None) -> Any:
        """Standard deviation of the values; see `linalg.statistics.std`."""
        return linalg.std(self, axis, ddof, executor=executor)

    def __neg__(self) -> BigMatrix:
        found: BigMatrix = linalg.multiple(self, -1.0)
        return found

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return linalg.apply_ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        return linalg.apply_function(function, arguments, options)


# -- big matrix ---------------------------------------------------------------------------------------------------


_DEFAULT_WORKERS = 2
IMPLICIT_BYTES = 2**30
"""Of the largest matrix that NumPy may read without having been told."""
TileFunction = Callable[[slice, slice], npt.NDArray[Any]]


class BigMatrix(Operators):
    """A matrix of which each tile is an object of a store. It never changes.

    Args:
        stored: where its tiles are.
        report: of the computation that made it; None: it was not computed.
    """

    def __init__(self, stored: StoredMatrix, report: LinalgReport | None = None) -> None:
        self._stored, self._report = stored, report
        self._owner = lifetimes.owner_of(stored)

    @property
    def stored(self) -> StoredMatrix:
        """Where its tiles are."""
        return self._stored

    @property
    def report(self) -> LinalgReport | None:
        """Of the computation that made it."""
        return self._report

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
            lambda rows, columns: array[rows, columns], array.shape, dtype=array.dtype, tile=tile, store=store, name=name
        )

    @classmethod
    def from_npy(cls, path: str | Path, **options: Any) -> BigMatrix:
        """Stores the array of an NPY file, of which one tile after another is read; options as for `from_numpy`.

        Raises:
            JobError: the file cannot be read, or as for `from_numpy`.
        """
        return cls._from_array(files.open_npy(path), options)

    @classmethod
    def from_zarr(cls, path: str | Path, **options: Any) -> BigMatrix:
        """Stores a Zarr array of two dimensions, of which one tile after another is read; options as for `from_numpy`.

        Args:
            path: a folder, or an address that Zarr opens.

        Raises:
            JobError: it cannot be read, or as for `from_numpy`.
            MissingExtra: Zarr is not installed.
        """
        return cls._from_array(files.open_zarr(path), options)

    @classmethod
    def from_parquet(cls, path: str | Path, *, columns: Sequence[str] | None = None, **options: Any) -> BigMatrix:
        """Stores columns of numbers of a Parquet file: a row for each of its rows; options as for `from_function`.

        Args:
            path: a file.
            columns: names, in the order of the matrix; None: all.

        Raises:
            JobError: the file cannot be read, a column is absent, has no numbers, or has nulls.
            MissingExtra: PyArrow is not installed.
        """
        table = files.ParquetColumns(path, columns)
        return cls.from_function(table.read, table.shape, **({"dtype": table.dtype} | options))

    @classmethod
    def _from_array(cls, array: Any, options: dict[str, Any]) -> BigMatrix:
        """Of what can be sliced like an array, without reading it whole."""
        if array.ndim != 2 or array.dtype.name not in DTYPES:
            return cls.from_numpy(np.asarray(array), **options)
        return cls.from_function(lambda rows, columns: np.asarray(array[rows, columns]), array.shape, **({"dtype": array.dtype} | options))

    @classmethod
    def from_function(
        cls,
        function: TileFunction,
        shape: Shape,
        *,
        dtype: npt.DTypeLike = "float64",
        tile: int | Shape | None = None,
        store: str | None = None,
        name: str | None = None,
    ) -> BigMatrix:
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
            store=store or default_store(),
            name=_named(name or f"matrix-{uuid.uuid4().hex[:16]}"),
            rows=rows,
            columns=columns,
            dtype=kind,
            tile_rows=tile_rows,
            tile_columns=tile_columns,
            generation=uuid.uuid4().hex[:16],
        )
        owner = None if name else lifetimes.own(stored)
        found = cls.stored_as(stored, function)
        assert owner is found._owner
        return found

    @classmethod
    def stored_as(cls, stored: StoredMatrix, function: TileFunction) -> BigMatrix:
        """The same, with the name that `stored` has."""

        def one(i: int, j: int) -> npt.NDArray[np.generic]:
            found = np.asarray(function(*stored.slices(i, j)), dtype=stored.dtype)
            if found.shape != stored.tile_shape(i, j):
                raise JobError(f"the function gave {found.shape} for tile {i}, {j}, which is {stored.tile_shape(i, j)}")
            return found

        async def write() -> None:
            async with tile_store.opened(stored.store) as channel:
                await tile_store.write(channel, stored, one)

        blocking(lambda interrupts: write())
        return cls(stored)

    @classmethod
    def planned(
        cls, shape: Shape, *, dtype: npt.DTypeLike = "float64", tile: int | Shape | None = None, structure: Structure = "full"
    ) -> BigMatrix:
        """A matrix without values, for predictions: what a computation with one of this shape would take.

        Args:
            shape, dtype, tile: as for `from_function`.
            structure: `lower` or `upper`: triangular.
        """
        kind = np.dtype("float64") if np.dtype(dtype).kind in "iub" else np.dtype(dtype)
        tile_rows, tile_columns = _tile_shape(tile, shape, kind.itemsize)
        return cls(
            StoredMatrix(
                store=tile_store.PLANNED,
                name="planned",
                rows=shape[0],
                columns=shape[1],
                dtype=kind.name,
                tile_rows=tile_rows,
                tile_columns=tile_columns,
                structure=structure,
            )
        )

    @classmethod
    def open(cls, store: str, name: str) -> BigMatrix:
        """A matrix that was stored before.

        Raises:
            JobError: there is none of that name.
        """

        async def find() -> StoredMatrix | None:
            async with tile_store.opened(store) as channel:
                return await tile_store.described(channel, store, _named(name))

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

    def compute(self, *, executor: FunctionExecutor | None = None) -> BigMatrix:
        """The matrix with all its tiles stored: itself, or the value of an expression."""
        return self

    def __getitem__(self, index: slice | tuple[slice, slice]) -> BigMatrix:
        """Rows and columns: a view where their borders are those of tiles, else an expression, which functions cut into tiles anew.

        Raises:
            JobError: they are no ranges, or empty.
        """
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        if not (isinstance(rows, slice) and isinstance(columns, slice)):
            raise JobError(f"{index!r} selects single rows or columns", remedy="take ranges, or to_numpy() first")
        found: BigMatrix = linalg.part(self, rows, columns)
        return found

    def __len__(self) -> int:
        return self.stored.rows

    def __repr__(self) -> str:
        s = self.stored
        return f"<BigMatrix {s.rows} x {s.columns}, {s.dtype}, tiles of {s.tile_rows} x {s.tile_columns}, {s.name} in {s.store}>"

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
        file = files.create_npy(path, self.shape, self.dtype)
        self._copy_to(file)
        file.flush()

    def to_zarr(self, path: str | Path) -> None:
        """Writes it to a new Zarr array whose chunks are its tiles, one after another.

        Raises:
            JobError: a tile is missing, or there is an array already.
            MissingExtra: Zarr is not installed.
        """
        stored = self.stored
        self._copy_to(files.create_zarr(path, self.shape, (stored.tile_rows, stored.tile_columns), self.dtype))

    def _copy_to(self, file: Any) -> None:
        async def write() -> None:
            async with tile_store.opened(self.stored.store) as channel:
                for i, j in self.stored.indices():
                    file[self.stored.slices(i, j)] = await tile_store.read_tile(channel, self.stored, i, j)

        blocking(lambda interrupts: write())

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Its values, where they are few enough for a conversion that may not have been meant.

        Raises:
            JobError: they take more than 1 GiB.
        """
        rows, columns = self.shape
        nbytes = rows * columns * self.dtype.itemsize
        if nbytes > IMPLICIT_BYTES:
            raise JobError(
                f"NumPy would read {nbytes / 2**30:.1f} GiB of a {rows} x {columns} matrix into memory",
                remedy="call to_numpy() if that is meant",
            )
        return self.to_numpy() if dtype is None else self.to_numpy().astype(dtype)

    def delete(self) -> None:
        """Removes its tiles; views of it are gone, too."""
        stored = self.stored

        async def remove() -> None:
            async with tile_store.opened(stored.store) as channel:
                await tile_store.delete_matrix(channel, stored)

        blocking(lambda interrupts: remove())
        lifetimes.disown(stored.store, stored.name)

    def keep(self) -> BigMatrix:
        """Makes a result, or a matrix that was stored without a name, stay when no object refers to it any more, and when the process ends.

        Returns:
            Itself. Another process opens it with `BigMatrix.open(a.stored.store, a.stored.name)`.
        """
        stored = self.stored

        async def mark() -> None:
            async with tile_store.opened(stored.store) as channel:
                await tile_store.mark_kept(channel, stored.name)

        if lifetimes.owner_of(stored) is not None:
            blocking(lambda interrupts: mark())
            lifetimes.disown(stored.store, stored.name)
        return self


def _named(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise JobError(f"a matrix cannot be named {name!r}", remedy="use alphanumeric characters, '_', '-' and '.'")
    return name


def default_store() -> str:
    """Address of the folder for matrices of this user."""
    folder = home() / "matrices"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise JobError(
            f"{folder} cannot be made: {e.strerror}", remedy="set EPHEMERON_HOME to a folder that can be written, or give store="
        ) from None
    return folder.resolve().as_uri()


def _checked(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise JobError(f"an array with {array.ndim} dimensions is no matrix", remedy="give one with two")
    if array.dtype.kind in "iub":
        array = array.astype("float64")
    if array.dtype.name not in DTYPES:
        raise JobError(f"matrices of {array.dtype} are not supported", remedy=f"convert it to one of {', '.join(DTYPES)}")
    return array


def _tile_shape(tile: int | Shape | None, shape: Shape, itemsize: int) -> Shape:
    if tile is None:
        tile = tile_size(*shape, itemsize, workers=_DEFAULT_WORKERS)
    rows, columns = (tile, tile) if isinstance(tile, int) else tile
    if rows < 1 or columns < 1:
        raise JobError(f"tiles of {rows} x {columns} have no values", remedy="use 1 and more")
    return rows, columns
