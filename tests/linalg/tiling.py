"""Arrays cut into tiles and joined again, and test matrices with given singular values."""

from __future__ import annotations

import numpy as np


def tiled(a, tile):
    """Tiles of `a` by index, of `tile` rows and columns, smaller at the ends."""
    rows, columns = (range(0, n, tile) for n in a.shape)
    return {(i, j): np.array(a[r : r + tile, c : c + tile]) for i, r in enumerate(rows) for j, c in enumerate(columns)}


def joined(tiles, shape, tile, dtype):
    """The array of `shape` that `tiles` make; absent tiles are zero."""
    made = np.zeros(shape, dtype)
    for (i, j), part in tiles.items():
        made[i * tile : i * tile + part.shape[0], j * tile : j * tile + part.shape[1]] = part
    return made


def count(n, tile):
    """Number of tiles along n rows."""
    return -(-n // tile)


def random(shape, dtype, seed=0):
    """Standard normal elements, complex where `dtype` is."""
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(shape)
    return (made + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else made).astype(dtype)


def conditioned(m, n, condition, dtype, seed=0):
    """An m × n matrix whose singular values fall geometrically from 1 to 1 / condition."""
    u, _ = np.linalg.qr(random((m, min(m, n)), "complex128" if np.dtype(dtype).kind == "c" else "float64", seed))
    v, _ = np.linalg.qr(random((n, min(m, n)), u.dtype, seed + 1))
    return ((u * np.geomspace(1, 1 / condition, min(m, n))) @ v.conj().T).astype(dtype)


def epsilon(dtype):
    """Relative accuracy of `dtype`."""
    return float(np.finfo(np.dtype(dtype)).eps)
