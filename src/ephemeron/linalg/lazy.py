"""Expressions of matrices: products, sums and multiples that are computed when they are read.

An expression is a `BigMatrix` whose shape, type and tiles are known before it is computed, so what does not fit is refused where it is
written. Reading it, or giving it to a function, computes it once; what it needed on the way is deleted then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg import arithmetic
from ephemeron.linalg.computation import BigVector, as_shaped
from ephemeron.linalg.execution.program_data import LinalgReport
from ephemeron.linalg.matrices import lifetimes
from ephemeron.linalg.matrices.big_matrix import BigMatrix, Operand
from ephemeron.linalg.matrices.stored import Shape, StoredMatrix, are_borders, bounds

_Apply = Callable[[Sequence[BigMatrix], FunctionExecutor], BigMatrix]


class Expression(BigMatrix):
    """A matrix that is not computed yet.

    Args:
        text: the expression, to print.
        operands: matrices and expressions.
        apply: computes it from its operands.
        shape, tile, dtype: of the result.
        is_view: whether the result has the tiles of its operand.
    """

    def __init__(
        self,
        text: str,
        operands: Sequence[BigMatrix],
        apply: _Apply,
        *,
        shape: Shape,
        tile: Shape,
        dtype: np.dtype[Any],
        is_view: bool = False,
    ) -> None:
        self._text, self._operands, self._apply = text, tuple(operands), apply
        self._shape, self._tile, self._dtype, self._is_view = shape, tile, dtype, is_view
        self._result: BigMatrix | None = None

    def compute(self, *, executor: FunctionExecutor | None = None) -> BigMatrix:
        """Its value, computed by functions the first time.

        Args:
            executor: runs the tasks; None: functions of this machine.
        """
        if self._result is None:
            with contextlib.ExitStack() as stack:
                pool = executor or stack.enter_context(FunctionExecutor("local", name="linalg"))
                made: dict[int, BigMatrix] = {}
                steps: list[BigMatrix] = []
                found = self._evaluate(pool, made, steps)
            reports = [step.report for step in steps if step.report is not None]
            total = sum(reports[1:], reports[0]) if reports else LinalgReport(algorithm="expression")
            self._result = BigMatrix(found.stored, total)
            for each in (made, steps):  # what nobody else has is removed
                each.clear()
            del found
            lifetimes.settle()
        return self._result

    def _evaluate(self, pool: FunctionExecutor, made: dict[int, BigMatrix], steps: list[BigMatrix]) -> BigMatrix:
        if self._result is not None:
            return self._result
        if id(self) not in made:
            operands = [each._evaluate(pool, made, steps) if isinstance(each, Expression) else each for each in self._operands]
            made[id(self)] = self._apply(operands, pool)
            if not self._is_view:
                steps.append(made[id(self)])
        return made[id(self)]

    @property
    def stored(self) -> StoredMatrix:
        """Where its tiles are; computes them."""
        return self.compute().stored

    @property
    def report(self) -> LinalgReport | None:
        """Sums over all steps; None: not computed yet."""
        return None if self._result is None else self._result.report

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        return self._shape

    @property
    def tile(self) -> Shape:
        """Rows and columns of a tile."""
        return self._tile

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its values."""
        return self._dtype

    @property
    def T(self) -> BigMatrix:
        """The transpose, as an expression."""
        return self._view(f"({self._text}).T", lambda a: a.T)

    @property
    def H(self) -> BigMatrix:
        """The adjoint, as an expression."""
        return self._view(f"({self._text}).H", lambda a: a.H)

    def _view(self, text: str, view: Callable[[BigMatrix], BigMatrix]) -> Expression:
        return Expression(
            text,
            [self],
            lambda operands, pool: view(operands[0]),
            shape=self._shape[::-1],
            tile=self._tile[::-1],
            dtype=self._dtype,
            is_view=True,
        )

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        if self._result is not None:
            return repr(self._result)
        rows, columns = self._shape
        return f"<{self._text}: {rows} x {columns}, {self._dtype}, not computed>"


def product(a: Any, b: Any) -> Any:
    """A B; a vector is one column on the right, one row on the left, and the result is a vector.

    Raises:
        JobError: shapes, types or tiles do not fit.
    """
    if isinstance(b, BigVector):
        return BigVector(product(a, b.column))
    if isinstance(a, BigVector):
        return BigVector(product(a.column.T, b).T)
    if isinstance(a, BigMatrix):
        left, right = a, _operand(b, like=a, rows=a.tile[1])
    else:
        assert isinstance(b, BigMatrix)
        right, left = b, _operand(a, like=b, columns=b.tile[0])
    arithmetic.check_product(left, right)
    found = Expression(
        f"{_name(left)} @ {_name(right)}",
        [left, right],
        lambda operands, pool: arithmetic.matmul(operands[0], operands[1], executor=pool),
        shape=(left.shape[0], right.shape[1]),
        tile=(left.tile[0], right.tile[1]),
        dtype=left.dtype,
    )
    return BigVector(found.T) if np.ndim(a) == 1 else as_shaped(found, b)


