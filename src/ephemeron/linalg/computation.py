"""What the operations on matrices share: programs that run one after the other for one result, checks of shapes, outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ephemeron import linalg
from ephemeron.blocking import run as blocking
from ephemeron.errors import JobError, TaskFailed
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.algorithms.qr import flat_thin_qr, thin_qr
from ephemeron.linalg.execution.gathered import run_gathered, solver_bytes
from ephemeron.linalg.execution.program_data import LinalgReport, matrix_error
from ephemeron.linalg.execution.run import run_program
from ephemeron.linalg.language.program import Program
from ephemeron.linalg.matrices import lifetimes, tile_store
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg.matrices.stored import StoredMatrix, Structure, TileFamily, Tiles
from ephemeron.linalg.prediction.planner import Planner

if TYPE_CHECKING:
    from ephemeron.executor import FunctionExecutor
    from ephemeron.linalg.execution.program_data import LinalgReport

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Computation:
    """Programs that run one after the other for one result."""

    def __init__(
        self, executor: FunctionExecutor | Planner, algorithm: str, store: str, matrices: Sequence[BigMatrix] = (), check: bool = False
    ) -> None:
        self._executor, self._store = executor, store
        self.report = LinalgReport(algorithm=algorithm)
        self.owners = lifetimes.Owners(matrix.stored for matrix in matrices)
        self._scratch: list[Tiles] = []
        self._checked = {(m.stored.store, m.stored.name) for m in matrices} if check else set()

    def run(
        self, program: Program, sizes: Mapping[str, int], inputs: Mapping[str, Tiles], outputs: Mapping[str, Tiles]
    ) -> dict[str, Tiles]:
        if isinstance(self._executor, Planner):
            return self._executor.plan(program, sizes, inputs, outputs)
        with _matrix_errors(self.report.algorithm):
            made, report = run_program(
                program,
                sizes,
                inputs=inputs,
                outputs=outputs,
                executor=self._executor,
                owners=self.owners,
                checked=[name for name, each in inputs.items() if (each.store, each.name) in self._checked],
            )
        self.report += report
        return made

    def gather(self, solver: str, matrix: StoredMatrix, outputs: Sequence[StoredMatrix], **more: Any) -> list[StoredMatrix]:
        """Runs a solver in one function; see `run_gathered`."""
        if isinstance(self._executor, Planner):
            return self._executor.plan_gathered(solver, matrix, outputs)
        with _matrix_errors(self.report.algorithm):
            made, report = run_gathered(
                solver,
                matrix,
                outputs,
                executor=self._executor,
                owners=self.owners,
                checked=(matrix.store, matrix.name) in self._checked,
                **more,
            )
        self.report += report
        return made

    @property
    def memory_mb(self) -> int:
        """Of a function."""
        return self._executor.memory_mb

    @property
    def is_planned(self) -> bool:
        """Whether nothing is computed, so that no value can be read."""
        return isinstance(self._executor, Planner)

    def values(self, matrix: StoredMatrix) -> npt.NDArray[Any]:
        """The values of a small result, which is removed at the end: shape [size]."""
        self.scratch(matrix)
        return BigMatrix(matrix).to_numpy().reshape(-1)

    def family(self) -> TileFamily:
        """Tiles that only later programs read."""
        return TileFamily(store=self._store)

    def scratch(self, *made: Tiles) -> None:
        """Outputs of a program that are removed at the end."""
        self._scratch += made

    def clear(self) -> None:
        self.owners.release(self._scratch)

    def result(self, made: Tiles) -> BigMatrix:
        assert isinstance(made, StoredMatrix)
        return BigMatrix(made, self.report)


@contextlib.contextmanager
def computing(
    executor: FunctionExecutor | Planner | None, algorithm: str, *matrices: BigMatrix, check: bool = False
) -> Iterator[Computation]:
    store = matrices[0].stored.store
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(FunctionExecutor("local", name="linalg"))
        computation = Computation(pool, algorithm, store, matrices, check)
        lifetimes.settle()
        try:
            yield computation
            computation.clear()
        except BaseException:
            computation.owners.fail()
            raise


@contextlib.contextmanager
def _matrix_errors(operation: str) -> Iterator[None]:
    """Raises a kernel's own error for that of its task, in the name of what the user has called."""
    try:
        yield
    except TaskFailed as failure:
        error = matrix_error(failure)
        if error is None:
            raise
        named = type(error)(error.message, kernel=operation, position=error.position, where=error.where)
        for note in getattr(error, "__notes__", ()):
            named.add_note(note)
        raise named from None


