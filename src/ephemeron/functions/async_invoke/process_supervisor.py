"""Supervision of a function's process, on platforms where the handler can start processes.

One call at a time. The time limit counts from the arrival of the call, imports included. At the limit, or when the call is
cancelled, the function's process is killed with everything it has started. The supervisor reports the end, so that only the
death of both (of a container, of a machine) has to be learned from another log source.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

from ephemeron import logs
from ephemeron.communication.channels.address import open_channel
from ephemeron.errors import EphemeronError
from ephemeron.events import Status
from ephemeron.functions.async_invoke.invoker import RecordedSender
from ephemeron.functions.async_invoke.records import HandlerOutcome, InvokeRequest, RecordKeys
from ephemeron.functions.async_invoke.reporter import DeliverySource, InvocationReporter
from ephemeron.functions.base import Call
from ephemeron.functions.cgroups import Enforcement
from ephemeron.functions.function_process import FunctionProcess
from ephemeron.functions.process_messages import (
    EventMessage,
    InvocationReply,
    InvokeMessage,
    InvokeSuccessor,
    Ready,
    StartFailed,
    SuccessorAccepted,
    SuccessorRefused,
)

_log = logging.getLogger(__name__)
_WATCHED = Enforcement(kind="none")
"""No control groups: the machine is shared, and its owner may use them."""


class _CallEnded(Exception):
    """The call was cancelled before it began, or its run is over."""


class ProcessSupervisor(ABC):
    """Serves calls, one after the other.

    Args:
        folder: for scratch folders and output; the supervisor's own.
        vcpus: CPU share of the function's process.
        lifetime_s: longest invocation that the platform allows.
    """

    billing_step_s: ClassVar[float] = 0.001
    """Multiple of seconds that the platform bills."""

    def __init__(self, folder: Path, *, vcpus: float, lifetime_s: float) -> None:
        self._folder, self._vcpus, self._lifetime_s = folder, vcpus, lifetime_s
        self.idle = asyncio.Event()
        self.idle.set()
        self._numbers = 0
        self.variables: Mapping[str, str] = {}
        """Secrets, for the next call's own environment."""
        self._environment: FunctionProcess | None = None
        self._starting: asyncio.Task[Ready | StartFailed | None] | None = None

    @abstractmethod
    def make(self, n: int) -> FunctionProcess:
        """A process for a function, not started; `n` counts them."""

    @abstractmethod
    def sender(self, callback: str, **sender: Any) -> RecordedSender:
        """Sender for the successors of a call; `sender` goes to `RecordedSender`."""

    def burst_vcpu_s(self) -> float:
        """vCPU-seconds of the present call beyond its CPU share, where these are billed."""
        return 0.0

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return not self.idle.is_set()

    def prepare(self) -> None:
        """Starts a process in advance, so that the next call finds its imports made."""
        if self._environment is None:
            self._numbers += 1
            self._environment = self.make(self._numbers)
            self._starting = asyncio.create_task(self._environment.start())

    async def serve(self, envelope: InvokeRequest, *, request: str, callback: str = "") -> HandlerOutcome:
        """Runs one delivery of a call, and returns its outcome once the outcome is in the store.

        Args:
            envelope: the delivered request.
            request: the cloud's id of the call.
            callback: URL that the cloud notifies of its end; also for successors.

        Raises:
            ChannelError: the store does not answer; nothing was run.
        """
        self.idle.clear()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(envelope.lifetime_s, self._lifetime_s)
        started = False

        def leave(code: int) -> None:
            # In the reporter's thread, which these exceptions end after its last report.
            if not started:
                raise _CallEnded
            loop.call_soon_threadsafe(self._kill, "cancelled")
            raise asyncio.CancelledError

        source = DeliverySource(request=request, billed_by="supervisor", billing_step_s=self.billing_step_s)
        reporter = InvocationReporter(envelope, lambda: open_channel(envelope.channel), source, lifetime_s=float("inf"), leave=leave)
        try:
            call = await asyncio.to_thread(reporter.start)
            started = True
            with logs.context(**call.log_fields):
                _log.info("call %s begins", reporter.name)
                try:
                    outcome = await self._run(call, envelope, reporter, callback, deadline)
                except Exception as e:  # noqa: BLE001 - also a fault of the supervisor must not leave the call without an end
                    _log.exception("call %s failed in its supervisor", reporter.name)
                    outcome = HandlerOutcome(status="error", error=f"{type(e).__name__}: {e}", took_s=reporter.took_s)
                _log.info("call %s has ended: %s", reporter.name, outcome.status)
            if outcome.status != "cancelled":
                await asyncio.to_thread(reporter.close, outcome)
            return outcome
        except _CallEnded:
            return HandlerOutcome(status="cancelled", error="cancelled before it began")
        finally:
            self.between()
            self.idle.set()

    def between(self) -> None:
        """Prepares for the next call."""
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
    ) -> HandlerOutcome:
        self.prepare()
        environment = self._environment
        assert environment is not None
        scratch = Path(tempfile.mkdtemp(prefix="eph-")).resolve()
        try:
            reply = await self._invoke(environment, call, envelope, reporter, callback, scratch, deadline)
            fit = environment.fit(reply)
            ended = environment.outcome(reply)
            return HandlerOutcome(
                status=ended.status,
                error=ended.error,
                value=ended.value,
                took_s=reporter.took_s,
                peak_mb=round(environment.peak_mb, 1),
                burst_vcpu_s=self.burst_vcpu_s(),
            )
        except BaseException:
            fit = False
            raise
        finally:
            if not fit:
                self._environment = self._starting = None
                await environment.dispose()
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def _invoke(
        self,
        environment: FunctionProcess,
        call: Call,
        envelope: InvokeRequest,
        reporter: InvocationReporter,
        callback: str,
        scratch: Path,
        deadline: float,
    ) -> InvocationReply | None:
        first = await self._started(environment, deadline)
        if not isinstance(first, Ready):
            return first
        lifetime_s = max(0.0, deadline - asyncio.get_running_loop().time())
        message = InvokeMessage(
            call=call,
            invocation=reporter.name,
            origin=call.origin,
            lifetime_s=lifetime_s,
            vcpus=self._vcpus,
            scratch=str(scratch),
            base=str(scratch),
            cold=environment.cold,
            variables=self.variables,
        )
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(open_channel(envelope.channel))
            sender = self.sender(
                callback,
                channel=channel,
                names=RecordKeys(envelope.calls),
                announce=reporter.announce,
                every_s=envelope.every_s,
                by=reporter.name,
            )
            sending: set[asyncio.Task[None]] = set()
            stack.push_async_callback(_all_sent, sending)

            def on_message(received: EventMessage | InvokeSuccessor) -> None:
                if isinstance(received, EventMessage):
                    reporter.say(received.line)
                else:
                    sending.add(asyncio.create_task(_send_successor(sender, environment, received)))

            return await environment.serve(message, on_message)

    async def _started(self, environment: FunctionProcess, deadline: float) -> Ready | StartFailed | None:
        """First message of a process; a process that has served a call is ready."""
        if self._starting is None:
            return Ready(pid=environment.pid)
        starting, self._starting = self._starting, None
        late = asyncio.get_running_loop().call_at(deadline, environment.kill, "timed_out")
        try:
            return await starting
        finally:
            late.cancel()


