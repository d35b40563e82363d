"""The event stream of a local run: a file to which several processes append lines, and from which others read.

Every line is one `write` on a file opened for appending, so lines of the host and of the client do not mix. A
reader may meet a torn line (a writer died, the disk was full): it is skipped, never repaired.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from ephemeron.events import Ended, Event, Invoked, RunStarted, from_json

_POLL_S = 0.05
_BACKLOG = 100_000


class Journal:
    """Writer of the file. While lines cannot be written (disk full), they wait, and `problem` has the reason.

    Args:
        path: the file; made when missing. A torn last line of an earlier writer is closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque(maxlen=_BACKLOG)
        self.problem = ""
        """Why the latest line could not be written; empty when all is in the file."""
        if _torn(path):
            self._waiting.append(b"\n")

    def append(self, line: str) -> None:
        """Adds a line, now or as soon as it can be written. Never raises."""
        self._waiting.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Tries to write the waiting lines."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while self._waiting:
                    data = self._waiting[0]
                    written = os.write(fd, data)
                    if written < len(data):
                        self._waiting[0] = data[written:]
                    else:
                        self._waiting.popleft()
            finally:
                os.close(fd)
            self.problem = ""
        except OSError as e:
            self.problem = f"{len(self._waiting)} events wait to be written: {e.strerror or e}"


class EventsReplaced(Exception):
    """Another file has taken the place of the one that was followed: the run begins again."""


def begin_again(path: Path) -> None:
    """Replaces the file by an empty one, so that those who follow it notice. It is made when missing."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    new.touch(0o600)
    new.replace(path)


async def follow(path: Path, check: Callable[[], None] = lambda: None, *, once: bool = False) -> AsyncIterator[Event]:
    """Every event in the file, from its beginning, without end; the file may not be there yet.

    Args:
        path: the file.
        check: called before each look; what it raises is raised once nothing is left to read.
        once: follow the file that is there first, and none that replaces it (`begin_again`).

    Raises:
        EventsReplaced: it was replaced, and `once` is set.
    """
    offset, first = 0, _number(path)
    while True:
        raised: Exception | None = None
        try:
            check()
        except Exception as e:  # noqa: BLE001 - raised below
            raised = e
        complete = complete_lines(path, offset)
        if once and (number := _number(path)) != first:
            if first:
                raise EventsReplaced
            first = number
        offset += len(complete)
        for event in events_in(complete):
            yield event
        if not complete:
            if raised is not None:
                raise raised
            await asyncio.sleep(_POLL_S)


def complete_lines(path: Path, offset: int) -> bytes:
    """Whole lines of a file from an offset on, up to some megabytes; the file may not be there yet."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(1 << 20)
            while data and b"\n" not in data and (more := file.read(1 << 20)):
                data += more
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _number(path: Path) -> int:
    """The file's inode, unlike that of the file which replaces it; 0: it is not there yet."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def _torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def latest_t(path: Path) -> float:
    """Time of the latest event in the file; 0: it has no event."""
    return max((event.t for event in _all(path)), default=0.0)


def quota_mb(path: Path) -> int:
    """Memory quota of the run's functions; 0: the file does not have it."""
    return max((event.memory_mb for event in _all(path) if isinstance(event, RunStarted)), default=0)


def unfinished(path: Path) -> tuple[list[Invoked], float]:
    """Invocations whose end is not in the file, and the time of its latest event."""
    started: dict[str, Invoked] = {}
    latest = 0.0
    for event in _all(path):
        latest = max(latest, event.t)
        if isinstance(event, Invoked):
            started[event.invocation] = event
        elif isinstance(event, Ended):
            started.pop(event.invocation, None)
    return list(started.values()), latest


def _all(path: Path) -> Iterator[Event]:
    offset = 0
    while complete := complete_lines(path, offset):
        offset += len(complete)
        yield from events_in(complete)


def events_in(lines: bytes) -> Iterator[Event]:
    """The events in these lines; lines that are torn, or of a later release, are skipped."""
    for line in lines.splitlines():
        try:
            yield from_json(line.decode())
        except (ValueError, TypeError, AttributeError):
            pass  # torn, or of a later version
