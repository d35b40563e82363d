"""QR of tiles with compact WY reflectors (LAPACK geqrt, tpqrt), and explicit Q for tall matrices.

A tile V (m × n) with T (nb × k) stands for Q = I − V T Vᴴ in blocks of nb columns, where k = min(m, n).

Orthogonal factors as blocks of reflectors, by BLAS and LAPACK without the interpreter lock (`lapack`).

Q = Q₁ Q₂ … with Q_k = I − V_k T_k V_kᴴ, V_k being the k-th block of columns of V, and T_k (upper triangular) that of T. LAPACK's routines for them
(gemqrt, tpqrt, tpmqrt) take 1.3 times as long as these at tiles of some thousand rows, with OpenBLAS: a product with few rows (V_kᴴ C) is slower
than one with few columns, so Q is applied to the transpose, from the right, which for a tile in C order needs no copy; blocks are 128 columns
wide; and a triangle above a tile is factored by the recursive routine (geqrt3), which has no counterpart for such pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.errors import NotConverged, NotFinite, NotHermitian
from ephemeron.linalg.kernels.lapack import Array, add_product, adjoint_of, fortran, lapack, leading, multiply_right, scale_of_tiny
from ephemeron.linalg.language.kernel import kernel

Shape = Sequence[int]


def _leaf_flops(a: Shape) -> float:
    m, n = max(a[0], a[1]), min(a[0], a[1])
    return 2.0 * n * n * (m - n / 3)


@kernel(outputs=3, flops=_leaf_flops)
def qr_leaf(a: Array) -> tuple[Array, Array, Array]:
    """V, T and R of `a` (m × n): R is min(m, n) × n."""
    return reflectors(a)


def _apply_leaf_flops(v: Shape, t: Shape, c: Shape, **options: Any) -> float:
    return 2.0 * v[1] * c[1] * (2 * v[0] - v[1])  # V is a trapezoid


@kernel(flops=_apply_leaf_flops)
def apply_leaf(v: Array, t: Array, c: Array, *, adjoint: bool = False) -> Array:
    """`Q @ c`, or `Qᴴ @ c`, for the Q (m × m) of `qr_leaf`; `c` is m × p."""
    return reflected(v, t, c, adjoint=adjoint)


@kernel(outputs=3, flops=lambda r, s: 2.0 / 3.0 * r[1] ** 3 * (s[0] / max(r[1], 1)))
def qr_pair(r: Array, s: Array) -> tuple[Array, Array, Array]:
    """V, T and R of `r` above `s`, where `r` (n × n) and `s` (m × n, m ≤ n) are upper triangular; V belongs to `s`."""
    top, v, t = pair_reflectors(r, s, trapezoid=True)
    return v, t, np.triu(top)


@kernel(outputs=2, flops=lambda v, t, c, d, **options: 2.0 * v[0] * v[1] * c[1])
def apply_pair(v: Array, t: Array, c: Array, d: Array, *, adjoint: bool = False) -> tuple[Array, Array]:
    """`Q`, or `Qᴴ`, of `qr_pair` applied to the first rows of `c` above those of `d`.

    V is m × n. Q acts on the first n rows of `c` and the first m rows of `d`; further rows stay as they are.
    """
    m, n = v.shape
    top, bottom = pair_reflected(v, t, c[:n], d[:m], trapezoid=True, adjoint=adjoint)
    return np.concatenate([top, c[n:]]), np.concatenate([bottom, d[m:]])


def _below_flops(v: Shape, *others: Any, **options: Any) -> float:
    columns = others[1][1] if len(others) > 1 else v[1]
    return 4.0 * v[0] * v[1] * columns


@kernel(outputs=3, flops=lambda r, s: 2.0 * s[0] * r[1] ** 2)
def qr_below(r: Array, s: Array) -> tuple[Array, Array, Array]:
    """V, T and R of the upper triangle `r` (n × n) above `s` (m × n), which is full; V belongs to `s`."""
    top, v, t = pair_reflectors(r, s)
    return v, t, np.triu(top)


@kernel(outputs=2, flops=_below_flops)
def apply_below(v: Array, t: Array, c: Array, d: Array, *, adjoint: bool = False) -> tuple[Array, Array]:
    """`Q`, or `Qᴴ`, of `qr_below` applied to `c` (n × p) above `d` (m × p), for V of m × n."""
    return pair_reflected(v, t, c, d, adjoint=adjoint)


@kernel(outputs=2, flops=_below_flops)
def below_columns(v: Array, t: Array) -> tuple[Array, Array]:
    """`apply_below` to the identity above zeros."""
    return first_pair_columns(v, t)


@kernel(outputs=2, flops=_below_flops)
def apply_below_to_upper(v: Array, t: Array, c: Array) -> tuple[Array, Array]:
    """`apply_below` to `c` above zeros."""
    return _both(apply_below(v, t, c, np.zeros((len(v), c.shape[1]), c.dtype)))


@kernel(outputs=2, flops=_below_flops)
def apply_below_to_lower(v: Array, t: Array, d: Array) -> tuple[Array, Array]:
    """`apply_below` to zeros above `d`."""
    return _both(apply_below(v, t, np.zeros((v.shape[1], d.shape[1]), d.dtype), d))


@kernel(flops=_apply_leaf_flops)
def apply_leaf_padded(v: Array, t: Array, c: Array) -> Array:
    """`apply_leaf` to `c` above zeros that fill it up to the rows of V."""
    return _of(apply_leaf(v, t, _filled(c, len(v))))


@kernel(flops=lambda v, t: 2.0 * v[0] * v[1] ** 2)
def leaf_columns(v: Array, t: Array) -> Array:
    """The first columns (m × k) of the Q of `qr_leaf`, for V of m × k."""
    return first_columns(v, t)


@kernel(outputs=2, flops=lambda v, t, above, below: 2.0 * v[0] * v[1] ** 2)
def pair_columns(v: Array, t: Array, above: Array, below: Array) -> tuple[Array, Array]:
    """`apply_pair` to the first columns of the identity, which has rows as `above` and `below` together."""
    top, bottom = first_pair_columns(v, t, trapezoid=True)
    return _filled(top, len(above)), _filled(bottom, len(below))


@kernel(outputs=2, flops=lambda v, t, c, below: 2.0 * v[0] * v[1] * c[1])
def apply_pair_above(v: Array, t: Array, c: Array, below: Array) -> tuple[Array, Array]:
    """`apply_pair` to `c` above zeros with as many rows as `below`."""
    return _both(apply_pair(v, t, c, np.zeros((len(below), c.shape[1]), c.dtype)))


@kernel(outputs=2, flops=lambda v, t, above, d: 2.0 * v[0] * v[1] * d[1])
def apply_pair_below(v: Array, t: Array, above: Array, d: Array) -> tuple[Array, Array]:
    """`apply_pair` to zeros with as many rows as `above`, above `d`."""
    return _both(apply_pair(v, t, np.zeros((len(above), d.shape[1]), d.dtype), d))


def _filled(a: Array, rows: int) -> Array:
    """`a` above zeros, so many rows in all."""
    if len(a) == rows:
        return a
    return np.concatenate([a, np.zeros((rows - len(a), a.shape[1]), a.dtype)])


def _of(made: Any) -> Array:
    found: Array = made
    return found


def _both(made: Any) -> tuple[Array, Array]:
    above, below = made
    return above, below


@kernel(outputs=2, flops=lambda a: 2.0 * _leaf_flops(a))
def thin_qr(a: Array) -> tuple[Array, Array]:
    """Q (m × k) and R (k × n) of `a` (m × n), k = min(m, n)."""
    q, r = np.linalg.qr(a)
    return q, r


@kernel(outputs=3, flops=lambda r, s: 2.0 * _leaf_flops((r[0] + s[0], r[1])))
def thin_qr_pair(r: Array, s: Array) -> tuple[Array, Array, Array]:
    """The rows of Q that belong to `r`, those that belong to `s`, and R, for `r` above `s`."""
    q, joined = np.linalg.qr(np.concatenate([r, s]))
    return q[: len(r)], q[len(r) :], joined


@kernel(flops=lambda a: 0.0)
def identity_like(a: Array) -> Array:
    """The identity with as many rows and columns as `a` has rows."""
    return np.eye(a.shape[0], dtype=a.dtype)


@kernel(outputs=3, flops=lambda a: 20.0 * a[0] * a[1] * min(a[0], a[1]))
def small_svd(a: Array) -> tuple[Array, Array, Array]:
    """U (m × k), singular values (1 × k, descending) and Vᴴ (k × n) of `a` (m × n), k = min(m, n).

    Raises:
        NotConverged: LAPACK's iteration did not converge.
    """
    try:
        u, s, vh = np.linalg.svd(a, full_matrices=False)
    except np.linalg.LinAlgError as error:
        raise NotConverged(str(error), kernel="small_svd") from None
    return u, s[None, :], vh


@kernel(outputs=3, flops=lambda a, k: 20.0 * a[0] * a[1] * min(a[0], a[1]))
def leading_svd(a: Array, k: int) -> tuple[Array, Array, Array]:
    """The first `k` singular values and vectors of `small_svd`, or all of them where there are fewer."""
    u, s, vh = small_svd(a)
    return np.ascontiguousarray(u[:, :k]), np.ascontiguousarray(s[:, :k]), np.ascontiguousarray(vh[:k])


# -- orthogonal factors as blocks of reflectors -------------------------------------------------------------------


BLOCK = 128
"""Columns of a block."""


def reflectors(a: Array) -> tuple[Array, Array, Array]:
    """V (m × k, unit lower trapezoidal), T (BLOCK × k) and R (k × n) of `a` (m × n), k = min(m, n) (LAPACK geqrt)."""
    (m, n), k, block = a.shape, min(a.shape), min(BLOCK, *a.shape)
    x, scale = np.array(a, order="F"), scale_of_tiny(a)
    x *= x.dtype.type(scale)
    t = np.zeros((block, k), x.dtype, order="F")
    lapack("geqrt", x.dtype, m, n, block, x, leading(x), t, leading(t), np.zeros(block * n, x.dtype))
    r, v = np.triu(x[:k]) / x.dtype.type(scale), x[:, :k]
    v[:k] = np.triu(v[:k].T, 1).T  # stays in Fortran order
    np.fill_diagonal(v, 1)
    return v, t, r


def reflected(v: Array, t: Array, c: Array, *, right: bool = False, adjoint: bool = False) -> Array:
    """`op(Q) c`, or `c op(Q)`, with Q of `reflectors`."""
    dtype, (block, k) = np.result_type(v, c), t.shape
    if (scale := scale_of_tiny(c)) != 1:  # rounding once, at the end
        made: Array = reflected(v, t, c * dtype.type(scale), right=right, adjoint=adjoint)
        unscaled: Array = made / dtype.type(scale)
        return unscaled
    v, t, x, is_adjoint = _prepared(v, t, c, dtype, right=right, adjoint=adjoint)
    for j in _order(k, block, descending=is_adjoint):
        e = min(j + block, k)
        _apply(None, x[:, j:], v[j:, j:e], t[: e - j, j:e], adjoint=is_adjoint)
    return x if right else x.T


def first_columns(v: Array, t: Array) -> Array:
    """The first k columns of Q of `reflectors`, for V of m × k."""
    block, k = t.shape
    v, t, x, _ = _prepared(v, t, np.eye(*v.shape, dtype=v.dtype), v.dtype, right=False, adjoint=False)
    for j in _order(k, block, descending=True):  # columns before block k are those of the identity still
        e = min(j + block, k)
        _apply(None, x[j:, j:], v[j:, j:e], t[: e - j, j:e], adjoint=True)
    return x.T


def pair_reflectors(r: Array, s: Array, *, trapezoid: bool = False) -> tuple[Array, Array, Array]:
    """R (n × n), V (m × n) and T (BLOCK × n) of the upper triangle `r` (n × n) above `s` (m × n): Q is that of I above V.

    Args:
        r, s: the matrices.
        trapezoid: `s` is upper trapezoidal, as V then is; else it is full.
    """
    dtype, (m, n) = np.result_type(r, s), s.shape
    if (scale := scale_of_tiny(r, s)) != 1:
        of = dtype.type(scale)
        joined, v, t = pair_reflectors(r * of, s * of, trapezoid=trapezoid)
        return joined / of, v, t
    block = min(BLOCK, n)
    top, rest = np.array(r, dtype, order="C"), np.array(s, dtype, order="C")
    v, t = np.zeros((m, n), dtype, order="F"), np.zeros((block, n), dtype, order="F")
    for j in range(0, n, block):
        e = min(j + block, n)
        rows, of, to = min(m, e) if trapezoid else m, v[:, j:e], t[: e - j, j:e]
        panel = np.empty((e - j + rows, e - j), dtype, order="F")
        panel[: e - j], panel[e - j :] = top[j:e, j:e], rest[:rows, j:e]
        lapack("geqrt3", dtype, *panel.shape, panel, leading(panel), to, leading(to))
        top[j:e, j:e], of[:rows] = np.triu(panel[: e - j]), panel[e - j :]
        # Zeros of the triangle below its diagonal stay zeros, so that the reflectors are the identity there.
        conjugate = _conjugate(of[:rows]), _conjugate(to)
        _apply(top[j:e, e:].T, rest[:rows, e:].T, *conjugate, adjoint=False)
    return top, v, t


def pair_reflected(
    v: Array, t: Array, c: Array, d: Array, *, trapezoid: bool = False, right: bool = False, adjoint: bool = False
) -> tuple[Array, Array]:
    """`op(Q)` of `pair_reflectors` applied to `c` above `d`, or `c` beside `d` times `op(Q)`."""
    dtype, (block, n), m = np.result_type(v, c, d), t.shape, len(v)
    if (scale := scale_of_tiny(c, d)) != 1:
        of = dtype.type(scale)
        first, second = pair_reflected(v, t, c * of, d * of, trapezoid=trapezoid, right=right, adjoint=adjoint)
        return first / of, second / of
    x = _copied(c, dtype, right=right)
    v, t, y, is_adjoint = _prepared(v, t, d, dtype, right=right, adjoint=adjoint)
    for j in _order(n, block, descending=is_adjoint):
        e = min(j + block, n)
        rows = min(m, e) if trapezoid else m
        _apply(x[:, j:e], y[:, :rows], v[:rows, j:e], t[: e - j, j:e], adjoint=is_adjoint)
    return (x, y) if right else (x.T, y.T)


def first_pair_columns(v: Array, t: Array, *, trapezoid: bool = False) -> tuple[Array, Array]:
    """The first n columns of Q of `pair_reflectors`: its first n rows, and the m rows below them."""
    (m, n), block = v.shape, len(t)
    x = _copied(np.eye(n, dtype=v.dtype), v.dtype, right=False)
    v, t, y, _ = _prepared(v, t, np.zeros((m, n), v.dtype), v.dtype, right=False, adjoint=False)
    for j in _order(n, block, descending=True):  # columns before block k are those of the identity still
        e = min(j + block, n)
        rows = min(m, e) if trapezoid else m
        _apply(x[j:, j:e], y[j:, :rows], v[:rows, j:e], t[: e - j, j:e], adjoint=True)
    return x.T, y.T


def _prepared(v: Array, t: Array, c: Array, dtype: np.dtype, *, right: bool, adjoint: bool) -> tuple[Array, Array, Array, bool]:
    """V, T, a matrix in Fortran order and whether to take the adjoint, so that Q acts on the matrix from the right.

    (op(Q) c)ᵀ = cᵀ op(Q)ᵀ, and Qᵀ is the adjoint of Q̄, which is that of V̄ and T̄.
    """
    v, t, x = fortran(v, dtype), fortran(t, dtype), _copied(c, dtype, right=right)
    if right:
        return v, t, x, adjoint
    return _conjugate(v), _conjugate(t), x, not adjoint


def _copied(c: Array, dtype: np.dtype, *, right: bool) -> Array:
    return np.array(c, dtype, order="F") if right else np.array(c, dtype, order="C").T


def _conjugate(a: Array) -> Array:
    return np.conjugate(a) if a.dtype.kind == "c" else a


def _order(columns: int, block: int, *, descending: bool) -> list[int]:
    """First columns of the blocks."""
    first = list(range(0, columns, max(1, block)))
    return first[::-1] if descending else first


def _apply(x: Array | None, y: Array, v: Array, t: Array, *, adjoint: bool) -> None:
    """`[x y] = [x y] op(I − [I; v] t [I; v]ᴴ)`; without x, `y = y op(I − v t vᴴ)`. x and y are in Fortran order."""
    to = adjoint_of(y.dtype)
    w = np.empty((len(y), v.shape[1]), y.dtype, order="F") if x is None else np.array(x, order="F")
    add_product(w, y, v, beta=0.0 if x is None else 1.0)
    multiply_right(w, t, op=to if adjoint else b"N")
    if x is not None:
        x -= w
    add_product(y, w, v, alpha=-1.0, op_b=to)


# -- what a reduction to band form needs beside the kernels of QR -------------------------------------------------


_TOLERANCE = 1e3
"""Units of rounding by which a tile may differ from the adjoint of its mirror image."""


def _lq_flops(a: Shape) -> float:
    m, n = max(a[0], a[1]), min(a[0], a[1])
    return 2.0 * n * n * (m - n / 3)


@kernel(outputs=3, flops=_lq_flops)
def lq_leaf(a: Array) -> tuple[Array, Array, Array]:
    """V, T and R of the adjoint of `a` (m × n), as of `qr_leaf`: `a` = Rᴴ Qᴴ."""
    made: tuple[Array, Array, Array] = qr_leaf(np.asfortranarray(a.conj().T))
    return made


@kernel(flops=lambda v, t, c: 4.0 * v[0] * v[1] * c[0])
def apply_leaf_right(v: Array, t: Array, c: Array) -> Array:
    """`c @ Q` for the Q (n × n) of `qr_leaf`; `c` is p × n."""
    return reflected(v, t, c, right=True)


@kernel(outputs=2, flops=lambda v, t, c, d: 2.0 * v[0] * v[1] * c[0])
def apply_pair_right(v: Array, t: Array, c: Array, d: Array) -> tuple[Array, Array]:
    """The first columns of `c` beside those of `d`, times the Q of `qr_pair`.

    V is m × n. Q acts on the first n columns of `c` and the first m columns of `d`; further columns stay as they are.
    """
    m, n = v.shape
    left, right = pair_reflected(v, t, c[:, :n], d[:, :m], trapezoid=True, right=True)
    return np.concatenate([left, c[:, n:]], axis=1), np.concatenate([right, d[:, m:]], axis=1)


@kernel(flops=lambda a, b: 0.0)
def hermitian_tile(a: Array, mirrored: Array) -> Array:
    """`a`, where it is the adjoint of its mirror image up to rounding.

    Raises:
        NotFinite: a value is NaN or infinite.
        NotHermitian: it is not; `position` is the row.
    """
    for tile in (a, mirrored):
        _check_finite(tile, "hermitian_tile")
    difference, size = np.abs(a - mirrored.conj().T), np.abs(a).max(initial=0) + np.abs(mirrored).max(initial=0)
    if difference.max(initial=0) > _TOLERANCE * np.finfo(a.dtype).eps * size:
        row, column = np.unravel_index(int(np.argmax(difference)), difference.shape)
        raise NotHermitian(
            f"the value at {row}, {column} of the tile is {a[row, column]}, and its mirror image {mirrored[column, row]}",
            kernel="hermitian_tile",
            position=int(row),
        )
    return np.array(a)


@kernel(flops=lambda a: 0.0)
def hermitian_diagonal(a: Array) -> Array:
    """A tile of the diagonal, from its lower triangle; checked like `hermitian_tile`."""
    checked: Array = hermitian_tile(a, a)
    lower = np.tril(checked, -1)
    made: Array = lower + lower.conj().T + np.diag(checked.diagonal().real).astype(a.dtype)
    return made


@kernel(flops=lambda a: 0.0)
def finite_copy(a: Array) -> Array:
    """The same values.

    Raises:
        NotFinite: one of them is NaN or infinite.
    """
    _check_finite(a, "finite_copy")
    return np.array(a)


@kernel(flops=lambda b, v: 0.0)
def pad_rows(b: Array, v: Array) -> Array:
    """`b` above zeros: as many rows as `v` has."""
    made = np.zeros((v.shape[0], b.shape[1]), b.dtype)
    made[: len(b)] = b
    return made


@kernel(flops=lambda v, b: 0.0)
def zero_rows(v: Array, b: Array) -> Array:
    """Zeros with the rows of `v` and the columns of `b`."""
    return np.zeros((v.shape[0], b.shape[1]), b.dtype)


def _check_finite(a: Array, name: str) -> None:
    if not np.isfinite(a).all():
        row, column = np.unravel_index(int(np.argmin(np.isfinite(a))), a.shape)
        raise NotFinite(f"the value at {row}, {column} of the tile is {a[row, column]}", kernel=name, position=int(row))
