"""Studies: their status, as they write it to `study.json`, and the curves of their trials, from the logs of the runs."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from ephemeron.dashboard.library import Found, Library
from ephemeron.dashboard.run_documents import Document, evaluations, finite
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.lock import is_driven

_MOST_CURVES = 400
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
        self._lock = threading.Lock()

    def rows(self) -> list[Document]:
        """One row for each study."""
        return [{k: v for k, v in self.head(found).items() if k != "trials"} for found in self._library.studies()]

    def head(self, found: Found) -> Document:
        """Status of a study, with the keys of the runs of its trials."""
        status = _status(found.path)
        runs = {run.trial: run for run in self._library.trials(found)}
        trials = [_trial(t, runs) for t in status.get("trials", []) if isinstance(t, dict)]
        known = {t["number"] for t in trials}
        trials += [_trial({"number": n, "state": ""}, runs) for n in sorted(runs.keys() - known)]
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
        metric = str(_status(found.path).get("metric", "loss"))
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


def _trial(trial: Document, runs: dict[int, Found]) -> Document:
    run = runs.get(int(trial["number"]))
    folder = run.path if run else None
    return {
        "value": None,
        "parameters": {},
        "cost_usd": None,
        "seconds": None,
        "reason": "",
        **trial,
        "state": str(trial.get("state", "")),
        "key": run.key if run else "",
        "ending": bool(folder and (folder / "end").exists() and trial.get("state") == "running"),
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
