"""LU with tournament pivoting (Grigori, Demmel, Xiang: CALU, 2011): the choice of pivot rows, and their exchange between tiles.

A list of pivots is an array of int64 (b × 2): number of the tile row, and row in it, of each pivot in order. It defines a permutation:
pivot p goes to row p of the top tile; rows of the top tile that are no pivots go, in order, to the places that pivots of other
tiles left, in the order of the pivots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ephemeron.errors import SingularMatrix
from ephemeron.linalg.kernels.factors import row_factors, triangular_solution
from ephemeron.linalg.language.kernel import kernel

Array = np.ndarray[Any, np.dtype[Any]]


@kernel(outputs=2, flops=lambda a, tile: float(a[0] * a[1] ** 2))
def pivot_candidates(a: Array, tile: int) -> tuple[Array, Array]:
    """The rows of `a` (m × n) that partial pivoting takes first, at most n, and their places in tile row `tile`."""
    places = np.stack([np.full(len(a), tile), np.arange(len(a))], axis=1)
    order = _pivot_order(a)[: a.shape[1]]
    return a[order], places[order]


@kernel(outputs=2, flops=lambda a, p, b, q: float((a[0] + b[0]) * a[1] ** 2))
def merge_candidates(a: Array, places_a: Array, b: Array, places_b: Array) -> tuple[Array, Array]:
    """The candidates that win among two sets, and their places."""
    both, places = np.concatenate([a, b]), np.concatenate([places_a, places_b])
    order = _pivot_order(both)[: a.shape[1]]
    return both[order], places[order]


@kernel(outputs=3, flops=lambda a, places, top, top_row: 2.0 / 3.0 * a[0] ** 3)
def factor_pivots(a: Array, places: Array, top: Array, top_row: int) -> tuple[Array, Array, Array]:
    """Unit lower L, upper U and the final order of pivots, for the rows that won.

    Args:
        a: the rows (k × n), k ≤ n.
        places: theirs.
        top: the tile in tile row `top_row`, to which they go. Where it has more rows than there are pivots, which is so in the last tile
            column of a tall matrix, rows of its own that are no pivots follow, in L (rows of `top` × k) and in the list of pivots.
        top_row: its tile row.

    Raises:
        SingularMatrix: a pivot is exactly zero, so the rank is less than the number of rows and columns.
    """
    packed, swaps, info = row_factors(a)
    if info > 0:
        raise SingularMatrix(f"pivot {info - 1} of the block is exactly zero", kernel="factor_pivots", position=info - 1)
    rows, upper = len(a), np.triu(packed)
    lower, pivots = np.tril(packed[:, :rows], -1) + np.eye(rows, dtype=a.dtype), places[_permutation(swaps, rows)]
    if rows < len(top):
        taken = set(pivots[pivots[:, 0] == top_row, 1].tolist())
        following = np.array([r for r in range(len(top)) if r not in taken][: len(top) - rows], dtype=np.int64)
        lower = np.concatenate([lower, _times_inverse(top[following], upper)])
        pivots = np.concatenate([pivots, np.stack([np.full(len(following), top_row), following], axis=1)])
    return lower, upper, pivots


@kernel(flops=lambda a, pivots, tile: 0.0)
def gather_pivots(a: Array, pivots: Array, tile: int) -> Array:
    """The pivot rows that are in tile row `tile`, of which `a` is a tile, at their new places; other rows are zero (b × n)."""
    made = np.zeros((len(pivots), a.shape[1]), a.dtype)
    here = pivots[:, 0] == tile
    made[here] = a[pivots[here, 1]]
    return made


@kernel(flops=lambda a, top, pivots, u, top_row, tile: float(a[0] * u[1] ** 2))
def eliminate_rows(a: Array, top: Array, pivots: Array, u: Array, top_row: int, tile: int) -> Array:
    """L of a tile of the panel below the pivots: the tile after the exchange of rows, times the inverse of U.

    Args:
        a: the tile in tile row `tile`.
        top: the tile in tile row `top_row`, before the exchange.
        pivots: the pivots.
        u: upper U of the pivots.
        top_row: number of the tile row that receives the pivots.
        tile: number of this tile row, greater than `top_row`.
    """
    exchanged = _exchanged(a, top, pivots, top_row, tile)
    return _times_inverse(exchanged, u)


@kernel(flops=lambda a, top, pivots, lower, u, top_row, tile: 2.0 * a[0] * u[0] * u[1])
def exchange_and_update(a: Array, top: Array, pivots: Array, lower: Array, u: Array, top_row: int, tile: int) -> Array:
    """A tile after the exchange of rows, minus `lower @ u`: the Schur complement. Arguments as for `eliminate_rows`."""
    made: Array = _exchanged(a, top, pivots, top_row, tile) - lower @ u
    return made


@kernel(flops=lambda a, top, pivots, top_row, tile: 0.0)
def exchange_rows(a: Array, top: Array, pivots: Array, top_row: int, tile: int) -> Array:
    """A tile below the pivots after the exchange of rows."""
    return _exchanged(a, top, pivots, top_row, tile)


def _times_inverse(a: Array, u: Array) -> Array:
    return triangular_solution(u, a, right=True, lower=False)


def _pivot_order(a: Array) -> Array:
    """Row numbers in the order in which partial pivoting takes them, all rows."""
    return _permutation(row_factors(a)[1], len(a))


def _permutation(swaps: Array, rows: int) -> Array:
    order = np.arange(rows)
    for k, other in enumerate(swaps):
        order[k], order[other] = order[other], order[k]
    return order


def _exchanged(a: Array, top: Array, pivots: Array, top_row: int, tile: int) -> Array:
    made = np.array(a)
    for source, place in _displaced(pivots, top_row, len(top)):
        if place[0] == tile:
            made[place[1]] = top[source]
    return made


def _displaced(pivots: Array, top_row: int, rows: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Rows of the top tile that are no pivots, each with the place (tile row, row) that it goes to."""
    staying = set(pivots[pivots[:, 0] == top_row, 1].tolist())
    leaving = [row for row in range(rows) if row not in staying]
    left = [(int(t), int(r)) for t, r in pivots if t != top_row]
    return zip(leaving, left, strict=True)
