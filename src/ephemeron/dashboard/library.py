"""Runs and studies below some folders, and what a table of them shows.

A folder with `study.json` is a study, another one with `run.json` a run. A study's `trials/N` are runs or links to them. Folders are looked through
again every few seconds; those of runs are not entered. A run is known by the number of its root and its path below it,
and only folders that were found are ever opened.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ephemeron.dashboard.run_documents import Document, finite, last_metrics
from ephemeron.dashboard.run_view import RunView
from ephemeron.runs.folders import PROGRESS_FILE, RESULT_FILE, RunFolder
from ephemeron.runs.header import read_header
from ephemeron.runs.status import may_be_running, status_of
from ephemeron.runs.summary import read_summary
from ephemeron.training.driver.records import read_result

_DEPTH = 6
"""Folders below a root that are looked through."""
_RESCAN_S = 2.0
_CHECKS_S = 100
"""Runs that have ended whose status is looked at again in a second, at most: one may have been resumed."""
_KEPT_VIEWS = 32
"""Logs that are kept in memory, least recently used ones go first."""
_SKIPPED = frozenset({"objects", "logs", "scratch", "node_modules", "__pycache__", ".git", ".venv", "groups"})


@dataclass(frozen=True, slots=True)
class Found:
    """A run or a study."""

    key: str
    path: Path
    study: str = ""
    """Key of the study of which a run is a trial."""
    trial: int = -1
    """Its number there."""


@dataclass(slots=True)
class _Ended:
    """The row of a run with a result."""

    row: Document
    result_at: float
    """Time of the result's file."""
    checked_at: float
    """When it was last seen not to be running."""


