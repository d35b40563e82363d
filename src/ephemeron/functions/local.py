"""Functions as processes of this machine that behave like those of a cloud. Needs no account.

A function gets CPU time in proportion to its memory quota, is killed above the quota and at its time limit, starts with an
empty scratch folder and without state of earlier invocations, and is billed to the millisecond. A separate process
(`local_daemon`) owns the functions of a run, or of all runs of a session, so that they go on when the client is killed.

    platform = await LocalPlatform.start(home / "runs" / run)
    invocation = await platform.invoke(call)
    outcome = await invocation.wait()
    await platform.shutdown()           # or close(), and the functions go on

Where Linux allows it, functions are forked from a process that has made their imports (`forking`), and are charged as if they
had made them. Measured on two cores: the first cold start of a run takes 1.5 CPU seconds with PyTorch, further ones 0.12, a warm
one 5 to 8 ms. More functions than the machine has CPU shares for run slower than their quota promises: see `default_memory_mb`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import psutil

from ephemeron.communication.rpc import Client
from ephemeron.config.typed import build, plain
from ephemeron.errors import CallTimedOut, InvocationRefused, PlatformError, ProtocolError, RemoteError
from ephemeron.errors import DaemonGone as DaemonGone
from ephemeron.events import Event, Note, to_json
from ephemeron.functions.base import Call, Invocation, Limits, Outcome, Platform
from ephemeron.functions.daemon_messages import (
    CHANNEL_FOLDER,
    EVENTS_FILE,
    HOST_FILE,
    LOCK_FILE,
    SCRATCH_FOLDER,
    DaemonStatus,
    InvocationParams,
    InvokeParams,
    RunParams,
    remove_early_remains,
    remove_remains,
)
from ephemeron.functions.jsonl import Journal, follow, latest_t
from ephemeron.functions.local_daemon_client import DaemonStart, held, join, reach, reach_or_launch, settings_of, status_of
from ephemeron.functions.passed_on import daemon_environment
from ephemeron.functions.validation import check_call
from ephemeron.units import MIB

Connect: TypeAlias = Callable[[], Awaitable[tuple[Client, DaemonStatus]]]

SESSION_VARIABLE = "EPHEMERON_SESSION"
"""Environment variable with the folder of the session in which all functions of a process are started."""

_log = logging.getLogger(__name__)
_ERRORS = {"DaemonGone": DaemonGone, "InvocationRefused": InvocationRefused}
"""Errors of the daemon by name; any other one is a PlatformError."""
_END_S = 30.0
_ASK_EVERY_S = 5.0
"""Seconds between two checks that the daemon answers."""
_SILENT_S = 60.0
"""Time for an answer before the daemon is killed; its event loop never blocks for a second."""
_FLOOR_MB = 512
_STEP_MB = 64
_CPU_PART = 0.8


class LocalInvocation(Invocation):
    """A started local function."""

    def __init__(self, platform: LocalPlatform, id: str, call: Call) -> None:
        self.id = id
        self.call = call
        self._platform = platform

    async def wait(self) -> Outcome:
        """Waits for its end. If the daemon dies, its functions are lost.

        Raises:
            PlatformError: the platform was closed meanwhile.
        """
        try:
            reply = await self._platform._ask("wait", InvocationParams(invocation=self.id))
            return build(Outcome, reply, where=f"outcome of invocation {self.id}")
        except DaemonGone as e:
            return Outcome(status="lost", error=str(e))

    async def cancel(self) -> None:
        """Ends it now, and returns when it has ended."""
        with contextlib.suppress(DaemonGone):
            await self._platform._ask("cancel", InvocationParams(invocation=self.id))


class LocalPlatform(Platform):
    """Functions of one run. Made by `start` or `attach`.

    Args:
        run_dir: folder of the run; holds `events.jsonl`, `channel/`, `logs/` and, while it runs, `host.json`.
        client: connected to the daemon.
        status: the daemon's answer to `status`.
        successor: reaches the daemon that replaces a dead one, and starts it; None: it is not replaced.
    """

    name = "local"

    def __init__(self, run_dir: Path, client: Client, status: DaemonStatus, successor: Connect | None = None) -> None:
        self.run_dir = run_dir
        self._shared = status.folder != run_dir
        """The daemon hosts the functions of other runs, too."""
        self.limits = status.limits
        self.unenforced = status.unenforced
        self.host_pid = status.pid
        self._client = client
        self._successor = successor
        self._closed = self._ending = False
        self._gone: PlatformError | None = None
        """Why there is no daemon any more, and will be none."""
        self._connected = asyncio.Event()
        self._connected.set()
        self._journal = Journal(run_dir / EVENTS_FILE)
        self._attending = asyncio.create_task(self._attend())

    @classmethod
    async def start(
        cls,
        run_dir: Path,
        *,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        idle_s: float = 30.0,
        linger_s: float = 2.0,
        enforce: bool = True,
        restart: bool = False,
        forks: bool = True,
        spare: bool = False,
        session: Path | None = None,
    ) -> LocalPlatform:
        """Starts a daemon for the run, or attaches to the living one, whose settings then hold.

        Args:
            run_dir: made when missing.
            limits: by default up to this machine's memory and 64 functions at once.
            env: variables for the functions, beside those of `passed_on.PASSED_ON`; never written to disk.
            idle_s: how long a warm process is kept.
            linger_s: how long the daemon stays without clients and functions.
            enforce: False leaves CPU unlimited and memory watched, as where control groups are missing.
            restart: start another daemon if this one is killed or stops answering, as long as this object is open. Its
                functions die with it; the new daemon records them as lost.
            forks: where Linux allows it, fork functions from a process that has made their imports; False, or the environment
                variable `EPHEMERON_FORKS=0`: each is a fresh process.
            spare: while functions run, keep one process of their quota ready, forked and charged, for a successor or a replacement.
            session: folder of a session: the daemon of the session hosts the run's functions, beside those of its other runs, with
                which they share warm processes. It is started if it does not live, with these settings. None: that of `EPHEMERON_SESSION`,
                if there is one.

        Raises:
            PlatformError: the daemon does not start; says why.
        """
        run_dir = run_dir.absolute()
        run_dir.mkdir(parents=True, exist_ok=True)
        if session is None and (given := os.environ.get(SESSION_VARIABLE)):
            session = Path(given)
        host = run_dir if session is None else session.absolute()
        host.mkdir(parents=True, exist_ok=True)
        settings = settings_of(
            host, limits or default_limits(), idle_s=idle_s, linger_s=linger_s, enforce=enforce, forks=forks, spare=spare
        )
        variables = daemon_environment(env or {})

        async def connect() -> tuple[Client, DaemonStatus]:
            if host == run_dir:
                return await reach_or_launch(run_dir, DaemonStart(settings, variables))
            return await join(host, DaemonStart(settings, daemon_environment({})), run_dir, variables)

        client, status = await connect()
        return cls(run_dir, client, status, connect if restart else None)

    @classmethod
    async def attach(cls, run_dir: Path, *, restart: bool = False) -> LocalPlatform:
        """Connects to the living daemon of a run.

        Args:
            run_dir: folder of the run.
            restart: as in `start`.

        Raises:
            DaemonGone: there is none.
            PlatformError: it refuses the token.
        """
        run_dir = run_dir.absolute()
        client, status = await reach(run_dir)
        successor = DaemonStart(settings_of(run_dir, status.limits), daemon_environment({}))
        return cls(run_dir, client, status, (lambda: reach_or_launch(run_dir, successor)) if restart else None)

    @property
    def channel_base(self) -> Path:
        """Folder that the channel address `folder` means to functions."""
        return self.run_dir / CHANNEL_FOLDER

    async def invoke(self, call: Call) -> LocalInvocation:
        check_call(call, self.limits)
        while True:
            try:
                reply = build(InvocationParams, await self._ask("invoke", InvokeParams(call=call)), where="reply of the daemon")
                return LocalInvocation(self, reply.invocation, call)
            except DaemonGone:
                if self._successor is None or self._gone is not None:
                    raise
            # A call that the dead daemon had accepted is recorded as lost, and fenced off like any second delivery.
            await self._connected.wait()

    def events(self, run: str) -> AsyncIterator[Event]:
        """All events in the run's folder, also of earlier daemons. Ends with `DaemonGone` when no daemon is left."""
        return follow(self.run_dir / EVENTS_FILE, self._check)

    async def emit(self, run: str, event: Event) -> None:
        """Appends an event.

        Raises:
            PlatformError: it cannot be written now; it is kept, and written with the next one.
        """
        self._journal.append(to_json(event))
        if self._journal.problem:
            raise PlatformError(f"cannot write to {self.run_dir / EVENTS_FILE}: {self._journal.problem}")

    async def cancel_all(self, run: str) -> None:
        with contextlib.suppress(DaemonGone):
            await self._ask("cancel_all", RunParams(folder=self.run_dir))

    async def status(self) -> DaemonStatus:
        """The state of the daemon.

        Raises:
            DaemonGone: there is none.
        """
        reply = await self._ask("status", RunParams(folder=self.run_dir))
        return build(DaemonStatus, reply, where="status of the daemon")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._attending.cancel()
        await asyncio.gather(self._attending, return_exceptions=True)
        await self._client.close()

    async def shutdown(self) -> None:
        """Ends all functions and the daemon, waits for their end, and detaches. A daemon that does not end is killed.

        A daemon that hosts other runs lets go of this one.

        Raises:
            PlatformError: the daemon does not end.
        """
        self._ending = True
        if self._shared:
            with contextlib.suppress(DaemonGone, CallTimedOut):
                await self._ask("leave", RunParams(folder=self.run_dir), timeout_s=_END_S)
            return await self.close()
        with contextlib.suppress(DaemonGone, CallTimedOut):
            await self._ask("shutdown", timeout_s=_END_S)
        end = time.monotonic() + _END_S
        while held(self.run_dir / LOCK_FILE):
            if time.monotonic() > end + _END_S:
                raise PlatformError(f"the host of the functions (process {self.host_pid}) does not end")
            if time.monotonic() > end:
                self._kill_host()
            await asyncio.sleep(0.02)
        await self.close()
        await asyncio.to_thread(_sweep_one, self.run_dir)

    async def __aenter__(self) -> LocalPlatform:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _ask(
        self, method: str, params: InvokeParams | InvocationParams | RunParams | None = None, *, timeout_s: float | None = None
    ) -> Mapping[str, object]:
        if self._closed:
            raise PlatformError("this platform was closed")
        if self._gone is not None:
            raise self._gone
        client = self._client
        try:
            reply, _ = await client.call(method, None if params is None else plain(params), timeout_s=timeout_s)
        except RemoteError as e:
            raise _ERRORS.get(e.type, PlatformError)(e.text) from None
        except ConnectionError as e:
            if self._closed:
                raise PlatformError("this platform was closed") from e
            if client is self._client:  # else another daemon has been reached meanwhile
                self._connected.clear()
            raise self._host_gone() from e
        return reply

    def _host_gone(self) -> DaemonGone:
        return DaemonGone(f"the process that hosts the functions (pid {self.host_pid}) is gone")

    def _check(self) -> None:
        """Raises the error with which waiting for functions of a dead daemon ends."""
        if self._gone is not None:
            raise self._gone

    # -- watching the daemon ----------------------------------------------------------------------------------

    async def _attend(self) -> None:
        """Keeps the daemon alive while this object is open, kills it if it stops answering, and replaces it if it died."""
        while True:
            await self._until_gone()
            if self._closed:
                return
            self._connected.clear()
            killed = (self.run_dir / HOST_FILE).exists()  # a daemon that ends in order removes it
            if self._ending or self._successor is None or not killed:
                self._gone = self._host_gone()
                break
            try:
                await self._replace_host(self._successor)
            except Exception as e:  # noqa: BLE001 - after any error, waits for this daemon have to end
                _log.warning("the daemon of %s was killed, and no other one starts: %s", self.run_dir, e)
                self._gone = DaemonGone(
                    f"the process that hosts the functions (pid {self.host_pid}) was killed, and no other one starts: {e}"
                )
                break
            self._connected.set()
        self._connected.set()

    async def _until_gone(self) -> None:
        attending = asyncio.create_task(self._ask("attend"))
        try:
            while not attending.done():
                await asyncio.wait([attending], timeout=_ASK_EVERY_S)
                try:
                    await status_of(self._client, timeout_s=_SILENT_S)
                except CallTimedOut:
                    _log.warning("the daemon (process %d) has not answered for %g s and is killed", self.host_pid, _SILENT_S)
                    self._kill_host()
                except (ConnectionError, RemoteError, ProtocolError):
                    pass  # gone, or ending
        finally:
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)

    async def _replace_host(self, successor: Connect) -> None:
        dead = self.host_pid
        await self._client.close()
        self._client, status = await successor()
        self.host_pid = status.pid
        self._shared = status.folder != self.run_dir
        _log.warning("the daemon (process %d) was killed; process %d replaces it", dead, self.host_pid)
        text = f"the process that hosts the functions (pid {dead}) was killed; pid {self.host_pid} replaces it and its functions"
        self._journal.append(to_json(Note(t=latest_t(self.run_dir / EVENTS_FILE), level="warning", text=text)))

    def _kill_host(self) -> None:
        """Kills a daemon that does not answer; while it holds its lock, the process number is still its own."""
        if held(self.run_dir / LOCK_FILE):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.host_pid, signal.SIGKILL)


