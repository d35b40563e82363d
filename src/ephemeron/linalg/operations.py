"""Factorisations, products and equations of matrices that are stored as tiles: what users call.

Each takes `executor=`, a `FunctionExecutor`; without one, functions of this machine are started for it. What a function returns has
the figures of the computation in `.report`. A computation that was interrupted goes on from its tiles when it is called again with the
same stored inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.algorithms import cholesky as cholesky_programs
from ephemeron.linalg.algorithms import lu as lu_programs
from ephemeron.linalg.algorithms import products, tall, triangular
from ephemeron.linalg.computation import (
    Computation,
    check_tall,
    computing,
    family_tile,
    like,
    on_computed,
    sides_of,
    square,
    tall_outputs,
    tiled_qr,
)
from ephemeron.linalg.kernels.pivoting import exchange_rows, gather_pivots
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg.matrices.stored import StoredMatrix, Tiles


@on_computed
def cholesky(a: BigMatrix, *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """Lower L with L Lᴴ = A, by the algorithm of NumPyWren (survey 2.4, figure 16). Reads the lower tiles of A.

    Args:
        a: shape [n, n], Hermitian and positive definite, with square tiles.
        executor: runs the tasks.

    Raises:
        JobError: it is not square.
        NotPositiveDefinite: it is not; names the tile, and the row in it.
    """
    stored = square(a, what="cholesky")
    with computing(executor, "cholesky", a) as computation:
        lower = like(stored, rows=stored.rows, columns=stored.rows, structure="lower")
        made = computation.run(cholesky_programs.cholesky, {"N": stored.tiles[0]}, {"A": stored}, {"L": lower})
    return computation.result(made["L"])


@on_computed
def lu(a: BigMatrix, *, executor: FunctionExecutor | None = None) -> tuple[npt.NDArray[np.int64], BigMatrix, BigMatrix]:
    """Rows p, unit lower L and upper U with A[p] = L U, by tournament pivoting (CALU: Grigori, Demmel, Xiang 2011).

    Args:
        a: shape [m, n], with square tiles.
        executor: runs the tasks.

    Returns:
        p, of shape [m]; L, of shape [m, k], and U, of shape [k, n], k = min(m, n).

    Raises:
        JobError: its tiles are not square.
        SingularMatrix: a pivot is exactly zero: the rank is less than k.
    """
    stored = a.stored
    _check_tiles(a, what="lu")
    with computing(executor, "lu", a) as computation:
        factors = _lu(computation, stored)
        lower = like(stored, rows=stored.rows, columns=min(stored.shape), structure="lower")
        made = computation.run(
            lu_programs.permuted_lower, _sizes(stored), {"L": factors["L"], "P": factors["P"]}, {"F": lower}
        )  # fmt: skip
        order = _order(_pivots(factors["P"], min(stored.tiles)), stored)
        computation.scratch(factors["L"], factors["P"])
    return order, computation.result(made["F"]), computation.result(factors["U"])


@on_computed
def solve(
    a: BigMatrix,
    b: BigMatrix | npt.NDArray[Any],
    *,
    assume_a: str = "general",
    executor: FunctionExecutor | None = None,
) -> BigMatrix:
    """X with A X = B.

    Args:
        a: shape [n, n], with square tiles.
        b: shape [n, k], with tiles of as many rows as those of A; or an array, of shape [n, k] or [n] for one column.
        assume_a: `general`: by LU with tournament pivoting; `positive definite`: by Cholesky, half the work.
        executor: runs the tasks.

    Raises:
        JobError: the shapes or types do not fit.
        SingularMatrix, NotPositiveDefinite: A is singular, or not positive definite; names the tile.
    """
    stored = square(a, what="solve")
    sides = sides_of(stored, b, what="solve")
    unknown = dataclasses.replace(
        like(sides, rows=sides.rows, columns=sides.columns), store=stored.store, tile_rows=stored.tile_rows
    )
    n, both = {"N": stored.tiles[0]}, {"N": stored.tiles[0], "M": sides.tiles[1]}
    with computing(executor, "solve", a) as computation:
        if assume_a == "positive definite":
            lower = like(stored, rows=stored.rows, columns=stored.rows, structure="lower")
            factor = computation.run(cholesky_programs.cholesky, n, {"A": stored}, {"L": lower})
            half = computation.run(
                triangular.forward_substitution, both, {"L": factor["L"], "B": sides}, {"X": unknown}
            )
            made = computation.run(
                triangular.adjoint_substitution, both, {"L": factor["L"], "B": half["X"]}, {"X": unknown}
            )
            computation.scratch(factor["L"], half["X"])
        elif assume_a == "general":
            made = {"X": _solved(computation, stored, sides, unknown)}
        else:
            raise JobError(f"assume_a = {assume_a!r}", remedy="use 'general' or 'positive definite'")
    return computation.result(made["X"])


@on_computed
def inv(a: BigMatrix, *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """The inverse, by LU with tournament pivoting. For equations use `solve`, which takes a third of the work and is more accurate.

    Args:
        a: shape [n, n], with square tiles.
        executor: runs the tasks.

    Raises:
        JobError: it is not square.
        SingularMatrix: it is singular; names the tile.
    """
    stored = square(a, what="inv")
    full = like(stored, rows=stored.rows, columns=stored.columns)
    with computing(executor, "inv", a) as computation:
        made = computation.run(
            products.identity, {"N": stored.tiles[0]}, {"A": stored}, {"C": dataclasses.replace(full, structure="diagonal")}
        )  # fmt: skip
        identity = made["C"]
        assert isinstance(identity, StoredMatrix)
        found = _solved(computation, stored, identity, full)
        computation.scratch(identity)
    return computation.result(found)


@on_computed
def qr(a: BigMatrix, *, executor: FunctionExecutor | None = None) -> tuple[BigMatrix, BigMatrix]:
    """Q with orthonormal columns and upper R with A = Q R: TSQR for one column of tiles, else tiled QR with a tree in each column.

    Args:
        a: shape [m, n]; with square tiles where it has several columns of them, or more columns than rows.
        executor: runs the tasks.

    Returns:
        Q, of shape [m, k], and R, of shape [k, n], k = min(m, n).

    Raises:
        JobError: it has tiles that are not square, or lower than a column of tiles is wide.
    """
    stored = a.stored
    if stored.rows >= stored.columns:
        check_tall(stored, what="qr")
    else:
        _check_tiles(a, what="qr")
    with computing(executor, "qr", a) as computation:
        if stored.tiles[1] == 1 and stored.rows >= stored.columns:
            made = computation.run(tall.tsqr, {"M": stored.tiles[0]}, {"A": stored}, tall_outputs(stored))
        else:
            made = tiled_qr(computation, stored)
    return computation.result(made["Q"]), computation.result(made["R"])


@on_computed
def lstsq(a: BigMatrix, b: BigMatrix | npt.NDArray[Any], *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """X that minimises the norm of A X - B, for A of full rank, by QR.

    Args:
        a: shape [m, n], m ≥ n.
        b: shape [m, k], with tiles of as many rows as those of A; or an array, of shape [m, k] or [m] for one column.
        executor: runs the tasks.

    Returns:
        X, of shape [n, k].

    Raises:
        JobError: the shapes or types do not fit.
        SingularMatrix: A has not full rank, exactly.
    """
    stored = a.stored
    check_tall(stored, what="lstsq")
    sides = sides_of(stored, b, what="lstsq")
    unknown = dataclasses.replace(
        like(sides, rows=stored.columns, columns=sides.columns), store=stored.store, tile_rows=stored.tile_columns
    )
    with computing(executor, "lstsq", a) as computation:
        if stored.tiles[1] == 1:
            factors = computation.run(tall.tsqr, {"M": stored.tiles[0]}, {"A": stored}, tall_outputs(stored))
        else:
            factors = tiled_qr(computation, stored)
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


def _solved(computation: Computation, stored: StoredMatrix, sides: StoredMatrix, unknown: StoredMatrix) -> Tiles:
    """X with A X = B, by LU."""
    factors, sizes = _lu(computation, stored), {"N": stored.tiles[0], "M": sides.tiles[1]}
    half = computation.run(
        lu_programs.lu_forward, sizes, {"L": factors["L"], "P": factors["P"], "B": sides}, {"X": unknown}
    )
    made = computation.run(
        triangular.backward_substitution, sizes, {"U": factors["U"], "B": half["X"]}, {"X": unknown}
    )  # fmt: skip
    computation.scratch(*factors.values(), half["X"])
    return made["X"]


def _lu(computation: Computation, stored: StoredMatrix) -> dict[str, Tiles]:
    lower = like(stored, rows=stored.rows, columns=min(stored.shape), structure="lower")
    upper = like(stored, rows=min(stored.shape), columns=stored.columns, structure="upper")
    outputs: dict[str, Tiles] = {"L": lower, "U": upper, "P": computation.family()}
    return computation.run(lu_programs.lu, _sizes(stored), {"A": stored}, outputs)


def _check_tiles(a: BigMatrix, *, what: str) -> None:
    if a.tile[0] != a.tile[1]:
        raise JobError(
            f"{what} needs square tiles, those of this matrix are {a.tile[0]} x {a.tile[1]}",
            remedy=f"store it with tile={min(a.tile)}",
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
