"""Operators and NumPy functions of matrices: each gives an expression, which is computed when it is read.

A matrix is a value, below whatever computes with it; the functions behind its operators are registered with the package, by name
(`linalg.__init__`), and imported when the first matrix is used in an expression.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ephemeron import linalg
from ephemeron.errors import JobError

if TYPE_CHECKING:
    from ephemeron.executor import FunctionExecutor
    from ephemeron.linalg.matrices.big_matrix import BigMatrix

Operand: TypeAlias = "BigMatrix | npt.NDArray[Any]"


class Operators:
    """What `BigMatrix` has of arithmetic."""

    def __matmul__(self, other: Operand) -> BigMatrix:
        """The product, as an expression that is computed when it is read, or by `compute(executor=…)`."""
        found: BigMatrix = linalg.product(self, other)
        return found

    def __rmatmul__(self, other: Operand) -> BigMatrix:
        found: BigMatrix = linalg.product(other, self)
        return found

    def __add__(self, other: Operand) -> BigMatrix:
        """The sum, as an expression."""
        found: BigMatrix = linalg.total(self, other, 1.0, 1.0)
        return found

    def __radd__(self, other: Operand) -> BigMatrix:
        found: BigMatrix = linalg.total(other, self, 1.0, 1.0)
        return found

    def __sub__(self, other: Operand) -> BigMatrix:
        """The difference, as an expression."""
        found: BigMatrix = linalg.total(self, other, 1.0, -1.0)
        return found

    def __rsub__(self, other: Operand) -> BigMatrix:
        found: BigMatrix = linalg.total(other, self, 1.0, -1.0)
        return found

    def __mul__(self, factor: complex) -> BigMatrix:
        """The product with a number, as an expression."""
        found: BigMatrix = linalg.multiple(self, factor)
        return found

    __rmul__ = __mul__

    def __truediv__(self, divisor: complex) -> BigMatrix:
        """The quotient by a number, as an expression."""
        found: BigMatrix = linalg.multiple(self, 1 / divisor)
        return found

    def __eq__(self, other: object) -> bool:
        """Refused: matrices are not compared value by value, and comparing their names would be mistaken for it."""
        if other is None or isinstance(other, str):
            return False
        raise JobError("matrices cannot be compared with ==", remedy="compare to_numpy(), or use norm(A - B)")

    __hash__ = object.__hash__

    def sum(self, axis: int | None = None, *, executor: FunctionExecutor | None = None) -> Any:
        """Sum of the values; see `linalg.statistics.sum`."""
        return linalg.sum(self, axis, executor=executor)

    def mean(self, axis: int | None = None, *, executor: FunctionExecutor | None = None) -> Any:
        """Mean of the values; see `linalg.statistics.mean`."""
        return linalg.mean(self, axis, executor=executor)

    def std(self, axis: int | None = None, ddof: int = 0, *, executor: FunctionExecutor | None = None) -> Any:
        """Standard deviation of the values; see `linalg.statistics.std`."""
        return linalg.std(self, axis, ddof, executor=executor)

    def __neg__(self) -> BigMatrix:
        found: BigMatrix = linalg.multiple(self, -1.0)
        return found

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return linalg.apply_ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        return linalg.apply_function(function, arguments, options)
