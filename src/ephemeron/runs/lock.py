"""One driver per run: the client that supervises it, decides how it ended and writes its result.

The lock is a kernel lock on a file of the run folder, so it is released however its holder ends. The file names the holder.
Other clients of this machine may watch the run (`observe`) and take over when the driver has ended. Readers take a shared lock for a
moment, so they do not take each other for drivers, and a driver tries several times to acquire it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from ephemeron.errors import RunAlreadyDriven, UserError
from ephemeron.runs.folders import RESULT_FILE, RunFolder

_log = logging.getLogger(__name__)

LOCK_FILE = "driver.lock"
EVENTS_FILE = "events.jsonl"
_TRIES, _TRY_EVERY_S = 10, 0.02
_held: WeakSet[IO[str]] = WeakSet()


def _let_go() -> None:
    """In a forked child: the lock is its parent's, and ends with that."""
    for file in list(_held):
        file.close()


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def driving(folder: RunFolder) -> Iterator[None]:
    """Makes this process the driver of a run.

    Raises:
        RunAlreadyDriven: another one is.
    """
    with hold(folder):
        yield


def hold(folder: RunFolder) -> IO[str]:
    """The same until what is returned is closed, or this process ends.

    Raises:
        RunAlreadyDriven: another one is.
    """
    file = (folder.path / LOCK_FILE).open("a+")
    if not _taken(file.fileno(), _TRIES):
        file.close()
        raise RunAlreadyDriven(folder.run_id, _owner(folder))
    file.seek(0)
    file.truncate()
    json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
    file.flush()
    _held.add(file)
    return file


def is_driven(folder: RunFolder) -> bool:
    """Whether a client on this machine drives the run."""
    try:
        with (folder.path / LOCK_FILE).open("rb") as file:
            return not _taken(file.fileno(), 1, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def owner(folder: RunFolder) -> int:
    """Process that drives a run, or was the last to do so.

    Raises:
        UserError: it is on another machine, or not known.
    """
    known = _known(folder)
    if known is None or known["host"] != socket.gethostname():
        raise UserError(f"run {folder.run_id} is driven by {_owner(folder)}, which cannot be killed from here")
    return int(known["pid"])


def sweep(runs: Path) -> None:
    """Removes the folders of runs whose client was killed before they began."""
    if not runs.is_dir():
        return
    for path in runs.iterdir():
        if (path / LOCK_FILE).exists() and not (path / EVENTS_FILE).exists() and not (path / RESULT_FILE).exists():
            with contextlib.suppress(OSError, RunAlreadyDriven), driving(RunFolder(path)):
                if not (path / EVENTS_FILE).exists():
                    _log.info("removing the folder of run %s, which never began", path.name)
                    shutil.rmtree(path, ignore_errors=True)


def _owner(folder: RunFolder) -> str:
    if (known := _known(folder)) is None:
        return "another process"
    here = "" if known["host"] == socket.gethostname() else f" on {known['host']}"
    return f"process {known['pid']}{here}"


def _known(folder: RunFolder) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads((folder.path / LOCK_FILE).read_text())
        return {"pid": int(known["pid"]), "host": str(known["host"])}
    return None


def _taken(fd: int, tries: int, kind: int = fcntl.LOCK_EX) -> bool:
    for left in reversed(range(tries)):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if left:
                time.sleep(_TRY_EVERY_S)
    return False
