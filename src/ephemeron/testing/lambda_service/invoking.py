"""The Invoke API: assignment of calls to environments, the queue of asynchronous calls, injected faults.

An asynchronous call is accepted (202) and queued. It waits there while no environment is free, with growing
pauses, and is dropped when it is older than the function's greatest event age; a call that failed is tried again,
twice unless the function says otherwise; a chain of functions that invoke each other is ended after 16 links
unless the function allows recursion. All of this as AWS documents it; only pauses can be shortened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence

from ephemeron.communication.rpc.http import HttpRequest, Response
from ephemeron.testing._emulation.service import EmulatorTasks, FaultConfig
from ephemeron.testing.lambda_service.environment import InvocationDone, LambdaEnvironment, Work
from ephemeron.testing.lambda_service.functions import LambdaApiError, LambdaFunction
from ephemeron.units import MIB

SYNCHRONOUS_BYTES = 6 * MIB
"""Largest payload, and largest answer, of a call that is waited for."""
ASYNCHRONOUS_BYTES = 1 * MIB
"""256 KB until October 2025."""
RETRY_AFTER_S = (60.0, 120.0)
"""Pauses before the first and before the second retry of a failed asynchronous call."""
MOST_LINKS = 16
"""In a chain of functions that invoke each other."""
_LINEAGE = re.compile(r"Lineage=\d+:[0-9a-f]+:(\d+)")

Make = Callable[[LambdaFunction], LambdaEnvironment]


class Invoker:
    """Runs calls on environments.

    Args:
        make: a new environment of a function; not started.
        concurrency: of the account.
        retry_after_s: see `RETRY_AFTER_S`.
        queue_pause_s: first pause of a queued call without a free environment; it doubles.
        idle_s: time after which an idle environment is ended.
    """

    def __init__(
        self,
        make: Make,
        *,
        concurrency: int,
        retry_after_s: Sequence[float] = RETRY_AFTER_S,
        queue_pause_s: float = 1.0,
        idle_s: float = 300.0,
    ) -> None:
        self.concurrency = concurrency
        self.faults = FaultConfig()
        self.dropped: list[str] = []
        """Reasons why queued calls were dropped, one line for each."""
        self._make, self._retry_after_s = make, tuple(retry_after_s)
        self._queue_pause_s, self._idle_s = queue_pause_s, idle_s
        self._idle: dict[str, list[LambdaEnvironment]] = defaultdict(list)
        self._running: dict[str, int] = defaultdict(int)
        self.busy: list[LambdaEnvironment] = []
        self._tasks = EmulatorTasks()

    @property
    def environments(self) -> list[LambdaEnvironment]:
        """All that live, busy ones first."""
        return [*self.busy, *(e for idle in self._idle.values() for e in idle)]

    async def invoke(self, function: LambdaFunction, request: HttpRequest, *, find: Callable[[str], LambdaFunction]) -> Response:
        """Answers one Invoke request.

        Args:
            find: the function as it is by then, for queued calls.

        Raises:
            LambdaApiError: payload, throttling, no JSON.
        """
        kind = request.headers.get("x-amz-invocation-type", "RequestResponse")
        limit = ASYNCHRONOUS_BYTES if kind == "Event" else SYNCHRONOUS_BYTES
        if len(request.body) > limit:
            text = f"{len(request.body)} byte payload is too large for the {kind} invocation type (limit {limit} bytes)"
            raise LambdaApiError(413, "RequestTooLargeException", text)
        try:
            json.loads(request.body or b"{}")
        except ValueError as e:
            text = f"Could not parse request body into json: {e}"
            raise LambdaApiError(400, "InvalidRequestContentException", text) from None
        if self.faults.take("throttle"):
            raise LambdaApiError(429, "TooManyRequestsException", "Rate Exceeded.")
        work = Work(request_id=str(uuid.uuid4()), payload=request.body or b"{}", arn=function.arn, trace=_trace(function, request))
        headers = {"x-amzn-RequestId": work.request_id}
        if kind == "DryRun":
            return Response(status=204, headers=headers)
        if kind == "Event":
            for _ in range(1 + self.faults.take("deliver_twice")):
                self._tasks.start(self._deliver(function, work, find))
            return Response(status=202, headers=headers)
        if _links(work.trace) > MOST_LINKS and function.recursion != "Allow":
            raise LambdaApiError(400, "RecursiveInvocationException", "Recursive invocation detected")
        if not self._has_room(function):
            raise LambdaApiError(429, "TooManyRequestsException", "Rate Exceeded.")
        done = await self._run(function, work)
        if done.error:
            headers["X-Amz-Function-Error"] = done.error
        return Response(headers={**headers, "X-Amz-Executed-Version": "$LATEST"}, body=done.payload)

    async def expire(self, *, everything: bool = False, keep: Callable[[LambdaEnvironment], bool] = lambda e: True) -> None:
        """Ends environments that are dead, out of date, or have been idle for too long."""
        now = time.monotonic()
        for idle in list(self._idle.values()):
            for e in list(idle):
                if everything or not e.alive or now - e.idle_since > self._idle_s or not keep(e):
                    idle.remove(e)
                    await e.dispose()

    async def close(self) -> None:
        """Ends every call and every environment."""
        await self._tasks.cancel()
        await asyncio.gather(*(e.dispose() for e in self.busy), return_exceptions=True)
        await self.expire(everything=True)

    # -- asynchronous calls ---------------------------------------------------------------------------------

    async def _deliver(self, function: LambdaFunction, work: Work, find: Callable[[str], LambdaFunction]) -> None:
        accepted = time.monotonic()
        if _links(work.trace) > MOST_LINKS and function.recursion != "Allow":
            self.dropped.append(f"{work.request_id}: recursive loop of more than {MOST_LINKS} links")
            return
        for tried in range(3):
            pause = self._queue_pause_s
            while not self._has_room(function):
                await asyncio.sleep(pause)
                pause = min(2 * pause, 300.0)
                if time.monotonic() - accepted > function.event_age_s:
                    self.dropped.append(f"{work.request_id}: older than {function.event_age_s:g} s")
                    return
            try:
                function = find(function.name)
            except LambdaApiError:
                return  # deleted meanwhile
            done = await self._run(function, work)
            if not done.error or tried >= function.retries:
                return
            await asyncio.sleep(self._retry_after_s[min(tried, len(self._retry_after_s) - 1)])

    def _has_room(self, function: LambdaFunction) -> bool:
        reserved = function.reserved
        if reserved is not None and self._running[function.name] >= reserved:
            return False
        return sum(self._running.values()) < self.concurrency

    async def _run(self, function: LambdaFunction, work: Work) -> InvocationDone:
        self._running[function.name] += 1
        environment = self._warm(function) or self._make(function)
        self.busy.append(environment)
        try:
            if not environment.pid:
                if function.folder is None:
                    text = f"this service runs no images ({function.image}); deploy a ZIP to try it here"
                    return InvocationDone(
                        payload=json.dumps({"errorType": "Runtime.InvalidImage", "errorMessage": text}).encode(), error="Unhandled"
                    )
                await environment.start()
            done = await environment.run(work)
            if len(done.payload) > SYNCHRONOUS_BYTES:
                text = (
                    f"Response payload size ({len(done.payload)} bytes) exceeded maximum allowed payload size ({SYNCHRONOUS_BYTES} bytes)."
                )
                size = {"errorType": "Function.ResponseSizeTooLarge", "errorMessage": text}
                done = InvocationDone(payload=json.dumps(size).encode(), error="Unhandled")
            return done
        finally:
            self._running[function.name] -= 1
            self.busy.remove(environment)
            if environment.alive and environment.pid:
                self._idle[function.name].append(environment)
            else:
                await asyncio.shield(environment.dispose())

    def _warm(self, function: LambdaFunction) -> LambdaEnvironment | None:
        idle = self._idle[function.name]
        for environment in reversed(idle):
            if environment.alive and environment.function.revision == function.revision:
                idle.remove(environment)
                return environment
        return None


def _trace(function: LambdaFunction, request: HttpRequest) -> str:
    """Trace header of the new invocation, with the number of functions that have invoked each other so far."""
    links = _links(request.headers.get("x-amzn-trace-id", "")) + 1
    root = f"1-{int(time.time()):08x}-{uuid.uuid4().hex[:24]}"
    with contextlib.suppress(StopIteration):
        parts = request.headers.get("x-amzn-trace-id", "").split(";")
        root = next(part.removeprefix("Root=") for part in parts if part.startswith("Root="))
    return f"Root={root};Parent={uuid.uuid4().hex[:16]};Sampled=0;Lineage=1:{abs(hash(function.name)) % 2**32:08x}:{links}"


def _links(trace: str) -> int:
    found = _LINEAGE.search(trace)
    return int(found[1]) if found else 0
