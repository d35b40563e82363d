"""Reaching the daemon of a run, and starting one: the client's side of `local_daemon`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from ephemeron.communication.rpc import Client
from ephemeron.config import own_processes
from ephemeron.config.typed import build, plain
from ephemeron.errors import DaemonGone, JobError, PlatformError, ProtocolError, RemoteError, TokenRefused
from ephemeron.functions.base import Limits
from ephemeron.functions.daemon_messages import HOST_FILE, DaemonSettings, DaemonStatus, OpenParams, address_in
from ephemeron.functions.early_daemon import waiting_daemon

START_S = 60.0
"""Longest start of a daemon, and longest silence of one that is asked for its status."""


_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class DaemonStart:
    """Settings and environment variables of a daemon that may have to be started."""

    settings: DaemonSettings
    env: Mapping[str, str]


def settings_of(
    run_dir: Path,
    limits: Limits,
    *,
    idle_s: float = 30.0,
    linger_s: float = 2.0,
    enforce: bool = True,
    forks: bool = True,
    spare: bool = False,
) -> DaemonSettings:
    """Settings of a daemon. The environment variable `EPHEMERON_FORKS=0` overrules `forks`."""
    return DaemonSettings(
        folder=run_dir,
        limits=limits,
        idle_s=idle_s,
        linger_s=linger_s,
        enforce=enforce,
        forks=forks and os.environ.get("EPHEMERON_FORKS") != "0",
        spare=spare,
    )


async def reach(run_dir: Path) -> tuple[Client, DaemonStatus]:
    """A connection to the living daemon of a run, and its status.

    Raises:
        DaemonGone: there is none.
        PlatformError: it refuses the token.
    """
    client: Client | None = None
    address = address_in(run_dir / HOST_FILE)
    if address is None:
        raise DaemonGone(f"no functions of the run in {run_dir} are hosted any more")
    try:
        client = await Client.connect_unix(address.socket, token=address.token)
        return client, await status_of(client, timeout_s=START_S)
    except TokenRefused as e:
        raise PlatformError(f"the host of the functions in {run_dir} refuses the token in {HOST_FILE}") from e
    except (OSError, JobError, RemoteError, ProtocolError) as e:
        if client is not None:
            await client.close()
        raise DaemonGone(f"no functions of the run in {run_dir} are hosted any more") from e


async def status_of(client: Client, *, timeout_s: float | None = None) -> DaemonStatus:
    """The daemon's answer to `status`."""
    reply, _ = await client.call("status", timeout_s=timeout_s)
    return build(DaemonStatus, reply, where="status of the daemon")


async def reach_or_launch(run_dir: Path, wanted: DaemonStart) -> tuple[Client, DaemonStatus]:
    """A connection to the living daemon of a run, or to a new one.

    Raises:
        PlatformError: it does not start, or cannot be reached.
    """
    end = time.monotonic() + START_S
    while True:
        try:
            return await reach(run_dir)
        except DaemonGone:
            # "taken": another one is just starting, or just ending.
            _log.info("a daemon for %s is started", run_dir)
            if await launch(wanted.settings, wanted.env) == "taken":
                await asyncio.sleep(0.05)
        if time.monotonic() > end:
            raise PlatformError(f"the host of the functions in {run_dir} starts but cannot be reached")


async def join(session: Path, wanted: DaemonStart, run_dir: Path, variables: Mapping[str, str]) -> tuple[Client, DaemonStatus]:
    """A connection to the daemon that hosts a run: the run's own if it lives, else that of the session, which takes the run on.

    Args:
        session: folder of the session.
        wanted: its daemon, if it has to be started.
        run_dir: folder of the run.
        variables: environment of its functions.

    Raises:
        PlatformError: it does not start, cannot be reached, or another one hosts the run.
    """
    with contextlib.suppress(DaemonGone):
        return await reach(run_dir)
    client, status = await reach_or_launch(session, wanted)
    try:
        await client.call("open", plain(OpenParams(run=run_dir.name, folder=run_dir, env=variables)))
    except (RemoteError, ConnectionError) as e:
        await client.close()
        raise PlatformError(f"the daemon of {session} does not take the run in {run_dir} on: {e}") from e
    return client, status


async def launch(settings: DaemonSettings, env: Mapping[str, str]) -> str:
    """Starts a daemon, or takes an early one, and returns its first line. A daemon whose start is cancelled ends by itself."""
    log = settings.folder / "host.log"
    early = waiting_daemon(env) if settings.enforce and settings.forks else None
    word = "" if early is None else await asyncio.to_thread(early.serve, settings, timeout_s=START_S)
    if not word:
        word = await asyncio.to_thread(_first_word, settings, env, log)
    if word not in ("ready", "taken"):
        tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise PlatformError(f"the host of the functions did not start: {tail[0]} (see {log})")
    return word


def _first_word(settings: DaemonSettings, env: Mapping[str, str], log: Path) -> str:
    # On a thread: asyncio's pipes would complain if the loop were closed while the daemon starts.
    command = own_processes.command("daemon", json.dumps(plain(settings)))
    with (
        log.open("ab") as err,
        subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, cwd="/", start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        if select.select([process.stdout], [], [], START_S)[0]:
            return process.stdout.readline().decode().strip()
        process.kill()
        return ""


def held(lock: Path) -> bool:
    """Whether a daemon lives; the kernel releases the lock however it ends."""
    try:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may ask at once
    except BlockingIOError:
        return True
    return False
