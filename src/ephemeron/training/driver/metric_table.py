"""Metrics of a run as a table: one row for each step, one column for each metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, overload

from ephemeron.errors import JobError, MissingExtra
from ephemeron.events import Event
from ephemeron.training.driver.step_metrics import StepMerger, StepMetrics

if TYPE_CHECKING:
    import pandas

Cell = int | float | None
Row = Mapping[str, Cell]

_FIRST = ("iteration", "epoch", "time_s")
_SHOWN = 20
"""Rows that are shown; of more, the first and the last half of so many."""


class MetricTable(Sequence[Row]):
    """Rows in the order of iterations, each a mapping from column to number; None where the step has no such metric.

    Columns are `iteration` (completed), `epoch` (completed, with the part of the current one), `time_s` (run seconds), then
    metrics: `train/…` of the batch of the step, `evaluation/…` of the evaluation data after it.

    Args:
        steps: metrics of steps; of two of the same step and split, the later one counts.
    """

    def __init__(self, steps: Iterable[StepMetrics]) -> None:
        latest = {(row.step, row.split): row for row in steps}
        rows: dict[int, dict[str, Cell]] = {}
        names: dict[str, None] = {}
        for (step, split), row in sorted(latest.items(), key=lambda item: (item[0][0], item[0][1] != "train")):
            values = rows.setdefault(step, {"iteration": step, "epoch": row.epoch, "time_s": row.t})
            values["time_s"] = max(row.t, values["time_s"] or 0.0)
            values |= {f"{split}/{name}": value for name, value in row.metrics.items()}
            names |= dict.fromkeys(f"{split}/{name}" for name in row.metrics)
        trained = sorted(names, key=lambda name: not name.startswith("train/"))
        self.columns: tuple[str, ...] = (*_FIRST, *trained)
        """Names of the columns."""
        self._rows = [{name: row.get(name) for name in self.columns} for row in rows.values()]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return list(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def column(self, name: str) -> list[tuple[int, float]]:
        """(iteration, value) of a metric, without steps that lack it.

        Raises:
            JobError: there is no such column.
        """
        if name not in self.columns:
            raise JobError(f"the run has no metric {name!r}", remedy=f"it has {', '.join(self.columns)}")
        return [(int(row["iteration"] or 0), value) for row in self._rows if (value := row[name]) is not None]

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame, with NaN where there is no value.

        Raises:
            MissingExtra: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise MissingExtra("pandas", "pandas") from None
        return pandas.DataFrame(self._rows, columns=list(self.columns))

    def _cells(self) -> tuple[list[list[str]], int]:
        """Text of the rows that are shown, and the number of rows left out after the first half of them."""
        hidden = max(0, len(self) - _SHOWN)
        half = _SHOWN // 2
        shown = self._rows if not hidden else [*self._rows[:half], *self._rows[-half:]]
        return [[_text(row[name]) for name in self.columns] for row in shown], hidden

    def __repr__(self) -> str:
        cells, hidden = self._cells()
        lines = [list(self.columns), *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        if hidden:
            text.insert(1 + _SHOWN // 2, f"… {hidden} rows …")
        return "\n".join(text)

    def _repr_html_(self) -> str:
        cells, hidden = self._cells()
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in cells]
        if hidden:
            body.insert(_SHOWN // 2, f'<tr><td colspan="{len(self.columns)}">… {hidden} rows …</td></tr>')
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def metric_table(events: Iterable[Event]) -> MetricTable:
    """The metrics of a run's events."""
    merger = StepMerger()
    return MetricTable(row for event in events if (row := merger.feed(event)) is not None)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) or math.isnan(value) else f"{value:.6g}"
