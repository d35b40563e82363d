"""Rows of a table from the view of a client: which shard has them, and what a caller may give for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from ephemeron.errors import JobError
from ephemeron.sparse.store.messages import TableReply
from ephemeron.sparse.store.optimizers import Floats, Indices


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table, from the view of a client."""

    name: str
    rows: int
    width: int
    """Values of a row."""
    numbers: tuple[int, ...]
    """Its number on each shard."""
    bounds: Indices
    """First row of each shard, and the number of rows."""

    @classmethod
    def of(cls, replies: Sequence[TableReply]) -> Self:
        """The table that all shards, in their order, have described."""
        spec = replies[0].spec
        bounds = np.array([reply.spec.first for reply in replies] + [replies[-1].spec.stop], np.int64)
        return cls(spec.name, spec.rows, spec.width, tuple(reply.number for reply in replies), bounds)

    def parts(self, rows: Indices) -> list[tuple[int, int, int]]:
        """Shards of ascending rows, each with the begin and end of its part."""
        shards = len(self.numbers)
        if shards == 1:
            return [(0, 0, rows.size)]
        cuts = np.searchsorted(rows, self.bounds)
        return [(shard, int(cuts[shard]), int(cuts[shard + 1])) for shard in range(shards) if cuts[shard] < cuts[shard + 1]]


def as_indices(indices: ArrayLike) -> Indices:
    """Indices as int64[n].

    Raises:
        JobError: they are no flat array of whole numbers.
    """
    rows = np.asarray(indices)
    if rows.size and rows.dtype.kind not in "iu":
        raise JobError(f"indices are of type {rows.dtype}", remedy="give whole numbers")
    if rows.ndim != 1:
        raise JobError(f"indices have the shape {rows.shape}", remedy="give a flat array")
    return np.ascontiguousarray(rows, np.int64)


def check_range(info: TableInfo, least: int, most: int) -> None:
    """Refuses indices that a table does not have.

    Raises:
        JobError: the least or the largest one is out of range.
    """
    if least < 0 or most >= info.rows:
        wrong = least if least < 0 else most
        raise JobError(f"index {wrong} is not in table {info.name!r}", remedy=f"its indices are 0 to {info.rows - 1}")


def combined(info: TableInfo, indices: ArrayLike, values: ArrayLike) -> tuple[Indices, Floats]:
    """Distinct ascending indices, and the sum of the values of each: int64[m], float32[m, width].

    Raises:
        JobError: an index out of range, a wrong shape, or a number that is not finite.
    """
    rows, gradient = as_indices(indices), np.asarray(values, np.float32)
    if gradient.ndim == 1 and info.width == 1:
        gradient = gradient[:, None]
    if gradient.shape != (rows.size, info.width):
        raise JobError(
            f"table {info.name!r} has rows of {info.width} values: a gradient of shape {gradient.shape} does not match {rows.size} indices",
            remedy=f"give the shape ({rows.size}, {info.width})",
        )
    if not rows.size:
        return rows, gradient
    if not np.isfinite(gradient).all():
        raise JobError(f"a gradient of table {info.name!r} has NaN or infinite values", remedy="mend its cause")
    if rows.size > 1 and (rows[1:] <= rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        rows, gradient = rows[order], gradient[order]
        first = np.concatenate(([True], rows[1:] != rows[:-1]))
        if not first.all():
            begins = np.flatnonzero(first)
            rows, gradient = rows[begins], np.add.reduceat(gradient, begins, axis=0)
    check_range(info, int(rows[0]), int(rows[-1]))
    return rows, gradient
