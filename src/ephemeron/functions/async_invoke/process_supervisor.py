"""What a process that supervises a function does with a call, where a cloud lets us run a process of our own.

One call at a time. Its life is the function's lifetime from the moment the call arrives, imports included; then, or
when the call is cancelled, the function's process is killed, with whatever it has started. The supervisor tells of the
end, so that only the death of both (a container, a machine) has to be told by somebody else.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ephemeron.communication.channels.address import open_channel
from ephemeron.errors import EphemeronError
from ephemeron.events import Status
from ephemeron.functions.async_invoke.invoker import RecordedSender
from ephemeron.functions.async_invoke.records import InvokeRequest, Record, RecordKeys
from ephemeron.functions.async_invoke.reporter import InvocationReporter
from ephemeron.functions.base import Call
from ephemeron.functions.cgroups import Enforcement
from ephemeron.functions.function_process import FunctionProcess

_WATCHED = Enforcement(kind="none")
"""No control groups: the machine is shared, and its owner may use them."""


class _Ended(Exception):
    """There is nothing to run: the call was cancelled before it began, or its run is over."""


class ProcessSupervisor(ABC):
    """Serves calls, one after the other.

    Args:
        folder: for scratch folders and output; the supervisor's own.
        vcpus: CPU share of the function's process.
        lifetime_s: longest life that this place allows.
    """

    def __init__(self, folder: Path, *, vcpus: float, lifetime_s: float) -> None:
        self._folder, self._vcpus, self._lifetime_s = folder, vcpus, lifetime_s
        self.idle = asyncio.Event()
        self.idle.set()
        self._numbers = 0
        self._environment: FunctionProcess | None = None
        self._hello: asyncio.Task[dict[str, Any] | None] | None = None

    @abstractmethod
    def make(self, n: int) -> FunctionProcess:
        """A process for a function, not started; `n` counts them."""

    @abstractmethod
    def sender(self, callback: str, **voice: Any) -> RecordedSender:
        """Starts successors for a call; `voice` goes to `RecordedSender`."""

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return not self.idle.is_set()

    def prepare(self) -> None:
        """Starts a process ahead, so that the next call finds its imports made."""
        if self._environment is None:
            self._numbers += 1
            self._environment = self.make(self._numbers)
            self._hello = asyncio.create_task(self._environment.start())

    async def serve(self, envelope: InvokeRequest, *, request: str, callback: str = "") -> Record:
        """Runs one delivery of a call, and returns its outcome after that is in the store.

        Args:
            envelope: what was delivered.
            request: the cloud's id of the call.
            callback: whom the cloud tells about it; successors' ends go there, too.

        Raises:
            ChannelError: the store does not answer; nothing was run.
        """
        self.idle.clear()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(envelope.lifetime_s, self._lifetime_s)
        started = False

        def leave(code: int) -> None:
            # In the reporter's thread, which ends by what is raised here: it has had its last word.
            if not started:
                raise _Ended
            loop.call_soon_threadsafe(self._kill, "cancelled")
            raise asyncio.CancelledError

        begun = {"request": request, "stream": "", "billed_by": "supervisor"}
        reporter = InvocationReporter(
            envelope, lambda: open_channel(envelope.channel), begun, lifetime_s=float("inf"), leave=leave
        )
        try:
            payload = await asyncio.to_thread(reporter.start)
            started = True
            try:
                call = Call.from_payload(payload if envelope.call is None else envelope.call)
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
            self.between()
            self.idle.set()

    def between(self) -> None:
        """After a call: gets ready for the next one."""
        self.prepare()

    async def close(self) -> None:
        """Kills the process."""
        if self._environment is not None:
            await self._environment.dispose()

    def _kill(self, why: Status) -> None:
        if self._environment is not None:
            self._environment.kill(why)

    async def _run(
        self, call: Call, envelope: InvokeRequest, reporter: InvocationReporter, callback: str, deadline: float
    ) -> Record:
        self.prepare()
        environment = self._environment
        assert environment is not None
        scratch = Path(tempfile.mkdtemp(prefix="eph-")).resolve()
        try:
            reply = await self._lead(environment, call, envelope, reporter, callback, scratch, deadline)
            fit = environment.fit(reply)
            status, error, value = _judged(environment, reply)
            return {"status": status, "error": error, "value": value, "took_s": reporter.took_s,
                    "peak_mb": round(environment.peak_mb, 1)}  # fmt: skip
        except BaseException:
            fit = False
            raise
        finally:
            if not fit:
                self._environment = self._hello = None
                await environment.dispose()
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def _lead(
        self, environment: FunctionProcess, call: Call, envelope: InvokeRequest, reporter: InvocationReporter, callback: str, scratch: Path,
        deadline: float,
    ) -> dict[str, Any] | None:  # fmt: skip
        loop = asyncio.get_running_loop()
        if (hello := await self._ready(environment, deadline)) is None or "failed" in hello:
            return hello
        lifetime_s = max(0.0, deadline - loop.time())
        message = {
            "call": call.to_payload(), "invocation": reporter.name, "origin": call.origin,
            "lifetime_s": lifetime_s, "vcpus": self._vcpus, "scratch": str(scratch), "base": str(scratch),
            "cold": environment.cold,
        }  # fmt: skip
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(open_channel(envelope.channel))
            sender = self.sender(
                callback, channel=channel, names=RecordKeys(envelope.calls), announce=reporter.announce,
                every_s=envelope.every_s, by=reporter.name,
            )  # fmt: skip
            sending: set[asyncio.Task[None]] = set()
            stack.push_async_callback(_all_sent, sending)

            def hear(said: dict[str, Any]) -> None:
                if "event" in said:
                    reporter.say(said["event"])
                else:
                    sending.add(asyncio.create_task(_pass_on(sender, environment, said)))

            return await environment.serve(message, lifetime_s, hear)

    async def _ready(self, environment: FunctionProcess, deadline: float) -> dict[str, Any] | None:
        """What a process says when its imports are made: once for each process."""
        if self._hello is None:
            return {}
        hello, self._hello = self._hello, None
        late = asyncio.get_running_loop().call_at(deadline, environment.kill, "timed_out")
        try:
            return await hello
        finally:
            late.cancel()


class OneShotSupervisor(ProcessSupervisor):
    """A supervisor of one call and no other, on a machine that enforces nothing: it watches the memory itself.

    Args:
        folder: its own.
        memory_mb: quota of the call.
        vcpus: CPU share that goes with it.
        variables: for the function, beside this process's own.
    """

    def __init__(self, folder: Path, *, memory_mb: int, vcpus: float, variables: Mapping[str, str]) -> None:
        super().__init__(folder, vcpus=vcpus, lifetime_s=float("inf"))
        self._memory_mb, self._variables = memory_mb, variables

    def make(self, n: int) -> FunctionProcess:
        root = str(Path(__file__).parents[2])  # where this process has found us, however that came about
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        env = {**os.environ, "PYTHONPATH": path, **self._variables}
        return FunctionProcess(_WATCHED, n, memory_mb=self._memory_mb, vcpus=self._vcpus, env=env, folder=self._folder)

    def between(self) -> None:
        """Nothing follows."""


async def _pass_on(sender: RecordedSender, environment: FunctionProcess, asked: dict[str, Any]) -> None:
    """A function starts another one."""
    try:
        await sender.send(Call.from_payload(asked["call"]))
        environment.tell({"accepted": asked["invoke"]})
    except EphemeronError as e:
        environment.tell({"refused": asked["invoke"], "text": str(e)})


async def _all_sent(sending: set[asyncio.Task[None]]) -> None:
    # What is being sent is sent, also when whoever wanted it has died: its claim has been taken.
    await asyncio.gather(*sending, return_exceptions=True)


def _judged(environment: FunctionProcess, reply: dict[str, Any] | None) -> tuple[Status, str, dict[str, Any]]:
    if reply is not None and "ok" in reply:
        return "ok", "", reply["ok"]
    if reply is None or environment.oom_killed():
        status, error = environment.why_dead()
        return status, error, {}
    return "error", f"{reply.get('error', reply.get('failed'))}\n{reply['traceback']}", {}
