"""Orthogonal factors as blocks of reflectors, by BLAS and LAPACK without the interpreter lock (`lapack`).

Q = Q₁ Q₂ … with Q_k = I − V_k T_k V_kᴴ, V_k being the k-th block of columns of V, and T_k (upper triangular) that of T. LAPACK's routines for them
(gemqrt, tpqrt, tpmqrt) take 1.3 times as long as these at tiles of some thousand rows, with OpenBLAS: a product with few rows (V_kᴴ C) is slower
than one with few columns, so Q is applied to the transpose, from the right, which for a tile in C order needs no copy; blocks are 128 columns
wide; and a triangle above a tile is factored by the recursive routine (geqrt3), which has no counterpart for such pairs.
"""

from __future__ import annotations

import numpy as np

from ephemeron.linalg.kernels.lapack import Array, add_product, adjoint_of, fortran, lapack, leading, multiply_right, scale_of_tiny

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
