"""Values of a run for its page, as JSON: a few kilobytes each, whatever the length of the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.dashboard.means import IterationMeans, moving_mean, thinned
from ephemeron.dashboard.run_view import RunView
from ephemeron.events import Invoked
from ephemeron.runs.folders import PLAN_FILE
from ephemeron.runs.status import status_of
from ephemeron.training.report.invocations import InvocationRow, as_begun, invocation_rows
from ephemeron.training.report.metrics import EvaluationPoint, learning

Document = dict[str, Any]

MOST_MARKS = 4000
"""Marks of a timeline, at most: the later ones."""
_SMOOTH_FROM = 120
"""Iterations from which a smoothed line is drawn beside the loss."""


def finite(value: float | None, digits: int = 7) -> float | None:
    """A number for JSON, which has no NaN; rounded, because pages show few digits."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def summary(view: RunView) -> Document:
    """Head of a run's page: status, progress, cost, what the run is made of, and what happened to it."""
    status = status_of(view.folder)
    with view.lock:
        run, result = view.started, view.folder.read("result.json") or {}
        rows = functions_of(view)
        done = view.meter.finished(run.workers if run else 0)
        members = view.meter.members
        out: Document = {
            "run_id": view.folder.run_id,
            "kind": view.record.kind if view.record else "",
            "job": run.job if run else "",
            "platform": run.platform if run else (view.record.platform if view.record else ""),
            "labels": dict(view.record.labels) if view.record else {},
            "status": status,
            "share_read": round(view.share_read, 4),
            "version": view.version,
            "seconds": finite(view.moment(status)),
            "wall_time": run.wall_time if run else 0.0,
            "iterations_done": done,
            "iterations": members.iterations,
            "epoch": view.epoch + 1 if view.meter.done else 0,
            "epochs": run.epochs if run else 0,
            "workers": members.workers,
            "aggregators": _last(view.generations, "aggregators", run.aggregators if run else 0),
            "memory_mb": view.meter.memory_mb,
            "samples": run.samples if run else 0,
            "loss": finite(view.loss.last()),
            "cost_usd": finite(view.cost_now(view.moment(status))),
            "is_priced": bool(view.meter.prices.name) or bool(view.meter.groups),
            "budget_usd": _budget(view),
            "predicted": predicted(view),
            "result": {k: result[k] for k in ("cost_usd", "seconds", "tasks", "failed", "cancelled") if k in result},
            "metrics": last_metrics(view),
            "ranks": _ranks(view),
            "functions": _counts(rows),
            "phases_s": {phase: round(s, 3) for phase, s in view.lanes.totals().items()},
            "traffic": _traffic(view),
            "generation": max((g.generation for g in view.generations), default=0),
            "generations": [
                {
                    "generation": g.generation,
                    "t": finite(g.t),
                    "iteration": g.from_iteration,
                    "workers": g.workers,
                    "memory_mb": g.memory_mb,
                    "request": g.request,
                }
                for g in view.generations
            ],
            "groups": _groups(view),
            "checkpoint": view.checkpoint,
            "faults": len(view.faults),
            "notes": [{"t": finite(n.t), "level": n.level, "text": n.text} for n in view.notes.values()],
            "causes": view.ended.causes if view.ended else [],
            "environment": list(dict.fromkeys(note for e in view.launches for note in e.notes)),
            "configuration": _configuration(run.configuration) if run else {},
            "unread": view.unread,
        }
    return out


def _last(events: list[Any], name: str, before: int) -> int:
    return int(getattr(events[-1], name)) if events else before


def _configuration(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {k: v for k, v in values.items() if v not in (None, "")}


def _budget(view: RunView) -> float | None:
    budget = view.started.configuration.get("budget_usd") if view.started else None
    return float(budget) if isinstance(budget, int | float) else None


def predicted(view: RunView) -> Document | None:
    """Seconds and cost that the run was planned with; None: it was not planned."""
    plan = view.folder.read(PLAN_FILE) or {}
    found = plan.get("predicted")
    if not isinstance(found, dict):
        return None
    values = {k: found.get(k) for k in ("seconds", "cost_usd")}
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float)}


