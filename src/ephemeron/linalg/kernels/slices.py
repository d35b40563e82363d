"""Tiles of a matrix whose rows begin within the tiles of another one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ephemeron.linalg.language.kernel import kernel

Array = np.ndarray[Any, np.dtype[Any]]


@kernel(flops=lambda a, i, **options: 0.0)
def rows_of(a: Array, i: int, *, top: int, height: int, total: int) -> Array:
    """Rows of tile `i` of a matrix of `total` rows in tiles of `height`, which are those of `a` from row `top` on."""
    return np.array(a[top : top + min(height, total - i * height)])


@kernel(flops=lambda a, b, i, **options: 0.0)
def rows_of_pair(a: Array, b: Array, i: int, *, top: int, height: int, total: int) -> Array:
    """The same where these rows end in the next tile, `b`."""
    made: Array = np.concatenate([a[top:], b[:top]])[: min(height, total - i * height)]
    return made