def sweep(runs: Path) -> None:
    """Removes sockets, addresses and scratch folders of killed daemons in the run folders below `runs`, and of early ones."""
    remove_early_remains()
    if runs.is_dir():
        for run_dir in runs.iterdir():
            _sweep_one(run_dir)


def _sweep_one(run_dir: Path) -> None:
    if not ((run_dir / HOST_FILE).exists() or (run_dir / SCRATCH_FOLDER).exists()):
        return
    with contextlib.suppress(OSError), (run_dir / LOCK_FILE).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if a daemon lives; none can start while it is held
        remove_remains(run_dir)


def is_hosted(run_dir: Path) -> bool:
    """Whether the daemon of this run lives."""
    return (run_dir / LOCK_FILE).exists() and held(run_dir / LOCK_FILE)


def default_limits() -> Limits:
    """This machine's memory and 64 concurrent functions; other limits as on AWS Lambda."""
    total_mb = psutil.virtual_memory().total // MIB
    return Limits(memory_max_mb=max(Limits().memory_min_mb, int(total_mb)), concurrency=64)


def default_memory_mb(workers: int) -> int:
    """The largest memory quota (MB) at which the machine has the CPU time that so many functions are due.

    All CPU shares together are at most 0.8 of the cores, a function has at most one core, and at least 512 MB (PyTorch alone
    takes some 350): with many workers the shares exceed the machine, and functions are slower.
    """
    cores = _CPU_PART * (os.cpu_count() or 1) / max(1, workers)
    most = Limits().mb_per_vcpu * min(1.0, cores)
    return max(_FLOOR_MB, int(most // _STEP_MB) * _STEP_MB)
