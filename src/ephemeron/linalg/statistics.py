"""Sums, means and standard deviations along the axes of matrices, and principal components: what users call.

Sums are products with ones, so that each tile is read once; NaN is a value, as in NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import JobError, NotComputed
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg import lazy, spectral
from ephemeron.linalg.algorithms.products import norms_of_columns
from ephemeron.linalg.arithmetic import matmul
from ephemeron.linalg.computation import computing, like, on_computed
from ephemeron.linalg.kernels.products import column_norms as tile_norms
from ephemeron.linalg.language.program import with_options
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
        columns = column_norms(differences, check=False, executor=pool)
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


# -- norms of matrices that are stored as tiles: what users call --------------------------------------------------


_ORDERS: dict[Any, tuple[int, Callable[[npt.NDArray[Any]], Any]]] = {
    "fro": (2, lambda row: tile_norms(row[:, None], power=2)[0, 0]),
    1: (1, np.max),
    -1: (1, np.min),
}
"""Power with which functions sum columns, and what the client makes of these sums."""
_SPECTRAL: dict[Any, Callable[[npt.NDArray[Any]], Any]] = {2: lambda s: s[0], -2: lambda s: s[-1], "nuc": np.sum}


@on_computed
def norm(a: BigMatrix, ord: int | float | str | None = None, *, check: bool = True, executor: FunctionExecutor | None = None) -> float:
    """Norm of a matrix, as `numpy.linalg.norm`.

    Functions sum along the columns, or the rows, in a tree; the client reads one value of each. Norms of singular values take `svdvals`.

    Args:
        a: shape [m, n]; for 2, -2 and `nuc` as for `svdvals`.
        ord: None or `fro`: Frobenius norm; 1, -1: largest and smallest sum of absolute values along the columns; ∞, -∞: along the rows;
            2, -2, `nuc`: largest and smallest singular value, and their sum.
        check: refuse values that are NaN or infinite.
        executor: runs the tasks.

    Raises:
        JobError: no such norm.
        NotFinite: a value is NaN or infinite.
    """
    if ord in _SPECTRAL:
        return float(_SPECTRAL[ord](spectral.svdvals(a, check=check, executor=executor)))
    if isinstance(ord, float) and math.isinf(ord):
        return norm(a.T, 1 if ord > 0 else -1, check=check, executor=executor)
    order = "fro" if ord is None else ord
    if order not in _ORDERS:
        raise JobError(f"ord = {ord!r} is no norm of matrices", remedy="use 'fro', 'nuc', 1, 2, or infinity")
    power, join = _ORDERS[order]
    return float(join(column_norms(a, power, check=check, executor=executor)))


@on_computed
def column_norms(a: BigMatrix, power: int = 2, *, check: bool = True, executor: FunctionExecutor | None = None) -> npt.NDArray[Any]:
    """Sums of absolute values (`power=1`) or Euclidean norms (2) of the columns: shape [n]."""
    stored = a.stored
    row = dataclasses.replace(like(stored, rows=1, columns=stored.columns), tile_rows=1, dtype=np.empty(0, a.dtype).real.dtype.name)
    m, n = stored.tiles
    with computing(executor, "norm", a, check=check) as computation:
        made = computation.run(with_options(norms_of_columns, power=power), {"M": m, "N": n}, {"A": stored}, {"C": row})
        return computation.values(computation.result(made["C"]).stored)
