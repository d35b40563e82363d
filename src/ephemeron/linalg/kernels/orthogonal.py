"""QR of tiles with compact WY reflectors (LAPACK geqrt, tpqrt), and explicit Q for tall matrices.

A tile V (m × n) with T (nb × k) stands for Q = I − V T Vᴴ in blocks of nb columns, where k = min(m, n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.errors import NotConverged
from ephemeron.linalg.kernels.reflectors import first_columns, first_pair_columns, pair_reflected, pair_reflectors, reflected, reflectors
from ephemeron.linalg.language.kernel import kernel

Array = np.ndarray[Any, np.dtype[Any]]
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
