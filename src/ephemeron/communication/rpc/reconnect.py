"""Clients that connect anew when the connection is lost, and prove the token again.

A call under way when that happens fails with `ConnectionLost`, whose `may_repeat` says whether its request never
left in full; then, and for calls marked `idempotent`, it is repeated here. A stream is bound to its connection and
fails with it. A refused token is not tried again.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ephemeron.communication.rpc.async_connection import AsyncStream, timed
from ephemeron.communication.rpc.blocking_client import BlockingCaller, BlockingClient
from ephemeron.communication.rpc.blocking_connection import BlockingStream, deadline_in
from ephemeron.communication.rpc.client import Caller, Client
from ephemeron.communication.rpc.frame import Frame, Receive
from ephemeron.communication.rpc.session import CallRequest
from ephemeron.errors import CallTimedOut, ConnectionLost


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectBackoff:
    """How long to wait before each attempt but the first."""

    first_s: float = 0.05
    factor: float = 2.0
    most_s: float = 2.0
    attempts: int = 8
    """Attempts to connect in a row, and to make one call."""
    spread: float = 0.5
    """Share of each wait that is random, so that many clients of one server do not come at once."""

    def waits_s(self, rng: random.Random) -> Iterator[float]:
        """Seconds before the second attempt, the third and so on."""
        for n in range(self.attempts - 1):
            whole = min(self.most_s, self.first_s * self.factor**n)
            yield whole * (1 - self.spread * rng.random())


class ReconnectingClient(Caller):
    """A `Client` that is made anew when its connection is lost.

    Args:
        dial: connects, as `lambda: Client.connect_tcp(host, port, token=token)`.
        backoff: see there.
        rng: spreads the waits.
    """

    def __init__(
        self, dial: Callable[[], Awaitable[Client]], *, rng: random.Random, backoff: ReconnectBackoff | None = None
    ) -> None:
        self._dial = dial
        self._backoff = backoff or ReconnectBackoff()
        self._rng = rng
        self._client: Client | None = None
        self._dialing = asyncio.Lock()

    async def client(self) -> Client:
        """A connected client; dials if there is none.

        Raises:
            ConnectionLost: all attempts failed.
            TokenRefused, ProtocolError: no attempt would succeed.
        """
        async with self._dialing:
            if self._client is not None and self._client.connected:
                return self._client
            await self.close()
            waits_s = self._backoff.waits_s(self._rng)
            while True:
                try:
                    self._client = await self._dial()
                    return self._client
                except ConnectionError as e:
                    wait_s = _next(waits_s, e)
                await asyncio.sleep(wait_s)

    async def stream(
        self, method: str, params: Mapping[str, Any] | None = None, *, receive: Receive = Receive.VIEWS
    ) -> AsyncStream:
        return await (await self.client()).stream(method, params, receive=receive)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _ask(self, request: CallRequest, receive: Receive, timeout_s: float | None, idempotent: bool) -> Frame:
        loop = asyncio.get_running_loop()
        begun, waits_s = loop.time(), self._backoff.waits_s(self._rng)
        async with timed(timeout_s, "no connection"):
            while True:
                client = await self.client()
                left_s = None if timeout_s is None else max(0.0, begun + timeout_s - loop.time())
                try:
                    return await client._ask(request, receive, left_s, idempotent)
                except ConnectionLost as e:
                    if not (e.may_repeat or idempotent):
                        raise
                    wait_s = _next(waits_s, e)
                await asyncio.sleep(wait_s)


class BlockingRedialing(BlockingCaller):
    """`ReconnectingClient` for threads: a `BlockingClient` that is made anew when its connection is lost.

    Args:
        dial: connects, as `lambda: BlockingClient.connect_tcp(host, port, token=token)`.
        backoff: see there.
        rng: spreads the waits.
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        dial: Callable[[], BlockingClient],
        *,
        rng: random.Random,
        backoff: ReconnectBackoff | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._dial = dial
        self._backoff = backoff or ReconnectBackoff()
        self._rng = rng
        self._sleep = sleep
        self._client: BlockingClient | None = None
        self._dialing = threading.Lock()

    def client(self, deadline: float | None = None) -> BlockingClient:
        """A connected client; dials if there is none, until `deadline` on the monotonic clock.

        Raises:
            CallTimedOut: it would take longer.
            ConnectionLost, TokenRefused, ProtocolError: see `ReconnectingClient.client`.
        """
        with self._dialing:
            if self._client is not None and self._client.connected:
                return self._client
            self.close()
            waits_s = self._backoff.waits_s(self._rng)
            while True:
                try:
                    self._client = self._dial()
                    return self._client
                except ConnectionError as e:
                    self._pause(_next(waits_s, e), deadline)

    def stream(
        self, method: str, params: Mapping[str, Any] | None = None, *, receive: Receive = Receive.VIEWS
    ) -> BlockingStream:
        return self.client().stream(method, params, receive=receive)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _ask(self, request: CallRequest, receive: Receive, timeout_s: float | None, idempotent: bool) -> Frame:
        deadline, waits_s = deadline_in(timeout_s), self._backoff.waits_s(self._rng)
        while True:
            client = self.client(deadline)
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return client._ask(request, receive, left_s, idempotent)
            except ConnectionLost as e:
                if not (e.may_repeat or idempotent):
                    raise
                self._pause(_next(waits_s, e), deadline)

    def _pause(self, wait_s: float, deadline: float | None) -> None:
        if deadline is not None and time.monotonic() + wait_s >= deadline:
            raise CallTimedOut("no connection before the deadline")
        self._sleep(wait_s)


def _next(waits_s: Iterator[float], error: ConnectionError) -> float:
    for wait_s in waits_s:
        return wait_s
    if isinstance(error, ConnectionLost):
        raise error
    raise ConnectionLost(f"gave up connecting: {error}", may_repeat=True) from error
