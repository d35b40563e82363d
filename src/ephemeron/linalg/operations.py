"""Factorisations, products and equations of matrices that are stored as tiles: what users call.

Each takes `executor=`, a `FunctionExecutor`; without one, functions of this machine are started for it. What a function returns has
the figures of the computation in `.report`. A computation that was interrupted goes on from its tiles when it is called again with the
same stored inputs.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import JobError, SingularMatrix
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.algorithms import equations, products
from ephemeron.linalg.algorithms import qr as qr_programs
from ephemeron.linalg.computation import (
    Computation,
    check_tall,
    computing,
    family_tile,
    fits,
    like,
    on_computed,
    reciprocal_condition,
    row_of_values,
    sides_of,
    square,
    tall_outputs,
    tiled_qr,
)
from ephemeron.linalg.kernels.factors import exchange_rows, gather_pivots
from ephemeron.linalg.kernels.lapack import LinAlgWarning
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg.matrices.stored import StoredMatrix, Tiles


@on_computed
def cholesky(a: BigMatrix, *, check: bool = True, executor: FunctionExecutor | None = None) -> BigMatrix:
    """Lower L with L Lᴴ = A, by the algorithm of NumPyWren (survey 2.4, figure 16). Reads the lower tiles of A.

    Args:
        a: shape [n, n], Hermitian and positive definite, with square tiles.
        check: refuse values that are NaN or infinite. The same for the other functions.
        executor: runs the tasks.

    Raises:
        JobError: it is not square.
        NotFinite: a value is NaN or infinite; names its row and column, and the tile.
        NotPositiveDefinite: it is not; names the tile, and the row in it.
    """
    stored = square(a, what="cholesky")
    with computing(executor, "cholesky", a, check=check) as computation:
        lower = like(stored, rows=stored.rows, columns=stored.rows, structure="lower")
        made = computation.run(equations.cholesky, {"N": stored.tiles[0]}, {"A": stored}, {"L": lower})
    return computation.result(made["L"])


@on_computed
def lu(a: BigMatrix, *, check: bool = True, executor: FunctionExecutor | None = None) -> tuple[npt.NDArray[np.int64], BigMatrix, BigMatrix]:
    """Rows p, unit lower L and upper U with A[p] = L U, by tournament pivoting (CALU: Grigori, Demmel, Xiang 2011).

    Args:
        a: shape [m, n], with square tiles.
        check: refuse values that are NaN or infinite.
        executor: runs the tasks.

    Returns:
        p, of shape [m]; L, of shape [m, k], and U, of shape [k, n], k = min(m, n).

    Raises:
        JobError: its tiles are not square.
        NotFinite: a value is NaN or infinite.
        SingularMatrix: a pivot is exactly zero: the rank is less than k.
    """
    stored = a.stored
    _check_tiles(a, what="lu")
    with computing(executor, "lu", a, check=check) as computation:
        factors = _lu(computation, stored)
        lower = like(stored, rows=stored.rows, columns=min(stored.shape), structure="lower")
        made = computation.run(equations.permuted_lower, _sizes(stored), {"L": factors["L"], "P": factors["P"]}, {"F": lower})
        order = _order(_pivots(factors["P"], min(stored.tiles)), stored)
        computation.scratch(factors["L"], factors["P"])
    return order, computation.result(made["F"]), computation.result(factors["U"])


@on_computed
def solve(
    a: BigMatrix,
    b: BigMatrix | npt.NDArray[Any],
    *,
    assume_a: str = "general",
    check: bool = True,
    executor: FunctionExecutor | None = None,
) -> BigMatrix:
    """X with A X = B.

    Args:
        a: shape [n, n], with square tiles.
        b: shape [n, k], with tiles of as many rows as those of A; or an array, of shape [n, k] or [n] for one column.
        assume_a: `general`: by LU with tournament pivoting; `positive definite`: by Cholesky, half the work.
        check: refuse values that are NaN or infinite, and warn where A is ill-conditioned: a task estimates its condition number, in one function.
        executor: runs the tasks.

    Raises:
        JobError: the shapes or types do not fit.
        NotFinite: a value is NaN or infinite.
        SingularMatrix, NotPositiveDefinite: A is singular, or not positive definite; names the tile and the row.

    Warns:
        LinAlgWarning: SciPy's. A is so ill-conditioned that X may have no correct digits.
    """
    stored = square(a, what="solve")
    sides = sides_of(stored, b, what="solve")
    unknown = dataclasses.replace(like(sides, rows=sides.rows, columns=sides.columns), store=stored.store, tile_rows=stored.tile_rows)
    n, both = {"N": stored.tiles[0]}, {"N": stored.tiles[0], "M": sides.tiles[1]}
    with computing(executor, "solve", a, BigMatrix(sides), check=check) as computation:
        if assume_a == "positive definite":
            lower = like(stored, rows=stored.rows, columns=stored.rows, structure="lower")
            factor = computation.run(equations.cholesky, n, {"A": stored}, {"L": lower})
            half = computation.run(equations.forward_substitution, both, {"L": factor["L"], "B": sides}, {"X": unknown})
            made = computation.run(equations.adjoint_substitution, both, {"L": factor["L"], "B": half["X"]}, {"X": unknown})
            _warn_of_condition(computation, "cholesky_condition", factor["L"], what="solve", check=check)
            computation.scratch(factor["L"], half["X"])
        elif assume_a == "general":
            made = {"X": _solved(computation, stored, sides, unknown, what="solve", check=check)}
        else:
            raise JobError(f"assume_a = {assume_a!r}", remedy="use 'general' or 'positive definite'")
    return computation.result(made["X"])


@on_computed
def inv(a: BigMatrix, *, check: bool = True, executor: FunctionExecutor | None = None) -> BigMatrix:
    """The inverse, by LU with tournament pivoting. For equations use `solve`, which takes a third of the work and is more accurate.

    Args:
        a: shape [n, n], with square tiles.
        check: as for `solve`.
        executor: runs the tasks.

    Raises:
        JobError: it is not square.
        NotFinite: a value is NaN or infinite.
        SingularMatrix: it is singular; names the tile and the row.

    Warns:
        LinAlgWarning: as for `solve`.
    """
    stored = square(a, what="inv")
    full = like(stored, rows=stored.rows, columns=stored.columns)
    with computing(executor, "inv", a, check=check) as computation:
        made = computation.run(
            products.identity, {"N": stored.tiles[0]}, {"A": stored}, {"C": dataclasses.replace(full, structure="diagonal")}
        )
        identity = made["C"]
        assert isinstance(identity, StoredMatrix)
        found = _solved(computation, stored, identity, full, what="inv", check=check)
        computation.scratch(identity)
    return computation.result(found)


@on_computed
def qr(a: BigMatrix, *, check: bool = True, executor: FunctionExecutor | None = None) -> tuple[BigMatrix, BigMatrix]:
    """Q with orthonormal columns and upper R with A = Q R: TSQR for one column of tiles, else tiled QR with a tree in each column.

    Args:
        a: shape [m, n]; with square tiles where it has several columns of them, or more columns than rows.
        check: refuse values that are NaN or infinite.
        executor: runs the tasks.

    Returns:
        Q, of shape [m, k], and R, of shape [k, n], k = min(m, n).

    Raises:
        JobError: it has tiles that are not square, or lower than a column of tiles is wide.
        NotFinite: a value is NaN or infinite.
    """
    stored = a.stored
    if stored.rows >= stored.columns:
        check_tall(stored, what="qr")
    else:
        _check_tiles(a, what="qr")
    with computing(executor, "qr", a, check=check) as computation:
        if stored.tiles[1] == 1 and stored.rows >= stored.columns:
            made = computation.run(qr_programs.tsqr, {"M": stored.tiles[0]}, {"A": stored}, tall_outputs(stored))
        else:
            made = tiled_qr(computation, stored)
    return computation.result(made["Q"]), computation.result(made["R"])


@on_computed
def lstsq(a: BigMatrix, b: BigMatrix | npt.NDArray[Any], *, check: bool = True, executor: FunctionExecutor | None = None) -> BigMatrix:
    """X that minimises the norm of A X - B, by QR; of all of them the one of least norm, where A has not full rank.

    The rank is NumPy's: singular values below m units of rounding of the largest one count as zero. They are computed, from R and in one
    function, where the estimated condition number says that there may be such values.

    Args:
        a: shape [m, n], m ≥ n.
        b: shape [m, k], with tiles of as many rows as those of A; or an array, of shape [m, k] or [m] for one column.
        check: refuse values that are NaN or infinite.
        executor: runs the tasks.

    Returns:
        X, of shape [n, k].

    Raises:
        JobError: the shapes or types do not fit.
        NotFinite: a value is NaN or infinite.
        SingularMatrix: A has not full rank, and R does not fit into the memory of one function.

    Warns:
        LinAlgWarning: SciPy's. A has not full rank.
    """
    stored = a.stored
    check_tall(stored, what="lstsq")
    sides = sides_of(stored, b, what="lstsq")
    unknown = dataclasses.replace(
        like(sides, rows=stored.columns, columns=sides.columns), store=stored.store, tile_rows=stored.tile_columns
    )
    with computing(executor, "lstsq", a, BigMatrix(sides), check=check) as computation:
        if stored.tiles[1] == 1:
            factors = computation.run(qr_programs.tsqr, {"M": stored.tiles[0]}, {"A": stored}, tall_outputs(stored))
        else:
            factors = tiled_qr(computation, stored)
        q = factors["Q"]
        assert isinstance(q, StoredMatrix)
        (m, n), k = q.tiles, sides.tiles[1]
        projected = computation.run(products.matmul, {"M": n, "N": k, "K": m}, {"A": q.H, "B": sides}, {"C": unknown})
        inverse = _pseudo_inverse(computation, factors["R"], rows=stored.rows)
        if inverse is None:
            made = computation.run(
                equations.backward_substitution,
                {"N": stored.tiles[1], "M": sides.tiles[1]},
                {"U": factors["R"], "B": projected["C"]},
                {"X": unknown},
            )["X"]
        else:
            made = computation.run(products.matmul, {"M": n, "N": k, "K": n}, {"A": inverse, "B": projected["C"]}, {"C": unknown})["C"]
        computation.scratch(*factors.values(), projected["C"])
    return computation.result(made)


def _pseudo_inverse(computation: Computation, triangle: Tiles, *, rows: int) -> StoredMatrix | None:
    """Of R, where it has not full rank; None: it has."""
    assert isinstance(triangle, StoredMatrix)
    n, eps = triangle.columns, float(np.finfo(triangle.dtype).eps)
    reciprocal = reciprocal_condition(computation, "triangle_condition", triangle)
    if reciprocal is None or reciprocal > _SUSPICIOUS * n * rows * eps:
        return None
    if not fits("pseudo_inverse", triangle, computation.memory_mb):
        if reciprocal > rows * eps:
            return None
        raise SingularMatrix(
            f"the {n} columns depend on each other: the condition number of R is {1 / max(reciprocal, 1e-300):.1e} or more; leave columns out, or "
            "give functions more memory for the solution of least norm",
            kernel="lstsq",
        )
    square = dataclasses.replace(triangle, structure="full")
    inverse, values = computation.gather("pseudo_inverse", triangle, [square, row_of_values(triangle, n)], number=rows)
    computation.scratch(inverse)
    s = computation.values(values)
    rank = int(np.count_nonzero(s > eps * rows * s[0]))
    if rank == n:
        return None
    warnings.warn(f"lstsq: the rank is {rank}, of {n} columns; X is the solution of least norm", LinAlgWarning, stacklevel=4)
    return inverse


_SUSPICIOUS = 10.0
"""Factor by which the estimated condition number in the 1-norm may be less than that of singular values, beside the size of the matrix."""


def _warn_of_condition(computation: Computation, solver: str, factor: Tiles, *, what: str, check: bool, **more: Any) -> None:
    """Warns as SciPy does."""
    assert isinstance(factor, StoredMatrix)
    reciprocal = reciprocal_condition(computation, solver, factor, **more) if check else None
    if reciprocal is not None and reciprocal < np.finfo(factor.dtype).eps:
        about = f"about {1 / reciprocal:.1e}" if reciprocal > 0 else "infinite"
        warnings.warn(
            f"{what}: the matrix is ill-conditioned, the result may have no correct digits: its condition number is {about} (1-norm, estimated "
            "from its factors)",
            LinAlgWarning,
            stacklevel=4,
        )


def _solved(computation: Computation, stored: StoredMatrix, sides: StoredMatrix, unknown: StoredMatrix, *, what: str, check: bool) -> Tiles:
    """X with A X = B, by LU."""
    factors, sizes = _lu(computation, stored), {"N": stored.tiles[0], "M": sides.tiles[1]}
    half = computation.run(equations.lu_forward, sizes, {"L": factors["L"], "P": factors["P"], "B": sides}, {"X": unknown})
    made = computation.run(equations.backward_substitution, sizes, {"U": factors["U"], "B": half["X"]}, {"X": unknown})
    _warn_of_condition(
        computation,
        "lu_condition",
        factors["U"],
        what=what,
        check=check,
        others=[factors["L"]],
        family=factors["P"],
        family_tiles=stored.tiles[0],
    )
    computation.scratch(*factors.values(), half["X"])
    return made["X"]


def _lu(computation: Computation, stored: StoredMatrix) -> dict[str, Tiles]:
    lower = like(stored, rows=stored.rows, columns=min(stored.shape), structure="lower")
    upper = like(stored, rows=min(stored.shape), columns=stored.columns, structure="upper")
    outputs: dict[str, Tiles] = {"L": lower, "U": upper, "P": computation.family()}
    return computation.run(equations.lu, _sizes(stored), {"A": stored}, outputs)


def _check_tiles(a: BigMatrix, *, what: str) -> None:
    if a.tile[0] != a.tile[1]:
        raise JobError(
            f"{what} needs square tiles, those of this matrix are {a.tile[0]} x {a.tile[1]}", remedy=f"store it with tile={min(a.tile)}"
        )


def _sizes(stored: StoredMatrix) -> dict[str, int]:
    return {"M": stored.tiles[0], "N": stored.tiles[1]}


def _pivots(made: Tiles, steps: int) -> list[npt.NDArray[Any]]:
    return [family_tile(made, (k, 0)) for k in range(steps)]


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
