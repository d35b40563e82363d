"""Linear algebra on functions: LAmbdaPACK programs over tiled matrices (NumPyWren, survey 2.4).

    from ephemeron import FunctionExecutor
    from ephemeron.linalg import BigMatrix, cholesky

    A = BigMatrix.from_numpy(a, tile=1000)
    with FunctionExecutor("local") as pool:
        L = cholesky(A, executor=pool)
    print(L.report)
    L.to_numpy()

Importing this package imports none of its modules: each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.linalg.arithmetic import matmul
    from ephemeron.linalg.embedding import lambdapack
    from ephemeron.linalg.execution.remains import clean
    from ephemeron.linalg.matrices.big_matrix import BigMatrix
    from ephemeron.linalg.operations import cholesky, inv, lstsq, lu, qr, solve
    from ephemeron.linalg.prediction.predict import predict
    from ephemeron.linalg.spectral import eigh, eigvalsh, randomized_svd, svd, svdvals
    from ephemeron.linalg.statistics import norm, pca

_LAZY = {
    "BigMatrix": "matrices.big_matrix",
    "cholesky": "operations",
    "clean": "execution.remains",
    "eigh": "spectral",
    "eigvalsh": "spectral",
    "inv": "operations",
    "lambdapack": "embedding",
    "lstsq": "operations",
    "lu": "operations",
    "matmul": "arithmetic",
    "norm": "statistics",
    "pca": "statistics",
    "predict": "prediction.predict",
    "qr": "operations",
    "randomized_svd": "spectral",
    "solve": "operations",
    "svd": "spectral",
    "svdvals": "spectral",
}
_OPERATORS = {
    "apply_function": "numpy_functions",
    "apply_ufunc": "numpy_functions",
    "mean": "statistics",
    "multiple": "lazy",
    "part": "lazy",
    "product": "lazy",
    "std": "statistics",
    "sum": "statistics",
    "total": "lazy",
}
"""What the operators and methods of a matrix call (`matrices.big_matrix`)."""

OPERATIONS = tuple(name for name, module in _LAZY.items() if module in ("arithmetic", "norms", "operations", "spectral", "statistics"))
"""Computations of which `predict` tells the cost by name."""

__all__ = [
    "BigMatrix",
    "cholesky",
    "clean",
    "eigh",
    "eigvalsh",
    "inv",
    "lambdapack",
    "lstsq",
    "lu",
    "matmul",
    "norm",
    "pca",
    "predict",
    "qr",
    "randomized_svd",
    "solve",
    "svd",
    "svdvals",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name) or _OPERATORS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
