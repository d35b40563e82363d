"""Norms of the columns of tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from ephemeron.linalg.language.kernel import kernel

Array = np.ndarray[Any, np.dtype[Any]]


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
