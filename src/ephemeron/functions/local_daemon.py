"""The process that owns the local functions of one run, so that they outlive whoever started them.

A client may be killed; its functions train on, invoke their successors and write their events, and another client
attaches later. The host ends by itself when nobody is connected and nothing has run for two seconds, and takes
every function with it. Started as `python -m ephemeron.functions.local_daemon SETTINGS` by `LocalPlatform.start`;
secrets come in its environment and are written nowhere.

Bills run from the acceptance of a call to its end, cold start included (as AWS Lambda does since August 2025),
rounded up to the millisecond.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ephemeron.communication.rpc import Server
from ephemeron.errors import DaemonGone, InvocationRefused, PlatformError
from ephemeron.events import Ended, Invoked, Status, to_json
from ephemeron.functions.base import Call, Limits, Outcome, Reason, ended_event
from ephemeron.functions.cgroups import UNENFORCED, Enforcement, detect
from ephemeron.functions.fork_server import Forks
from ephemeron.functions.function_process import FunctionProcess, WarmPool
from ephemeron.functions.jsonl import Journal, quota_mb, unfinished
from ephemeron.functions.validation import check_call

HOST_FILE = "host.json"
LOCK_FILE = "host.lock"
EVENTS_FILE = "events.jsonl"
SCRATCH_FOLDER = "scratch"
LOGS_FOLDER = "logs"
CHANNEL_FOLDER = "channel"
"""What the channel `folder` means, below the run's folder."""

_TICK_S = 0.2
_PRIVATE = "eph-"
_SOCKET_PATH = 100
"""Longest path of a socket that every system takes."""


