"""Rotations of two tile columns that make all their columns orthogonal (block Jacobi)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.errors import NotConverged
from ephemeron.linalg.language.kernel import kernel

Array = np.ndarray[Any, np.dtype[Any]]
Shape = Sequence[int]


def _columns_flops(p: Shape, q: Shape) -> float:
    return 2.0 * p[0] * (p[1] + q[1]) ** 2


@kernel(flops=lambda a: 2.0 * a[0] * a[1] ** 2)
def thin_triangle(a: Array) -> Array:
    """R of a tile."""
    return np.asarray(np.linalg.qr(a, mode="r"))


@kernel(flops=lambda r, a: 2.0 * a[0] * a[1] ** 2)
def add_rows(r: Array, a: Array) -> Array:
    """R of `r` above the tile `a`."""
    return np.asarray(np.linalg.qr(np.concatenate([r, a]), mode="r"))


@kernel(flops=_columns_flops)
def pair_triangle(p: Array, q: Array) -> Array:
    """R of the tiles `p` and `q` side by side."""
    return np.asarray(np.linalg.qr(np.concatenate([p, q], axis=1), mode="r"))


@kernel(flops=lambda r, p, q: _columns_flops(p, q))
def extend_triangle(r: Array, p: Array, q: Array) -> Array:
    """R of `r` above the tiles `p` and `q` side by side."""
    both = np.concatenate([r, np.concatenate([p, q], axis=1)])
    return np.asarray(np.linalg.qr(both, mode="r"))


@kernel(flops=lambda r: 20.0 * r[1] ** 3)
def right_vectors(r: Array) -> Array:
    """Unitary J (n × n) such that `r @ J` has orthogonal columns with descending norms.

    Raises:
        NotConverged: LAPACK's iteration did not converge.
    """
    try:
        _, _, vh = np.linalg.svd(r)
    except np.linalg.LinAlgError as error:
        raise NotConverged(str(error), kernel="right_vectors") from None
    return np.ascontiguousarray(vh.conj().T)


@kernel(outputs=2, flops=lambda p, q, j: 2.0 * p[0] * j[0] * j[1])
def rotate_pair(p: Array, q: Array, j: Array) -> tuple[Array, Array]:
    """The tiles `p` and `q`, side by side, times `j`."""
    both = np.concatenate([p, q], axis=1) @ j
    return np.ascontiguousarray(both[:, : p.shape[1]]), np.ascontiguousarray(both[:, p.shape[1] :])


@kernel(flops=lambda a, b: 0.0)
def zero_block(a: Array, b: Array) -> Array:
    """Zeros with a row for each column of `a`, and a column for each column of `b`."""
    return np.zeros((a.shape[1], b.shape[1]), a.dtype)