def on_computed(operation: Callable[_P, _R], *, cut_as: int = 0) -> Callable[_P, _R]:
    """The operation on the values of expressions among its arguments, which its executor computes first, and on arrays.

    An array is stored for as long as the operation takes; one beside a matrix with its rows cut into tiles as axis `cut_as` of the matrix. Where
    one argument is a vector, a result of one column is one, too.
    """
    name = operation.__name__

    @functools.wraps(operation)
    def wrapped(*arguments: _P.args, **options: _P.kwargs) -> _R:
        executor: Any = options.get("executor")
        with contextlib.ExitStack() as stack:
            given: list[Any] = []
            arrays = [each for each in arguments if np.ndim(each) == 1]  # type: ignore[arg-type]
            for each in arguments:
                if isinstance(each, BigVector):
                    each = each.column
                if isinstance(each, BigMatrix):
                    given.append(each.compute(executor=executor))
                elif isinstance(each, np.ndarray) and given:
                    matrix: BigMatrix = given[0]
                    given.append(stored_beside(matrix.stored, each, tile_rows=matrix.tile[cut_as]))
                    stack.callback(given[-1].delete)
                elif given:
                    given.append(each)
                elif isinstance(each, np.ndarray):
                    given.append(BigMatrix.from_numpy(each))
                    stack.callback(given[-1].delete)
                else:
                    raise JobError(
                        f"{name} takes a BigMatrix, this is a {type(each).__name__}",
                        remedy="store it first: BigMatrix.from_numpy(a, store='file:///folder')",
                    )
            found = operation(*given, **options)
            return as_shaped(found, arrays[0]) if arrays and isinstance(found, BigMatrix) else found

    return wrapped


def stored_beside(matrix: StoredMatrix, array: npt.NDArray[Any], *, tile_rows: int) -> BigMatrix:
    """An array, stored where a matrix is; a vector as one column."""
    columns = 1 if array.ndim < 2 else array.shape[1]
    return BigMatrix.from_numpy(
        array.astype(np.result_type(array, matrix.dtype)), tile=(tile_rows, max(1, min(matrix.tile_columns, columns))), store=matrix.store
    )


def like(matrix: StoredMatrix, *, rows: int, columns: int, structure: Structure = "full") -> StoredMatrix:
    """An output beside a matrix, with its tiles."""
    return dataclasses.replace(
        matrix,
        rows=rows,
        columns=columns,
        structure=structure,
        first_row=0,
        first_column=0,
        transposed=False,
        conjugated=False,
        generation="",
    )


def row_of_values(stored: StoredMatrix, values: int) -> StoredMatrix:
    """One row of real values, beside a matrix."""
    real = np.zeros(0, stored.dtype).real.dtype.name
    return dataclasses.replace(like(stored, rows=1, columns=values), tile_rows=1, tile_columns=values, dtype=real)


def fits(solver: str, stored: StoredMatrix, memory_mb: int) -> bool:
    """Whether one function can hold what a solver needs for a matrix."""
    return solver_bytes(solver, stored.rows, stored.columns, np.dtype(stored.dtype).itemsize) <= memory_mb * 2**20


def reciprocal_condition(computation: Computation, solver: str, factor: StoredMatrix, **more: Any) -> float | None:
    """Estimate of the reciprocal condition number, from factors.

    Where one function cannot hold them it is that of the diagonal, which may be much too large: the ratio of its smallest and its
    largest value, read by the client. None: nothing is computed.

    Args:
        computation: runs the solver.
        solver: one of `gathered.SOLVERS`, for condition numbers.
        factor: a triangle.
        more: see `Computation.gather`.
    """
    if fits(solver, factor, computation.memory_mb):
        [found] = computation.gather(solver, factor, [row_of_values(factor, 1)], **more)
        return None if computation.is_planned else float(computation.values(found)[0])
    if computation.is_planned:
        return None
    sizes = [np.abs(stored_tile(factor, k, k).diagonal()) for k in range(min(factor.tiles))]
    diagonal = np.concatenate(sizes)
    ratio = float(diagonal.min() / diagonal.max()) if diagonal.max() > 0 else 0.0
    return ratio**2 if solver == "cholesky_condition" else ratio


