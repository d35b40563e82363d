"""Prediction of a plan beside the measurement of its run: one table, for the terminal and for the page.

Totals are compared as they are. Phases need a word, because a plan and a run count them differently: a plan states the
seconds of each phase *on the critical path*, a run adds up the seconds that *every function* spent. So the measured
sums are divided by the number of functions that have the phase: by the workers W, and by the aggregators K for
`aggregate`. What is compared is a critical path with a mean; where functions are unequal the path is the longer of the
two. Functions wait for each other and start; a plan does not predict the one by itself, a run does not measure the
other as a phase: these rows have one number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from ephemeron.errors import JobError
from ephemeron.events import PHASES
from ephemeron.rendering.page import table
from ephemeron.training.planner.plan import Choice, Predicted, load_plan
from ephemeron.training.report.headline import usd

Unit = Literal["s", "usd", "count"]

CAPTION = (
    "The error is that of the prediction, as a share of what was measured: +10% was predicted too high. "
    "The price of invocations is measured with the functions and predicted with the requests. "
    "Phases: predicted on the critical path, measured as the mean of the functions that have the phase "
    "(aggregate: of the aggregators). Waiting is part of no predicted phase."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One quantity."""

    name: str
    unit: Unit
    predicted: float | None
    measured: float | None
    error: float | None
    """predicted / measured − 1; None where one of the two is missing, or only the measured one is 0."""
    phase: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The table of one run."""

    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...] = ()
    """Why the two should not be expected to agree."""


def compare(folder: Path, summary: Mapping[str, object]) -> Comparison | None:
    """The comparison for a run's folder, or None where it has no `plan.json` that can be read.

    Args:
        folder: of the run.
        summary: its `result.json`.
    """
    path = folder / "plan.json"
    if not path.exists():
        return None
    try:
        plan = load_plan(path)
    except JobError:
        return _of_sparse_job(path, summary)
    told = rows(plan.choice.predicted, summary)
    return Comparison(rows=tuple(told), notes=tuple(_notes(plan.choice, summary))) if told else None


def _of_sparse_job(path: Path, summary: Mapping[str, object]) -> Comparison | None:
    """The comparison with the plan of a sparse job, which has no iterations that functions do together; None: it is none."""
    try:
        plan = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(plan, dict) or "shards" not in plan:
        return None
    servers, cost = _number(summary, "billed.storage_usd"), _number(summary, "cost_usd")
    told = [
        _row("time", "s", _number(plan, "predicted.seconds"), _number(summary, "seconds")),
        _row("cost", "usd", _number(plan, "predicted.cost_usd"), cost),
        _row("cost of functions", "usd", _number(plan, "predicted.functions_usd"), _less(cost, servers)),
        _row("cost of shards", "usd", _number(plan, "predicted.servers_usd"), servers),
        _row("invocations", "count", _number(plan, "predicted.invocations"), _number(summary, "invocations")),
    ]
    status = summary.get("status", "finished")
    return Comparison(rows=tuple(told), notes=() if status == "finished" else (_unfinished(status),))


def _unfinished(status: object) -> str:
    return f"The run was not finished ({status}), so it did less than was predicted."


def rows(predicted: Predicted, summary: Mapping[str, object]) -> list[ComparisonRow]:
    """Every quantity that the plan or the run knows.

    Args:
        predicted: of the plan's choice.
        summary: what `--json` prints at the end of a run; may be partial.
    """
    storage, cost = _number(summary, "billed.storage_usd"), _number(summary, "cost_usd")
    p = predicted
    rest = [p.cost[name] for name in ("storage", "requests") if name in p.cost]
    out = [
        _row("time", "s", p.seconds, _number(summary, "seconds")),
        _row("cost", "usd", p.cost_usd, cost),
        _row("cost of functions", "usd", p.cost.get("functions"), _less(cost, storage)),
        _row("cost of storage and requests", "usd", sum(rest) if rest else None, storage),
    ]
    for name, where in (("iterations", ""), ("invocations", ""), *((n, "traffic.") for n in ("puts", "gets", "polls"))):
        out.append(_row(name, "count", float(getattr(p, name)), _number(summary, where + name)))
    workers = _number(summary, "workers") or 1.0
    aggregators = _number(summary, "aggregators") or 1.0
    for phase in ("start", *(p for p in PHASES if p != "wait"), "relay", "wait"):
        total = _number(summary, f"phases_s.{phase}")
        share = total / (aggregators if phase == "aggregate" else workers) if total is not None else None
        out.append(_row(phase, "s", p.phases_s.get(phase), share, phase=True))
    return [r for r in out if r.predicted is not None or r.measured is not None]


def _row(name: str, unit: Unit, predicted: float | None, measured: float | None, *, phase: bool = False) -> ComparisonRow:
    error = None
    if predicted is not None and measured is not None:
        error = predicted / measured - 1 if measured else 0.0 if not predicted else None
    return ComparisonRow(name=name, unit=unit, predicted=predicted, measured=measured, error=error, phase=phase)


def _less(whole: float | None, part: float | None) -> float | None:
    return max(0.0, whole - part) if whole is not None and part is not None else None


def _number(tree: Mapping[str, object], path: str) -> float | None:
    """The finite number at `a.b`; None if there is none."""
    value: object = tree
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def _notes(chosen: Choice, summary: Mapping[str, object]) -> list[str]:
    out = []
    status = summary.get("status", "finished")
    if status != "finished":
        out.append(_unfinished(status))
    names = ("workers", "memory_mb", "aggregators", "batch_size_aggregator", "batch_size_nonaggregator", "pattern", "sync", "compression")
    other = [f"{n} {summary[n]} instead of {getattr(chosen, n)}" for n in names if n in summary and _differ(summary[n], getattr(chosen, n))]
    if other:
        out.append(f"The run was not the one that was planned: {', '.join(other)}.")
    return out


def _differ(a: object, b: object) -> bool:
    return str(a).replace("_", "-") != str(b).replace("_", "-")


def render_text(rows: Sequence[ComparisonRow]) -> str:
    """An aligned table of at most 80 columns, phases last."""
    cells = [("", "predicted", "measured", "error")]
    for i, r in enumerate(rows):
        if r.phase and not (i and rows[i - 1].phase):
            cells.append(("by phase", "", "", ""))
        cells.append((f"  {r.name}" if r.phase else r.name, *_cells(r)))
    wide = [max(len(c[i]) for c in cells) for i in range(4)]
    lines = [c[0].ljust(wide[0]) + "".join(f"  {c[i]:>{wide[i]}}" for i in (1, 2, 3)) for c in cells]
    return "\n".join(line.rstrip() for line in lines)


def render_table(comparison: Comparison) -> Markup:
    """The same for the page."""
    body = [[f"{'phase: ' if r.phase else ''}{r.name}", *_cells(r)] for r in comparison.rows]
    return table(["", "predicted", "measured", "error"], body)


def _cells(row: ComparisonRow) -> tuple[str, str, str]:
    off = "–" if row.error is None else f"{row.error:+.1%}" if abs(row.error) < 10 else f"{row.error + 1:,.0f}×"
    return quantity(row.predicted, row.unit), quantity(row.measured, row.unit), off


def quantity(value: float | None, unit: Unit) -> str:
    """A value with its unit, as every table of predictions writes it."""
    if value is None:
        return "–"
    if unit == "usd":
        return usd(value)
    if unit == "count":
        return f"{value:,.0f}"
    return f"{value:,.2f} s" if value < 100 else f"{value:,.1f} s"
