"""Output of a run's functions, as far as it is stored on this machine.

For runs on this machine, `logs/INVOCATION.txt` in the run's folder has the output of an invocation, and `logs/N.txt` (forked:
`logs/fork-server-N.txt`) that of a process while it starts. For runs on a cloud, the collector copies the cloud's log of
invocations that ended badly. The rest is in the cloud's own log; `elsewhere` returns the command that prints it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ephemeron.events import Invoked
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.runs.header import read_header
from ephemeron.runs.run_platform import settings_of
from ephemeron.runs.status import may_be_running, status_of

LOGS_FOLDER = "logs"
CLIENT_LOG = f"{LOGS_FOLDER}/client.txt"
"""What a run that lives in one process says."""
PARTS_FOLDER = f"{LOGS_FOLDER}/parts"
"""Logs of its other processes, or links to them."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of output."""

    source: str
    """`rank 0`, `rank 0, attempt 2`, `start of process 3`, or the name of a part; of a study, after `trial 3, `."""
    text: str


def lines(folder: RunFolder, *, rank: int | None = None, follow: bool = False) -> Iterator[LogLine]:
    """Lines of output, by invocation in the order of their starts.

    Args:
        folder: of the run.
        rank: only of this rank.
        follow: continue until the run has ended.
    """
    offsets: dict[Path, int] = {}
    while True:
        over = not (follow and may_be_running(status_of(folder)))
        for path, source in _files(folder, rank):
            data = _from(path, offsets.get(path, 0), whole=over)
            offsets[path] = offsets.get(path, 0) + len(data)
            for text in data.decode(errors="replace").splitlines():
                yield LogLine(source=source, text=text)
        if over:
            return
        time.sleep(_POLL_S)


def elsewhere(folder: RunFolder) -> str:
    """Command that prints output that is not on this machine; empty: all of it is."""
    record = read_header(folder)
    if record is None or record.platform not in CLOUDS:
        return ""
    where = cloud(record.platform)
    try:
        return where.logs(settings_of(where, record).located())
    except Exception:  # noqa: BLE001 - a hint, for which an account or a library may be missing
        return f"the log of {where.title}"


def _files(folder: RunFolder, rank: int | None) -> Iterator[tuple[Path, str]]:
    for number, trial in folder.trials:
        yield from ((path, f"trial {number}, {source}") for path, source in _files(trial, rank))
    logs = folder.path / LOGS_FOLDER
    if rank is None and logs.is_dir():
        for path in (folder.path / CLIENT_LOG, *sorted((folder.path / PARTS_FOLDER).glob("*.txt"))):
            if path.exists():
                yield path, path.stem
        for path in sorted(logs.glob("*.txt")):
            if path.stem.isdigit():
                yield path, f"start of process {path.stem}"
            elif path.stem.startswith("fork-server-"):
                yield path, f"start of {path.stem}"
    if folder.events.exists():
        for event in events_of(folder):
            if isinstance(event, Invoked) and rank in (None, event.rank):
                attempt = f", attempt {event.attempt}" if event.attempt else ""
                name = f"{event.invocation}.txt"
                places = [logs, *(group.path / LOGS_FOLDER for group in folder.groups)]
                found = next((place / name for place in places if (place / name).exists()), logs / name)
                yield found, f"rank {event.rank}{attempt}"


def _from(path: Path, offset: int, *, whole: bool) -> bytes:
    """Bytes of a file from an offset: complete lines, or everything."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return b""
    return data if whole else data[: data.rfind(b"\n") + 1]