def stored_tile(matrix: StoredMatrix, i: int, j: int) -> npt.NDArray[Any]:
    """A tile, read by the client."""

    async def read() -> npt.NDArray[Any]:
        async with tile_store.opened(matrix.store) as channel:
            return await tile_store.read_tile(channel, matrix, i, j)

    return blocking(lambda interrupts: read())


def square(a: BigMatrix, *, what: str) -> StoredMatrix:
    rows, columns = a.shape
    if rows != columns:
        raise JobError(f"{what} needs a square matrix, this one is {rows} x {columns}")
    if a.stored.tile_rows != a.stored.tile_columns:
        raise JobError(
            f"{what} needs square tiles, those of this matrix are {a.tile[0]} x {a.tile[1]}", remedy=f"store it with tile={min(a.tile)}"
        )
    return a.stored


def sides_of(a: StoredMatrix, b: BigMatrix | npt.NDArray[Any], *, what: str) -> StoredMatrix:
    """The right-hand sides of equations; see `on_computed` for arrays."""
    if not isinstance(b, BigMatrix):
        raise JobError(f"{what}: right-hand sides of type {type(b).__name__}", remedy="give a BigMatrix or a NumPy array")
    if b.stored.rows != a.rows:
        raise JobError(f"{what}: the matrix has {a.rows} rows, the right-hand sides have {b.stored.rows}")
    if b.stored.tile_rows != a.tile_rows and b.stored.tiles[0] > 1:
        raise JobError(
            f"{what}: tiles have {a.tile_rows} rows, those of the right-hand sides {b.stored.tile_rows}",
            remedy=f"store them with tile=({a.tile_rows}, {b.stored.tile_columns})",
        )
    if b.dtype != np.dtype(a.dtype):
        raise JobError(f"{what}: the matrix is {a.dtype}, the right-hand sides are {b.dtype}", remedy="convert one")
    return b.stored


def check_tall(stored: StoredMatrix, *, what: str) -> None:
    if stored.rows < stored.columns:
        raise JobError(f"{what} needs as many rows as columns, this matrix is {stored.rows} x {stored.columns}")
    if stored.tiles[1] > 1 and stored.tile_rows != stored.tile_columns:
        raise JobError(
            f"{what} needs square tiles where a matrix has several columns of them, these are {stored.tile_rows} x {stored.tile_columns}",
            remedy=f"store it with tile={min(stored.tile_rows, stored.tile_columns)}",
        )
    if stored.tiles[1] == 1 and stored.tile_shape(0, 0)[0] < stored.columns:
        raise JobError(
            f"{what} of {stored.columns} columns needs tiles of as many rows, these have {stored.tile_rows}",
            remedy=f"store it with tile=({max(stored.columns, stored.tile_rows)}, {stored.columns})",
        )


def tall_outputs(stored: StoredMatrix) -> dict[str, StoredMatrix]:
    n = stored.columns
    orthonormal = like(stored, rows=stored.rows, columns=n)
    triangle = dataclasses.replace(like(stored, rows=n, columns=n), tile_rows=n, tile_columns=n)
    return {"Q": orthonormal, "R": triangle}


_TALL = 2
"""Rows of tiles for one column of them from which a tree in each column is quicker: its chains are shorter."""


def tiled_qr(computation: Computation, stored: StoredMatrix) -> dict[str, Tiles]:
    """Q and R of a matrix of any shape."""
    m, n = stored.tiles
    k = min(stored.shape)
    outputs: dict[str, Tiles] = {
        "Q": like(stored, rows=stored.rows, columns=k),
        "R": like(stored, rows=k, columns=stored.columns, structure="upper"),
    }
    return computation.run(flat_thin_qr if m <= _TALL * n else thin_qr, {"M": m, "N": n}, {"A": stored}, outputs)


