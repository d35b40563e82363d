"""What a run's functions have printed, as far as it is on this machine.

On this machine every invocation has a file of its own, `logs/INVOCATION.txt`, below the run's folder, and what a process
prints while it starts is in `logs/N.txt`, or `logs/fork-server-N.txt` where it is forked. On clouds the collector leaves there
what the cloud's log says of invocations that ended badly; the rest stays in the cloud's own log, whose command `elsewhere` knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ephemeron.events import Invoked
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.training.driver.records import read_record
from ephemeron.training.driver.result import events_of
from ephemeron.training.driver.run_dir import RunFolder
from ephemeron.training.driver.run_platform import settings_of
from ephemeron.training.driver.run_status import may_live, standing

LOGS_FOLDER = "logs"
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A printed line."""

    source: str
    """`rank 0`, `rank 0, attempt 2`, or `start of process 3`."""
    text: str


def lines(folder: RunFolder, *, rank: int | None = None, follow: bool = False) -> Iterator[LogLine]:
    """Printed lines, invocation by invocation in the order of their start.

    Args:
        folder: of the run.
        rank: only of this one.
        follow: as they come, until the run has ended.
    """
    offsets: dict[Path, int] = {}
    while True:
        over = not (follow and may_live(standing(folder)))
        for path, source in _files(folder, rank):
            data = _from(path, offsets.get(path, 0), whole=over)
            offsets[path] = offsets.get(path, 0) + len(data)
            for text in data.decode(errors="replace").splitlines():
                yield LogLine(source=source, text=text)
        if over:
            return
        time.sleep(_POLL_S)


def elsewhere(folder: RunFolder) -> str:
    """A command that prints what is not on this machine; empty where all is."""
    record = read_record(folder)
    if record is None or record.platform not in CLOUDS:
        return ""
    where = cloud(record.platform)
    try:
        return where.logs(settings_of(where, record).located())
    except Exception:  # noqa: BLE001 - a hint, for which an account or a library may be missing
        return f"the log of {where.title}"


def _files(folder: RunFolder, rank: int | None) -> Iterator[tuple[Path, str]]:
    logs = folder.path / LOGS_FOLDER
    if rank is None and logs.is_dir():
        for path in sorted(logs.glob("*.txt")):
            if path.stem.isdigit():
                yield path, f"start of process {path.stem}"
            elif path.stem.startswith("fork-server-"):
                yield path, f"start of {path.stem}"
    if folder.events.exists():
        for event in events_of(folder):
            if isinstance(event, Invoked) and rank in (None, event.rank):
                attempt = f", attempt {event.attempt}" if event.attempt else ""
                yield logs / f"{event.invocation}.txt", f"rank {event.rank}{attempt}"


def _from(path: Path, offset: int, *, whole: bool) -> bytes:
    """What is new in a file: complete lines, or everything."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return b""
    return data if whole else data[: data.rfind(b"\n") + 1]
