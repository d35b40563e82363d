"""How a durable map has ended, and its results in the order of the items."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ephemeron.executor.session import Bill
from ephemeron.maps.estimate import Estimate
from ephemeron.maps.result_table import ResultTable, Row

PART_ROWS, PART_BYTES = 50_000, 64 << 20
"""Rows that are read at a time."""


def rows_of_part(table: ResultTable) -> int:
    """Rows of a table that are in memory at once."""
    return max(1, min(PART_ROWS, int(PART_BYTES / max(1.0, table.row_bytes))))


@dataclass(slots=True)
class Failure:
    """An item without a result."""

    item: int
    """Number of the item, from 1."""
    key: str
    error: str
    tries: int = 1
    traceback: str = ""


@dataclass(slots=True)
class MapResult:
    """How a map has ended.

    Iterating gives the results in the order of the items, as JSON gives them back, or as bytes; None for items that have none. Of groups and partitions it
    gives what is recorded of them.
    """

    items: int
    recorded: int
    """Items that had a row before."""
    computed: int = 0
    failed: int = 0
    """Items whose row is of a failure, those of earlier calls included."""
    missing: int = 0
    """Items without a row, since it ended early."""
    replaced: int = 0
    """NaN and infinite values of the results that are null."""
    stopped: str = ""
    """Why it ended early; empty: it did not."""
    cause: Literal["", "enough", "interrupt", "stop", "budget", "failures", "other"] = ""
    failures: list[Failure] = field(default_factory=list)
    """The first ones of this call."""
    run: str = ""
    """Name of its run; empty: no function was needed."""
    bill: Bill | None = None
    backups: int = 0
    forgotten: int = 0
    """Rows that were deleted, see `forget_superseded`."""
    estimate: Estimate | None = None
    """Of the results of this call, with `stop_when`; they include those of earlier calls."""
    seconds: float = 0.0
    table: ResultTable | None = None
    refused: int = 0
    """Results that the file cannot have."""
    _rows: NDArray[np.int64] | None = None
    """Of the table, by item; None: they were not needed."""
    _find: Callable[[], NDArray[np.int64]] | None = None

    def __iter__(self) -> Iterator[Any]:
        for rows in self.parts(("result", "data")):
            for result, data in zip(rows.column("result").to_pylist(), rows.column("data").to_pylist(), strict=True):
                yield data if result is None else json.loads(result)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The row of each item, in the order of the items; those without a row are left out."""
        for part in self.parts():
            yield from part.to_pylist()

    def parts(self, columns: Sequence[str] = Row._fields) -> Iterator[Any]:
        """The same as `pyarrow.Table`s."""
        assert self.table is not None
        if self._rows is None:
            assert self._find is not None
            self._rows = self._find()
        of_part = rows_of_part(self.table)
        for at in range(0, len(self._rows), of_part):
            rows = self._rows[at : at + of_part]
            yield self.table.take(rows[rows >= 0], columns)
