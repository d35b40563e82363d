"""The figures of a report as one JSON document, for runs of all kinds: `ephemeron report RUN --json`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ephemeron.config.typed import plain
from ephemeron.runs.header import RunHeader
from ephemeron.training.report import read_events, read_result
from ephemeron.training.report.headline import Headline
from ephemeron.training.report.prediction import compare
from ephemeron.training.report.run_summary import RunSummary


def report_figures(run_dir: Path, header: RunHeader) -> dict[str, Any]:
    """What the page of a run shows, as numbers and texts.

    Args:
        run_dir, header: of the run, which may go on.

    Raises:
        RunNotFound: the folder holds no events.
    """
    result = read_result(run_dir / "result.json")
    story = RunSummary.from_events(read_events(run_dir / "events.jsonl"), header.prices)
    head, spent = Headline.of(story, result), story.spending
    rows = story.invocations
    comparison = compare(run_dir, result) if result and story.status != "running" else None
    return {
        "run_id": header.run_id,
        "kind": header.kind,
        "name": header.name,
        "platform": header.platform,
        "parent": header.parent,
        "labels": dict(header.labels),
        "command": header.command,
        "commit": header.commit,
        "started_at": header.started_at,
        "status": head.status,
        "causes": list(story.causes),
        "seconds": head.seconds,
        "cost_usd": head.cost_usd,
        "budget_usd": header.budget_usd,
        "prices": f"{header.prices.name}, {header.prices.as_of}",
        "cost": {
            "functions_usd": spent.compute_usd,
            "invocations_usd": spent.calls_usd,
            "requests_usd": spent.requests_usd,
            "direct_usd": spent.direct_usd,
            "burst_usd": spent.burst_usd,
            "suspended_usd": spent.suspended_usd,
            "is_estimated": spent.estimated,
        },
        "gb_seconds": head.gb_seconds,
        "traffic": plain(spent.traffic),
        "functions": head.workers,
        "memory_mb": head.memory_mb,
        "invocations": {
            "total": head.invocations,
            "by_status": dict(sorted(Counter(row.status for row in rows).items())),
            "cold": sum(row.cold is True for row in rows),
            "billed_s": sum(row.billed_s for row in rows),
            "peak_memory_mb": max((row.peak_memory_mb for row in rows), default=0.0),
        },
        "iterations": head.iterations,
        "planned_iterations": head.planned_iterations,
        "loss": head.train_loss,
        "metrics": {name: [list(point) for point in points] for name, points in story.learning.curves},
        "evaluations": [plain(point) for point in story.learning.evaluations],
        "faults": len(story.faults),
        "notes": [note.text for note in story.notes],
        "environment": list(story.environment),
        "predicted": None if comparison is None else plain(comparison),
        "result": result,
    }