class OneShotSupervisor(ProcessSupervisor):
    """A supervisor of exactly one call, on a machine that enforces no quota: it watches the memory itself.

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
        root = str(Path(__file__).parents[2])  # the package's folder, as this process has found it
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        env = {**os.environ, "PYTHONPATH": path, **self._variables}
        return FunctionProcess(_WATCHED, n, memory_mb=self._memory_mb, vcpus=self._vcpus, env=env, folder=self._folder)

    def between(self) -> None:
        """No call follows."""


def pass_output_on(folder: Path, n: int) -> None:
    """Sends the output of a process to the supervisor's own output, which the cloud keeps."""
    log = folder / "logs" / f"{n}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.symlink_to("/dev/stdout")


async def _send_successor(sender: RecordedSender, environment: FunctionProcess, asked: InvokeSuccessor) -> None:
    """Starts the function that another one asks for, and answers."""
    try:
        await sender.send(asked.call)
        environment.send(SuccessorAccepted(number=asked.number))
    except EphemeronError as e:
        environment.send(SuccessorRefused(number=asked.number, text=str(e)))


async def _all_sent(sending: set[asyncio.Task[None]]) -> None:
    # Requests are completed also when the function that made them has died: it has taken the lease for the successor.
    await asyncio.gather(*sending, return_exceptions=True)
