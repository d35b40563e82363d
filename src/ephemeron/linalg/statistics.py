"""Sums, means and standard deviations along the axes of matrices, and principal components: what users call.

Sums are products with ones, so that each tile is read once; NaN is a value, as in NumPy.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import JobError, NotComputed
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg import lazy, norms, spectral
from ephemeron.linalg.arithmetic import matmul
from ephemeron.linalg.computation import on_computed
from ephemeron.linalg.matrices.big_matrix import BigMatrix

_Values = npt.NDArray[Any]


def sum(a: BigMatrix, axis: int | None = None, *, executor: FunctionExecutor | None = None) -> Any:
    """Sum of the values of a matrix.

    Args:
        a: shape [m, n].
        axis: 0: along the columns, shape [n]; 1: along the rows, shape [m]; None: of all, a number.
        executor: runs the tasks.

    Raises:
        JobError: no such axis.
    """
    given = a if _axis(axis) != 1 else a.T
    found = _sums(given, executor=executor)
    return found.sum() if axis is None else found


def mean(a: BigMatrix, axis: int | None = None, *, executor: FunctionExecutor | None = None) -> Any:
    """Mean of the values; as `sum`."""
    found = sum(a, axis, executor=executor)
    return found / (a.shape[0] * a.shape[1] if axis is None else a.shape[_axis(axis) or 0])


def std(a: BigMatrix, axis: int | None = None, ddof: int = 0, *, executor: FunctionExecutor | None = None) -> Any:
    """Standard deviation of the values, from their differences to the mean; as `sum`.

    Args:
        a: shape [m, n].
        axis: as for `sum`.
        ddof: is subtracted from the number of values.
        executor: runs the tasks.
    """
    given, (m, n) = (a if _axis(axis) != 1 else a.T), a.shape
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(FunctionExecutor("local", name="linalg"))
        whole = given.compute(executor=pool)
        middle = mean(whole, 0 if axis is not None else None, executor=pool)
        differences = lazy.total(whole, middle, 1.0, -1.0).compute(executor=pool)
        columns = norms.column_norms(differences, check=False, executor=pool)
        differences.delete()
    count = m * n if axis is None else given.shape[0]
    found = (columns if axis is not None else np.linalg.norm(columns)) / np.sqrt(np.float64(count - ddof))
    return found.astype(columns.dtype) if axis is not None else float(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipalComponents:
    """Directions of the largest variance of the rows of a matrix."""

    mean: _Values
    """Of the rows: shape [n]."""
    components: _Values
    """Orthonormal rows, the largest variance first; the largest value of each is positive: shape [k, n]."""
    explained_variance: _Values
    """Along each of them, with m - 1 degrees of freedom: shape [k]."""
    scores: BigMatrix
    """The rows of the matrix minus the mean, along the components: shape [m, k]."""


@on_computed
def pca(a: BigMatrix, k: int, *, seed: int = 0, check: bool = True, executor: FunctionExecutor | None = None) -> PrincipalComponents:
    """Principal components: singular vectors of A minus the mean of its rows.

    Of a matrix with one column of tiles, and at least as many rows as columns, they are those of `svd`; else `randomized_svd` finds the k largest,
    with four power iterations.

    Args:
        a: shape [m, n], m ≥ 2.
        k: number of components, at most min(m, n).
        seed: of the random matrix.
        check: refuse values that are NaN or infinite.
        executor: runs the tasks.

    Raises:
        JobError: k is not between 1 and min(m, n), or there is one row.
        NotFinite: a value is NaN or infinite.
    """
    m, n = a.shape
    if not 1 <= k <= min(m, n) or m < 2:
        raise JobError(f"{k} principal components of {m} x {n} values", remedy=f"use 1 to {min(m, n)}, of two rows and more")
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(FunctionExecutor("local", name="linalg"))
        middle = np.zeros(n, a.dtype)
        with contextlib.suppress(NotComputed):  # where nothing is computed, but predicted
            middle = mean(a, 0, executor=pool)
        centred = lazy.total(a, middle, 1.0, -1.0).compute(executor=pool)
        if a.stored.tiles[1] == 1 and a.stored.tile_shape(0, 0)[0] >= n:
            _, s, vh = spectral.svd(centred, check=check, executor=pool)
        else:
            _, s, vh = spectral.randomized_svd(centred, k, iterations=4, seed=seed, check=check, executor=pool)
        components = vh.to_numpy()[:k]
        largest = components[np.arange(k), np.argmax(np.abs(components), axis=1)]
        components *= (np.abs(largest) / largest)[:, None]
        scores = matmul(centred, np.ascontiguousarray(components.conj().T), executor=pool)
        centred.delete()
    return PrincipalComponents(mean=middle, components=components, explained_variance=s[:k] ** 2 / (m - 1), scores=scores)


@on_computed
def _sums(a: BigMatrix, *, executor: FunctionExecutor | None = None) -> _Values:
    """Along the columns: shape [n]."""
    made = matmul(a.T, np.ones(a.shape[0], a.dtype), executor=executor)
    return np.asarray(made.to_numpy())


def _axis(axis: int | None) -> int | None:
    if axis not in (None, 0, 1, -1, -2):
        raise JobError(f"axis = {axis!r} of a matrix", remedy="use 0, 1 or None")
    return None if axis is None else axis % 2
