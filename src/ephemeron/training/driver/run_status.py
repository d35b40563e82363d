"""How a run stands, as far as this machine knows without asking anybody.

On this machine a lock says whether a run's functions live. On a cloud nothing of ours does: the run's own events say
whether it has ended for a client that watched; where none did, it may go on, or have ended without a witness. So such a
run is called `on aws`, and `ephemeron attach` finds out.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ephemeron.events import RunEnded, RunStarted, from_json
from ephemeron.functions.registry import CLOUDS
from ephemeron.training.driver.driver_lock import is_driven
from ephemeron.training.driver.records import RESULT_FILE, RUN_FILE
from ephemeron.training.driver.run_dir import RunFolder

_TAIL_BYTES = 1 << 16
_MARK = b'"kind":"run_'


def standing(folder: RunFolder) -> str:
    """One word or two: `finished`, `stopped`, `failed`, `running`, `interrupted`, or `on CLOUD`.

    `running`: somebody on this machine hosts or watches it. `interrupted`: nobody runs it any more, and it has no result.
    `on CLOUD`: nobody here watches it, and nobody who did has seen its end.
    """
    platform = str((folder.read(RUN_FILE) or {}).get("platform", ""))
    status = str((folder.read(RESULT_FILE) or {}).get("status", ""))
    if platform in CLOUDS and folder.events.exists():  # its first line is written before anything is invoked
        ended = session_end(folder.events)
        if ended is None:
            return "running" if _is_watched(folder) else f"on {platform}"
        return status or ended
    from ephemeron.functions.local import is_hosted

    if is_driven(folder) or (platform not in CLOUDS and is_hosted(folder.path)):
        return "running"
    return status or "interrupted"


def may_live(status: str) -> bool:
    """Whether functions of a run with this standing may still be at work."""
    return status == "running" or status.startswith("on ")


def session_end(events: Path) -> str | None:
    """How the latest launch or resume ended; None where it has not, or nobody saw it.

    Args:
        events: a run's `events.jsonl`; need not be there. Only its end is read where that says enough.
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
