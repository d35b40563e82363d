"""Client of a control function, in any process that reaches its channel: it asks, and starts the function where none answers.

A function that ended by itself has said so, and the next attempt is started at once. One that was killed has not: the next attempt is started when no
answer has come for `answer_s`. Attempts are claimed by create-only objects, so of many clients one starts it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ephemeron.communication.channels.base import Channel, poll
from ephemeron.config.typed import build, plain
from ephemeron.errors import ChannelTimeout, JobError, PlatformError, ServiceUnreachable
from ephemeron.functions.base import Call
from ephemeron.regions.control.addressing import AddressAnswer, AddressRequest
from ephemeron.regions.control.function import ControlRequest, ControlStore
from ephemeron.regions.control.scheduling import ScheduleAnswer, ScheduleRequest

_log = logging.getLogger(__name__)

FUNCTIONS = ("scheduling", "addressing")
_LOOK_S = 0.1
"""Time between two looks whether the function has ended."""
_LONGEST_START_S = 60.0

T = TypeVar("T")


class ControlClient:
    """A client of the control functions of one run.

    Args:
        channel: of the functions.
        call: of a control function, with run, channel, memory, time limit and key; entry and attempt are filled in.
        invoke: starts a call: that of a platform, or of a function's context.
        owner: name of this client, unlike that of every other of the run.
        request: arguments of the functions.
        answer_s: time after which a function that does not answer is replaced; it doubles with each attempt of one request.
    """

    def __init__(
        self,
        channel: Channel,
        call: Call,
        invoke: Callable[[Call], Awaitable[object]],
        *,
        owner: str,
        request: ControlRequest | None = None,
        answer_s: float = 3.0,
    ) -> None:
        self._call, self._invoke, self._answer_s = call, invoke, answer_s
        self._request = request or ControlRequest()
        self._stores = {
            name: ControlStore(channel, run=call.run, function=name, owner=f"{owner}-{name}", key=call.key) for name in FUNCTIONS
        }
        self.started = 0
        """Attempts that this client has started."""

    async def schedule(self, request: ScheduleRequest, *, timeout_s: float = 60.0) -> ScheduleAnswer:
        """Asks the scheduling function.

        Raises:
            JobError: it refuses the request.
            ServiceUnreachable: it has not answered in time.
        """
        return await self._ask("scheduling", request, ScheduleAnswer, timeout_s)

    async def address(self, request: AddressRequest, *, timeout_s: float = 60.0) -> AddressAnswer:
        """Asks the addressing function; as `schedule`."""
        return await self._ask("addressing", request, AddressAnswer, timeout_s)

    async def clear(self) -> None:
        """Deletes what the control functions have stored. No other client may be at work."""
        for store in self._stores.values():
            await store.clear()

    async def _ask(self, function: str, request: object, kind: type[T], timeout_s: float) -> T:
        store, id = self._stores[function], uuid.uuid4().hex
        await store.create("request", id, plain(request))
        try:
            answer = await self._answered(store, function, id, asyncio.get_running_loop().time() + timeout_s)
        finally:
            await store.delete("request", id)
        await store.delete("answer", id)
        if "answer" not in answer:
            raise JobError(str(answer.get("refused") or answer.get("failed")))
        return build(kind, answer["answer"], where=f"answer of {function}")

    async def _answered(self, store: ControlStore, function: str, id: str, deadline: float) -> Mapping[str, Any]:
        loop, wait_s = asyncio.get_running_loop(), self._answer_s
        attempt = await store.latest("attempt")
        if not attempt or await store.read("ended", attempt) is not None:
            attempt = await self._start(store, function, attempt + 1)
        replace_at = loop.time() + wait_s
        while loop.time() < deadline:
            try:
                return await self._look(store, id, min(loop.time() + _LOOK_S, deadline))
            except ChannelTimeout:
                late = loop.time() > replace_at
            if late or await store.read("ended", attempt) is not None:
                if late:
                    _log.info("the %s function, attempt %d, does not answer: it is replaced", function, attempt)
                    wait_s = min(2 * wait_s, _LONGEST_START_S)
                attempt = await self._start(store, function, attempt + 1)
                replace_at = loop.time() + wait_s
        raise ServiceUnreachable(f"the {function} function of {self._call.run} has not answered")

    async def _look(self, store: ControlStore, id: str, deadline: float) -> Mapping[str, Any]:
        found: dict[str, Any] = {}

        async def fetch(key: str) -> memoryview | None:
            answer = await store.read("answer", key)
            if answer is None:
                return None
            found.update(answer)
            return memoryview(b"")

        await poll(fetch, id, deadline=deadline)
        return found

    async def _start(self, store: ControlStore, function: str, attempt: int) -> int:
        """Starts an attempt, unless another client does; returns the newest one."""
        newest = await store.latest("attempt")
        if newest >= attempt:
            return newest
        if not await store.create("attempt", attempt, {}):
            return attempt
        call = dataclasses.replace(
            self._call,
            entry=f"geo-{function}",
            attempt=attempt,
            rank=FUNCTIONS.index(function),
            request=plain(self._request),
            reason="start" if attempt == 1 else "replacement",
        )
        try:
            await self._invoke(call)
            self.started += 1
        except PlatformError as e:
            _log.warning("the %s function is not started: %s", function, e)
        return attempt
