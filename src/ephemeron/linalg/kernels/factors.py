"""Cholesky factors of tiles, and equations with triangular tiles (LAPACK potrf, BLAS trsm).

Triangular factors and equations of one tile, by BLAS and LAPACK without the interpreter lock (`lapack`).

OpenBLAS solves triangular equations at half the speed of a product, and at a third for few columns at the left. So equations are brought to the
form X op(T) = B in Fortran order, and are halved: all but the diagonal blocks of T is a product (recursive blocking; Elmroth, Gustavson, Jonsson,
Kågström 2004). Arrays may be in C or Fortran order; results are in the order in which they were computed.

Condition numbers from factors, in one function: LAPACK's estimates (trcon, gecon, pocon), which cost some equations with one right-hand side.

They are lower bounds that are rarely off by more than a factor of three (Higham 1988). The norm of the matrix itself is estimated from its factors
in the same way, so that nothing but them is read.

LU with tournament pivoting (Grigori, Demmel, Xiang: CALU, 2011): the choice of pivot rows, and their exchange between tiles.

A list of pivots is an array of int64 (b × 2): number of the tile row, and row in it, of each pivot in order. It defines a permutation:
pivot p goes to row p of the top tile; rows of the top tile that are no pivots go, in order, to the places that pivots of other
tiles left, in the order of the pivots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ephemeron.errors import NotPositiveDefinite, SingularMatrix
from ephemeron.linalg.kernels.lapack import Array, add_product, adjoint_of, blas, fortran, lapack, leading, scale_of_tiny, solve_right
from ephemeron.linalg.kernels.spectra import Blocks, singular_vectors
from ephemeron.linalg.language.kernel import kernel

Shape = Sequence[int]


@kernel(flops=lambda a: a[0] ** 3 / 3)
def cholesky_factor(a: Array) -> Array:
    """Lower L with L Lᴴ = a. Reads the lower triangle of `a` (n × n).

    Raises:
        NotPositiveDefinite: a leading block is not positive definite.
    """
    factor, info = cholesky_triangle(a)
    if info > 0 or not np.isfinite(factor.diagonal()).all():
        position = info - 1 if info > 0 else int(np.argmin(np.isfinite(factor.diagonal())))
        raise NotPositiveDefinite(
            f"the leading block of order {position + 1} of the tile is not positive definite", kernel="cholesky_factor", position=position
        )
    return factor


def _left_flops(t: Shape, b: Shape, **options: Any) -> float:
    return float(t[0] ** 2 * b[1])


def _solved(name: str, t: Array, b: Array, **options: bool) -> Array:
    if not options.get("unit") and not np.all(t.diagonal()):
        position = int(np.argmin(t.diagonal() != 0))
        raise SingularMatrix(f"the diagonal is zero at {position}", kernel=name, position=position)
    return triangular_solution(t, b, **options)


@kernel(flops=_left_flops)
def solve_lower(t: Array, b: Array, *, unit: bool = False) -> Array:
    """X with L X = b, where L is the lower triangle of `t`, with ones on the diagonal where `unit`.

    Raises:
        SingularMatrix: a diagonal element is zero. The same for the other triangular kernels.
    """
    return _solved("solve_lower", t, b, unit=unit)


@kernel(flops=_left_flops)
def solve_lower_adjoint(t: Array, b: Array, *, unit: bool = False) -> Array:
    """X with Lᴴ X = b, where L is the lower triangle of `t`."""
    return _solved("solve_lower_adjoint", t, b, adjoint=True, unit=unit)


@kernel(flops=_left_flops)
def solve_upper(t: Array, b: Array) -> Array:
    """X with U X = b, where U is the upper triangle of `t`."""
    return _solved("solve_upper", t, b, lower=False)


@kernel(flops=lambda t, b: float(t[0] ** 2 * b[0]))
def solve_right_lower_adjoint(t: Array, b: Array) -> Array:
    """X with X Lᴴ = b, where L is the lower triangle of `t`."""
    return _solved("solve_right_lower_adjoint", t, b, right=True, adjoint=True)


# -- triangular factors and equations of one tile -----------------------------------------------------------------


_BASE = 64
"""Rows of the triangles that BLAS solves."""


def triangular_solution(t: Array, b: Array, *, right: bool = False, lower: bool = True, adjoint: bool = False, unit: bool = False) -> Array:
    """X with op(t) X = b, or X op(t) = b.

    Args:
        t: its triangle (n × n) is read.
        b: right-hand sides.
        right: X is at the left of op(t).
        lower: the lower triangle, not the upper one.
        adjoint: op is the adjoint, not nothing.
        unit: the diagonal is ones.
    """
    dtype = np.result_type(t, b)
    if (scale := scale_of_tiny(t)) != 1:
        t, b = t * dtype.type(scale), b * dtype.type(scale)
    of = fortran(t, dtype)
    if right:
        x = np.array(b, dtype, order="F")
        _solve(x, of, lower=lower, op=adjoint_of(dtype) if adjoint else b"N", unit=unit)
        return x
    x = np.array(b, dtype, order="C")  # the transposed equation: Xᵀ op(t)ᵀ = bᵀ
    if adjoint:
        _solve(x.T, of.conj() if dtype.kind == "c" else of, lower=lower, op=b"N", unit=unit)
    else:
        _solve(x.T, of, lower=lower, op=b"T", unit=unit)
    return x


def _solve(x: Array, t: Array, *, lower: bool, op: bytes, unit: bool) -> None:
    """`x = x op(t)⁻¹`."""
    n = len(t)
    if n <= _BASE:
        solve_right(x, t, lower=lower, op=op, unit=unit)
        return
    half = 8 * ((n // 2 + 7) // 8)
    first, second = slice(0, half), slice(half, n)
    off = t[second, first] if lower else t[first, second]
    done, left = (second, first) if lower == (op == b"N") else (first, second)  # op(t) is a lower triangle, or not
    _solve(x[:, done], t[done, done], lower=lower, op=op, unit=unit)
    add_product(x[:, left], x[:, done], off, alpha=-1.0, op_b=op)
    _solve(x[:, left], t[left, left], lower=lower, op=op, unit=unit)


def cholesky_triangle(a: Array) -> tuple[Array, int]:
    """Lower L with L Lᴴ = a, from the lower triangle of `a` (n × n), and LAPACK's `info` (potrf)."""
    x = np.array(a, order="F")
    info = lapack("potrf", x.dtype, b"L", len(x), x, leading(x))
    return np.triu(x.T).T, info


