"""Data services and task queues of this machine, as pages show them: each from the files that its own commands read."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ephemeron.config.typed import plain
from ephemeron.dashboard.run_documents import Document, finite, functions_of
from ephemeron.dashboard.run_view import RunView
from ephemeron.data.service import Service
from ephemeron.data.service.daemon import ManagedProcess
from ephemeron.data.service.messages import Nothing, RouterStatus
from ephemeron.data.service.protocol import LIST_FLOWS
from ephemeron.errors import EphemeronError
from ephemeron.functions.local import is_hosted
from ephemeron.functions.tasks.object_keys import QueueKeys, tasks_of
from ephemeron.runs.folders import RESULT_FILE, RUN_FILE, RunFolder
from ephemeron.runs.header import read_header
from ephemeron.runs.status import may_be_running, status_of
from ephemeron.runs.summary import read_summary
from ephemeron.training.report.map_items import read_map_items

_HISTORY = 600
"""Looks at a service or a queue that are kept."""
_COUNTERS = ("readers", "loaders", "loaded", "hits", "half_hits", "skipped", "buffered_bytes", "cached_bytes")


class Services:
    """Data services below some folders: folders with a `coordinator`'s state.

    Args:
        roots: folders, of which `data-service` is looked at.
    """

    def __init__(self, roots: list[Path]) -> None:
        self._folders = [root / "data-service" for root in roots]
        self._history: dict[Path, deque[Document]] = {}
        self._lock = threading.Lock()

    def document(self) -> list[Document]:
        """All services with their flows. A service that runs is asked; of another one its stored flows are shown."""
        with self._lock:
            return [self._one(folder) for folder in self._folders if folder.is_dir()]

    def _one(self, folder: Path) -> Document:
        running = ManagedProcess("coordinator", folder, "").alive
        out: Document = {"folder": str(folder), "running": running, "flows": [], "problem": "", "address": "", "settings": {}}
        if not running:
            out["flows"] = [_stored(flow) for flow in _table(folder / "flows.json").get("flows", [])]
            return out
        try:
            found = Service(folder=folder, timeout_s=2.0).call(LIST_FLOWS, Nothing())
        except (EphemeronError, OSError) as e:
            return out | {"problem": str(e)}
        out["settings"] = _table(folder / "settings.json")
        flows: list[Document] = []
        for entry in found.flows:
            router = found.routers.get(entry.name, RouterStatus())
            row: Document = {"flow": entry.name, "version": entry.version, "state": entry.state, "samples": entry.samples}
            row |= {name: sum(getattr(s, name) for s in router.shards) for name in _COUNTERS if name != "readers"}
            flows.append(row | {"readers": router.readers, "shards": len(router.shards)})
        out["flows"] = flows
        history = self._history.setdefault(folder, deque(maxlen=_HISTORY))
        history.append({"t": round(time.time(), 2)} | {k: sum(f[k] for f in flows) for k in _COUNTERS})
        out["history"] = {k: [h[k] for h in history] for k in ("t", *_COUNTERS)}
        return out


def _stored(flow: Mapping[str, Any]) -> Document:
    return {k: flow.get(k) for k in ("name", "version", "state", "samples")} | {"flow": flow.get("name"), "state": "stopped"}


def _table(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Tasks:
    """Executors below some folders.

    Args:
        roots: folders, of which `runs/` is looked through, and `tasks/` of earlier releases.
    """

    def __init__(self, roots: list[Path]) -> None:
        self._roots = roots
        self._views: dict[Path, RunView] = {}
        self._history: dict[Path, deque[tuple[float, int, int, int]]] = {}
        self._is_executor: dict[Path, bool] = {}
        """By folder of a run, whether it is one; that never changes."""
        self._lock = threading.Lock()

    def document(self) -> list[Document]:
        """All executors, newest first."""
        with self._lock:
            folders = [p for root in self._roots for p in self._executors_below(root)]
            for gone in set(self._views) - set(folders):
                self._views.pop(gone, None)
                self._history.pop(gone, None)
            return [self._one(p) for p in sorted(folders, key=lambda p: p.stat().st_mtime, reverse=True)[:50]]

    def _executors_below(self, root: Path) -> list[Path]:
        runs = [p.parent for p in (root / "runs").glob(f"*/{RUN_FILE}")]
        for path in runs:
            if path not in self._is_executor:
                self._is_executor[path] = (RunFolder(path).read(RUN_FILE) or {}).get("kind") == "tasks"
        return [*filter(Path.is_dir, (root / "tasks").glob("*/")), *filter(self._is_executor.__getitem__, runs)]

    def _one(self, folder: Path) -> Document:
        view = self._views.setdefault(folder, RunView(folder))
        for _ in range(8):
            if not view.advance():
                break
        hosted, status = is_hosted(folder), status_of(view.folder)
        found = read_map_items(view.folder)
        result, ended = view.folder.read(RESULT_FILE) or {}, read_summary(view.folder)
        with view.lock:
            functions, now = functions_of(view), view.moment(status)
            running = sum(r.status == "running" for r in functions) if hosted else 0
            out: Document = {
                "run": folder.name,
                "key": next(f"{n}/{folder.relative_to(r).as_posix()}" for n, r in enumerate(self._roots) if folder.is_relative_to(r)),
                "folder": str(folder),
                "name": view.record.name if view.record else "",
                "status": status,
                "is_running": may_be_running(status),
                "seconds": finite(now),
                "invocations": len(functions),
                "executors": running,
                "failed": sum(not r.well and r.status not in ("unknown", "cancelled") for r in functions),
                "gb_seconds": finite(sum(r.gb_seconds for r in functions)),
                "cost_usd": finite(view.cost_now(now) if ended is None or may_be_running(status) else ended.cost_usd)
                if view.meter.prices.name
                else None,
                "budget_usd": view.record.budget_usd if view.record else None,
                "result": {k: result.get(k) for k in ("tasks", "failed", "cancelled")},
                "items": None if found is None else plain(found),
                "causes": result.get("causes") or [],
                "functions": [
                    {
                        "rank": r.rank,
                        "invocation": r.invocation,
                        "status": r.status if hosted or r.ended else "unknown",
                        "outcome": r.outcome,
                        "start": finite(r.start),
                        "end": finite(r.end),
                        "memory_mb": r.memory_mb,
                        "error": r.error[:500],
                    }
                    for r in functions[-200:]
                ],
            }
        address = _address(folder)
        depth = _depth(folder) if not result and (folder / "objects").is_dir() else None
        out |= {"channel": address, "depth": depth}
        if depth is not None and out["is_running"]:
            history = self._history.setdefault(folder, deque(maxlen=_HISTORY))
            history.append((round(time.time(), 2), depth["ready"], depth["leased"], out["executors"]))
            out["history"] = [list(column) for column in zip(*history, strict=True)]
        return out


def _depth(folder: Path) -> Document:
    """Tasks of a queue whose objects are files, by the names of the files."""
    keys = QueueKeys(folder.name)
    names = [f"{keys.work}{name}" for name in _names(folder / "objects" / keys.work)]
    batches, closed = keys.listed(n for n in names if not n.endswith(".part"))
    leased = {name: b for name, b in batches.items() if b.attempt > b.expired}
    return {
        "ready": sum(tasks_of(name) for name in batches if name not in leased),
        "leased": sum(map(tasks_of, leased)),
        "batches": len(batches),
        "closed": closed,
        "announced": len({name.rpartition(".")[0] for name in _names(folder / "objects" / keys.live)}),
    }


def _names(folder: Path) -> list[str]:
    try:
        return [p.name for p in folder.iterdir()]
    except OSError:
        return []


def _address(folder: Path) -> str:
    header = read_header(RunFolder(folder))
    if header is not None:
        return header.channel
    try:
        value = json.loads((folder / "client.json").read_text())
        return str(value["address"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