def last_metrics(view: RunView) -> Document:
    """Metrics of the latest evaluation; of the training batches, where nothing was evaluated."""
    points = evaluations(view)
    if points:
        return {name: finite(value) for name, value in points[-1].metrics.items()}
    return {name: finite(means.last()) for name, means in view.metrics.items()}


def evaluations(view: RunView) -> Any:
    """Evaluations of the run, over ranks."""
    return learning((), view.evaluated.values(), view.measured.values()).evaluations


def _ranks(view: RunView) -> list[int]:
    called = {e.rank for e in view.calls if isinstance(e, Invoked)}
    return sorted(called | set(view.lanes.ranks))


def functions_of(view: RunView) -> tuple[InvocationRow, ...]:
    """Invocations by rank, in the order of their calls. Hold the lock of the view."""
    version, rows = view.functions
    if version != view.version:
        events = as_begun(sorted(view.calls, key=lambda e: e.t))
        found = invocation_rows(events, now=view.t, over=view.ended is not None, memory_mb=view.meter.memory_mb)
        rows = tuple(_seen(row, view) for row in found)
        view.functions = (view.version, rows)
    return rows


def _seen(row: InvocationRow, view: RunView) -> InvocationRow:
    """The row with its end at its latest report, where no end is recorded and it does not run any more."""
    if row.ended or row.status != "unknown":
        return row
    seen = view.last_seen.get((row.rank, row.attempt), row.end)

    return dataclasses.replace(row, end=max(row.end, seen))


def _counts(rows: tuple[InvocationRow, ...]) -> Document:
    running = [r for r in rows if r.status == "running"]
    return {
        "invocations": len(rows),
        "running": sum(r.cold is not None for r in running),
        "starting": sum(r.cold is None for r in running),
        "cold": sum(bool(r.cold) for r in rows),
        "replacements": sum(r.reason == "replacement" for r in rows),
        "relays": sum(r.reason == "relay" for r in rows),
        "failed": sum(not r.well and r.status not in ("unknown", "cancelled") for r in rows),
    }


def _traffic(view: RunView) -> Document:
    t = view.meter.traffic
    return {
        "puts": t.puts,
        "gets": t.gets,
        "polls": t.polls,
        "deletes": t.deletes,
        "lists": t.lists,
        "bytes_up": t.bytes_up,
        "bytes_down": t.bytes_down,
        "direct_bytes": t.direct_bytes_sent,
    }


def _groups(view: RunView) -> list[Document]:
    return [
        {
            "name": s.name,
            "platform": s.platform,
            "first_rank": g.started.first_rank,
            "workers": s.workers,
            "memory_mb": s.memory_mb,
            "samples": s.samples,
            "iterations": s.iterations,
            "invocations": s.invocations,
            "gb_seconds": finite(s.gb_seconds),
            "cost_usd": finite(s.cost_usd),
            "prices": s.prices,
            "steps_per_s": finite(a.steps_per_s),
            "staleness": a.staleness,
            "exchanges": a.exchanges,
            "waiting_share": finite(a.waiting_share),
            "wan_bytes_sent": a.wan_bytes_sent,
            "wan_bytes_received": a.wan_bytes_received,
            "wan_kernel_bytes_sent": a.wan_kernel_bytes_sent,
            "wan_kernel_bytes_received": a.wan_kernel_bytes_received,
        }
        for g in view.meter.groups
        for s, a in [(g.region(view.t), g.activity)]
    ]


def series(view: RunView, points: int = 1200) -> Document:
    """Curves of a run.

    Args:
        points: of each curve, at most. Minima and maxima are kept.
    """
    with view.lock:
        out: Document = {"version": view.version, "share_read": view.share_read, "loss": _curve(view.loss, points), "metrics": {}}
        for name, means in view.metrics.items():
            out["metrics"][name] = _curve(means, points)
        out["evaluations"] = _evaluation_curves(evaluations(view))
        out["groups"] = [
            {
                "name": group.started.name,
                "loss": _curve(view.loss_of.get(group.started.name, IterationMeans()), points),
                "evaluations": _evaluation_curves(
                    learning((), [e for e in view.evaluated.values() if group.started.has(e.rank)]).evaluations
                ),
            }
            for group in view.meter.groups
        ]
        times = np.asarray([*view.cost_times, view.t])
        costs = np.asarray([*view.cost_usd, view.cost_now()])
    at = thinned(costs, 400)
    out["cost"] = {"t": _numbers(times[at]), "usd": _numbers(costs[at])}
    return out


