"""Files of the local daemon in the folder of its run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from ephemeron.config.typed import build
from ephemeron.errors import JobError
from ephemeron.functions.daemon_messages import DaemonAddress

HOST_FILE = "host.json"
LOCK_FILE = "host.lock"
EVENTS_FILE = "events.jsonl"
SCRATCH_FOLDER = "scratch"
LOGS_FOLDER = "logs"
CHANNEL_FOLDER = "channel"
"""Folder that the channel address `folder` means, below the run's folder."""

PRIVATE = "eph-"
"""Prefix of the folder with the daemon's socket."""
EARLY = f"{PRIVATE}early-"
"""The same of an early daemon; its process number follows."""
_SOCKET_PATH = 100
"""Longest path of a socket that every system accepts."""


def short_folder() -> str:
    """A folder for temporary files in which the path of a socket fits its limit."""
    folder = tempfile.gettempdir()
    return folder if len(folder) + len("/eph-12345678/host") < _SOCKET_PATH else "/tmp"


def remove_remains(folder: Path) -> None:
    """Removes socket, address and scratch folders of a daemon that was killed. The caller holds its lock."""
    known = folder / HOST_FILE
    address = address_in(known)
    if address is not None and (private := Path(address.socket).parent).name.startswith(PRIVATE):
        shutil.rmtree(private, ignore_errors=True)
    known.unlink(missing_ok=True)
    shutil.rmtree(folder / SCRATCH_FOLDER, ignore_errors=True)


def remove_early_remains() -> None:
    """Removes the folders of this user's early daemons that were killed before they had a run."""
    for folder in Path(short_folder()).glob(f"{EARLY}*"):
        number = folder.name.removeprefix(EARLY).partition("-")[0]
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid() and number.isdecimal() and not psutil.pid_exists(int(number)):
                shutil.rmtree(folder, ignore_errors=True)


def address_in(path: Path) -> DaemonAddress | None:
    """The content of `host.json`; None where there is no such file, or it is damaged."""
    try:
        return build(DaemonAddress, json.loads(path.read_text()), where=str(path))
    except (OSError, ValueError, JobError):
        return None


def write_private(path: Path, address: DaemonAddress) -> None:
    """Writes `host.json`, which only this user can read."""
    temporary = path.with_suffix(".part")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(dataclasses.asdict(address), file)
    os.replace(temporary, path)
