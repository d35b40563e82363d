"""A rendezvous service and members of runs, in one event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ephemeron.communication.direct.connection import Connection
from ephemeron.communication.direct.message import Head
from ephemeron.communication.direct.punching import MeetingTransport, PunchedTransport, RelayTransport
from ephemeron.communication.direct.rendezvous import Rendezvous, ServiceAddress
from ephemeron.communication.direct.rendezvous_service import RendezvousService, ServiceLimits

SERVICE_TOKEN, RUN_TOKEN = "the service's token", "the run's token"
TIMEOUT_S = 120.0
TRANSPORTS: dict[str, type[MeetingTransport]] = {"punched": PunchedTransport, "relay": RelayTransport}


class Inbox:
    """Messages of one connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.messages: asyncio.Queue[tuple[Head, bytes]] = asyncio.Queue()
        self.closed = asyncio.Event()
        connection.start(self)

    def allocate(self, connection: Connection, head: Head, nbytes: int) -> memoryview | None:
        return None

    def on_message(self, connection: Connection, head: Head, body: memoryview) -> None:
        self.messages.put_nowait((head, bytes(body)))

    def on_closed(self, connection: Connection, why: str) -> None:
        self.closed.set()

    def send(self, number: int, body: bytes) -> None:
        self.connection.send(Head(kind=40, sender=0, target=1, number=number), [body])

    async def receive(self) -> tuple[int, bytes]:
        async with asyncio.timeout(TIMEOUT_S):
            head, body = await self.messages.get()
        return head.number, body


class Member:
    """One member of a run, with one transport."""

    def __init__(self, transport: MeetingTransport, run_token: str) -> None:
        self.transport, self.run_token = transport, run_token
        self.address: str | None = None
        self.accepted: asyncio.Queue[Connection] = asyncio.Queue()

    async def open(self) -> Member:
        self.address = await self.transport.listen(self.run_token, self.accepted.put_nowait)
        return self

    async def dial(self, other: Member, *, timeout_s: float = TIMEOUT_S) -> Connection:
        assert other.address is not None
        return await self.transport.dial(other.address, self.run_token, timeout_s=timeout_s)

    async def connect(self, other: Member) -> tuple[Inbox, Inbox]:
        """Both ends of a new connection."""
        connection = await self.dial(other)
        async with asyncio.timeout(TIMEOUT_S):
            return Inbox(connection), Inbox(await other.accepted.get())


@asynccontextmanager
async def service(
    *, token: str = SERVICE_TOKEN, limits: ServiceLimits | None = None, tls: ssl.SSLContext | None = None, port: int = 0
) -> AsyncIterator[tuple[RendezvousService, ServiceAddress]]:
    """A service on loopback."""
    serving = RendezvousService(token, limits=limits, tls=tls)
    host, bound = await serving.listen(port=port)
    try:
        yield serving, ServiceAddress(host, bound, tls is not None)
    finally:
        await serving.close()


@asynccontextmanager
async def members(
    address: ServiceAddress, *purposes: str, run_tokens: Sequence[str] = (), service_token: str = SERVICE_TOKEN
) -> AsyncIterator[list[Any]]:
    """Members that have tried to register: one for each transport that is named."""
    tokens = run_tokens or [RUN_TOKEN] * len(purposes)
    found = [
        Member(TRANSPORTS[purpose](Rendezvous(address, token=service_token)), token)
        for purpose, token in zip(purposes, tokens, strict=True)
    ]
    try:
        yield [await member.open() for member in found]
    finally:
        for member in found:
            await member.transport.close()
