"""A run whose functions a local daemon hosts: its event stream, its files and the lock that says that its host lives."""

from __future__ import annotations

import fcntl
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ephemeron.errors import PlatformError
from ephemeron.events import Ended, to_json
from ephemeron.functions.daemon_messages import (
    CHANNEL_FOLDER,
    EVENTS_FILE,
    HOST_FILE,
    LOCK_FILE,
    LOGS_FOLDER,
    SCRATCH_FOLDER,
    DaemonAddress,
    remove_remains,
    write_private,
)
from ephemeron.functions.jsonl import Journal, quota_mb, unfinished


def function_environment(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """Environment variables with which a function process begins; `home` is its HOME and TMPDIR until it serves an invocation."""
    return {**env, "HOME": str(home), "TMPDIR": str(home), "PYTHONUNBUFFERED": "1"}


class HostedRun:
    """Files of one run.

    Args:
        folder: of the run.
        env: environment variables of its functions.
        home: their HOME and TMPDIR until an invocation has a scratch folder of its own; None: the folder of these.
    """

    def __init__(self, folder: Path, env: Mapping[str, str], *, home: Path | None = None) -> None:
        self.folder = folder
        self.home = home or self.scratch
        self.env = function_environment(env, self.home)
        self.journal = Journal(folder / EVENTS_FILE)
        self._lock: IO[bytes] | None = None

    @property
    def channel(self) -> Path:
        """Folder that the channel address `folder` means."""
        return self.folder / CHANNEL_FOLDER

    @property
    def logs(self) -> Path:
        """Folder for the output of functions."""
        return self.folder / LOGS_FOLDER

    @property
    def scratch(self) -> Path:
        """Folder of the scratch folders."""
        return self.folder / SCRATCH_FOLDER

    def acquire(self, address: DaemonAddress) -> None:
        """Makes the daemon at `address` the host of the run, in place of one that died.

        Raises:
            PlatformError: another daemon hosts the run.
        """
        lock = (self.folder / LOCK_FILE).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise PlatformError(f"another process hosts the functions of the run in {self.folder}") from None
        self._lock = lock
        self.logs.mkdir(exist_ok=True)
        self.close_unfinished()
        remove_remains(self.folder)
        write_private(self.folder / HOST_FILE, address)

    def release(self) -> None:
        """Lets go of the run, none of whose functions runs any more."""
        self.journal.flush()
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self._lock is not None:
            (self.folder / HOST_FILE).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def close_unfinished(self) -> None:
        """Writes the end of invocations that died with an earlier daemon, billed until the last event of the run."""
        events = self.folder / EVENTS_FILE
        left, latest = unfinished(events)
        memory_mb = quota_mb(events) if left else 0
        for event in left:
            billed_s = math.ceil(max(0.0, latest - event.t) * 1000) / 1000
            end = Ended(
                t=latest,
                rank=event.rank,
                attempt=event.attempt,
                invocation=event.invocation,
                status="lost",
                error="the process that hosts the local functions died",
                billed_s=billed_s,
                memory_mb=memory_mb,
                gb_seconds=memory_mb / 1024 * billed_s,
            )
            self.journal.append(to_json(end))
