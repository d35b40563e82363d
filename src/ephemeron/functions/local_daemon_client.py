"""Reaching the daemon of a run, and starting one: the client's side of `local_daemon`."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ephemeron.communication.rpc import Client
from ephemeron.errors import DaemonGone, PlatformError, ProtocolError, RemoteError, TokenRefused
from ephemeron.functions.base import Limits
from ephemeron.functions.local_daemon import HOST_FILE

START_S = 60.0
"""Longest start of a daemon, and longest silence of one that is asked for its status."""


@dataclasses.dataclass(frozen=True, slots=True)
class Successor:
    """What the next host of a run is started with."""

    settings: Mapping[str, Any]
    env: Mapping[str, str]


def settings_of(
    run_dir: Path, limits: Limits, *, idle_s: float = 30.0, linger_s: float = 2.0, enforce: bool = True,
    forks: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """What a host is told. The environment variable `EPHEMERON_FORKS=0` overrules `forks`."""
    return {
        "folder": str(run_dir), "limits": dataclasses.asdict(limits), "idle_s": idle_s, "linger_s": linger_s,
        "enforce": enforce, "forks": forks and os.environ.get("EPHEMERON_FORKS") != "0",
    }  # fmt: skip


async def reach(run_dir: Path) -> tuple[Client, dict[str, Any]]:
    """A connection to the living host of a run, and its status.

    Raises:
        HostGone: there is none.
        PlatformError: it refuses us.
    """
    client: Client | None = None
    try:
        known = json.loads((run_dir / HOST_FILE).read_text())
        client = await Client.connect_unix(known["socket"], token=known["token"])
        status, _ = await client.call("status", timeout_s=START_S)
        return client, status
    except TokenRefused as e:
        raise PlatformError(f"the host of the functions in {run_dir} refuses the token in {HOST_FILE}") from e
    except (OSError, ValueError, RemoteError, ProtocolError) as e:
        if client is not None:
            await client.close()
        raise DaemonGone(f"no functions of the run in {run_dir} are hosted any more") from e


async def reach_or_launch(run_dir: Path, wanted: Successor) -> tuple[Client, dict[str, Any]]:
    end = time.monotonic() + START_S
    while True:
        try:
            return await reach(run_dir)
        except DaemonGone:
            # "taken": another one is just starting, or just ending.
            if await launch(wanted.settings, wanted.env) == "taken":
                await asyncio.sleep(0.05)
        if time.monotonic() > end:
            raise PlatformError(f"the host of the functions in {run_dir} starts but cannot be reached")


async def launch(settings: Mapping[str, Any], env: Mapping[str, str]) -> str:
    """Starts a host and returns its first word. A host whose start is cancelled ends by itself."""
    log = Path(settings["folder"]) / "host.log"
    word = await asyncio.to_thread(_first_word, settings, env, log)
    if word not in ("ready", "taken"):
        tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise PlatformError(f"the host of the functions did not start: {tail[0]} (see {log})")
    return word


def _first_word(settings: Mapping[str, Any], env: Mapping[str, str], log: Path) -> str:
    """On a thread: asyncio's pipes would complain if the loop were closed while the host starts."""
    command = [sys.executable, "-P", "-m", "ephemeron.functions.local_daemon", json.dumps(settings)]
    with (
        log.open("ab") as err,
        subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, cwd="/",
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        if select.select([process.stdout], [], [], START_S)[0]:
            return process.stdout.readline().decode().strip()
        process.kill()
        return ""


def held(lock: Path) -> bool:
    """Whether a host lives; the kernel gives the lock back however it ends."""
    try:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
