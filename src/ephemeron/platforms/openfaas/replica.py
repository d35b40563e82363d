"""What a replica does with a call: the handler's side of the process in which the user's code runs.

One call at a time. Its life is the function's lifetime from the moment the call arrives, imports included; then, or
when the call is cancelled, the process is killed, with whatever it has started. A process that has ended well and
left nothing behind serves the next call; another one is started ahead otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ephemeron.channels.address import open_channel
from ephemeron.errors import EphemeronError
from ephemeron.events import Status
from ephemeron.platforms._environments import Environment
from ephemeron.platforms.aws.records import Envelope, Names, Record
from ephemeron.platforms.aws.reporter import Reporter
from ephemeron.platforms.base import Call
from ephemeron.platforms.cgroups import Enforcement
from ephemeron.platforms.openfaas.gateway import Gateway
from ephemeron.platforms.openfaas.sending import GatewaySender
from ephemeron.platforms.openfaas.settings import OpenFaasSettings

_WATCH_S = 0.2
_NOTHING = Enforcement(kind="none")
_GROUP_FILES = (
    ("/sys/fs/cgroup/memory{path}/memory.oom_control", "memory"),
    ("/sys/fs/cgroup{path}/memory.events", ""),
    ("/sys/fs/cgroup/memory/memory.oom_control", "memory"),
    ("/sys/fs/cgroup/memory.events", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What `deploy` has told the function about itself."""

    memory_mb: int
    """Limit of the replica, handler included."""
    vcpus: float
    lifetime_s: float
    gateway: OpenFaasSettings
    """As functions reach it, and this function's name."""
    digest: str = ""


class _Ended(Exception):
    """There is nothing to run: the call was cancelled before it began, or its run is over."""


class Resident(Environment):
    """A process that shares a container with the handler: the container's limits are the ones that hold."""

    def __init__(self, n: int, *, memory_mb: int, vcpus: float, folder: Path) -> None:
        super().__init__(_NOTHING, n, memory_mb=memory_mb, vcpus=vcpus, env=os.environ, folder=folder)
        self._kills_before = out_of_memory_kills()

    def oom_killed(self) -> bool:
        return super().oom_killed() or out_of_memory_kills() > self._kills_before

    async def _watch(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self._resident_mb())
            await asyncio.sleep(_WATCH_S)