def _evaluation_curves(found: Sequence[EvaluationPoint]) -> Document:
    names = dict.fromkeys(name for point in found for name in point.metrics)
    return {
        "iteration": [p.iteration for p in found],
        "epoch": [p.epoch for p in found],
        "t": [finite(p.t) for p in found],
        "metrics": {name: [finite(p.metrics.get(name)) for p in found] for name in names},
    }


def _curve(means: IterationMeans, points: int) -> Document:
    iterations, values, times = means.curve()
    at = thinned(values, points)
    out: Document = {"iteration": iterations[at].tolist(), "t": _numbers(times[at]), "value": _numbers(values[at])}
    if len(values) >= _SMOOTH_FROM:
        window = max(5, len(values) // 60)
        out["smooth"] = _numbers(moving_mean(values, window)[at])
        out["window"] = window
    return out


def _numbers(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [finite(v, 6) for v in values.tolist()]


def function_table(view: RunView) -> Document:
    """Every invocation, and its rank's iteration."""
    with view.lock:
        rows = functions_of(view)
        return {
            "version": view.version,
            "rows": [
                {
                    "rank": r.rank,
                    "attempt": r.attempt,
                    "invocation": r.invocation,
                    "reason": r.reason,
                    "status": r.status,
                    "outcome": r.outcome,
                    "error": r.error[:2000],
                    "invoked": finite(r.invoked),
                    "start": finite(r.start),
                    "end": finite(r.end),
                    "cold": r.cold,
                    "billed_s": finite(r.billed_s),
                    "gb_seconds": finite(r.gb_seconds),
                    "memory_mb": r.memory_mb,
                    "peak_memory_mb": finite(r.peak_memory_mb),
                    "iteration": view.iteration_of.get(r.rank),
                }
                for r in rows
            ],
        }


def marks(view: RunView) -> Document:
    """What a timeline shows as marks: faults, replacements, relays, ends that were bad, generations, resumes."""
    with view.lock:
        found: list[Document] = []
        for r in functions_of(view):
            if r.reason != "start":
                found.append({"kind": r.reason, "t": finite(r.start), "rank": r.rank, "text": f"attempt {r.attempt} starts"})
            if r.ended and not r.well and r.status != "cancelled":
                said = f"{r.status.replace('_', ' ')}: {r.error[:200]}" if r.error else r.status.replace("_", " ")
                found.append({"kind": "bad", "t": finite(r.end), "rank": r.rank, "text": said})
        for f in view.faults:
            where = "" if f.iteration is None else f" at iteration {f.iteration}"
            found.append({"kind": "fault", "t": finite(f.t), "rank": f.rank, "text": f"injected: {f.fault}{where}"})
        for g in view.generations:
            said = f"generation {g.generation}: {g.workers} functions of {g.memory_mb} MB from iteration {g.from_iteration}"
            found.append({"kind": "generation", "t": finite(g.t), "rank": None, "text": said})
        found += [{"kind": "resumed", "t": finite(e.t), "rank": None, "text": "resumed"} for e in view.launches[1:]]
        found.sort(key=lambda m: m["t"] or 0.0)
        return {"version": view.version, "marks": found[-MOST_MARKS:], "left_out": max(0, len(found) - MOST_MARKS)}


def alive_of(view: RunView) -> dict[int, list[tuple[float, float]]]:
    """By rank, when its functions ran. Hold the lock of the view."""
    out: dict[int, list[tuple[float, float]]] = {}
    for r in functions_of(view):
        out.setdefault(r.rank, []).append((r.start, r.end))
    return out


def ranks_of(view: RunView) -> list[int]:
    """Ranks of a timeline, from the top. Hold the lock of the view."""
    return _ranks(view)
