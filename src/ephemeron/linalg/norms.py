"""Norms of matrices that are stored as tiles: what users call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg import spectral
from ephemeron.linalg.algorithms.norms import norms_of_columns
from ephemeron.linalg.computation import computing, like, on_computed
from ephemeron.linalg.kernels.norms import column_norms as tile_norms
from ephemeron.linalg.language.program import with_options
from ephemeron.linalg.matrices.big_matrix import BigMatrix

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
