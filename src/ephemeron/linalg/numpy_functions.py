"""NumPy functions of `BigMatrix` (NEP 13, NEP 18): those that can be computed on tiles and mean the same.

What is not here is a TypeError by NumPy; so no function reads a large matrix into memory without having been told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ephemeron.errors import SingularMatrix
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg import lazy, operations, spectral, statistics
from ephemeron.linalg.computation import BigVector, as_shaped
from ephemeron.linalg.matrices.big_matrix import BigMatrix


def apply_ufunc(ufunc: np.ufunc, method: str, inputs: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A ufunc of matrices, as an expression; NotImplemented where there is none."""
    apply = _UFUNCS.get(ufunc)
    return NotImplemented if method != "__call__" or options or apply is None else apply(*inputs)


def apply_function(function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A function of `numpy` or `numpy.linalg`; NotImplemented where there is none, or an option has another meaning."""
    apply = _FUNCTIONS.get(function)
    return NotImplemented if apply is None else apply(*arguments, **options)


def _multiply(a: Any, b: Any) -> Any:
    if isinstance(a, BigMatrix) and isinstance(b, BigMatrix):
        return NotImplemented
    matrix, factor = (a, b) if isinstance(a, BigMatrix) else (b, a)
    return lazy.multiple(matrix, factor) if np.ndim(factor) == 0 else NotImplemented


def _transpose(a: BigMatrix, axes: Any = None) -> Any:
    return a.T if axes is None or tuple(axes) in ((1, 0), (-1, -2)) else NotImplemented


def _svd(a: BigMatrix, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    if hermitian or (full_matrices and compute_uv and a.shape[0] != a.shape[1]):
        return NotImplemented
    return spectral.svd(a) if compute_uv else spectral.svdvals(a)


def _qr(a: BigMatrix, mode: str = "reduced") -> Any:
    return operations.qr(a) if mode == "reduced" else NotImplemented


def _cholesky(a: BigMatrix, *, upper: bool = False) -> Any:
    factor = operations.cholesky(a)
    return BigMatrix(factor.stored.H, factor.report) if upper else factor


def _solve(a: Any, b: Any) -> Any:
    return operations.solve(a, b) if isinstance(a, BigMatrix) else NotImplemented


def _lstsq(a: Any, b: Any, rcond: float | None = None) -> Any:
    """Solution, sums of squared residuals by column (none without full rank), rank and singular values."""
    if not isinstance(a, BigMatrix):
        return NotImplemented
    (m, n), sides = a.shape, _column(b)
    with FunctionExecutor("local") as pool:
        s = spectral.svdvals(a, executor=pool)
        usual = np.finfo(a.dtype).eps * max(m, n)
        rank = int(np.count_nonzero(s > usual * s[0]))
        if rcond is not None and rank != np.count_nonzero(s > rcond * s[0]):
            raise SingularMatrix(f"the rank is {rank}, and another one with rcond = {rcond}; use svd", kernel="lstsq")
        x = operations.lstsq(a, sides, executor=pool)
        shaped = as_shaped(x, b)
        if m == n or rank < n:
            return shaped, np.empty(0, s.dtype), rank, s
        residuals = lazy.total(sides, lazy.product(a, x), 1.0, -1.0).compute(executor=pool)
        squares = statistics.column_norms(residuals, executor=pool) ** 2
    return shaped, squares, rank, s


def _column(b: Any) -> Any:
    return b.column if isinstance(b, BigVector) else b[:, None] if np.ndim(b) == 1 else b


def _sum(a: Any, axis: Any = None) -> Any:
    return statistics.sum(a, axis)


def _mean(a: Any, axis: Any = None) -> Any:
    return statistics.mean(a, axis)


def _std(a: Any, axis: Any = None, *, ddof: int = 0) -> Any:
    return statistics.std(a, axis, ddof)


def _norm(a: BigMatrix, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    if keepdims or (axis is not None and tuple(np.atleast_1d(axis) % 2) != (0, 1)):
        return NotImplemented
    return statistics.norm(a, ord)


def _lower_half(compute: Callable[[BigMatrix], Any]) -> Callable[..., Any]:
    return lambda a, UPLO="L": compute(a) if UPLO in ("L", "U") else NotImplemented


_UFUNCS: dict[np.ufunc, Callable[..., Any]] = {
    np.matmul: lazy.product,
    np.add: lambda a, b: lazy.total(a, b, 1.0, 1.0),
    np.subtract: lambda a, b: lazy.total(a, b, 1.0, -1.0),
    np.multiply: _multiply,
    np.negative: lambda a: lazy.multiple(a, -1.0),
    np.conjugate: lambda a: a.T.H,
}
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: 2,
    np.size: lambda a, axis=None: a.shape[0] * a.shape[1] if axis is None else a.shape[axis],
    np.transpose: _transpose,
    np.sum: _sum,
    np.mean: _mean,
    np.std: _std,
    np.dot: lambda a, b: lazy.product(a, b),
    np.linalg.cholesky: _cholesky,
    np.linalg.qr: _qr,
    np.linalg.svd: _svd,
    np.linalg.eigh: _lower_half(spectral.eigh),
    np.linalg.eigvalsh: _lower_half(spectral.eigvalsh),
    np.linalg.solve: _solve,
    np.linalg.inv: operations.inv,
    np.linalg.lstsq: _lstsq,
    np.linalg.norm: _norm,
}
for _name, _apply in {
    "matrix_transpose": lambda a: a.T,
    "matmul": lazy.product,
    "svdvals": spectral.svdvals,
    "matrix_norm": lambda a, *, keepdims=False, ord="fro": _norm(a, ord, keepdims=keepdims),
}.items():
    if hasattr(np.linalg, _name):  # since NumPy 2
        _FUNCTIONS[getattr(np.linalg, _name)] = _apply  # type: ignore[assignment]
