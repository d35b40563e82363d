"""Functions as processes of this machine that behave like a cloud's: the platform that needs no account.

A function gets CPU time in proportion to its memory quota, dies above it, dies at its lifetime limit, finds an
empty scratch folder and no memory of earlier invocations, and is billed to the millisecond. A process of its own
(`local_host`) owns the functions of a run, so that they go on when the client is killed.

    platform = await LocalPlatform.start(home / "runs" / run)
    invocation = await platform.invoke(call)
    outcome = await invocation.wait()
    await platform.shutdown()           # or close(), and the functions go on

Measured on two cores: a cold start takes 0.15 s without PyTorch and 1.2 s with it, a warm one 5 to 8 ms. More
functions than the machine has CPU shares for run slower than their quota promises: see `default_memory_mb`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import fnmatch
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from ephemeron.errors import InvocationRefused, PlatformError
from ephemeron.events import Event, to_json
from ephemeron.platforms._journal import Journal, follow
from ephemeron.platforms._refusals import check_call
from ephemeron.platforms.base import Call, Invocation, Limits, Outcome, Platform
from ephemeron.platforms.local_host import CHANNEL_FOLDER, EVENTS_FILE, HOST_FILE, LOCK_FILE
from ephemeron.rpc import Client, ProtocolError, RemoteError, TokenRefused
from ephemeron.units import MIB

PASSED_ON = (
    "PATH", "LANG", "LC_*", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "AWS_*", "GOOGLE_*", "AZURE_*",
    "EPHEMERON_CHANNEL_*", "SSL_CERT_*", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
"""Variables of the client's environment that functions see. Everything else stays here."""

_START_S = 60.0
_END_S = 30.0
_FLOOR_MB = 512
_STEP_MB = 64
_CPU_PART = 0.8


class HostGone(PlatformError):
    """No living process hosts the functions of this run."""


class LocalInvocation(Invocation):
    """A started local function."""

    def __init__(self, platform: LocalPlatform, id: str, call: Call) -> None:
        self.id = id
        self.call = call
        self._platform = platform

    async def wait(self) -> Outcome:
        """Until it has ended. A host that died took its functions along: they are lost.

        Raises:
            PlatformError: the platform was closed meanwhile.
        """
        try:
            return Outcome(**await self._platform._ask("wait", invocation=self.id))
        except HostGone as e:
            return Outcome(status="lost", error=str(e))

    async def cancel(self) -> None:
        """Ends it now, and returns when it has ended."""
        with contextlib.suppress(HostGone):
            await self._platform._ask("cancel", invocation=self.id)


