"""Products, sums and multiples of matrices that are stored as tiles: what users call, and the checks that expressions share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.algorithms import products
from ephemeron.linalg.computation import Computation, computing, like, on_computed
from ephemeron.linalg.language.program import Program, with_options
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg.matrices.stored import StoredMatrix, are_borders, bounds
from ephemeron.units import MB

_PAIRS_TILES = 40
"""Tiles that fit into the memory of a function where it sums four products at once: nine of the task, nine of the next one, the sum and a
product, copies on their way to the store, and a quarter of the memory for those that are kept."""


@functools.partial(on_computed, cut_as=1)
def matmul(a: BigMatrix, b: BigMatrix | npt.NDArray[Any], *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """The product A B, summed in a fixed order.

    Args:
        a: shape [m, k].
        b: shape [k, n]; or an array, of shape [k, n] or [k] for one column.
        executor: runs the tasks.

    Raises:
        JobError: the shapes, types or tiles do not fit.
    """
    if not isinstance(b, BigMatrix):
        raise JobError(f"a matrix times {type(b).__name__}", remedy="give a BigMatrix or a NumPy array")
    check_product(a, b)
    left, right = a.stored, b.stored
    product = dataclasses.replace(like(left, rows=left.rows, columns=right.columns), tile_columns=right.tile_columns)
    (m, k), n = left.tiles, right.tiles[1]
    with computing(executor, "matmul", a, b) as computation:
        pairs = left.tile_rows * left.tile_columns * a.dtype.itemsize * _PAIRS_TILES <= computation.memory_mb * MB
        program = products.matmul_pairs if pairs else products.matmul
        made = computation.run(program, {"M": m, "N": n, "K": k}, {"A": left, "B": right}, {"C": product})
    return computation.result(made["C"])


def check_product(a: BigMatrix, b: BigMatrix) -> None:
    """Refuses a product A B whose operands do not fit.

    Raises:
        JobError: the shapes, types or tiles do not fit.
    """
    if a.shape[1] != b.shape[0]:
        raise JobError(f"{_size(a.shape)} and {_size(b.shape)} cannot be multiplied")
    if a.tile[1] != b.tile[0] and a.shape[1] > min(a.tile[1], b.tile[0]):
        raise JobError(f"tiles of {_size(a.tile)} and {_size(b.tile)} cannot be multiplied", remedy="store both with the same tile")
    _check_types(a, b, what="product")


def check_sum(a: BigMatrix, b: BigMatrix) -> None:
    """Refuses a sum A + B whose operands do not fit; B may be one row or one column.

    Raises:
        JobError: the shapes, types or tiles do not fit.
    """
    if any(y not in (x, 1) for x, y in zip(a.shape, b.shape, strict=True)):
        raise JobError(f"{_size(a.shape)} and {_size(b.shape)} cannot be added")
    if any(x != y and n > min(x, y) for x, y, n in zip(a.tile, b.tile, b.shape, strict=True)):
        raise JobError(f"tiles of {_size(a.tile)} and {_size(b.tile)} cannot be added", remedy="store both with the same tile")
    _check_types(a, b, what="sum")


@on_computed
def combine(a: BigMatrix, b: BigMatrix, alpha: float = 1.0, beta: float = 1.0, *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """alpha A + beta B.

    Args:
        a: shape [m, n].
        b: of the same shape, type and tiles; or one row [1, n], or one column [m, 1], which is added to each of A's.
        alpha, beta: factors.
        executor: runs the tasks.

    Raises:
        JobError: the shapes, types or tiles do not fit.
    """
    check_sum(a, b)
    by_shape = {(1, a.shape[1]): products.combine_row, (a.shape[0], 1): products.combine_column}
    chosen = products.combine if a.shape == b.shape else by_shape.get(b.shape)
    if chosen is None:
        raise JobError(f"{_size(a.shape)} and {_size(b.shape)} cannot be added", remedy="add a number, a row or a column")
    program = with_options(chosen, alpha=float(alpha), beta=float(beta))
    return _elementwise("combine", program, {"A": a.stored, "B": b.stored}, executor)


@on_computed
def scale(a: BigMatrix, factor: complex, *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """A times a number.

    Args:
        a: shape [m, n].
        factor: complex only where A is.
        executor: runs the tasks.

    Raises:
        JobError: the number is not finite.
    """
    if not np.isfinite(factor):
        raise JobError(f"a matrix times {factor}", remedy="use a finite number")
    program = with_options(products.scale, real=float(np.real(factor)), imaginary=float(np.imag(factor)))
    return _elementwise("scale", program, {"A": a.stored}, executor)


@on_computed
def part(a: BigMatrix, rows: slice, columns: slice, *, executor: FunctionExecutor | None = None) -> BigMatrix:
    """Rows and columns that begin and end anywhere, cut into tiles anew. Each tile is read twice at most for rows, and as often for columns.

    Args:
        a: shape [m, n].
        rows, columns: not empty, without a step.
        executor: runs the tasks.
    """
    with computing(executor, "slice", a) as computation:
        across = _rows(computation, a.stored, rows)
        made = _rows(computation, across.T, columns).T
        if across.name not in (a.stored.name, made.name):
            computation.scratch(across)
    return computation.result(made)


def _rows(computation: Computation, stored: StoredMatrix, wanted: slice) -> StoredMatrix:
    """Some rows: a view, or a matrix that functions make of them."""
    (first, last), height = bounds(wanted, stored.rows, what="rows"), stored.tile_rows
    if are_borders(first, last, stored.rows, height):
        return stored.part(wanted, slice(None))
    begin, end = first - first % height, min(last + -last % height, stored.rows)
    whole, top = stored.part(slice(begin, end), slice(None)), first - begin
    output = like(whole, rows=last - first, columns=whole.columns)
    program = with_options(products.rows_from if top else products.first_rows, top=top, height=height, total=last - first)
    sizes = {"M": output.tiles[0], "K": whole.tiles[0], "N": whole.tiles[1]}
    made = computation.run(program, {n: sizes[n] for n in program.sizes}, {"A": whole}, {"C": output})["C"]
    assert isinstance(made, StoredMatrix)
    return made


def _elementwise(name: str, program: Program, operands: dict[str, StoredMatrix], executor: FunctionExecutor | None) -> BigMatrix:
    first = operands["A"]
    m, n = first.tiles
    with computing(executor, name, *map(BigMatrix, operands.values())) as computation:
        made = computation.run(program, {"M": m, "N": n}, operands, {"C": like(first, rows=first.rows, columns=first.columns)})
    return computation.result(made["C"])


def _check_types(a: BigMatrix, b: BigMatrix, *, what: str) -> None:
    if a.dtype != b.dtype:
        raise JobError(f"a {what} of {a.dtype} and {b.dtype}", remedy="convert one of them")


def _size(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"