def rank_k_difference(c: Array, a: Array) -> Array:
    """`c - a aᴴ` in the lower triangle, `c` above it (BLAS syrk, herk). `c` is n × n and Hermitian, `a` is n × k."""
    dtype = np.result_type(c, a)
    x = np.array(c, dtype, order="C")  # its transpose: c̄ - ā aᵀ above the diagonal
    is_complex, real = dtype.kind == "c", np.dtype(dtype.char.lower())
    if a.flags.f_contiguous and not is_complex:
        op, of, k = b"N", fortran(a, dtype), a.shape[1]
    else:
        op, of, k = adjoint_of(dtype), fortran(a.T, dtype), a.shape[1]
    blas(
        "herk" if is_complex else "syrk",
        dtype,
        b"U",
        op,
        len(x),
        k,
        np.full(1, -1.0, real),
        of,
        leading(of),
        np.ones(1, real),
        x.T,
        leading(x.T),
    )
    return x


def row_factors(a: Array) -> tuple[Array, Array, int]:
    """L and U in one matrix, the row that was exchanged with each, from 0, and LAPACK's `info` (getrf) of `a` (m × n)."""
    x, swaps, scale = np.array(a, order="F"), np.zeros(min(a.shape), np.intc), scale_of_tiny(a)
    x *= x.dtype.type(scale)
    info = lapack("getrf", x.dtype, *x.shape, x, leading(x), swaps)
    return (x if scale == 1 else np.tril(x, -1) + np.triu(x) / x.dtype.type(scale)), swaps - 1, info


# -- condition numbers from factors -------------------------------------------------------------------------------


_STEPS = 5


def triangle_condition(upper: Blocks) -> tuple[Array]:
    """The reciprocal condition number (1 × 1, in the 1-norm) of an upper triangle."""
    return (_reciprocal("trcon", upper.dense(), b"1", b"U", b"N"),)


def cholesky_condition(lower: Blocks) -> tuple[Array]:
    """The reciprocal condition number (1 × 1, in the 1-norm) of L Lᴴ."""
    factor = lower.dense()

    def product(x: Array) -> Array:
        return np.asarray(factor @ (factor.conj().T @ x))

    return (_reciprocal("pocon", factor, b"L", norm=one_norm(product, product, len(factor), factor.dtype)),)


def lu_condition(upper: Blocks, lower: Blocks, pivots: Sequence[Array]) -> tuple[Array]:
    """The reciprocal condition number (1 × 1, in the 1-norm) of the matrix of which `algorithms.equations` made these.

    Args:
        upper, lower: U and L.
        pivots: of each step.
    """
    permuted, u = _permuted(lower, pivots), upper.dense()
    packed = np.asfortranarray(np.tril(permuted, -1) + u)

    def product(x: Array) -> Array:
        return np.asarray(permuted @ (u @ x))

    def adjoint(x: Array) -> Array:
        return np.asarray(u.conj().T @ (permuted.conj().T @ x))

    return (_reciprocal("gecon", packed, b"1", norm=one_norm(product, adjoint, len(u), u.dtype)),)