class LocalPlatform(Platform):
    """Functions of one run. Made by `start` or `attach`.

    Args:
        run_dir: folder of the run; holds `events.jsonl`, `channel/`, `logs/` and, while it runs, `host.json`.
        client: connected to the host.
        status: the host's answer to `status`.
    """

    name = "local"

    def __init__(self, run_dir: Path, client: Client, status: Mapping[str, Any]) -> None:
        self.run_dir = run_dir
        self.limits = Limits(**status["limits"])
        self.unenforced = tuple(status["unenforced"])
        self.host_pid = int(status["pid"])
        self._client = client
        self._closed = False
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
    ) -> LocalPlatform:
        """Starts a host for the run, or attaches to the one that lives (whose settings then hold).

        Args:
            run_dir: made when missing.
            limits: by default up to this machine's memory and 64 functions at once.
            env: variables for the functions, beside those of `PASSED_ON`; never written to disk.
            idle_s: how long a warm process is kept.
            linger_s: how long the host stays when nobody is attached and nothing runs.
            enforce: False leaves CPU unlimited and memory watched, as where control groups are missing.

        Raises:
            PlatformError: the host does not start; says why.
        """
        run_dir = run_dir.absolute()
        run_dir.mkdir(parents=True, exist_ok=True)
        settings = {
            "folder": str(run_dir),
            "limits": dataclasses.asdict(limits or default_limits()),
            "idle_s": idle_s,
            "linger_s": linger_s,
            "enforce": enforce,
        }
        end = time.monotonic() + _START_S
        while True:
            try:
                return await cls.attach(run_dir)
            except HostGone:
                # "taken": another one is just starting, or just ending.
                if await _launch(settings, _environment(env or {})) == "taken":
                    await asyncio.sleep(0.05)
            if time.monotonic() > end:
                raise PlatformError(f"the host of the functions in {run_dir} starts but cannot be reached")

    @classmethod
    async def attach(cls, run_dir: Path) -> LocalPlatform:
        """Connects to the living host of a run.

        Raises:
            HostGone: there is none.
            PlatformError: it refuses us.
        """
        run_dir = run_dir.absolute()
        client: Client | None = None
        try:
            known = json.loads((run_dir / HOST_FILE).read_text())
            client = await Client.connect_unix(known["socket"], token=known["token"])
            status, _ = await client.call("status")
            return cls(run_dir, client, status)
        except TokenRefused as e:
            raise PlatformError(f"the host of the functions in {run_dir} refuses the token in {HOST_FILE}") from e
        except (OSError, ValueError, RemoteError, ProtocolError) as e:
            if client is not None:
                await client.close()
            raise HostGone(f"no functions of the run in {run_dir} are hosted any more") from e

    @property
    def channel_base(self) -> Path:
        """What the channel address `folder` means to the functions."""
        return self.run_dir / CHANNEL_FOLDER

    async def invoke(self, call: Call) -> LocalInvocation:
        check_call(call, self.limits)
        reply = await self._ask("invoke", call=call.to_payload())
        return LocalInvocation(self, reply["invocation"], call)

    def events(self, run: str) -> AsyncIterator[Event]:
        """All events in the run's folder, those of earlier hosts included."""
        return follow(self.run_dir / EVENTS_FILE)

    async def emit(self, run: str, event: Event) -> None:
        """Appends an event.

        Raises:
            PlatformError: it cannot be written now; it is kept, and written with the next one.
        """
        self._journal.append(to_json(event))
        if self._journal.problem:
            raise PlatformError(f"cannot write to {self.run_dir / EVENTS_FILE}: {self._journal.problem}")

    async def cancel_all(self, run: str) -> None:
        with contextlib.suppress(HostGone):
            await self._ask("cancel_all")

    async def status(self) -> dict[str, Any]:
        """What the host does now: `running` (invocation to pid), `warm`, `enforcement`, `problem`.

        Raises:
            HostGone: there is none.
        """
        return await self._ask("status")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._attending.cancel()
        await asyncio.gather(self._attending, return_exceptions=True)
        await self._client.close()

    async def shutdown(self) -> None:
        """Ends all functions and the host, waits until they are gone, and detaches.

        Raises:
            PlatformError: the host does not end.
        """
        with contextlib.suppress(HostGone):
            await self._ask("shutdown")
        end = time.monotonic() + _END_S
        while _held(self.run_dir / LOCK_FILE):
            if time.monotonic() > end:
                raise PlatformError(f"the host of the functions (process {self.host_pid}) does not end")
            await asyncio.sleep(0.02)
        await self.close()

    async def __aenter__(self) -> LocalPlatform:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        if self._closed:
            raise PlatformError("this platform was closed")
        try:
            reply, _ = await self._client.call(method, params)
        except RemoteError as e:
            raise (InvocationRefused if e.type == "InvocationRefused" else PlatformError)(e.text) from None
        except ConnectionError as e:
            if self._closed:
                raise PlatformError("this platform was closed") from e
            raise HostGone(f"the process that hosts the functions (pid {self.host_pid}) is gone") from e
        return reply

    async def _attend(self) -> None:
        """Keeps the host alive as long as we are here."""
        with contextlib.suppress(PlatformError):
            await self._ask("attend")


def is_hosted(run_dir: Path) -> bool:
    """Whether a host for the functions of this run lives."""
    return (run_dir / LOCK_FILE).exists() and _held(run_dir / LOCK_FILE)


def default_limits() -> Limits:
    """This machine's memory, 64 functions at once, everything else as AWS Lambda has it."""
    total_mb = psutil.virtual_memory().total // MIB
    return Limits(memory_max_mb=max(Limits().memory_min_mb, int(total_mb)), concurrency=64)


def default_memory_mb(workers: int) -> int:
    """The largest quota with which that many functions get the CPU time they are promised, MB.

    All CPU shares together are at most 0.8 of the cores, a function has at most one core, and never less than
    512 MB (PyTorch alone takes some 350): with many workers the machine is promised more than once, and slower.
    """
    cores = _CPU_PART * (os.cpu_count() or 1) / max(1, workers)
    most = Limits().mb_per_vcpu * min(1.0, cores)
    return max(_FLOOR_MB, int(most // _STEP_MB) * _STEP_MB)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, pattern) for pattern in PASSED_ON)}
    return {**kept, **extra}


async def _launch(settings: Mapping[str, Any], env: Mapping[str, str]) -> str:
    """Starts a host and returns its first word."""
    log = Path(settings["folder"]) / "host.log"
    with log.open("ab") as err:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "ephemeron.platforms.local_host", json.dumps(settings), env=dict(env),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=err, cwd="/",
            start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            word = (await process.stdout.readline()).decode().strip()
            await process.wait()
    except TimeoutError:
        word = ""
    if word not in ("ready", "taken"):
        tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise PlatformError(f"the host of the functions did not start: {tail[0]} (see {log})")
    return word


def _held(lock: Path) -> bool:
    """Whether a host lives; the kernel gives the lock back however it ends."""
    try:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
