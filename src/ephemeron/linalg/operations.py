"""Factorisations, products and equations of matrices that are stored as tiles: what users call.

Each takes `executor=`, a `FunctionExecutor`; without one, functions of this machine are started for it. What a function returns has
the figures of the computation in `.report`. A computation that was interrupted goes on from its tiles when it is called again with the
same stored inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.blocking import run as blocking
from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.algorithms import cholesky as cholesky_programs
from ephemeron.linalg.algorithms import lu as lu_programs
from ephemeron.linalg.algorithms import products, tall, triangular
from ephemeron.linalg.algorithms import qr as qr_programs
from ephemeron.linalg.execution.report import LinalgReport
from ephemeron.linalg.execution.run import run_program
from ephemeron.linalg.kernels.pivoting import exchange_rows, gather_pivots
from ephemeron.linalg.language.program import Program
from ephemeron.linalg.matrices import tile_store
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg.matrices.stored import StoredMatrix, Structure, TileFamily, Tiles


class _Computation:
    """Programs that run one after the other for one result."""

    def __init__(self, executor: FunctionExecutor, algorithm: str, store: str) -> None:
        self._executor, self._store = executor, store
        self.report = LinalgReport(algorithm=algorithm)
        self._scratch: list[Tiles] = []

    def run(
        self, program: Program, sizes: Mapping[str, int], inputs: Mapping[str, Tiles], outputs: Mapping[str, Tiles]
    ) -> dict[str, Tiles]:
        made, report = run_program(program, sizes, inputs=inputs, outputs=outputs, executor=self._executor)
        self.report += report
        return made

    def family(self) -> TileFamily:
        """Tiles that only later programs read."""
        return TileFamily(store=self._store)

    def scratch(self, *made: Tiles) -> None:
        """Outputs of a program that are removed at the end."""
        self._scratch += made

    def clear(self) -> None:
        async def remove() -> None:
            async with tile_store.opened(self._store) as channel:
                for each in self._scratch:
                    await tile_store.delete(channel, each.name)

        if self._scratch:
            blocking(lambda interrupts: remove())

    def result(self, made: Tiles) -> BigMatrix:
        assert isinstance(made, StoredMatrix)
        return BigMatrix(made, self.report)


@contextlib.contextmanager
def _computing(executor: FunctionExecutor | None, algorithm: str, *matrices: BigMatrix) -> Iterator[_Computation]:
    store = matrices[0].stored.store
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(FunctionExecutor("local"))
        computation = _Computation(pool, algorithm, store)
        yield computation
        computation.clear()


def _like(matrix: StoredMatrix, *, rows: int, columns: int, structure: Structure = "full") -> StoredMatrix:
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
    )


def _square(a: BigMatrix, *, what: str) -> StoredMatrix:
    rows, columns = a.shape
    if rows != columns:
        raise JobError(f"{what} needs a square matrix, this one is {rows} x {columns}")
    if a.stored.tile_rows != a.stored.tile_columns:
        raise JobError(
            f"{what} needs square tiles, those of this matrix are {a.tile[0]} x {a.tile[1]}",
            remedy=f"store it with tile={min(a.tile)}",
        )
    return a.stored


def _sides(a: StoredMatrix, b: BigMatrix, *, what: str) -> StoredMatrix:
    """The right-hand sides of equations."""
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


def matmul(a: BigMatrix, b: BigMatrix, *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """The product A B, summed in a fixed order.

    Args:
        a: shape [m, k].
        b: shape [k, n].
        executor: runs the tasks.

    Raises:
        JobError: the shapes, types or tiles do not fit.
    """
    left, right = a.stored, b.stored
    if left.columns != right.rows:
        raise JobError(f"{left.rows} x {left.columns} and {right.rows} x {right.columns} cannot be multiplied")
    if left.tile_columns != right.tile_rows and max(left.tiles[1], right.tiles[0]) > 1:
        raise JobError(
            f"tiles of {left.tile_rows} x {left.tile_columns} and {right.tile_rows} x {right.tile_columns} cannot be multiplied",
            remedy="store both with the same tile",
        )
    if left.dtype != right.dtype:
        raise JobError(f"a product of {left.dtype} and {right.dtype}", remedy="convert one of them")
    product = dataclasses.replace(
        _like(left, rows=left.rows, columns=right.columns), tile_columns=right.tile_columns
    )  # fmt: skip
    (m, k), n = left.tiles, right.tiles[1]
    with _computing(executor, "matmul", a) as computation:
        made = computation.run(
            products.matmul, {"M": m, "N": n, "K": k}, {"A": left, "B": right}, {"C": product}
        )  # fmt: skip
    return computation.result(made["C"])


def cholesky(a: BigMatrix, *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """Lower L with L Lᴴ = A, by the algorithm of NumPyWren (survey 2.4, figure 16). Reads the lower tiles of A.

    Args:
        a: shape [n, n], Hermitian and positive definite, with square tiles.
        executor: runs the tasks.

    Raises:
        JobError: it is not square.
        TaskFailed: it is not positive definite; says at which block.
    """
    stored = _square(a, what="cholesky")
    with _computing(executor, "cholesky", a) as computation:
        lower = _like(stored, rows=stored.rows, columns=stored.rows, structure="lower")
        made = computation.run(cholesky_programs.cholesky, {"N": stored.tiles[0]}, {"A": stored}, {"L": lower})
    return computation.result(made["L"])


def lu(a: BigMatrix, *, executor: FunctionExecutor | None = None) -> tuple[npt.NDArray[np.int64], BigMatrix, BigMatrix]:
    """Rows p, unit lower L and upper U with A[p] = L U, by tournament pivoting (CALU: Grigori, Demmel, Xiang 2011).

    Args:
        a: shape [n, n], with square tiles.
        executor: runs the tasks.

    Returns:
        p, of shape [n], L and U.

    Raises:
        JobError: it is not square.
        TaskFailed: it is singular.
    """
    stored = _square(a, what="lu")
    n = {"N": stored.tiles[0]}
    with _computing(executor, "lu", a) as computation:
        factors = _lu(computation, stored)
        lower = _like(stored, rows=stored.rows, columns=stored.rows, structure="lower")
        made = computation.run(
            lu_programs.permuted_lower, n, {"L": factors["L"], "P": factors["P"]}, {"F": lower}
        )  # fmt: skip
        order = _order(_pivots(factors["P"], stored.tiles[0]), stored)
        computation.scratch(factors["L"], factors["P"])
    return order, computation.result(made["F"]), computation.result(factors["U"])


def solve(
    a: BigMatrix, b: BigMatrix, *, assume_a: str = "general", executor: FunctionExecutor | None = None
) -> BigMatrix:
    """X with A X = B.

    Args:
        a: shape [n, n], with square tiles.
        b: shape [n, k], with tiles of as many rows as those of A.
        assume_a: `general`: by LU with tournament pivoting; `positive definite`: by Cholesky, half the work.
        executor: runs the tasks.

    Raises:
        JobError: the shapes or types do not fit.
        TaskFailed: A is singular, or not positive definite.
    """
    stored = _square(a, what="solve")
    sides = _sides(stored, b, what="solve")
    unknown = dataclasses.replace(
        _like(sides, rows=sides.rows, columns=sides.columns), store=stored.store, tile_rows=stored.tile_rows
    )
    n, both = {"N": stored.tiles[0]}, {"N": stored.tiles[0], "M": sides.tiles[1]}
    with _computing(executor, "solve", a) as computation:
        if assume_a == "positive definite":
            lower = _like(stored, rows=stored.rows, columns=stored.rows, structure="lower")
            factor = computation.run(cholesky_programs.cholesky, n, {"A": stored}, {"L": lower})
            half = computation.run(
                triangular.forward_substitution, both, {"L": factor["L"], "B": sides}, {"X": unknown}
            )
            made = computation.run(
                triangular.adjoint_substitution, both, {"L": factor["L"], "B": half["X"]}, {"X": unknown}
            )
            computation.scratch(factor["L"], half["X"])
        elif assume_a == "general":
            factors = _lu(computation, stored)
            half = computation.run(
                lu_programs.lu_forward, both, {"L": factors["L"], "P": factors["P"], "B": sides}, {"X": unknown}
            )
            made = computation.run(
                triangular.backward_substitution, both, {"U": factors["U"], "B": half["X"]}, {"X": unknown}
            )
            computation.scratch(*factors.values(), half["X"])
        else:
            raise JobError(f"assume_a = {assume_a!r}", remedy="use 'general' or 'positive definite'")
    return computation.result(made["X"])


def qr(a: BigMatrix, *, executor: FunctionExecutor | None = None) -> tuple[BigMatrix, BigMatrix]:
    """Q with orthonormal columns and upper R with A = Q R: TSQR for one column of tiles, else tiled QR with a tree in each column.

    Args:
        a: shape [m, n], m ≥ n; with square tiles where it has several columns of them.
        executor: runs the tasks.

    Returns:
        Q, of shape [m, n], and R, of shape [n, n].

    Raises:
        JobError: it has more columns than rows, or tiles that are not square.
    """
    stored = a.stored
    _tall(stored, what="qr")
    with _computing(executor, "qr", a) as computation:
        if stored.tiles[1] == 1:
            made = computation.run(tall.tsqr, {"M": stored.tiles[0]}, {"A": stored}, _tall_outputs(stored))
        else:
            made = _tiled_qr(computation, stored)
    return computation.result(made["Q"]), computation.result(made["R"])


def svd(
    a: BigMatrix, *, executor: FunctionExecutor | None = None
) -> tuple[BigMatrix, npt.NDArray[Any], npt.NDArray[Any]]:
    """U, singular values and Vᴴ with A = U diag(s) Vᴴ, for a tall matrix: QR, then the singular values of R in one function.

    Args:
        a: shape [m, n], m ≥ n, with one column of tiles.
        executor: runs the tasks.

    Returns:
        U, of shape [m, n]; s, of shape [n], descending; Vᴴ, of shape [n, n].

    Raises:
        JobError: it has several columns of tiles, or more columns than rows.
    """
    stored = a.stored
    _tall(stored, what="svd")
    if stored.tiles[1] > 1:
        raise JobError(
            f"svd takes matrices with one column of tiles, this one has {stored.tiles[1]}",
            remedy=f"store it with tile=({stored.tile_rows}, {stored.columns})",
        )
    m = {"M": stored.tiles[0]}
    with _computing(executor, "svd", a) as computation:
        factors = computation.run(tall.tsqr, m, {"A": stored}, _tall_outputs(stored))
        values, vectors = computation.family(), computation.family()
        made = computation.run(
            tall.tall_svd, m, {"Q": factors["Q"], "R": factors["R"]},
            {"U": _tall_outputs(stored)["Q"], "D": values, "W": vectors},
        )  # fmt: skip
        singular, right = _tile(made["D"], (0, 0)), _tile(made["W"], (0, 0))
        computation.scratch(*factors.values(), made["D"], made["W"])
    return computation.result(made["U"]), singular.reshape(-1), right


def lstsq(a: BigMatrix, b: BigMatrix, *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """X that minimises the norm of A X - B, for A of full rank, by QR.

    Args:
        a: shape [m, n], m ≥ n.
        b: shape [m, k], with tiles of as many rows as those of A.
        executor: runs the tasks.

    Returns:
        X, of shape [n, k].

    Raises:
        JobError: the shapes or types do not fit.
        TaskFailed: A has not full rank.
    """
    stored = a.stored
    _tall(stored, what="lstsq")
    sides = _sides(stored, b, what="lstsq")
    unknown = dataclasses.replace(
        _like(sides, rows=stored.columns, columns=sides.columns), store=stored.store, tile_rows=stored.tile_columns
    )
    with _computing(executor, "lstsq", a) as computation:
        if stored.tiles[1] == 1:
            factors = computation.run(tall.tsqr, {"M": stored.tiles[0]}, {"A": stored}, _tall_outputs(stored))
        else:
            factors = _tiled_qr(computation, stored)
        q = factors["Q"]
        assert isinstance(q, StoredMatrix)
        (m, n), k = q.tiles, sides.tiles[1]
        projected = computation.run(
            products.matmul, {"M": n, "N": k, "K": m}, {"A": q.H, "B": sides}, {"C": unknown}
        )  # fmt: skip
        made = computation.run(
            triangular.backward_substitution, {"N": stored.tiles[1], "M": sides.tiles[1]},
            {"U": factors["R"], "B": projected["C"]}, {"X": unknown},
        )  # fmt: skip
        computation.scratch(*factors.values(), projected["C"])
    return computation.result(made["X"])


def _lu(computation: _Computation, stored: StoredMatrix) -> dict[str, Tiles]:
    lower = _like(stored, rows=stored.rows, columns=stored.rows, structure="lower")
    upper = _like(stored, rows=stored.rows, columns=stored.rows, structure="upper")
    return computation.run(
        lu_programs.lu, {"N": stored.tiles[0]}, {"A": stored}, {"L": lower, "U": upper, "P": computation.family()}
    )


def _tall(stored: StoredMatrix, *, what: str) -> None:
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


def _tall_outputs(stored: StoredMatrix) -> dict[str, StoredMatrix]:
    n = stored.columns
    orthonormal = _like(stored, rows=stored.rows, columns=n)
    triangle = dataclasses.replace(_like(stored, rows=n, columns=n), tile_rows=n, tile_columns=n)
    return {"Q": orthonormal, "R": triangle}


def _tiled_qr(computation: _Computation, stored: StoredMatrix) -> dict[str, Tiles]:
    m, n = stored.tiles
    triangle = _like(stored, rows=stored.columns, columns=stored.columns, structure="upper")
    factors = computation.run(
        qr_programs.qr, {"M": m, "N": n}, {"A": stored},
        {"R": triangle, "V": computation.family(), "T": computation.family()},
    )  # fmt: skip
    identity = BigMatrix.from_function(
        lambda rows, columns: _identity(rows, columns, stored.dtype), stored.shape,
        dtype=stored.dtype, tile=(stored.tile_rows, stored.tile_columns), store=stored.store,
    )  # fmt: skip
    made = computation.run(
        qr_programs.apply_q, {"M": m, "N": n, "K": n}, {"V": factors["V"], "T": factors["T"], "B": identity.stored},
        {"X": _like(stored, rows=stored.rows, columns=stored.columns)},
    )  # fmt: skip
    computation.scratch(factors["V"], factors["T"], identity.stored)
    return {"Q": made["X"], "R": factors["R"]}


def _identity(rows: slice, columns: slice, dtype: str) -> npt.NDArray[Any]:
    down, across = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
    found: npt.NDArray[Any] = (down[:, None] == across[None, :]).astype(dtype)
    return found


def _tile(made: Tiles, index: tuple[int, ...]) -> npt.NDArray[Any]:
    async def read() -> npt.NDArray[Any]:
        assert isinstance(made, TileFamily)
        async with tile_store.opened(made.store) as channel:
            return await tile_store.read_family_tile(channel, made, index)

    return blocking(lambda interrupts: read())


def _pivots(made: Tiles, steps: int) -> list[npt.NDArray[Any]]:
    return [_tile(made, (k, 0)) for k in range(steps)]


def _order(pivots: list[npt.NDArray[Any]], stored: StoredMatrix) -> npt.NDArray[np.int64]:
    """Rows of A in the order of those of L U: the exchanges of every step, applied to row numbers."""
    down = stored.tiles[0]
    numbers = [np.arange(*stored.slices(i, 0)[0].indices(stored.rows), dtype="float64")[:, None] for i in range(down)]
    for k, places in enumerate(pivots):
        top = numbers[k]
        gathered = sum(gather_pivots(numbers[i], places, i) for i in range(k, down))
        numbers[k + 1 :] = [exchange_rows(numbers[i], top, places, k, i) for i in range(k + 1, down)]
        numbers[k] = np.asarray(gathered)
    return np.concatenate(numbers)[:, 0].astype(np.int64)
