"""Products and sums of tiles (BLAS 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.linalg.language.kernel import kernel

Array = np.ndarray[Any, np.dtype[Any]]
Shape = Sequence[int]


def _product_flops(a: Shape, b: Shape, *, adjoint_a: bool = False, adjoint_b: bool = False) -> float:
    return 2.0 * a[0] * a[1] * (b[0] if adjoint_b else b[1])


def _product(a: Array, b: Array, adjoint_a: bool, adjoint_b: bool) -> Array:
    made: Array = (a.conj().T if adjoint_a else a) @ (b.conj().T if adjoint_b else b)
    return made


@kernel(flops=_product_flops)
def multiply(a: Array, b: Array, *, adjoint_a: bool = False, adjoint_b: bool = False) -> Array:
    """`op(a) @ op(b)`, where op is the adjoint (conjugate transpose) or nothing."""
    return _product(a, b, adjoint_a, adjoint_b)


@kernel(flops=lambda c, a, b, **options: _product_flops(a, b, **options))
def multiply_add(c: Array, a: Array, b: Array, *, adjoint_a: bool = False, adjoint_b: bool = False) -> Array:
    """`c + op(a) @ op(b)`."""
    return c + _product(a, b, adjoint_a, adjoint_b)


@kernel(flops=lambda c, a, b, **options: _product_flops(a, b, **options))
def multiply_subtract(c: Array, a: Array, b: Array, *, adjoint_a: bool = False, adjoint_b: bool = False) -> Array:
    """`c - op(a) @ op(b)`."""
    return c - _product(a, b, adjoint_a, adjoint_b)


@kernel(flops=lambda a, b: float(a[0] * a[1]))
def add(a: Array, b: Array) -> Array:
    """`a + b`."""
    return a + b


@kernel(flops=lambda a, **options: 0.0)
def copy(a: Array, *, adjoint: bool = False) -> Array:
    """The same values, or their adjoint."""
    return np.array(a.conj().T if adjoint else a)


@kernel(flops=lambda a, d: float(a[0] * a[1]))
def scale_columns(a: Array, d: Array) -> Array:
    """`a * d`, where `d` (1 × n) holds a factor for each column."""
    return a * d
