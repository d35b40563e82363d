"""Condition numbers from factors, in one function: LAPACK's estimates (trcon, gecon, pocon), which cost some equations with one right-hand side.

They are lower bounds that are rarely off by more than a factor of three (Higham 1988). The norm of the matrix itself is estimated from its factors
in the same way, so that nothing but them is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ephemeron.linalg.kernels.lapack import Array, lapack
from ephemeron.linalg.kernels.pivoting import exchange_rows, gather_pivots
from ephemeron.linalg.kernels.spectra import Blocks, singular_vectors

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
    """The reciprocal condition number (1 × 1, in the 1-norm) of the matrix of which `algorithms.lu` made these.

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
