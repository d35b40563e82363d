"""Cholesky factors of tiles, and equations with triangular tiles (LAPACK potrf, BLAS trsm)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.errors import NotPositiveDefinite, SingularMatrix
from ephemeron.linalg.kernels.factors import cholesky_triangle, triangular_solution
from ephemeron.linalg.language.kernel import kernel

Array = np.ndarray[Any, np.dtype[Any]]
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
