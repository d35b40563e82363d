"""A member's side of the rendezvous service: a control connection that is made anew when it is lost, and meetings.

member = Rendezvous(ServiceAddress.parse("rendezvous.example:7071"), token=...)
await member.open(run_token, {"punched": handler})          # handler(ticket, timeout_s): for another member
ticket = await member.invite("7f3a…", "punched", timeout_s=5)
channel, go = await member.redeem(ticket, sock, timeout_s=5)
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ephemeron.communication.direct.connection import LinkFailed, tune
from ephemeron.communication.direct.rendezvous_protocol import (
    Go,
    Invite,
    Invited,
    MessageSocket,
    Ping,
    Pong,
    Purpose,
    Redeem,
    Refused,
    Register,
    Registered,
    group_of,
)
from ephemeron.communication.direct.tls_socket import client_context, over_tls
from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.communication.rpc.sockets import not_in_children
from ephemeron.errors import JobError, ProtocolError, TokenRefused

SERVICE_VARIABLE = "EPHEMERON_RENDEZVOUS"
"""Address of the rendezvous service: `HOST:PORT`, or `tls://HOST:PORT`."""
TOKEN_VARIABLE = "EPHEMERON_RENDEZVOUS_TOKEN"
"""Token of the rendezvous service."""
_PING_S = 20.0
_CONNECT_S = 10.0
_RETRY_S = (0.2, 10.0)
_GONE = (OSError, ProtocolError, TokenRefused)  # TimeoutError is an OSError
_log = logging.getLogger(__name__)

Handler = Callable[[str, float], Coroutine[Any, Any, None]]
"""Takes the ticket of a meeting that another member wants, and the seconds that it tries for."""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where the rendezvous service listens."""

    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> ServiceAddress:
        """Reads `HOST:PORT` or `tls://HOST:PORT`.

        Raises:
            JobError: it is neither.
        """
        rest = text.strip().removeprefix("tls://")
        host, _, port = rest.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or "/" in rest or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise JobError(
                f"{SERVICE_VARIABLE} = {text!r} is no address of a rendezvous service",
                remedy="give HOST:PORT, or tls://HOST:PORT for a service with a certificate",
            )
        return cls(host, int(port), text.strip().startswith("tls://"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls://' if self.tls else ''}{host}:{self.port}"


class Rendezvous:
    """One member at one service, for all transports that need it.

    Args:
        service: where it listens.
        token: of the service.
    """

    def __init__(self, service: ServiceAddress, *, token: Token) -> None:
        self.service = service
        self.name = secrets.token_hex(8)
        """Of this member at the service; new for each object."""
        self.observed: tuple[str, int] | None = None
        """Address from which the control connection comes, as the service sees it."""
        self._token = token_text(token)
        self._tls = client_context() if service.tls else None
        self._handlers: dict[Purpose, Handler] = {}
        self._control: MessageSocket | None = None
        self._target: tuple[socket.AddressFamily, Any] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._number = 0

    @property
    def connected(self) -> bool:
        """Whether the service can be asked now."""
        return self._control is not None

    async def open(self, run_token: str, purpose: Purpose, handler: Handler) -> bool:
        """Registers, and takes invitations for a purpose from now on. May be called for several purposes.

        Returns:
            Whether the service is reached; if not, it is tried again in the background.
        """
        self._handlers[purpose] = handler
        if self._keeping is None:
            tried = asyncio.Event()
            self._keeping = asyncio.get_running_loop().create_task(self._keep(group_of(run_token), tried))
            await tried.wait()
        return self.connected

    async def invite(self, name: str, purpose: Purpose, *, timeout_s: float) -> str:
        """Asks for a meeting with another member.

        Returns:
            This member's ticket.

        Raises:
            LinkFailed: the service is not connected, or the other member is not.
        """
        control = self._control
        if control is None:
            raise LinkFailed(f"the rendezvous service {self.service} is not connected")
        self._number += 1
        number, future = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                await control.send(Invite(number=number, name=name, purpose=purpose, timeout_s=min(60.0, timeout_s)))
                ticket: str = await future
                return ticket
        except LinkFailed:
            raise
        except OSError as e:
            raise LinkFailed(f"the rendezvous service {self.service}: {str(e) or 'no answer in time'}") from e
        finally:
            self._waiting.pop(number, None)

    async def redeem(self, ticket: str, sock: socket.socket, *, timeout_s: float) -> tuple[MessageSocket, Go]:
        """Connects to the service with a socket, and waits there for the other member.

        Args:
            ticket: of the meeting.
            sock: not connected, perhaps bound; owned from now on.

        Returns:
            The connection, which must be closed, and how to go on.

        Raises:
            LinkFailed: no service, or no other member, within the time.
        """
        channel = MessageSocket(sock)
        try:
            async with asyncio.timeout(timeout_s):
                await self._connect(channel)
                await channel.send(Redeem(ticket=ticket))
                answer = await channel.receive()
            if not isinstance(answer, Go):
                raise ProtocolError(f"{type(answer).__name__} for a ticket")
        except BaseException as e:
            channel.close()
            if isinstance(e, _GONE):
                raise LinkFailed(f"a meeting at {self.service} failed: {str(e) or 'not in time'}") from e
            raise
        return channel, answer

    async def family(self) -> socket.AddressFamily:
        """Family of the service's address.

        Raises:
            LinkFailed: its name cannot be resolved.
        """
        try:
            return (await self._resolved())[0]
        except OSError as e:
            raise LinkFailed(f"the rendezvous service {self.service}: {e}") from e

    async def close(self) -> None:
        """Ends the control connection and what invitations have begun."""
        tasks = [*self._tasks, *([self._keeping] if self._keeping else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._keeping = None

    # -- the control connection -----------------------------------------------------------------------------

    async def _resolved(self) -> tuple[socket.AddressFamily, Any]:
        if self._target is None:
            found = await asyncio.get_running_loop().getaddrinfo(self.service.host, self.service.port, type=socket.SOCK_STREAM)
            self._target = found[0][0], found[0][4]
        return self._target

    async def _connect(self, channel: MessageSocket) -> None:
        _, target = await self._resolved()
        tune(channel.sock)
        not_in_children(channel.sock)
        await asyncio.get_running_loop().sock_connect(channel.sock, target)
        if self._tls is not None:
            channel.sock = await over_tls(channel.sock, self._tls, server_hostname=self.service.host, limit_s=_CONNECT_S)
        await channel.prove(self._token, client=True)

    async def _keep(self, group: str, tried: asyncio.Event) -> None:
        pause_s, warned = _RETRY_S[0], False
        while True:
            channel: MessageSocket | None = None
            try:
                async with asyncio.timeout(_CONNECT_S):
                    family, _ = await self._resolved()
                    channel = MessageSocket(socket.socket(family, socket.SOCK_STREAM))
                    await self._connect(channel)
                    await channel.send(Register(group=group, name=self.name))
                    answer = await channel.receive()
                if not isinstance(answer, Registered):
                    raise ProtocolError(answer.why if isinstance(answer, Refused) else "no answer to a registration")
                self.observed, self._control = (answer.host, answer.port), channel
                pause_s, warned = _RETRY_S[0], False
                tried.set()
                await self._serve(channel)
            except _GONE as e:
                if not warned:
                    _log.warning("the rendezvous service %s: %s; it is tried again", self.service, str(e) or "no answer in time")
                warned, self._target = True, None
            finally:
                self._control = None
                if channel is not None:
                    channel.close()
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(LinkFailed(f"the connection to the rendezvous service {self.service} is lost"))
            tried.set()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_RETRY_S[1], 2 * pause_s)

    async def _serve(self, channel: MessageSocket) -> None:
        async def ping() -> None:
            while True:
                await asyncio.sleep(_PING_S)
                await channel.send(Ping())

        pinging = asyncio.get_running_loop().create_task(ping())
        try:
            while True:
                async with asyncio.timeout(2.5 * _PING_S):
                    message = await channel.receive()
                self._take(message)
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)

    def _take(self, message: object) -> None:
        match message:
            case Invited(number=0, purpose=purpose, ticket=ticket, timeout_s=timeout_s) if purpose in self._handlers:
                task = asyncio.get_running_loop().create_task(self._handlers[purpose](ticket, timeout_s))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Invited(number=number, ticket=ticket):
                if (future := self._waiting.get(number)) is not None and not future.done():
                    future.set_result(ticket)
            case Refused(number=number, why=why):
                if (future := self._waiting.get(number)) is not None and not future.done():
                    future.set_exception(LinkFailed(f"the rendezvous service {self.service}: {why}"))
            case Pong():
                pass
            case _:
                raise ProtocolError(f"{type(message).__name__} on a control connection")
