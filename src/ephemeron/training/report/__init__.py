"""Report of a run: one page and one picture, both from its events.

    run_summary  events and prices -> RunSummary, pure     metrics, invocations, lanes, cost_series: its parts
    html         RunSummary -> one self-contained page     headline, charts, timeline, tables, map_items: its parts
    png          RunSummary -> one picture (needs matplotlib)
    prediction   a plan against its run
    pareto       Plan -> terminal, page and picture        scatter, plan_page: its parts

`write_report` reads a run folder at any moment of the run, also while it goes on or after it was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ephemeron.errors import MissingExtra, RunNotFound
from ephemeron.events import Event, Note, from_json
from ephemeron.runs.folders import RUN_FILE, RunFolder
from ephemeron.training.report.cost_series import CostRates
from ephemeron.training.report.html import render_html, write_png
from ephemeron.training.report.map_items import read_map_items
from ephemeron.training.report.prediction import compare
from ephemeron.training.report.run_summary import RunSummary

__all__ = ["CostRates", "RunSummary", "read_events", "render_html", "write_png", "write_report"]


PICTURE_VARIABLE = "EPHEMERON_REPORT_PICTURE"
"""Environment variable; 0: reports are pages alone. A picture takes longer than a short run."""


def write_report(run_dir: Path, out: Path | None = None, *, prices: CostRates) -> list[Path]:
    """Writes report.html, and report.png where matplotlib is installed and `PICTURE_VARIABLE` is not 0.

    Args:
        run_dir: folder with events.jsonl, run.json and, if the run came to an end, result.json; if it had a plan, plan.json.
        out: folder to write to; the run's own by default.
        prices: see `RunSummary.from_events`.

    Returns:
        The files written; without a picture, the page alone.

    Raises:
        RunNotFound: the folder holds no events.
    """
    story = RunSummary.from_events(read_events(run_dir / "events.jsonl"), prices)
    result = read_result(run_dir / "result.json")
    folder = out or run_dir
    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / "report.html", folder / "report.png"
    comparison = compare(run_dir, result) if result and story.status != "running" else None
    header = read_result(run_dir / RUN_FILE) or {}
    origin = {name: str(header.get(name) or "") for name in ("command", "commit")}
    page.write_text(render_html(story, result, comparison, origin, read_map_items(RunFolder(run_dir))), encoding="utf-8")
    if os.environ.get(PICTURE_VARIABLE) == "0":
        return [page]
    try:
        write_png(story, result, picture)
    except MissingExtra:
        return [page]
    return [page, picture]


def read_events(path: Path) -> list[Event]:
    """The events of a file. A torn last line is what a killed writer leaves, and is passed over in silence;
    other lines that cannot be read are counted in a note.

    Raises:
        RunNotFound: there is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError as e:
        raise RunNotFound(f"{path.parent} holds no run: {path.name} is missing") from e
    events: list[Event] = []
    unread: list[int] = []
    for i, line in enumerate(lines, start=1):
        try:
            events.append(from_json(line))
        except (ValueError, TypeError, AttributeError):
            unread.append(i)
    unread = [i for i in unread if i != len(lines) and lines[i - 1].strip()]
    if unread:
        t = events[-1].t if events else 0.0
        where = ", ".join(map(str, unread[:5])) + (", …" if len(unread) > 5 else "")
        events.append(Note(t=t, level="warning", text=f"{path.name}: could not read line {where}"))
    return events


def read_result(path: Path) -> Mapping[str, Any] | None:
    """A JSON file of a run, or None while there is none that can be read."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return result if isinstance(result, dict) else None