def family_tile(made: Tiles, index: tuple[int, ...]) -> npt.NDArray[Any]:
    async def read() -> npt.NDArray[Any]:
        assert isinstance(made, TileFamily)
        async with tile_store.opened(made.store) as channel:
            return await tile_store.read_family_tile(channel, made, index)

    return blocking(lambda interrupts: read())


# -- `BigVector` --------------------------------------------------------------------------------------------------


Other: TypeAlias = "BigVector | npt.NDArray[Any]"


class BigVector:
    """A vector of n values, stored as one column of tiles, or an expression of one.

    Args:
        column: its values, of shape [n, 1].
    """

    def __init__(self, column: BigMatrix) -> None:
        if column.shape[1] != 1:
            raise JobError(f"a matrix of {column.shape[0]} x {column.shape[1]} is no vector")
        self.column = column

    @property
    def shape(self) -> tuple[int]:
        """Number of values."""
        return (self.column.shape[0],)

    @property
    def ndim(self) -> int:
        """1."""
        return 1

    @property
    def size(self) -> int:
        """Number of values."""
        return self.column.shape[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its values."""
        return self.column.dtype

    @property
    def report(self) -> LinalgReport | None:
        """Of the computation that made it."""
        return self.column.report

    @property
    def T(self) -> BigVector:
        """Itself, as in NumPy."""
        return self

    def compute(self, *, executor: FunctionExecutor | None = None) -> BigVector:
        """The vector with all its tiles stored."""
        return BigVector(self.column.compute(executor=executor))

    def to_numpy(self) -> npt.NDArray[Any]:
        """Its values: shape [n]."""
        found: npt.NDArray[Any] = self.column.to_numpy()[:, 0]
        return found

    def delete(self) -> None:
        """Removes its tiles."""
        self.column.delete()

    def keep(self) -> BigVector:
        """As `BigMatrix.keep`."""
        self.column.keep()
        return self

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values = np.asarray(self.column)[:, 0]
        return values if dtype is None else values.astype(dtype)

    __array_ufunc__ = None  # arrays leave operators with vectors to these methods

    __eq__ = BigMatrix.__eq__
    __hash__ = BigMatrix.__hash__

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<BigVector {self.size}, {self.dtype}: {self.column!r}>"

    def __matmul__(self, other: BigMatrix) -> BigVector:
        """Of a matrix: the vector vᵀ A."""
        if not isinstance(other, BigMatrix):
            return NotImplemented
        found: BigVector = linalg.product(self, other)
        return found

    def __add__(self, other: Other) -> BigVector:
        return self._sum(other, 1.0, 1.0)

    __radd__ = __add__

    def __sub__(self, other: Other) -> BigVector:
        return self._sum(other, 1.0, -1.0)

    def __rsub__(self, other: Other) -> BigVector:
        return self._sum(other, -1.0, 1.0)

    def __mul__(self, factor: complex) -> BigVector:
        return BigVector(self.column * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: complex) -> BigVector:
        return BigVector(self.column / divisor)

    def __neg__(self) -> BigVector:
        return BigVector(-self.column)

    def _sum(self, other: Other, alpha: float, beta: float) -> BigVector:
        if np.ndim(other) not in (0, 1):
            raise JobError(f"a vector and {np.ndim(other)} dimensions", remedy="use .column, a matrix of one column")
        given: Any = other.column if isinstance(other, BigVector) else other
        if not isinstance(given, BigMatrix) and np.ndim(given) == 1:
            given = np.asarray(given)[:, None]
        if np.shape(given) not in ((), self.column.shape):
            raise JobError(f"vectors of {self.size} and {np.shape(given)[0]} values cannot be added")
        return BigVector(linalg.total(self.column, given, alpha, beta))


def as_shaped(found: BigMatrix, given: Any) -> Any:
    """A result of one column as a vector, where what was given is one."""
    return BigVector(found) if np.ndim(given) == 1 else found
