"""The data service of this machine: its flows with their loaders and caches, as `ephemeron data status` prints them."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ephemeron.dashboard.run_documents import Document
from ephemeron.data.service import Service
from ephemeron.data.service.daemon import ManagedProcess
from ephemeron.data.service.messages import Nothing, RouterStatus
from ephemeron.data.service.protocol import LIST_FLOWS
from ephemeron.errors import EphemeronError

_HISTORY = 600
"""Looks at a service that are kept."""
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
