"""Singular values and eigenvalues of matrices that are stored as tiles: what users call.

What one function can hold is solved there, after QR where a matrix is tall. Values alone of larger matrices come from a band: functions
reduce the matrix, one of them solves the band, whose width is that of a tile. Vectors of the band can be transformed back, too
(`method="band"`); but LAPACK's dense algorithms are its fastest with vectors, so the one function then holds as much as without a band.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.algorithms import qr as qr_programs
from ephemeron.linalg.algorithms import spectral as programs
from ephemeron.linalg.computation import Computation, check_tall, computing, like, on_computed, row_of_values, square, tall_outputs
from ephemeron.linalg.execution.gathered import check_memory, solver_bytes
from ephemeron.linalg.execution.program_data import run_name
from ephemeron.linalg.kernels.spectra import NARROW
from ephemeron.linalg.language.program import Program
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg.matrices.stored import StoredMatrix, Tiles

_METHODS = ("auto", "band", "one function")
_Factors = tuple[BigMatrix, npt.NDArray[Any], BigMatrix]


@on_computed
def svd(a: BigMatrix, *, method: str = "auto", check: bool = True, executor: FunctionExecutor | None = None) -> _Factors:
    """U, singular values and Vᴴ with A = U diag(s) Vᴴ, of which U and Vᴴ have k = min(m, n) columns and rows.

    Args:
        a: shape [m, n]; with square tiles where the shorter side has several.
        method: `band`: reduction to band form, LAPACK on the band, back transformation; `one function`: the matrix, or R of its
            QR factorisation, in one function; `auto`: TSQR for one column of tiles, else `one function`.
        check: refuse values that are NaN or infinite.
        executor: runs the tasks.

    Returns:
        U, of shape [m, k]; s, of shape [k], descending; Vᴴ, of shape [k, n].

    Raises:
        JobError: tiles are not square, or one function has not enough memory.
        NotFinite: a value is NaN or infinite.
    """
    _check_method(method)
    if a.shape[0] < a.shape[1]:
        left, s, right = svd(a.H, method=method, check=check, executor=executor)
        return BigMatrix(right.stored.H, right.report), s, BigMatrix(left.stored.H, left.report)
    check_tall(a.stored, what="svd")
    with computing(executor, "svd", a, check=check) as computation:
        if a.stored.tiles[1] == 1 and method == "auto":
            return _tall_svd(computation, a.stored)
        _check_solver(computation, "svd", a.stored)
        return _general_svd(computation, a.stored, "one function" if method == "auto" else method)


@on_computed
def svdvals(a: BigMatrix, *, method: str = "auto", check: bool = True, executor: FunctionExecutor | None = None) -> npt.NDArray[Any]:
    """Singular values, descending: shape [min(m, n)]. By way of a band where there are many columns of tiles.

    Args and raises: as for `svd`; `auto` takes the band from 17 columns of tiles on, and where one function could not hold the matrix.
    """
    _check_method(method)
    a = a if a.shape[0] >= a.shape[1] else a.H
    stored = a.stored
    check_tall(stored, what="svdvals")
    with computing(executor, "svdvals", a, check=check) as computation:
        chosen = _chosen(computation, "svdvals", stored, method)
        core = stored
        if stored.rows > stored.columns and (chosen == "one function" or stored.tiles[0] >= 2 * stored.tiles[1]):
            core = _triangle(computation, stored)["R"]
        if chosen == "band":
            core = _upper_band(computation, core)["B"]
        return computation.values(computation.gather("svdvals", core, [row_of_values(core, stored.columns)])[0])


@on_computed
def eigh(
    a: BigMatrix, *, method: str = "auto", check: bool = True, executor: FunctionExecutor | None = None
) -> tuple[npt.NDArray[Any], BigMatrix]:
    """Eigenvalues and orthonormal eigenvectors of a Hermitian matrix: A V = V diag(w).

    Args:
        a: shape [n, n], with square tiles.
        method: `band`: reduction to band form, LAPACK on the band, back transformation; `one function` or `auto`: in one function.
        check: refuse values that are NaN or infinite.
        executor: runs the tasks.

    Returns:
        w, of shape [n], ascending, and V, of shape [n, n].

    Raises:
        JobError: it is not square, or one function has not enough memory.
        NotHermitian: it is further than 1,000 units of rounding from its adjoint; names values and tile.
        NotFinite: a value is NaN or infinite.
    """
    _check_method(method)
    stored = square(a, what="eigh")
    n, full = stored.tiles[0], like(stored, rows=stored.rows, columns=stored.rows)
    with computing(executor, "eigh", a, check=check) as computation:
        _check_solver(computation, "eigh", stored)
        if method != "band":
            w, v = computation.gather("eigh", stored, [row_of_values(stored, stored.rows), full])
            return computation.values(w), computation.result(v)
        reduced = _hermitian_band(computation, stored)
        w, v = computation.gather("eigh", reduced["B"], [row_of_values(stored, stored.rows), full])
        made = computation.run(programs.apply_band_q, {"N": n, "K": n}, {"V": reduced["V"], "T": reduced["T"], "B": v}, {"X": full})
        computation.scratch(v)
        return computation.values(w), computation.result(made["X"])


@on_computed
def eigvalsh(a: BigMatrix, *, method: str = "auto", check: bool = True, executor: FunctionExecutor | None = None) -> npt.NDArray[Any]:
    """Eigenvalues of a Hermitian matrix, ascending: shape [n]. By way of a band where there are many columns of tiles.

    Args and raises: as for `eigh`; `auto` as for `svdvals`.
    """
    _check_method(method)
    stored = square(a, what="eigvalsh")
    with computing(executor, "eigvalsh", a, check=check) as computation:
        core = stored
        if _chosen(computation, "eigvalsh", stored, method) == "band":
            core = _hermitian_band(computation, stored)["B"]
        return computation.values(computation.gather("eigvalsh", core, [row_of_values(stored, stored.rows)])[0])


@on_computed
def randomized_svd(
    a: BigMatrix,
    k: int,
    *,
    oversampling: int = 10,
    iterations: int = 2,
    seed: int = 0,
    check: bool = True,
    executor: FunctionExecutor | None = None,
) -> _Factors:
    """The k largest singular values and their vectors, approximately (Halko, Martinsson, Tropp 2011, algorithms 4.4 and 5.1).

    The error of the best approximation of rank k is exceeded by a factor that falls with every power iteration; it is near one
    where singular values fall fast.

    Args:
        a: shape [m, n].
        k: number of singular values.
        oversampling: further columns of the random matrix.
        iterations: power iterations, each with orthonormal bases.
        seed: of the random matrix.
        check: refuse values that are NaN or infinite.
        executor: runs the tasks.

    Returns:
        U, of shape [m, k]; s, of shape [k], descending; Vᴴ, of shape [k, n].

    Raises:
        JobError: k is not between 1 and the shorter side, or a count is negative.
        NotFinite: a value is NaN or infinite.
    """
    stored = a.stored
    shorter = min(stored.shape)
    if not 1 <= k <= shorter:
        raise JobError(f"k = {k} singular values of a matrix of {stored.rows} x {stored.columns}", remedy=f"use 1 to {shorter}")
    if oversampling < 0 or iterations < 0:
        raise JobError(f"oversampling = {oversampling}, iterations = {iterations}", remedy="use 0 or more")
    width = min(k + oversampling, shorter)

    sample = _sample(stored, width, seed)
    with computing(executor, "randomized_svd", a, check=check) as computation:
        computation.owners.begin([sample.stored])
        left = dataclasses.replace(like(stored, rows=stored.rows, columns=k), tile_columns=k)
        right = dataclasses.replace(like(stored, rows=stored.columns, columns=k), tile_rows=stored.tile_columns, tile_columns=k)
        made = computation.run(
            programs.randomized_svd,
            {"M": stored.tiles[0], "N": stored.tiles[1], "R": iterations + 1, "L": k},
            {"A": stored, "O": sample.stored},
            {"U": left, "D": row_of_values(stored, k), "V": right},
        )
        computation.scratch(sample.stored)
        return _factors(computation, made["U"], made["D"], _stored(made["V"]).H)


def _sample(stored: StoredMatrix, width: int, seed: int) -> BigMatrix:
    """The random matrix. Its name follows from what it is for, so that a computation that was interrupted finds it and its own tiles."""

    def normal(rows: slice, columns: slice) -> npt.NDArray[Any]:
        random, shape = np.random.default_rng((seed, rows.start)), (rows.stop - rows.start, width)
        found: npt.NDArray[Any] = random.standard_normal(shape).astype(stored.dtype)
        return found + 1j * random.standard_normal(shape) if np.iscomplexobj(found) else found

    name = f"sample-{run_name('normal', {'width': width, 'seed': seed}, {'A': stored})}"
    try:
        return BigMatrix.open(stored.store, name)
    except JobError:  # there is none yet
        found = dataclasses.replace(like(stored, rows=stored.columns, columns=width), name=name)
        return BigMatrix.stored_as(dataclasses.replace(found, tile_rows=stored.tile_columns, tile_columns=width), normal)


def _tall_svd(computation: Computation, stored: StoredMatrix) -> _Factors:
    m, outputs = {"M": stored.tiles[0]}, tall_outputs(stored)
    factors = computation.run(qr_programs.tsqr, m, {"A": stored}, outputs)
    made = computation.run(
        qr_programs.tall_svd, m, factors, {"U": outputs["Q"], "D": row_of_values(stored, stored.columns), "W": outputs["R"]}
    )
    computation.scratch(*factors.values())
    return _factors(computation, made["U"], made["D"], made["W"])


def _general_svd(computation: Computation, stored: StoredMatrix, method: str) -> _Factors:
    (m, n), columns = stored.tiles, stored.columns
    core, before = stored, None
    if stored.rows > columns and (method == "one function" or m >= 2 * n):
        before = _triangle(computation, stored)
        core = before["R"]
    small = like(stored, rows=columns, columns=columns)
    if method == "band":
        reduced = _upper_band(computation, core)
        u, s, vh = computation.gather("svd", reduced["B"], [small, row_of_values(stored, columns), small])
        left = computation.run(
            programs.apply_thin_q,
            {"M": core.tiles[0], "N": n, "K": n},
            {"V": reduced["V"], "T": reduced["T"], "B": u},
            {"X": like(stored, rows=core.rows, columns=columns)},
        )["X"]
        right = computation.run(programs.apply_band_q, {"N": n, "K": n}, {"V": reduced["H"], "T": reduced["J"], "B": vh.H}, {"X": small})[
            "X"
        ]
        computation.scratch(u, vh)
        vh = _stored(right).H
    else:
        left, s, vh = computation.gather("svd", core, [small, row_of_values(stored, columns), small])
    if before is not None:
        inner = left
        left = computation.run(
            programs.apply_thin_q,
            {"M": m, "N": n, "K": n},
            {"V": before["V"], "T": before["T"], "B": inner},
            {"X": like(stored, rows=stored.rows, columns=columns)},
        )["X"]
        computation.scratch(inner)
    return _factors(computation, left, s, vh)


def _triangle(computation: Computation, stored: StoredMatrix) -> dict[str, Any]:
    """R, and the reflectors V and T of Q."""
    upper = like(stored, rows=stored.columns, columns=stored.columns, structure="upper")
    sizes = {"M": stored.tiles[0], "N": stored.tiles[1]}
    return _reduced(computation, qr_programs.qr, sizes, stored, {"R": upper}, "VT")


def _upper_band(computation: Computation, core: StoredMatrix) -> dict[str, Any]:
    two = like(core, rows=core.columns, columns=core.columns, structure="upper band")
    sizes = {"M": core.tiles[0], "N": core.tiles[1]}
    return _reduced(computation, programs.upper_band, sizes, core, {"B": two}, "VTHJ")


def _hermitian_band(computation: Computation, stored: StoredMatrix) -> dict[str, Any]:
    two = like(stored, rows=stored.rows, columns=stored.rows, structure="lower band")
    return _reduced(computation, programs.hermitian_band, {"N": stored.tiles[0]}, stored, {"B": two}, "VT")


def _reduced(
    computation: Computation, program: Program, sizes: dict[str, int], a: StoredMatrix, outputs: dict[str, StoredMatrix], families: str
) -> dict[str, Any]:
    """Results of a reduction, all of which are removed at the end: a matrix, and reflectors."""
    made = computation.run(program, sizes, {"A": a}, outputs | {name: computation.family() for name in families})
    computation.scratch(*made.values())
    return made


def _factors(computation: Computation, u: Tiles, s: Tiles, vh: Tiles) -> _Factors:
    values = computation.values(_stored(s))
    return computation.result(u), values, computation.result(vh)


def _stored(made: Tiles) -> StoredMatrix:
    assert isinstance(made, StoredMatrix)
    return made


def _chosen(computation: Computation, solver: str, stored: StoredMatrix, method: str) -> str:
    """`band` or `one function`, where memory is enough for it."""
    size, memory = _itemsize(stored), computation.memory_mb
    fits = solver_bytes(solver, stored.columns, stored.columns, size) <= memory * 2**20
    if method == "auto":
        method = "one function" if fits and stored.tiles[1] <= NARROW else "band"
    width = stored.tile_columns if method == "band" else None
    check_memory(solver, stored.columns, stored.columns, size, band=width, memory_mb=memory)
    return method


def _check_solver(computation: Computation, solver: str, stored: StoredMatrix) -> None:
    check_memory(solver, stored.columns, stored.columns, _itemsize(stored), band=None, memory_mb=computation.memory_mb)


def _itemsize(stored: StoredMatrix) -> int:
    return np.dtype(stored.dtype).itemsize


def _check_method(method: str) -> None:
    if method not in _METHODS:
        raise JobError(f"method = {method!r}", remedy=f"use one of {', '.join(map(repr, _METHODS))}")