def total(a: Any, b: Any, alpha: float, beta: float) -> BigMatrix:
    """α A + β B. One of them may be a number, a row (as a vector is, as in NumPy) or a column, which is added to each of the other's.

    Raises:
        JobError: shapes, types or tiles do not fit.
    """
    a, b = (each.column.T if isinstance(each, BigVector) else each for each in (a, b))
    known = a if isinstance(a, BigMatrix) else b
    assert isinstance(known, BigMatrix)
    left, right = (_summand(each, like=known) for each in (a, b))
    if left.shape != right.shape and 1 in left.shape and (1 not in right.shape or left.shape == (1, 1)):
        left, right, alpha, beta = right, left, beta, alpha
    arithmetic.check_sum(left, right)
    return Expression(
        f"{_name(left)} {'-' if beta < 0 else '+'} {_name(right)}",
        [left, right],
        lambda operands, pool: arithmetic.combine(operands[0], operands[1], alpha, beta, executor=pool),
        shape=left.shape,
        tile=left.tile,
        dtype=left.dtype,
    )


def multiple(a: BigMatrix, factor: complex) -> BigMatrix:
    """A times a number.

    Raises:
        JobError: it is no number, or a complex one, and A is real.
    """
    if not isinstance(factor, int | float | complex | np.number):
        raise JobError(f"a matrix times {type(factor).__name__}", remedy="multiply by a number, or use @")
    if isinstance(factor, complex) and a.dtype.kind != "c":
        raise JobError(f"a matrix of {a.dtype} times {factor}", remedy="convert the matrix to complex values")
    return Expression(
        f"{factor} * {_name(a)}",
        [a],
        lambda operands, pool: arithmetic.scale(operands[0], factor, executor=pool),
        shape=a.shape,
        tile=a.tile,
        dtype=a.dtype,
    )


def part(a: BigMatrix, rows: slice, columns: slice) -> BigMatrix:
    """Some rows and columns: a view where they begin and end at borders of tiles.

    Raises:
        JobError: a range is empty, or has a step.
    """
    (m, n), (height, width) = a.shape, a.tile
    (top, bottom), (left, right) = bounds(rows, m, what="rows"), bounds(columns, n, what="columns")
    down, across = slice(top, bottom), slice(left, right)
    is_view = are_borders(top, bottom, m, height) and are_borders(left, right, n, width)
    if is_view and not isinstance(a, Expression):
        return BigMatrix(a.stored.part(down, across))

    def apply(operands: Sequence[BigMatrix], pool: FunctionExecutor) -> BigMatrix:
        [whole] = operands
        if is_view:
            return BigMatrix(whole.stored.part(down, across))
        return arithmetic.part(whole, down, across, executor=pool)

    return Expression(
        f"{_name(a)}[{top}:{bottom}, {left}:{right}]",
        [a],
        apply,
        shape=(bottom - top, right - left),
        tile=a.tile,
        dtype=a.dtype,
        is_view=is_view,
    )


def _operand(given: Operand, *, like: BigMatrix, rows: int | None = None, columns: int | None = None) -> BigMatrix:
    """An array as a matrix whose tiles fit, a vector as a column or a row; a matrix as it is."""
    if isinstance(given, BigMatrix):
        return given
    array: npt.NDArray[Any] = np.asarray(given)
    if array.ndim == 1 and (rows is None) != (columns is None):
        array = array.reshape((-1, 1) if columns is None else (1, -1))
    if array.ndim != 2:
        raise JobError(f"a matrix and an array with {array.ndim} dimensions", remedy="give one with two")
    tile = (rows or min(like.tile[0], array.shape[0]), columns or min(like.tile[1], array.shape[1]))
    array, store = array.astype(np.result_type(array, like.dtype)), _store(like)
    return Expression(
        "array",
        [like],
        lambda _, pool: BigMatrix.from_numpy(array, tile=tile, store=store),
        shape=array.shape,
        tile=tile,
        dtype=array.dtype,
    )


def _summand(given: Any, *, like: BigMatrix) -> BigMatrix:
    """A matrix, or an array of the shape of one, or a number, a row or a column."""
    if isinstance(given, BigMatrix):
        return given
    array: npt.NDArray[Any] = np.asarray(given)
    if array.ndim < 2:
        if array.size not in (1, like.shape[1]) or array.dtype.kind not in "biufc":
            raise JobError(f"a matrix of {like.shape[0]} x {like.shape[1]} and an array of shape {array.shape} cannot be added")
        array = np.broadcast_to(array, like.shape[1]).reshape(1, -1)
    tile = tuple(min(t, n) if n == 1 else t for t, n in zip(like.tile, array.shape, strict=False))
    if like.dtype.kind == "f" and array.dtype.kind in "biuf" and np.ndim(given) == 0:
        array = array.astype(like.dtype)  # as NumPy: a number takes the precision of the matrix
    return _operand(array, like=like, rows=tile[0], columns=tile[1])


def _store(a: BigMatrix) -> str:
    """Where the first matrix of an expression is."""
    while isinstance(a, Expression):
        a = a._operands[0]
    return a.stored.store


def _name(a: BigMatrix) -> str:
    return f"({a._text})" if isinstance(a, Expression) else a.stored.name
