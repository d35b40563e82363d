"""`BigVector`: one column of a matrix with the shape of a NumPy vector, (n,): what products with vectors and equations for one right-hand side give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ephemeron import linalg
from ephemeron.errors import JobError
from ephemeron.linalg.matrices.big_matrix import BigMatrix

if TYPE_CHECKING:
    from ephemeron.executor import FunctionExecutor
    from ephemeron.linalg.execution.report import LinalgReport

Other: TypeAlias = "BigVector | npt.NDArray[Any]"


class BigVector:
    """A vector of n values, stored as one column of tiles, or an expression of one.

    Args:
        column: its values, of shape [n, 1].
    """

    def __init__(self, column: BigMatrix) -> None:
        if column.shape[1] != 1:
            raise JobError(f"a matrix of {column.shape[0]} x {column.shape[1]} is no vector")
        self.column = column

    @property
    def shape(self) -> tuple[int]:
        """Number of values."""
        return (self.column.shape[0],)

    @property
    def ndim(self) -> int:
        """1."""
        return 1

    @property
    def size(self) -> int:
        """Number of values."""
        return self.column.shape[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its values."""
        return self.column.dtype

    @property
    def report(self) -> LinalgReport | None:
        """Of the computation that made it."""
        return self.column.report

    @property
    def T(self) -> BigVector:
        """Itself, as in NumPy."""
        return self

    def compute(self, *, executor: FunctionExecutor | None = None) -> BigVector:
        """The vector with all its tiles stored."""
        return BigVector(self.column.compute(executor=executor))

    def to_numpy(self) -> npt.NDArray[Any]:
        """Its values: shape [n]."""
        found: npt.NDArray[Any] = self.column.to_numpy()[:, 0]
        return found

    def delete(self) -> None:
        """Removes its tiles."""
        self.column.delete()

    def keep(self) -> BigVector:
        """As `BigMatrix.keep`."""
        self.column.keep()
        return self

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        values = np.asarray(self.column)[:, 0]
        return values if dtype is None else values.astype(dtype)

    __array_ufunc__ = None  # arrays leave operators with vectors to these methods

    __eq__ = BigMatrix.__eq__
    __hash__ = BigMatrix.__hash__

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<BigVector {self.size}, {self.dtype}: {self.column!r}>"

    def __matmul__(self, other: BigMatrix) -> BigVector:
        """Of a matrix: the vector vᵀ A."""
        if not isinstance(other, BigMatrix):
            return NotImplemented
        found: BigVector = linalg.product(self, other)
        return found

    def __add__(self, other: Other) -> BigVector:
        return self._sum(other, 1.0, 1.0)

    __radd__ = __add__

    def __sub__(self, other: Other) -> BigVector:
        return self._sum(other, 1.0, -1.0)

    def __rsub__(self, other: Other) -> BigVector:
        return self._sum(other, -1.0, 1.0)

    def __mul__(self, factor: complex) -> BigVector:
        return BigVector(self.column * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: complex) -> BigVector:
        return BigVector(self.column / divisor)

    def __neg__(self) -> BigVector:
        return BigVector(-self.column)

    def _sum(self, other: Other, alpha: float, beta: float) -> BigVector:
        if np.ndim(other) not in (0, 1):
            raise JobError(f"a vector and {np.ndim(other)} dimensions", remedy="use .column, a matrix of one column")
        given: Any = other.column if isinstance(other, BigVector) else other
        if not isinstance(given, BigMatrix) and np.ndim(given) == 1:
            given = np.asarray(given)[:, None]
        if np.shape(given) not in ((), self.column.shape):
            raise JobError(f"vectors of {self.size} and {np.shape(given)[0]} values cannot be added")
        return BigVector(linalg.total(self.column, given, alpha, beta))


def as_shaped(found: BigMatrix, given: Any) -> Any:
    """A result of one column as a vector, where what was given is one."""
    return BigVector(found) if np.ndim(given) == 1 else found