class Replica:
    """Serves calls, one after the other.

    Args:
        told: what this replica is.
        folder: for scratch folders and output; the replica's own.
    """

    def __init__(self, told: Told, folder: Path) -> None:
        self._told, self._folder = told, folder
        self.idle = asyncio.Event()
        self.idle.set()
        self._numbers = 0
        self._resident: Resident | None = None
        self._hello: asyncio.Task[dict[str, Any] | None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return not self.idle.is_set()

    def prepare(self) -> None:
        """Starts a process ahead, so that the next call finds its imports made."""
        if self._resident is None:
            self._numbers += 1
            _pass_output_on(self._folder, self._numbers)
            told = self._told
            self._resident = Resident(
                self._numbers, memory_mb=told.memory_mb, vcpus=told.vcpus, folder=self._folder
            )  # fmt: skip
            self._hello = asyncio.create_task(self._resident.start())

    async def serve(self, envelope: Envelope, *, request: str, callback: str = "") -> Record:
        """Runs one delivery of a call, and returns its outcome after that is in the store.

        Args:
            envelope: what was delivered.
            request: the gateway's id of the call.
            callback: whom the gateway tells about it; successors' ends go there, too.

        Raises:
            ChannelError: the store does not answer; nothing was run.
        """
        self.idle.clear()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(envelope.lifetime_s, self._told.lifetime_s)
        started = False

        def leave(code: int) -> None:
            # In the reporter's thread, which ends by what is raised here: it has had its last word.
            if not started:
                raise _Ended
            loop.call_soon_threadsafe(self._kill, "cancelled")
            raise asyncio.CancelledError

        begun = {"request": request, "stream": "", "billed_by": "supervisor"}
        reporter = Reporter(
            envelope, lambda: open_channel(envelope.channel), begun, lifetime_s=float("inf"), leave=leave
        )
        try:
            payload = await asyncio.to_thread(reporter.start)
            started = True
            try:
                call = Call.from_payload(payload if envelope.call is None else envelope.call)  # type: ignore[arg-type]
                outcome = await self._run(call, envelope, reporter, callback, deadline)
            except Exception as e:  # noqa: BLE001 - also a fault of ours must not leave the call without an end
                error = f"{type(e).__name__}: {e}"
                outcome = {"status": "error", "error": error, "value": {}, "took_s": reporter.took_s, "peak_mb": 0.0}
            if outcome["status"] != "cancelled":
                await asyncio.to_thread(reporter.close, outcome)
            return outcome
        except _Ended:
            return {"status": "cancelled", "value": {}, "error": "cancelled before it began"}
        finally:
            self.prepare()
            self.idle.set()

    async def close(self) -> None:
        """Kills the process."""
        if self._resident is not None:
            await self._resident.dispose()

    def _kill(self, why: Status) -> None:
        if self._resident is not None:
            self._resident.kill(why)

    async def _run(self, call: Call, envelope: Envelope, reporter: Reporter, callback: str, deadline: float) -> Record:
        self.prepare()
        resident = self._resident
        assert resident is not None
        scratch = Path(tempfile.mkdtemp(prefix="eph-")).resolve()
        try:
            reply = await self._lead(resident, call, envelope, reporter, callback, scratch, deadline)
            fit = resident.fit(reply)
            status, error, value = _judged(resident, reply, self._told.memory_mb)
            return {"status": status, "error": error, "value": value, "took_s": reporter.took_s,
                    "peak_mb": round(resident.peak_mb, 1)}  # fmt: skip
        except BaseException:
            fit = False
            raise
        finally:
            if not fit:
                self._resident = self._hello = None
                await resident.dispose()
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def _lead(
        self, resident: Resident, call: Call, envelope: Envelope, reporter: Reporter, callback: str, scratch: Path,
        deadline: float,
    ) -> dict[str, Any] | None:  # fmt: skip
        loop = asyncio.get_running_loop()
        if (hello := await self._ready(resident, deadline)) is None or "failed" in hello:
            return hello
        lifetime_s = max(0.0, deadline - loop.time())
        message = {
            "call": call.to_payload(), "invocation": reporter.name, "origin": float(call.options.get("origin", 0.0)),
            "lifetime_s": lifetime_s, "vcpus": self._told.vcpus, "scratch": str(scratch), "base": str(scratch),
            "cold": resident.cold,
        }  # fmt: skip
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(open_channel(envelope.channel))
            sender = GatewaySender(
                Gateway(self._told.gateway), callback=callback, channel=channel, names=Names(envelope.calls),
                announce=reporter.announce, every_s=envelope.every_s, by=reporter.name,
            )  # fmt: skip
            sending: set[asyncio.Task[None]] = set()
            stack.push_async_callback(_all_sent, sending)

            def hear(said: dict[str, Any]) -> None:
                if "event" in said:
                    reporter.say(said["event"])
                else:
                    sending.add(asyncio.create_task(_pass_on(sender, resident, said)))

            return await resident.serve(message, lifetime_s, hear)

    async def _ready(self, resident: Resident, deadline: float) -> dict[str, Any] | None:
        """What a process says when its imports are made: once for each process."""
        if self._hello is None:
            return {}
        hello, self._hello = self._hello, None
        late = asyncio.get_running_loop().call_at(deadline, resident.kill, "timed_out")
        try:
            return await hello
        finally:
            late.cancel()


async def _pass_on(sender: GatewaySender, resident: Resident, asked: dict[str, Any]) -> None:
    """A function starts another one."""
    try:
        await sender.send(Call.from_payload(asked["call"]))
        resident.tell({"accepted": asked["invoke"]})
    except EphemeronError as e:
        resident.tell({"refused": asked["invoke"], "text": str(e)})


async def _all_sent(sending: set[asyncio.Task[None]]) -> None:
    # What is being sent is sent, also when whoever wanted it has died: its claim has been taken.
    await asyncio.gather(*sending, return_exceptions=True)


def _judged(resident: Resident, reply: dict[str, Any] | None, memory_mb: int) -> tuple[Status, str, dict[str, Any]]:
    if reply is not None and "ok" in reply:
        return "ok", "", reply["ok"]
    if reply is None or resident.oom_killed():
        status, error = resident.why_dead()
        if status == "timed_out":
            error = "killed at its lifetime limit"
        return status, error, {}
    return "error", f"{reply.get('error', reply.get('failed'))}\n{reply['traceback']}", {}


def out_of_memory_kills(own: Path = Path("/proc/self/cgroup")) -> int:
    """How many processes the kernel has killed for want of memory in this process's control group; 0 if unknown."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return 0
    paths = {controller: path.rstrip("/") for _, names, path in lines for controller in names.split(",")}
    for pattern, controller in _GROUP_FILES:
        if controller in paths:
            try:
                text = Path(pattern.format(path=paths[controller])).read_text()
            except OSError:
                continue
            counts = dict(line.split(None, 1) for line in text.splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def _pass_output_on(folder: Path, n: int) -> None:
    """What the user's code prints goes where the handler's own output goes: to the function's log."""
    log = folder / "logs" / f"{n}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.symlink_to("/dev/stdout")


def told_by(environ: dict[str, str]) -> Told:
    """Reads what `deploy` has put into the function's environment.

    Raises:
        KeyError, ValueError: it was not deployed by us.
    """
    return Told(
        memory_mb=int(environ["EPHEMERON_MEMORY_MB"]), vcpus=float(environ["EPHEMERON_VCPUS"]),
        lifetime_s=float(environ["EPHEMERON_LIFETIME_S"]), digest=environ.get("EPHEMERON_CODE", ""),
        gateway=OpenFaasSettings(
            gateway=environ["EPHEMERON_GATEWAY"], function=environ["EPHEMERON_FUNCTION"],
            namespace=environ.get("EPHEMERON_NAMESPACE", ""),
        ).located(),
    )  # fmt: skip


def answer_of(outcome: Record, delivery: str) -> bytes:
    """What the gateway, and a call-back, are told: small, since the value is in the store."""
    error = str(outcome["error"]).splitlines()[0] if outcome["error"] else ""
    return json.dumps({"id": delivery, "status": outcome["status"], "error": error}).encode()
