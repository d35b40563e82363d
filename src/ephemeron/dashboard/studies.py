"""Studies: their status, as they write it to `study.json`, and the curves of their trials, from the logs of the runs; of an objective,
whose trials are no runs, from that of the study."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from ephemeron.dashboard.library import Found, Library
from ephemeron.dashboard.run_documents import Document, evaluations, finite
from ephemeron.events import TaskReported
from ephemeron.functions.jsonl import complete_lines, events_in
from ephemeron.runs.folders import TRIALS, RunFolder
from ephemeron.runs.lock import is_driven

_MOST_CURVES = 400
_MOST_TEXT = 2_000
"""Characters of a traceback, its last ones."""
_STATUS = "study.json"


class Studies:
    """Pages of studies.

    Args:
        library: of runs and studies.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._curves: dict[str, tuple[int, Document]] = {}
        """By key of a run: version of its log, and its curve."""
        self._reports: dict[str, _Reports] = {}
        """By key of a study of an objective."""
        self._lock = threading.Lock()

    def rows(self) -> list[Document]:
        """One row for each study."""
        return [{k: v for k, v in self.head(found).items() if k != "trials"} for found in self._library.studies()]

    def head(self, found: Found) -> Document:
        """Status of a study, with the keys of the runs of its trials."""
        status = _status(found.path)
        runs = {run.trial: run for run in self._library.trials(found)}
        trials = [_trial(t, runs, found.path) for t in status.get("trials", []) if isinstance(t, dict)]
        known = {t["number"] for t in trials}
        trials += [_trial({"number": n, "state": ""}, runs, found.path) for n in sorted(runs.keys() - known)]
        state = str(status.get("state", ""))
        if state == "running" and not is_driven(RunFolder(found.path)):
            state = "interrupted"
        counts: dict[str, int] = {}
        for trial in trials:
            counts[trial["state"]] = counts.get(trial["state"], 0) + 1
        best = next((t for t in trials if t["number"] == status.get("best")), None)
        return {
            **{k: v for k, v in status.items() if k not in ("trials", "token", "digest")},
            "key": found.key,
            "name": str(status.get("name", found.path.name)),
            "path": str(found.path),
            "state": state,
            "trials": trials,
            "counts": counts,
            "best_value": best["value"] if best else None,
        }

    def curves(self, found: Found) -> list[Document]:
        """Evaluations of each trial, by iteration. Reads the logs of trials on."""
        status = _status(found.path)
        if status.get("is_of_objective"):
            numbers = {str(t.get("run")): t.get("number") for t in status.get("trials", []) if isinstance(t, dict)}
            with self._lock:
                return self._reports.setdefault(found.key, _Reports(found.path / "events.jsonl")).curves(numbers)
        metric = str(status.get("metric", "loss"))
        return [self._curve(run, metric) for run in self._library.trials(found)[-_MOST_CURVES:]]

    def _curve(self, run: Found, metric: str) -> Document:
        size = _size(run.path / "events.jsonl")
        with self._lock:
            known = self._curves.get(run.key)
        if known is not None and known[0] == size:
            return known[1]
        view = self._library.view(run)
        while view.advance():
            pass
        with view.lock:
            points = evaluations(view)
            curve = {
                "trial": run.trial,
                "key": run.key,
                "iteration": [p.iteration for p in points],
                "epoch": [p.epoch for p in points],
                "t": [finite(p.t) for p in points],
                "value": [finite(p.metrics.get(metric)) for p in points],
            }
        with self._lock:
            self._curves[run.key] = (size, curve)
        return curve

    def may_end(self, found: Found, number: int) -> Path | None:
        """Folder of a trial that may be ended; None: there is no such trial, or it has ended."""
        head = self.head(found)
        trial = next((t for t in head["trials"] if t["number"] == number), None)
        if trial is None or trial["state"] not in ("running", "waiting", ""):
            return None
        folder = found.path / "trials" / str(number)
        return folder if folder.is_dir() else None


class _Reports:
    """What tasks of a study have reported, read on from where it was read before.

    Args:
        events: log of the study.
    """

    def __init__(self, events: Path) -> None:
        self._events, self._offset = events, 0
        self._of: dict[str, dict[int, TaskReported]] = {}
        """By task and step."""

    def curves(self, numbers: dict[str, Any]) -> list[Document]:
        """Curves of trials.

        Args:
            numbers: of the trials, by task.
        """
        while lines := complete_lines(self._events, self._offset):
            self._offset += len(lines)
            for event in events_in(lines):
                if isinstance(event, TaskReported):
                    self._of.setdefault(event.task, {}).setdefault(event.step, event)
        found = [
            {
                "trial": numbers[task],
                "key": "",
                "iteration": list(steps),
                "epoch": [None] * len(steps),
                "t": [finite(e.t) for e in steps.values()],
                "value": [finite(e.value) for e in steps.values()],
            }
            for task, steps in self._of.items()
            if task in numbers
        ]
        return sorted(found, key=lambda curve: curve["trial"])[-_MOST_CURVES:]


def _trial(trial: Document, runs: dict[int, Found], study: Path) -> Document:
    run = runs.get(int(trial["number"]))
    folder = run.path if run else study / TRIALS / str(trial["number"])
    return {
        "value": None,
        "parameters": {},
        "cost_usd": None,
        "seconds": None,
        "reason": "",
        **trial,
        "state": str(trial.get("state", "")),
        "key": run.key if run else "",
        "ending": (folder / "end").exists() and trial.get("state") == "running",
        "traceback": str(trial.get("traceback", ""))[-_MOST_TEXT:],
    }


def _status(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / _STATUS).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
