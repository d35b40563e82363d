"""Products and sums of tiles (BLAS 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.linalg.kernels.factors import rank_k_difference
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
    product = _product(a, b, adjoint_a, adjoint_b)
    return np.add(c, product, out=product)


def _pairs_flops(*factors: Shape) -> float:
    return sum(_product_flops(a, b) for a, b in zip(factors[::2], factors[1::2], strict=True))


@kernel(flops=_pairs_flops)
def multiply_pairs(*factors: Array) -> Array:
    """`a0 @ b0 + a1 @ b1 + …` for factors a0, b0, a1, b1, …, from left to right: the bits of `multiply` and then `multiply_add`, with
    one tile written."""
    return _add_products(np.matmul(factors[0], factors[1]), factors[2:])


@kernel(flops=lambda c, *factors: _pairs_flops(*factors))
def multiply_add_pairs(c: Array, *factors: Array) -> Array:
    """`c + a0 @ b0 + a1 @ b1 + …`, likewise."""
    return _add_products(np.array(c), factors)


def _add_products(total: Array, factors: Sequence[Array]) -> Array:
    product = np.empty(total.shape, total.dtype)
    for a, b in zip(factors[::2], factors[1::2], strict=True):
        np.add(total, np.matmul(a, b, out=product), out=total)
    return total


@kernel(flops=lambda c, a, b, **options: _product_flops(a, b, **options))
def multiply_subtract(c: Array, a: Array, b: Array, *, adjoint_a: bool = False, adjoint_b: bool = False) -> Array:
    """`c - op(a) @ op(b)`."""
    product = _product(a, b, adjoint_a, adjoint_b)
    return np.subtract(c, product, out=product)


@kernel(flops=lambda c, a: float(a[0] ** 2 * a[1]))
def subtract_gram(c: Array, a: Array) -> Array:
    """`c - a aᴴ` for a Hermitian `c` (n × n), whose lower triangle is read and made; above it are values without meaning."""
    return rank_k_difference(c, a)


@kernel(flops=lambda a, b: float(a[0] * a[1]))
def add(a: Array, b: Array) -> Array:
    """`a + b`."""
    return a + b


@kernel(flops=lambda a, b, **options: 3.0 * a[0] * a[1])
def weighted_sum(a: Array, b: Array, *, alpha: float = 1.0, beta: float = 1.0) -> Array:
    """`alpha * a + beta * b`."""
    made: Array = alpha * a + beta * b
    return made


@kernel(flops=lambda a, **options: float(a[0] * a[1]))
def scaled(a: Array, *, real: float = 1.0, imaginary: float = 0.0) -> Array:
    """`(real + imaginary i) a`."""
    made: Array = (complex(real, imaginary) if imaginary else real) * a
    return made


@kernel(flops=lambda a, **options: 0.0)
def copy(a: Array, *, adjoint: bool = False) -> Array:
    """The same values, or their adjoint."""
    return np.array(a.conj().T if adjoint else a)


@kernel(flops=lambda a, d: float(a[0] * a[1]))
def scale_columns(a: Array, d: Array) -> Array:
    """`a * d`, where `d` (1 × n) holds a factor for each column."""
    return a * d


# -- norms of the columns of tiles --------------------------------------------------------------------------------


@kernel(flops=lambda a, *, power: 2.0 * a[0] * a[1])
def column_norms(a: Array, *, power: int) -> Array:
    """Sums of absolute values (`power=1`) or roots of sums of squares (`power=2`) along the columns: 1 × n, real."""
    values = np.abs(a)
    if power == 1:
        return np.asarray(values.sum(axis=0, keepdims=True))
    largest = values.max(axis=0, keepdims=True)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1)  # squares of large values are infinite, of small ones zero
    made: Array = scale * np.linalg.norm(values / scale, axis=0, keepdims=True)
    return made.astype(values.dtype, copy=False)


@kernel(flops=lambda a, b, *, power: float(a[1]))
def join_norms(a: Array, b: Array, *, power: int) -> Array:
    """Norms of columns, of which `a` and `b` (1 × n) have those of two parts."""
    made: Array = a + b if power == 1 else np.hypot(a, b)
    return made


# -- tiles of a matrix whose rows begin within the tiles of another one -------------------------------------------


@kernel(flops=lambda a, i, **options: 0.0)
def rows_of(a: Array, i: int, *, top: int, height: int, total: int) -> Array:
    """Rows of tile `i` of a matrix of `total` rows in tiles of `height`, which are those of `a` from row `top` on."""
    return np.array(a[top : top + min(height, total - i * height)])


@kernel(flops=lambda a, b, i, **options: 0.0)
def rows_of_pair(a: Array, b: Array, i: int, *, top: int, height: int, total: int) -> Array:
    """The same where these rows end in the next tile, `b`."""
    made: Array = np.concatenate([a[top:], b[:top]])[: min(height, total - i * height)]
    return made
