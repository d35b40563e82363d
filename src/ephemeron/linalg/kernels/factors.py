"""Triangular factors and equations of one tile, by BLAS and LAPACK without the interpreter lock (`lapack`).

OpenBLAS solves triangular equations at half the speed of a product, and at a third for few columns at the left. So equations are brought to the
form X op(T) = B in Fortran order, and are halved: all but the diagonal blocks of T is a product (recursive blocking; Elmroth, Gustavson, Jonsson,
Kågström 2004). Arrays may be in C or Fortran order; results are in the order in which they were computed.
"""

from __future__ import annotations

import numpy as np

from ephemeron.linalg.kernels.lapack import Array, add_product, adjoint_of, blas, fortran, lapack, leading, scale_of_tiny, solve_right

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
