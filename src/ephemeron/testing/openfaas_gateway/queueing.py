"""The queue of asynchronous calls and the queue-worker that empties it, as the documents of OpenFaaS describe them.

A call is taken by one of `inflight` workers, in order, and handed to the function like any other request. Its answer goes to
the call-back, if there is one. Where the function's annotations say so (`com.openfaas.retry.attempts`, `.codes`, `.min_wait`,
`.max_wait`), a status is tried again after a pause that doubles; without them nothing is (Community Edition).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ephemeron.communication.rpc.http import HttpRequest, Response, ask
from ephemeron.testing._emulation.service import EmulatorTasks, FaultConfig
from ephemeron.testing.openfaas_gateway.functions import GatewayApiError, GatewayFunction, seconds

MESSAGE_BYTES = 1 << 20
"""Largest message of NATS, which holds the body in base64."""
_HOP = ("connection", "host", "content-length", "transfer-encoding")

Deliver = Callable[[str, HttpRequest], Awaitable[Response]]
Find = Callable[[str], GatewayFunction]


@dataclass(kw_only=True)
class _Message:
    function: str
    request: HttpRequest
    callback: str
    call_id: str
    tries: int = 0
    began: float = field(default_factory=time.monotonic)


class Queue:
    """Accepts calls and delivers them.

    Args:
        deliver: hands a request to a function, and returns what it answers, 404, 429 and 5xx included.
        find: a function as it is by then.
        inflight: calls that are delivered at the same time.
    """

    def __init__(self, deliver: Deliver, find: Find, *, inflight: int) -> None:
        self.faults = FaultConfig()
        self.delivered: list[tuple[str, int]] = []
        """X-Call-Id and the last status of each call that is over."""
        self._deliver, self._find, self._inflight = deliver, find, inflight
        self._waiting: asyncio.Queue[_Message] = asyncio.Queue()
        self._tasks = EmulatorTasks()

    def start(self) -> None:
        """Starts the workers."""
        for _ in range(self._inflight):
            self._tasks.start(self._work())

    def accept(self, function: str, request: HttpRequest, *, call_id: str) -> None:
        """Queues a call.

        Raises:
            GatewayApiError: 429 or 500, and nothing was queued.
        """
        if self.faults.take("throttle"):
            raise GatewayApiError(429, "too many requests")
        size = len(json.dumps({"Header": dict(request.headers), "Body": base64.b64encode(request.body).decode()}))
        if size > MESSAGE_BYTES:
            raise GatewayApiError(500, "Error queuing request: nats: maximum payload exceeded")
        copies = 1 + self.faults.take("deliver_twice")
        if self.faults.take("lose"):
            return
        for _ in range(copies):
            self._waiting.put_nowait(
                _Message(function=function, request=request, callback=request.headers.get("x-callback-url", ""), call_id=call_id)
            )

    async def close(self) -> None:
        """Ends the workers; what waits is lost."""
        await self._tasks.cancel()

    async def _work(self) -> None:
        while True:
            message = await self._waiting.get()
            began = time.monotonic()
            answer = await self._deliver(message.function, message.request)
            took_s = time.monotonic() - began
            pause_s = self._pause(message, answer.status)
            if pause_s is not None:
                message.tries += 1
                self._tasks.start(self._again(message, pause_s))
                continue
            self.delivered.append((message.call_id, answer.status))
            if message.callback:
                self._tasks.start(self._call_back(message, answer, took_s))

    def _pause(self, message: _Message, status: int) -> float | None:
        """Seconds until the next try; None: there is none."""
        try:
            notes: Mapping[str, str] = self._find(message.function).annotations
        except GatewayApiError:
            return None
        codes = notes.get("com.openfaas.retry.codes", "").split(",")
        if str(status) not in codes or message.tries >= int(notes.get("com.openfaas.retry.attempts", "0")):
            return None
        shortest = seconds(notes.get("com.openfaas.retry.min_wait", ""), 10.0)
        longest = seconds(notes.get("com.openfaas.retry.max_wait", ""), 120.0)
        return min(longest, shortest * 2.0**message.tries)

    async def _again(self, message: _Message, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._waiting.put_nowait(message)

    async def _call_back(self, message: _Message, answer: Response, took_s: float) -> None:
        parts = urlsplit(message.callback)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in (*_HOP, "x-call-id", "x-duration-seconds")}
        headers = {
            **kept,
            "X-Call-Id": message.call_id,
            "X-Duration-Seconds": f"{took_s:f}",
            "X-Function-Status": str(answer.status),
            "X-Function-Name": message.function,
            "User-Agent": "openfaas-gateway-of-ephemeron/1",
        }
        if message.tries:
            headers |= {"X-Retry": str(message.tries)}
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, IndexError):  # no listener there
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            await ask(parts.hostname or "", parts.port or 80, "POST", target, headers=headers, body=answer.body)
