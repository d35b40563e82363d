"""Settings of the local daemon, its requests and its replies, as client and daemon exchange them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ephemeron.config.typed import Count, NonNegative, build
from ephemeron.errors import JobError
from ephemeron.functions.base import Call, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """Argument of the daemon's process."""

    folder: Path
    """Folder of the run."""
    limits: Limits
    """Calls beyond them are refused."""
    idle_s: NonNegative = 30.0
    """Time for which a warm process is kept."""
    linger_s: NonNegative = 2.0
    """Time for which the daemon stays without clients and functions."""
    enforce: bool = True
    """Control groups enforce quotas, where this machine has them."""
    forks: bool = True
    """Function processes are forked, where this system can do it."""
    spare: bool = False
    """While functions run, one process of their quota is kept ready for a successor or a replacement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionsWanted:
    """Function processes that an early daemon is to start before it has a run."""

    memory_mb: Count
    """Their quota."""
    count: Count
    limits: Limits
    """Of the machine: CPU shares follow from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRequest:
    """A line to an early daemon. Exactly one of the two is given."""

    functions: FunctionsWanted | None = None
    run: DaemonSettings | None = None
    """Its run: the last request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonAddress:
    """Content of `host.json`: how clients of the same user reach the daemon."""

    pid: int
    socket: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenParams:
    """Parameters of `open`: a further run whose functions the daemon hosts."""

    run: str
    """Name of the run in calls."""
    folder: Path
    """Folder of the run."""
    env: Mapping[str, str]
    """Environment variables of its functions; never written to disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParams:
    """Parameters of `status`, `cancel_all` and `leave`: one of the runs that the daemon hosts."""

    folder: Path
    """Folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeParams:
    """Parameters of `invoke`."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationParams:
    """Parameters of `wait` and `cancel`, and the reply to `invoke`."""

    invocation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """Reply to `status`."""

    pid: int
    folder: Path
    """The daemon's own folder: that of its run, or of a session."""
    limits: Limits
    enforcement: str
    """`Enforcement.kind`."""
    unenforced: tuple[str, ...]
    """See `Platform.unenforced`."""
    running: Mapping[str, int]
    """Process of each running invocation of the run; 0: not started yet."""
    warm: int
    """Idle processes."""
    fork_servers: tuple[int, ...]
    """Processes that functions are forked from."""
    problem: str
    """Why events cannot be written; empty: they can."""


# -- files of the local daemon in the folder of its run -----------------------------------------------------------


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
