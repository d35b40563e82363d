"""Operators and NumPy functions of matrices: each gives an expression, which is computed when it is read (`linalg.lazy`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ephemeron.linalg.matrices.big_matrix import BigMatrix

Operand: TypeAlias = "BigMatrix | npt.NDArray[Any]"


class Operators:
    """What `BigMatrix` has of arithmetic."""

    def __matmul__(self, other: Operand) -> BigMatrix:
        """The product, as an expression that is computed when it is read, or by `compute(executor=…)`."""
        found: BigMatrix = lazy_expressions().product(self, other)
        return found

    def __rmatmul__(self, other: Operand) -> BigMatrix:
        found: BigMatrix = lazy_expressions().product(other, self)
        return found

    def __add__(self, other: Operand) -> BigMatrix:
        """The sum, as an expression."""
        found: BigMatrix = lazy_expressions().total(self, other, 1.0, 1.0)
        return found

    def __radd__(self, other: Operand) -> BigMatrix:
        found: BigMatrix = lazy_expressions().total(other, self, 1.0, 1.0)
        return found

    def __sub__(self, other: Operand) -> BigMatrix:
        """The difference, as an expression."""
        found: BigMatrix = lazy_expressions().total(self, other, 1.0, -1.0)
        return found

    def __rsub__(self, other: Operand) -> BigMatrix:
        found: BigMatrix = lazy_expressions().total(other, self, 1.0, -1.0)
        return found

    def __mul__(self, factor: complex) -> BigMatrix:
        """The product with a number, as an expression."""
        found: BigMatrix = lazy_expressions().multiple(self, factor)
        return found

    __rmul__ = __mul__

    def __truediv__(self, divisor: complex) -> BigMatrix:
        """The quotient by a number, as an expression."""
        found: BigMatrix = lazy_expressions().multiple(self, 1 / divisor)
        return found

    def __neg__(self) -> BigMatrix:
        found: BigMatrix = lazy_expressions().multiple(self, -1.0)
        return found

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return _numpy().apply_ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        return _numpy().apply_function(function, arguments, options)


def lazy_expressions() -> Any:
    return import_module("ephemeron.linalg.lazy")


def _numpy() -> Any:
    return import_module("ephemeron.linalg.numpy_functions")