def pseudo_inverse(upper: Blocks, rows: int) -> tuple[Array, Array]:
    """The pseudo-inverse (n × n) of the triangle of a QR factorisation, and its singular values (1 × n, descending). As in NumPy's `lstsq`, those
    that are below `rows` units of rounding of the largest one count as zero.

    Args:
        upper: the triangle.
        rows: of the matrix that was factored, at least n.
    """
    u, s, vh = singular_vectors(upper)
    kept = s[0] > np.finfo(s.dtype).eps * rows * s[0, 0]
    inverse: Array = (vh[kept].conj().T / s[0, kept]) @ u[:, kept].conj().T
    return inverse.astype(u.dtype, copy=False), s


def one_norm(apply: Callable[[Array], Array], adjoint: Callable[[Array], Array], n: int, dtype: np.dtype[Any]) -> float:
    """A lower bound of the 1-norm of an n × n matrix, mostly its value (Hager 1984, as in LAPACK's lacn2).

    Args:
        apply, adjoint: the matrix, and its adjoint, times a vector.
        n: rows and columns.
        dtype: of the values.
    """
    x, best = np.full(n, 1 / n, dtype), 0.0
    for _ in range(_STEPS):
        y = apply(x)
        if not (norm := float(np.abs(y).sum())) > best:
            break
        best = norm
        size = np.abs(y)
        z = adjoint(np.where(size > 0, y / np.where(size > 0, size, 1), 1).astype(dtype))
        at = int(np.argmax(np.abs(z)))
        if not np.abs(z[at]) > np.abs(np.vdot(z, x)):
            break
        x = np.zeros(n, dtype)
        x[at] = 1
    alternating = np.where(np.arange(n) % 2, -1, 1) * (1 + np.arange(n) / max(n - 1, 1))
    return max(best, 2 * float(np.abs(apply(alternating.astype(dtype))).sum()) / (3 * n))


def _permuted(lower: Blocks, pivots: Sequence[Array]) -> Array:
    """The unit lower triangle of P A = L U: rows of earlier columns after the exchanges of later steps."""
    made, b = lower.dense(), lower.tile
    rows = [slice(i * b, min((i + 1) * b, len(made))) for i in range(len(pivots))]
    for k in range(1, len(pivots)):
        left = made[:, : k * b]
        top = left[rows[k]].copy()
        gathered = sum(gather_pivots(left[rows[i]], pivots[k], i) for i in range(k, len(rows)))
        for i in range(k + 1, len(rows)):
            left[rows[i]] = exchange_rows(left[rows[i]], top, pivots[k], k, i)
        left[rows[k]] = gathered
    return made


def _reciprocal(name: str, a: Array, *options: bytes, norm: float | None = None) -> Array:
    """LAPACK's estimate for a matrix or its factors; 0 where a pivot is zero, or it cannot be told."""
    n, is_complex, real = len(a), np.iscomplexobj(a), np.dtype(a.dtype.char.lower())
    found = np.zeros(1, real)
    work, more = np.zeros(4 * n, a.dtype), np.zeros(2 * n, real if is_complex else np.intc)
    norms = [] if norm is None else [np.full(1, norm, real)]
    if np.isfinite(a).all() and (norm is None or np.isfinite(norm)):
        lapack(name, a.dtype, *options, n, a, n, *norms, found, work, more)
    return np.nan_to_num(found)[None, :]


# -- LU with tournament pivoting (Grigori -------------------------------------------------------------------------


@kernel(outputs=2, flops=lambda a, tile: float(a[0] * a[1] ** 2))
def pivot_candidates(a: Array, tile: int) -> tuple[Array, Array]:
    """The rows of `a` (m × n) that partial pivoting takes first, at most n, and their places in tile row `tile`."""
    places = np.stack([np.full(len(a), tile), np.arange(len(a))], axis=1)
    order = _pivot_order(a)[: a.shape[1]]
    return a[order], places[order]


@kernel(outputs=2, flops=lambda a, p, b, q: float((a[0] + b[0]) * a[1] ** 2))
def merge_candidates(a: Array, places_a: Array, b: Array, places_b: Array) -> tuple[Array, Array]:
    """The candidates that win among two sets, and their places."""
    both, places = np.concatenate([a, b]), np.concatenate([places_a, places_b])
    order = _pivot_order(both)[: a.shape[1]]
    return both[order], places[order]