class Library:
    """Everything below the roots.

    Args:
        roots: folders; they need not exist yet.
    """

    def __init__(self, roots: list[Path]) -> None:
        self.roots = [root.absolute() for root in roots]
        self._runs: dict[str, Found] = {}
        self._studies: dict[str, Found] = {}
        self._views: OrderedDict[str, RunView] = OrderedDict()
        self._ended: dict[str, _Ended] = {}
        """Rows of runs with a result, by key."""
        self._scanned_at = float("-inf")
        self._lock = threading.RLock()

    def scan(self, *, force: bool = False) -> None:
        """Looks for runs and studies, if the last look was some time ago."""
        with self._lock:
            if not force and time.monotonic() - self._scanned_at < _RESCAN_S:
                return
            runs: dict[Path, Found] = {}
            studies: dict[str, Found] = {}
            for n, root in enumerate(self.roots):
                for path, kind in _walk(root):
                    key = f"{n}/{path.relative_to(root).as_posix()}"
                    if kind == "run":
                        runs.setdefault(path.resolve(), Found(key, path))
                    else:
                        studies[key] = Found(key, path)
            for study in studies.values():
                for number, link in _trials(study.path):
                    path = link.resolve()
                    known = runs.get(path, Found(f"{study.key}/trials/{number}", path))
                    runs[path] = replace(known, study=study.key, trial=number)
            self._runs, self._studies = {f.key: f for f in runs.values()}, studies
            self._scanned_at = time.monotonic()

    def run(self, key: str) -> Found | None:
        """A run by its key; None: there is none."""
        return self._lookup(key, "run")

    def study(self, key: str) -> Found | None:
        """A study by its key; None: there is none."""
        return self._lookup(key, "study")

    def _lookup(self, key: str, kind: str) -> Found | None:
        self.scan()
        with self._lock:
            found = (self._runs if kind == "run" else self._studies).get(key)
            if found is None:
                self.scan(force=True)
                found = (self._runs if kind == "run" else self._studies).get(key)
            return found

    def runs(self) -> list[Found]:
        """All runs."""
        self.scan()
        with self._lock:
            return list(self._runs.values())

    def studies(self) -> list[Found]:
        """All studies."""
        self.scan()
        with self._lock:
            return list(self._studies.values())

    def trials(self, study: Found) -> list[Found]:
        """Runs of a study, in the order of their numbers."""
        return sorted((run for run in self.runs() if run.study == study.key), key=lambda run: run.trial)

    def view(self, found: Found) -> RunView:
        """The log of a run, which the caller reads on with `RunView.advance`."""
        with self._lock:
            view = self._views.get(found.key)
            if view is None:
                view = self._views[found.key] = RunView(found.path)
            self._views.move_to_end(found.key)
            while len(self._views) > _KEPT_VIEWS:
                self._views.popitem(last=False)
            return view

    def rows(self) -> list[Document]:
        """One row for each run, newest first."""
        rows = [self.row(found) for found in self.runs()]
        return sorted(rows, key=lambda row: -(row["wall_time"] or 0.0))

    def row(self, found: Found) -> Document:
        """A run in a table. Of a run with a result, its log is not read."""
        folder = RunFolder(found.path)
        at = _changed(found.path / "result.json")
        with self._lock:
            known = self._ended.get(found.key)
            recheck_s = max(_RESCAN_S, len(self._runs) / _CHECKS_S)
        if known is not None and known.result_at == at:
            if time.monotonic() - known.checked_at < recheck_s:
                return known.row
            if not may_be_running(status_of(folder)):
                known.checked_at = time.monotonic()
                return known.row
        record, ended, result, status = read_header(folder), read_summary(folder), read_result(folder), status_of(folder)
        row: Document = {
            "key": found.key,
            "run_id": folder.run_id,
            "study": found.study,
            "trial": found.trial,
            "path": str(found.path),
            "kind": record.kind if record else "",
            "status": status,
            "job": record.name if record else "",
            "platform": record.platform if record else "",
            "labels": dict(record.labels) if record else {},
            "workers": record.functions if record else None,
            "wall_time": record.started_at if record else 0.0,
            "iterations": None,
            "planned": None,
            "seconds": None,
            "cost_usd": None,
            "loss": None,
            "metrics": {},
            "sync": "",
            "groups": 0,
        }
        if ended is not None and result is None and not may_be_running(status):
            tasks = (folder.read(RESULT_FILE) or {}).get("tasks")
            return row | {"seconds": finite(ended.seconds), "cost_usd": finite(ended.cost_usd), "iterations": tasks}
        if result is not None and not may_be_running(status):
            row |= {
                "iterations": result.iterations,
                "seconds": finite(result.seconds),
                "cost_usd": finite(result.cost_usd),
                "workers": result.workers,
                "loss": finite(result.metrics.get("loss")),
                "sync": result.sync,
                "groups": len(result.regions),
                "metrics": {k: finite(v) for k, v in result.metrics.items() if k != "loss"},
                "planned": result.iterations,
            }
            with self._lock:
                self._ended[found.key] = _Ended(row, at, time.monotonic())
            return row
        return row | self._live(found, status)

    def _live(self, found: Found, status: str) -> Document:
        view = self.view(found)
        for _ in range(4):
            if not view.advance():
                break
        with view.lock:
            run, metrics, now = view.started, last_metrics(view), view.moment(status)
            told = view.folder.read(PROGRESS_FILE) or {}
            loss = metrics.pop("loss", None)
            return {
                "metrics": metrics,
                "groups": len(view.meter.groups),
                "iterations": told.get("tasks", view.meter.finished(run.workers if run else 0)),
                "planned": told.get("of", view.meter.members.iterations or None),
                "seconds": finite(now),
                "cost_usd": finite(view.cost_now(now)),
                "loss": finite(view.loss.last()) if loss is None else loss,
                "workers": view.meter.members.workers or None,
                "sync": str(run.configuration.get("sync", "")) if run else "",
            }


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """Folders that are a `run` or a `study`."""
    waiting: list[tuple[Path, int]] = [(root, 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as entries:
                there = {e.name: e for e in entries}
        except OSError:
            continue
        if "study.json" in there:  # it may have `run.json`, too
            yield path, "study"
            continue
        if "run.json" in there:
            yield path, "run"
            continue
        if depth < _DEPTH:
            for name, entry in there.items():
                if name not in _SKIPPED and not name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    waiting.append((path / name, depth + 1))


def _trials(study: Path) -> Iterator[tuple[int, Path]]:
    """Trials of a study that have a run: number, and its folder or a link to it."""
    try:
        names = [name for name in os.listdir(study / "trials") if name.isdigit()]
    except OSError:
        return
    for name in names:
        if (study / "trials" / name / "run.json").is_file():
            yield int(name), study / "trials" / name


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
