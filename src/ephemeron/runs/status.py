"""Status of a run, as far as it is known on this machine without a request to a platform.

For runs on this machine a lock shows whether functions are running. For runs on a cloud, the events show whether the run has
ended while a client watched it. Where none did, it may be running or have ended: its status is then, for example, `on aws`, and
`ephemeron attach` finds out.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ephemeron.events import RunEnded, RunStarted, from_json
from ephemeron.functions.registry import CLOUDS
from ephemeron.runs.folders import GROUPS, RESULT_FILE, RUN_FILE, RunFolder
from ephemeron.runs.lock import is_driven

_TAIL_BYTES = 1 << 16
_MARK = b'"kind":"run_'


def status_of(folder: RunFolder) -> str:
    """`finished`, `stopped`, `failed`, `running`, `interrupted`, or `on CLOUD`.

    `running`: a process of this machine hosts or watches the run. `interrupted`: no process does, and the run has no result.
    `on CLOUD`: no process of this machine watches the run, and no client has seen its end.
    """
    header = folder.read(RUN_FILE) or {}
    platform = str(header.get("platform", ""))
    status = str((folder.read(RESULT_FILE) or {}).get("status", ""))
    if header.get("kind") == "regions" or platform == GROUPS:
        of_groups = sorted({status_of(group) for group in folder.groups}, key=lambda s: (s != "running", s))
        return "running" if is_driven(folder) else next(filter(may_be_running, of_groups), status or "interrupted")
    if header.get("kind") == "study":  # functions are those of its trials, which have a status of their own
        elsewhere = f"on {platform}" if header.get("detached") and platform in CLOUDS else "interrupted"
        return "running" if is_driven(folder) else status or elsewhere
    if (
        platform in CLOUDS and folder.events.exists() and not header.get("ends_with_client")
    ):  # its first line is written before anything is invoked
        ended = session_end(folder.events)
        if ended is None:
            return "running" if _is_watched(folder) else f"on {platform}"
        return status or ended
    from ephemeron.functions.local import is_hosted

    if is_driven(folder) or (platform not in CLOUDS and is_hosted(folder.path)):
        return "running"
    return status or "interrupted"


def may_be_running(status: str) -> bool:
    """Whether functions of a run with this status may be running."""
    return status == "running" or status.startswith("on ")


def session_end(events: Path) -> str | None:
    """Status with which the latest launch or resume ended; None where it has not, or no client has seen it.

    Args:
        events: `events.jsonl` of the run, which need not exist. Only its end is read where that suffices.
    """
    with contextlib.suppress(FileNotFoundError), events.open("rb") as file:
        size = file.seek(0, 2)
        for start in (max(0, size - _TAIL_BYTES), 0):
            file.seek(start)
            if start:
                file.readline()  # the rest of a line
            last = [line for line in file if _MARK in line][-1:]
            if last:
                return _end_of(last[0])
    return None


def _end_of(line: bytes) -> str | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        event = from_json(line.decode(errors="replace"))
        if isinstance(event, RunEnded):
            return event.status
        assert isinstance(event, RunStarted)
    return None


def _is_watched(folder: RunFolder) -> bool:
    from ephemeron.functions.async_invoke.collector import is_collected

    return is_collected(folder.path)
