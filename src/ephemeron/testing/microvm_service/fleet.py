"""Life of the MicroVMs: start, states, idle policy, quotas, and the end at the maximum duration."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ephemeron.functions.cgroups import Enforcement
from ephemeron.testing._emulation.service import EmulatorTasks, FaultConfig
from ephemeron.testing.microvm_service.images import Image, ImageVersion
from ephemeron.testing.microvm_service.microvm import Microvm
from ephemeron.testing.microvm_service.model import ServiceError, same

_GONE = (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError)
_KEPT = 2_000
"""Terminated MicroVMs that are still known."""
_names = itertools.count(1)


class Fleet:
    """All MicroVMs.

    Args:
        folder: for their files.
        enforcement: how limits are imposed on this machine.
        memory_gb: quota of the account: baselines of all MicroVMs that are not terminated.
        variables: for every MicroVM.
        ahead: MicroVMs of each version that are started in advance, stopped once they are ready, as after a snapshot.
        on_line: takes each line of their output, with the MicroVM's id.
    """

    def __init__(
        self,
        folder: Path,
        enforcement: Enforcement,
        *,
        memory_gb: float,
        variables: Mapping[str, str],
        ahead: int,
        on_line: Callable[[str, str], None],
    ) -> None:
        self.faults, self.memory_gb = FaultConfig(), memory_gb
        self.all: dict[str, Microvm] = {}
        self.requests: list[Mapping[str, Any]] = []
        """Of all MicroVMs, in order."""
        self._folder, self._enforcement, self._variables = folder, enforcement, variables
        self._on_line, self._ahead, self._stocking = on_line, ahead, asyncio.Lock()
        self._spares: dict[tuple[str, str], list[Microvm]] = {}
        self._by_token: dict[str, Microvm] = {}
        self._tasks = EmulatorTasks()

    def running(self) -> list[Microvm]:
        """Those that are not terminated."""
        return [m for m in self.all.values() if m.state not in ("TERMINATED", "TERMINATING")]

    def make(self, arn: str, version: ImageVersion, request: Mapping[str, Any]) -> Microvm:
        """A MicroVM that has not been started."""
        id = f"microvm-{uuid.uuid4()}"
        return Microvm(
            id,
            arn,
            version,
            request,
            folder=self._folder / f"vm-{next(_names)}",
            enforcement=self._enforcement,
            variables=self._variables,
            on_line=lambda line: self._on_line(id, line),
        )

    def run(self, image: Image, version: ImageVersion, request: Mapping[str, Any]) -> Microvm:
        """Starts one; the same one for the same client token.

        Raises:
            ServiceError: above the quota, or the token was used for something else.
        """
        token = str(request.get("clientToken", ""))
        if (known := self._by_token.get(token)) is not None:
            if not same(known.request, request):
                raise ServiceError("ConflictException", "the client token was used with other parameters")
            return known
        if (sum(m.version.memory_mb for m in self.running()) + version.memory_mb) / 1024 > self.memory_gb:
            raise ServiceError("ServiceQuotaExceededException", f"the quota of {self.memory_gb:g} GB of memory is exceeded")
        self.requests.append(request)
        spares = self._spares.get((image.arn, version.number))
        made = spares.pop(0) if spares else self.make(image.arn, version, request)
        made.request, made.started_at = request, time.time()
        self.all[made.id] = made
        if token:
            self._by_token[token] = made
        self._tasks.start(self._start(made))
        return made

    async def stock(self, arn: str, version: ImageVersion) -> None:
        """Starts MicroVMs of a version in advance, one after the other.

        Raises:
            RuntimeError: one is not ready.
        """
        async with self._stocking:
            spares = self._spares.setdefault((arn, version.number), [])
            while len(spares) < self._ahead:
                spare = self.make(arn, version, {})
                try:
                    await spare.boot()
                except BaseException:
                    await spare.dispose()
                    raise
                spare.stop()
                spares.append(spare)

    async def suspend(self, microvm: Microvm) -> None:
        """Suspends a running one; nothing where it is suspended.

        Raises:
            ServiceError: it is in another state.
        """
        async with microvm.changing:
            if microvm.state == "SUSPENDED":
                return
            _demand(microvm, "RUNNING")
            microvm.state = "SUSPENDING"
            with contextlib.suppress(*_GONE):
                await microvm.hook("suspend", {"microvmId": microvm.id})
            microvm.stop()
            microvm.state = "SUSPENDED"

    async def resume(self, microvm: Microvm) -> None:
        """Resumes a suspended one; nothing where it runs.

        Raises:
            ServiceError: it is in another state.
        """
        async with microvm.changing:
            if microvm.state == "RUNNING":
                return
            _demand(microvm, "SUSPENDED")
            microvm.go_on()
            with contextlib.suppress(*_GONE):
                await microvm.hook("resume", {"microvmId": microvm.id})
            microvm.state = "RUNNING"

    async def terminate(self, microvm: Microvm, reason: str) -> None:
        """Ends one; nothing where it has ended."""
        async with microvm.changing:
            if microvm.state == "TERMINATED":
                return
            if microvm.state == "RUNNING" and not microvm.exited:
                microvm.state = "TERMINATING"
                with contextlib.suppress(*_GONE):
                    await microvm.hook("terminate", {"microvmId": microvm.id})
            microvm.state, microvm.reason = "TERMINATED", reason
            microvm.terminated_at = time.time()
            await microvm.dispose()
        for old in [m.id for m in self.all.values() if m.state == "TERMINATED"][:-_KEPT]:
            del self.all[old]

    def end(self, microvm: Microvm, reason: str) -> None:
        """Ends one in the background: it may be one that asks for its own end, and answers hooks only afterwards."""
        self._tasks.start(self.terminate(microvm, reason))

    def look(self) -> None:
        """Ends and suspends what is due."""
        now, wall = time.monotonic(), time.time()
        for microvm in self.running():
            if microvm.changing.locked() or microvm.state == "PENDING":
                continue
            idle: Mapping[str, Any] | None = microvm.request.get("idlePolicy")
            if wall - microvm.started_at >= microvm.maximum_s:
                self.end(microvm, "The MicroVM reached its maximum duration")
            elif microvm.exited:
                self.end(microvm, "The application exited")
            elif idle is not None and microvm.state == "RUNNING":
                if now - microvm.last_request >= idle["maxIdleDurationSeconds"]:
                    self._tasks.start(self.suspend(microvm))
            elif idle is not None and now - microvm.suspended_at >= idle["suspendedDurationSeconds"]:
                self.end(microvm, "The MicroVM was suspended for too long")

    async def close(self) -> None:
        """Ends everything."""
        await self._tasks.cancel()
        spares = [spare for spares in self._spares.values() for spare in spares]
        await asyncio.gather(*(m.dispose() for m in (*self.all.values(), *spares)), return_exceptions=True)

    async def _start(self, microvm: Microvm) -> None:
        body = {"microvmId": microvm.id, "runHookPayload": microvm.request.get("runHookPayload", "")}
        try:
            if microvm.pid:
                microvm.go_on()
            else:
                await microvm.boot()
            answer = await microvm.hook("run", body)
            reason = "" if answer.status == 200 else f"The run hook answered {answer.status}"
        except (RuntimeError, *_GONE) as e:
            reason = f"The run hook failed: {e}"
        if reason:
            await self.terminate(microvm, reason)
        elif microvm.state == "PENDING":
            microvm.state = "RUNNING"
        if self._ahead:
            with contextlib.suppress(RuntimeError):
                await self.stock(microvm.arn, microvm.version)


def _demand(microvm: Microvm, state: str) -> None:
    if microvm.state != state:
        raise ServiceError("ConflictException", f"{microvm.id} is {microvm.state}, not {state}")
