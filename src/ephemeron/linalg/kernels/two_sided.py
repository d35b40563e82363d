"""What a reduction to band form needs beside the kernels of QR: reflectors from the right, checks of Hermitian tiles, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.errors import NotFinite, NotHermitian
from ephemeron.linalg.kernels.orthogonal import qr_leaf
from ephemeron.linalg.kernels.reflectors import pair_reflected, reflected
from ephemeron.linalg.language.kernel import kernel

Array = np.ndarray[Any, np.dtype[Any]]
Shape = Sequence[int]
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
