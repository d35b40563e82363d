"""Copy of a table at one moment, taken in parts while pushes go on.

Rows that a push is about to change, and that have not been copied, are saved first (copy on write by rows). So a snapshot never stops
the shard for longer than one part takes.
"""

from __future__ import annotations

import numpy as np

from ephemeron.sparse.store.optimizers import Floats, Indices
from ephemeron.sparse.store.state import Table


class TableCapture:
    """A table as it is now. One at a time for each table; `close` ends it."""

    def __init__(self, table: Table) -> None:
        self.spec = table.spec
        self._table = table
        self._arrays = [table.weights, *(table.slots[name] for name in table.optimizer.slots)]
        self._taken = np.zeros(len(table.weights), bool)
        self._saved: list[tuple[Indices, list[Floats]]] = []
        table.before_change = self._before

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return len(self._taken)

    def part(self, begin: int, stop: int) -> list[Floats]:
        """Copies of some rows: of the weights and then of each slot, float32[stop - begin, width]."""
        copies = [array[begin:stop].copy() for array in self._arrays]
        for rows, values in self._saved:
            inside = (rows >= begin) & (rows < stop)
            for copy, value in zip(copies, values, strict=True):
                copy[rows[inside] - begin] = value[inside]
        self._taken[begin:stop] = True
        return copies

    def close(self) -> None:
        """Ends it."""
        self._table.before_change = None

    def _before(self, rows: Indices) -> None:
        fresh = rows[~self._taken[rows]]
        if fresh.size:
            self._taken[fresh] = True
            self._saved.append((fresh, [array[fresh] for array in self._arrays]))