@dataclass(kw_only=True)
class _Started:
    """An invocation, running or ended."""

    id: str
    call: Call
    accepted: float
    environment: FunctionProcess | None = None
    cancelled: bool = False
    outcome: asyncio.Future[Outcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LocalDaemon:
    """Runs the functions of one run.

    Args:
        folder: of the run.
        limits: beyond which calls are refused.
        enforcement: how quotas are imposed.
        idle_s: after which a warm process is given up.
        linger_s: how long to stay when there is nobody to serve and nothing to run.
        forks: what function processes are forked from; None: they are fresh ones.
    """

    def __init__(
        self, folder: Path, limits: Limits, enforcement: Enforcement, *, idle_s: float, linger_s: float,
        forks: Forks | None = None,
    ) -> None:  # fmt: skip
        self.stopping = asyncio.Event()
        self._folder = folder
        self._limits = limits
        self._enforcement = enforcement
        self._linger_s = linger_s
        self._forks = forks
        self._journal = Journal(folder / EVENTS_FILE)
        self._pool = WarmPool(self._make, idle_s=idle_s)
        self._started: dict[str, _Started] = {}
        self._running: dict[str, _Started] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients = 0
        self._environments = 0
        self._born = time.time()
        self._busy = time.monotonic()

    async def handle(
        self, method: str, params: dict[str, Any], buffers: list[memoryview]
    ) -> tuple[dict[str, Any], Sequence[memoryview]]:
        """Answers one message of a client."""
        if self.stopping.is_set():
            raise DaemonGone("the process that hosts the functions is ending")
        reply: dict[str, Any] = {}
        if method == "attend":
            await self._attend()
        elif method == "invoke":
            reply["invocation"] = self.invoke(Call.from_payload(params["call"]))
        elif method == "wait":
            reply = dataclasses.asdict(await asyncio.shield(self._find(params["invocation"]).outcome))
        elif method == "cancel":
            await self._cancel([self._find(params["invocation"])])
        elif method == "cancel_all":
            await self.cancel_all()
        elif method == "status":
            reply = self._status()
        elif method == "shutdown":
            self.stopping.set()
        else:
            raise ValueError(f"no method {method!r}")
        return reply, ()

    def invoke(self, call: Call) -> str:
        """Accepts a call and starts it, twice when it asks for a duplicate.

        Raises:
            InvocationRefused: memory, lifetime, payload or concurrency is beyond the limits.
        """
        check_call(call, self._limits)
        twice, call = call.duplicate, dataclasses.replace(call, duplicate=False)
        first = self._begin(call, call.reason)
        if twice and len(self._running) < self._limits.concurrency:
            self._begin(call, "duplicate")
        return first

    async def cancel_all(self) -> None:
        """Ends everything, also what functions invoke meanwhile."""
        while self._running:
            await self._cancel(list(self._running.values()))

    async def tend(self) -> None:
        """Gives up idle processes and, in the end, the host itself."""
        while not self.stopping.is_set():
            await asyncio.sleep(_TICK_S)
            await self._pool.expire()
            if self._forks is not None:
                self._forks.reap()
            if self._journal.problem:
                self._journal.flush()
            if self._clients or self._running:
                self._busy = time.monotonic()
            elif time.monotonic() - self._busy > self._linger_s:
                self.stopping.set()

    async def close(self) -> None:
        """Leaves no process, no control group and no scratch folder behind."""
        self.stopping.set()
        await self.cancel_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.expire(everything=True)
        if self._forks is not None:
            await self._forks.close()
        self._journal.flush()
        await asyncio.to_thread(shutil.rmtree, self._folder / SCRATCH_FOLDER, ignore_errors=True)

    def close_unfinished(self) -> None:
        """Writes the end of invocations that died with an earlier host, billed until the last event of the run."""
        events = self._folder / EVENTS_FILE
        left, latest = unfinished(events)
        memory_mb = quota_mb(events) if left else 0
        for event in left:
            billed_s = math.ceil(max(0.0, latest - event.t) * 1000) / 1000
            end = Ended(
                t=latest, rank=event.rank, attempt=event.attempt, invocation=event.invocation, status="lost",
                error="the process that hosts the local functions died", billed_s=billed_s, memory_mb=memory_mb,
                gb_seconds=memory_mb / 1024 * billed_s,
            )  # fmt: skip
            self._journal.append(to_json(end))

    def _begin(self, call: Call, reason: Reason) -> str:
        if len(self._running) >= self._limits.concurrency:
            raise InvocationRefused(
                f"{len(self._running)} functions run already; the limit of concurrency is {self._limits.concurrency}"
            )
        started = _Started(id=secrets.token_hex(6), call=call, accepted=time.monotonic())
        self._started[started.id] = self._running[started.id] = started
        invoked = Invoked(
            t=self._t(call), rank=call.rank, attempt=call.attempt, invocation=started.id, reason=reason
        )  # fmt: skip
        self._journal.append(to_json(invoked))
        self._in_background(self._run(started))
        return started.id

    async def _run(self, started: _Started) -> None:
        scratch = self._folder / SCRATCH_FOLDER / started.id
        environment = started.environment = self._pool.take(started.call.memory_mb)
        reply: dict[str, Any] | None = None
        try:
            scratch.mkdir(parents=True)
            reply = await self._lead(started, environment, scratch)
            status, error = _judge(environment, reply)
        except Exception as e:  # noqa: BLE001 - also a fault of ours must not leave the caller waiting
            status, error = "error", f"{type(e).__name__}: {e}"
        if started.cancelled and status != "ok":
            status, error = "cancelled", "cancelled"
        outcome = self._outcome(started, status, error, reply)
        self._journal.append(to_json(ended_event(started.call, started.id, outcome, t=self._t(started.call))))
        fit = environment.fit(reply)
        if fit:
            self._pool.give(environment)
        del self._running[started.id]
        started.outcome.set_result(outcome)
        if not fit:
            await environment.dispose()
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def _lead(self, started: _Started, environment: FunctionProcess, scratch: Path) -> dict[str, Any] | None:
        if environment.cold:
            hello = await environment.start()
            if hello is None or "failed" in hello:
                return hello
        call = started.call
        message = {
            "call": call.to_payload(),
            "invocation": started.id,
            "origin": self._origin(call),
            "lifetime_s": call.lifetime_s,
            "vcpus": self._limits.vcpus(call.memory_mb),
            "scratch": str(scratch),
            "base": str(self._folder / CHANNEL_FOLDER),
            "cold": environment.cold,
            "log": str(self._folder / LOGS_FOLDER / f"{started.id}.txt"),
        }

        def hear(said: dict[str, Any]) -> None:
            if "event" in said:
                self._journal.append(said["event"])
            else:
                environment.tell(self._answer(said))

        return await environment.serve(message, call.lifetime_s, hear)

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A function invokes another one."""
        try:
            self.invoke(Call.from_payload(asked["call"]))
        except InvocationRefused as e:
            return {"refused": asked["invoke"], "text": str(e)}
        return {"accepted": asked["invoke"]}

    def _outcome(self, started: _Started, status: Status, error: str, reply: dict[str, Any] | None) -> Outcome:
        billed_s = math.ceil((time.monotonic() - started.accepted) * 1000) / 1000
        assert started.environment is not None
        return Outcome(
            status=status,
            value=reply["ok"] if status == "ok" and reply else {},
            error=error,
            billed_s=billed_s,
            gb_seconds=started.call.memory_mb / 1024 * billed_s,
            peak_memory_mb=round(started.environment.peak_mb, 1),
        )

    async def _cancel(self, victims: list[_Started]) -> None:
        for victim in victims:
            victim.cancelled = True
            if victim.environment is not None and not victim.outcome.done():
                victim.environment.kill("cancelled")
        await asyncio.gather(*(asyncio.shield(victim.outcome) for victim in victims))

    async def _attend(self) -> None:
        """A client stays connected for as long as this call of its is open."""
        self._clients += 1
        try:
            await asyncio.Event().wait()
        finally:
            self._clients -= 1

    def _find(self, invocation: str) -> _Started:
        if invocation not in self._started:
            raise PlatformError(f"this host knows no invocation {invocation!r}")
        return self._started[invocation]

    def _status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "limits": dataclasses.asdict(self._limits),
            "enforcement": self._enforcement.kind,
            "unenforced": list(self._enforcement.unenforced),
            "running": {s.id: s.environment.pid if s.environment else 0 for s in self._running.values()},
            "warm": len(self._pool),
            "fork_servers": self._forks.pids if self._forks else [],
            "problem": self._journal.problem,
        }

    def _make(self, memory_mb: int) -> FunctionProcess:
        self._environments += 1
        scratch = self._folder / SCRATCH_FOLDER
        env = {**os.environ, "HOME": str(scratch), "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
        return FunctionProcess(
            self._enforcement, self._environments, memory_mb=memory_mb, vcpus=self._limits.vcpus(memory_mb),
            env=env, folder=self._folder, forks=self._forks,
        )  # fmt: skip

    def _origin(self, call: Call) -> float:
        return call.origin or self._born

    def _t(self, call: Call) -> float:
        return time.time() - self._origin(call)

    def _in_background(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _judge(environment: FunctionProcess, reply: dict[str, Any] | None) -> tuple[Status, str]:
    if reply is None:
        return environment.why_dead()
    if "ok" in reply:
        return "ok", ""
    if environment.oom_killed():
        return environment.why_dead()  # a child of the function was killed, and the function could not go on
    return "error", f"{reply.get('error', reply.get('failed'))}\n{reply['traceback']}"


async def serve(settings: dict[str, Any], ready: Callable[[], None]) -> None:
    """Runs a host until it is told to end, or has nothing left to do.

    Args:
        settings: `folder`, `limits`, `idle_s`, `linger_s`, `enforce`, `forks`.
        ready: called once clients can connect.
    """
    folder = Path(settings["folder"])
    enforcement = detect() if settings["enforce"] else Enforcement(kind="none", unenforced=UNENFORCED)
    enforcement.clean()
    forks = Forks.make(folder / LOGS_FOLDER) if settings["forks"] else None
    host = LocalDaemon(
        folder, Limits(**settings["limits"]), enforcement, idle_s=settings["idle_s"], linger_s=settings["linger_s"],
        forks=forks,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stopping.set)
    host.close_unfinished()
    remove_remains(folder)
    token = secrets.token_urlsafe(32)
    server = Server(host.handle, token=token)
    with tempfile.TemporaryDirectory(prefix=_PRIVATE, dir=_short_folder()) as private:
        socket_path = os.path.join(private, "host")
        await server.listen_unix(socket_path)
        _write_private(folder / HOST_FILE, {"pid": os.getpid(), "socket": socket_path, "token": token})
        tending = asyncio.create_task(host.tend())
        try:
            ready()
            await host.stopping.wait()
        finally:
            await host.close()
            tending.cancel()
            (folder / HOST_FILE).unlink(missing_ok=True)
            await server.close()


def main() -> None:
    """Detaches from whoever started it, says `ready` on standard output and serves."""
    settings = json.loads(sys.argv[1])
    if os.fork():
        os._exit(0)  # so that the client has no child to wait for, and init has one
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with open(os.path.join(settings["folder"], LOCK_FILE), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _say("taken")
            return
        asyncio.run(serve(settings, lambda: _say("ready")))


def _say(word: str) -> None:
    os.write(1, f"{word}\n".encode())
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) + len("/eph-12345678/host") < _SOCKET_PATH else "/tmp"


def remove_remains(folder: Path) -> None:
    """Removes what a host that was killed could not: socket, address, scratch folders. The caller holds its lock."""
    known = folder / HOST_FILE
    try:
        private = Path(json.loads(known.read_text())["socket"]).parent
    except (OSError, ValueError, KeyError):
        pass
    else:
        if private.name.startswith(_PRIVATE):
            shutil.rmtree(private, ignore_errors=True)
    known.unlink(missing_ok=True)
    shutil.rmtree(folder / SCRATCH_FOLDER, ignore_errors=True)


def _write_private(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".part")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(value, file)
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