@kernel(outputs=3, flops=lambda a, places, top, top_row: 2.0 / 3.0 * a[0] ** 3)
def factor_pivots(a: Array, places: Array, top: Array, top_row: int) -> tuple[Array, Array, Array]:
    """Unit lower L, upper U and the final order of pivots, for the rows that won.

    Args:
        a: the rows (k × n), k ≤ n.
        places: theirs.
        top: the tile in tile row `top_row`, to which they go. Where it has more rows than there are pivots, which is so in the last tile
            column of a tall matrix, rows of its own that are no pivots follow, in L (rows of `top` × k) and in the list of pivots.
        top_row: its tile row.

    Raises:
        SingularMatrix: a pivot is exactly zero, so the rank is less than the number of rows and columns.
    """
    packed, swaps, info = row_factors(a)
    if info > 0:
        raise SingularMatrix(f"pivot {info - 1} of the block is exactly zero", kernel="factor_pivots", position=info - 1)
    rows, upper = len(a), np.triu(packed)
    lower, pivots = np.tril(packed[:, :rows], -1) + np.eye(rows, dtype=a.dtype), places[_permutation(swaps, rows)]
    if rows < len(top):
        taken = set(pivots[pivots[:, 0] == top_row, 1].tolist())
        following = np.array([r for r in range(len(top)) if r not in taken][: len(top) - rows], dtype=np.int64)
        lower = np.concatenate([lower, _times_inverse(top[following], upper)])
        pivots = np.concatenate([pivots, np.stack([np.full(len(following), top_row), following], axis=1)])
    return lower, upper, pivots


@kernel(flops=lambda a, pivots, tile: 0.0)
def gather_pivots(a: Array, pivots: Array, tile: int) -> Array:
    """The pivot rows that are in tile row `tile`, of which `a` is a tile, at their new places; other rows are zero (b × n)."""
    made = np.zeros((len(pivots), a.shape[1]), a.dtype)
    here = pivots[:, 0] == tile
    made[here] = a[pivots[here, 1]]
    return made


@kernel(flops=lambda a, top, pivots, u, top_row, tile: float(a[0] * u[1] ** 2))
def eliminate_rows(a: Array, top: Array, pivots: Array, u: Array, top_row: int, tile: int) -> Array:
    """L of a tile of the panel below the pivots: the tile after the exchange of rows, times the inverse of U.

    Args:
        a: the tile in tile row `tile`.
        top: the tile in tile row `top_row`, before the exchange.
        pivots: the pivots.
        u: upper U of the pivots.
        top_row: number of the tile row that receives the pivots.
        tile: number of this tile row, greater than `top_row`.
    """
    exchanged = _exchanged(a, top, pivots, top_row, tile)
    return _times_inverse(exchanged, u)


@kernel(flops=lambda a, top, pivots, lower, u, top_row, tile: 2.0 * a[0] * u[0] * u[1])
def exchange_and_update(a: Array, top: Array, pivots: Array, lower: Array, u: Array, top_row: int, tile: int) -> Array:
    """A tile after the exchange of rows, minus `lower @ u`: the Schur complement. Arguments as for `eliminate_rows`."""
    made: Array = _exchanged(a, top, pivots, top_row, tile) - lower @ u
    return made


@kernel(flops=lambda a, top, pivots, top_row, tile: 0.0)
def exchange_rows(a: Array, top: Array, pivots: Array, top_row: int, tile: int) -> Array:
    """A tile below the pivots after the exchange of rows."""
    return _exchanged(a, top, pivots, top_row, tile)


def _times_inverse(a: Array, u: Array) -> Array:
    return triangular_solution(u, a, right=True, lower=False)


def _pivot_order(a: Array) -> Array:
    """Row numbers in the order in which partial pivoting takes them, all rows."""
    return _permutation(row_factors(a)[1], len(a))


def _permutation(swaps: Array, rows: int) -> Array:
    order = np.arange(rows)
    for k, other in enumerate(swaps):
        order[k], order[other] = order[other], order[k]
    return order


def _exchanged(a: Array, top: Array, pivots: Array, top_row: int, tile: int) -> Array:
    made = np.array(a)
    for source, place in _displaced(pivots, top_row, len(top)):
        if place[0] == tile:
            made[place[1]] = top[source]
    return made


def _displaced(pivots: Array, top_row: int, rows: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Rows of the top tile that are no pivots, each with the place (tile row, row) that it goes to."""
    staying = set(pivots[pivots[:, 0] == top_row, 1].tolist())
    leaving = [row for row in range(rows) if row not in staying]
    left = [(int(t), int(r)) for t, r in pivots if t != top_row]
    return zip(leaving, left, strict=True)
