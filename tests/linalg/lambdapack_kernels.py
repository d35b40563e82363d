"""Kernels without arithmetic, for tests of the language and of its dependencies."""

from __future__ import annotations

import numpy as np

from ephemeron.linalg.language.kernel import kernel


@kernel()
def combine(*parts: np.ndarray) -> np.ndarray:
    """The sum of any number of tiles."""
    return np.sum(parts, axis=0)


@kernel(outputs=2)
def pair(*parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two tiles."""
    total = np.sum(parts, axis=0)
    return total, -total


@kernel()
def scale(a: np.ndarray, factor: int = 1, *, negate: bool = False) -> np.ndarray:
    """A tile times an integer."""
    return -a * factor if negate else a * factor


KERNELS = {"combine": combine, "pair": pair, "scale": scale}
