"""The rendezvous service: introduces members that cannot be dialled to each other, and relays where that does not suffice.

It knows a token of its own, which members prove, and neither the runs' tokens nor what members say to each other: on every
connection that it brings about, the members prove the run's token to each other. Everything that a client can make it hold
is limited (`ServiceLimits`). One process without state: connections that members have made stay when it ends, relayed ones
do not. The protocol is in `rendezvous_protocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from ephemeron.communication.direct.connection import tune
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
)
from ephemeron.communication.direct.tls_socket import over_tls
from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.communication.rpc.sockets import listen_tcp
from ephemeron.communication.unproved import IN_ALL, PER_ADDRESS, UnprovedConnections
from ephemeron.errors import ProtocolError, TokenRefused

_log = logging.getLogger(__name__)
_CHUNK = 256 << 10
_GONE = (OSError, ProtocolError, TokenRefused)  # TimeoutError is an OSError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """What clients can make the service hold or do."""

    runs: int = 256
    members: int = 1024
    """Of one run."""
    connections: int = 8192
    unproved: int = IN_ALL
    """Connections whose client has not proved the token yet; the oldest is closed for a further one."""
    unproved_per_address: int = PER_ADDRESS
    """Of these, from one address."""
    proof_s: float = 10.0
    """For the proof and the first message."""
    idle_s: float = 120.0
    """Without a message on a control connection, or a byte on a relayed one."""
    send_s: float = 5.0
    """For a member to take a message; one that does not is disconnected."""
    tickets: int = 2048
    """Of one run, that are not redeemed yet."""
    ticket_s: float = 30.0
    """For both members to redeem their tickets, and then to connect to each other."""
    invitations_s: float = 32.0
    """Invitations of one member in a second; faster ones wait."""
    burst: int = 256
    """Invitations at once."""
    relayed: int = 1024
    """Pairs that are relayed at once."""
    relayed_bytes: int = 1 << 40
    """Relayed for one run, while it has members; then its relayed connections are closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatistics:
    """What the service has done, and holds."""

    runs: int
    members: int
    meetings: int
    """Pairs that were told to connect, so far."""
    relayed_pairs: int
    """Now."""
    relayed_bytes: int
    """So far, in both directions."""


class Pace:
    """Rate limit: so many at once, and so many a second.

    Args:
        rate: a second.
        burst: at once.
        now: seconds.
    """

    def __init__(self, *, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._allowed, self._at = burst, now

    def take(self, now: float) -> float:
        """Seconds to wait before the next one."""
        self._allowed = min(self._burst, self._allowed + (now - self._at) * self._rate) - 1
        self._at = now
        return max(0.0, -self._allowed / self._rate)


@dataclass(slots=True, kw_only=True)
class _Member:
    name: str
    channel: MessageSocket
    pace: Pace


@dataclass(slots=True)
class _Group:
    members: dict[str, _Member] = field(default_factory=dict)
    tickets: int = 0
    relayed_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Arrival:
    channel: MessageSocket
    address: tuple[str, int]
    round_trip_s: float


class _Meeting:
    """Two tickets, and the connections on which they were redeemed."""

    def __init__(self, purpose: Purpose, group: _Group) -> None:
        self.purpose, self.group = purpose, group
        self.arrivals: list[_Arrival] = []
        self.over = asyncio.Event()


class RendezvousService:
    """Serves members of any number of runs that know its token.

    Args:
        token: the service's; must not be empty.
        limits: see `ServiceLimits`.
        tls: a server's context; None: connections are not encrypted.
    """

    def __init__(self, token: Token, *, limits: ServiceLimits | None = None, tls: ssl.SSLContext | None = None) -> None:
        if not token:
            raise ValueError("a rendezvous service without a token would serve anybody")
        self.limits = limits or ServiceLimits()
        self._token, self._tls = token_text(token), tls
        self._groups: dict[str, _Group] = {}
        self._tickets: dict[str, _Meeting] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[socket.socket] = []
        self._unproved = UnprovedConnections(in_all=self.limits.unproved, per_address=self.limits.unproved_per_address)
        self._connections = 0
        self._meetings = self._relayed_pairs = self._relayed_bytes = 0

    async def listen(self, host: str = "127.0.0.1", port: int = 0, *, allow_remote: bool = False) -> tuple[str, int]:
        """Listens and returns the address; port 0 takes a free one.

        Raises:
            JobError: the address can be reached from other machines, and `allow_remote` is not set.
            OSError: the port is taken.
        """
        sock = listen_tcp(host, port, allow_remote=allow_remote)
        sock.setblocking(False)
        self._listening.append(sock)
        self._start(self._accept(sock))
        bound_host, bound_port, *_ = sock.getsockname()
        return str(bound_host), int(bound_port)

    def statistics(self) -> ServiceStatistics:
        """Counts, for logs and tests."""
        return ServiceStatistics(
            runs=len(self._groups),
            members=sum(len(g.members) for g in self._groups.values()),
            meetings=self._meetings,
            relayed_pairs=self._relayed_pairs,
            relayed_bytes=self._relayed_bytes,
        )

    async def close(self) -> None:
        """Stops listening and closes all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._listening:
            sock.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- connections ----------------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError:  # out of file handles, or a client that left before it was accepted
                await asyncio.sleep(0.05)
                continue
            if self._connections >= self.limits.connections:
                sock.close()
                continue
            self._connections += 1
            self._start(self._serve(sock, (str(address[0]), int(address[1]))))

    async def _serve(self, sock: socket.socket, address: tuple[str, int]) -> None:
        tune(sock)
        channel = MessageSocket(sock)
        try:
            with self._unproved.admitted(sock):
                async with asyncio.timeout(self.limits.proof_s):
                    if self._tls is not None:
                        channel.sock = await over_tls(sock, self._tls, limit_s=self.limits.proof_s)
                    round_trip_s = await channel.prove(self._token, client=False)
                    first = await channel.receive()
            if isinstance(first, Register):
                await self._registered(channel, first, address)
            elif isinstance(first, Redeem):
                await self._redeemed(first.ticket, _Arrival(channel=channel, address=address, round_trip_s=round_trip_s))
        except _GONE as e:
            _log.debug("connection from %s:%d ends: %s", *address, str(e) or type(e).__name__)
        finally:
            self._connections -= 1
            channel.close()
            sock.close()

    # -- control --------------------------------------------------------------------------------------------

    async def _registered(self, channel: MessageSocket, wanted: Register, address: tuple[str, int]) -> None:
        limits = self.limits
        group = self._groups.get(wanted.group)
        if group is None and len(self._groups) >= limits.runs:
            return await self._tell(channel, Refused(number=0, why=f"{limits.runs} runs are registered already"))
        group = self._groups.setdefault(wanted.group, _Group())
        earlier = group.members.get(wanted.name)
        if earlier is None and len(group.members) >= limits.members:
            return await self._tell(channel, Refused(number=0, why=f"the run has {limits.members} members already"))
        pace = Pace(rate=limits.invitations_s, burst=limits.burst, now=asyncio.get_running_loop().time())
        member = _Member(name=wanted.name, channel=channel, pace=pace)
        group.members[wanted.name] = member
        if earlier is not None:
            with contextlib.suppress(OSError):
                earlier.channel.sock.shutdown(socket.SHUT_RDWR)
        try:
            await self._tell(channel, Registered(host=address[0], port=address[1]))
            while True:
                async with asyncio.timeout(limits.idle_s):
                    message = await channel.receive()
                match message:
                    case Ping():
                        await self._tell(channel, Pong())
                    case Invite():
                        await asyncio.sleep(member.pace.take(asyncio.get_running_loop().time()))
                        await self._invite(group, member, message)
                    case _:
                        raise ProtocolError(f"{type(message).__name__} on a control connection")
        finally:
            if group.members.get(wanted.name) is member:
                del group.members[wanted.name]
            if not group.members and self._groups.get(wanted.group) is group:
                del self._groups[wanted.group]

    async def _invite(self, group: _Group, member: _Member, wanted: Invite) -> None:
        other = group.members.get(wanted.name)
        why = ""
        if other is None or other is member:
            why = "no such member is registered"
        elif group.tickets + 2 > self.limits.tickets:
            why = f"{self.limits.tickets} tickets of the run are not redeemed yet"
        elif wanted.purpose == "relay" and self._relayed_pairs >= self.limits.relayed:
            why = f"{self.limits.relayed} pairs are relayed already"
        elif wanted.purpose == "relay" and group.relayed_bytes > self.limits.relayed_bytes:
            why = f"{self.limits.relayed_bytes} bytes of the run were relayed already"
        if other is None or why:
            return await self._tell(member.channel, Refused(number=wanted.number, why=why))
        meeting, tickets = _Meeting(wanted.purpose, group), (secrets.token_hex(16), secrets.token_hex(16))
        terms: dict[str, Any] = {"purpose": wanted.purpose, "timeout_s": wanted.timeout_s}
        self._tickets.update(dict.fromkeys(tickets, meeting))
        group.tickets += 2
        self._start(self._expire(meeting, tickets))
        try:
            await self._tell(other.channel, Invited(number=0, name=member.name, ticket=tickets[1], **terms))
        except OSError:
            return await self._tell(member.channel, Refused(number=wanted.number, why="the member does not answer"))
        await self._tell(member.channel, Invited(number=wanted.number, name=other.name, ticket=tickets[0], **terms))

    async def _tell(self, channel: MessageSocket, message: Any) -> None:
        try:
            async with asyncio.timeout(self.limits.send_s):
                await channel.send(message)
        except OSError:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)  # ends the task that reads from it
            raise

    # -- meetings -------------------------------------------------------------------------------------------

    async def _expire(self, meeting: _Meeting, tickets: tuple[str, str]) -> None:
        try:
            async with asyncio.timeout(self.limits.ticket_s):
                await meeting.over.wait()
        except TimeoutError:
            pass
        finally:
            for ticket in tickets:
                if self._tickets.pop(ticket, None) is not None:
                    meeting.group.tickets -= 1
            if len(meeting.arrivals) < 2:
                meeting.over.set()

    async def _redeemed(self, ticket: str, arrival: _Arrival) -> None:
        meeting = self._tickets.pop(ticket, None)
        if meeting is None:
            raise ProtocolError("a ticket that is not valid, or no longer")
        meeting.group.tickets -= 1
        meeting.arrivals.append(arrival)
        if len(meeting.arrivals) < 2:
            await meeting.over.wait()  # the task of the second arrival serves both
            return
        try:
            await self._meet(meeting, *meeting.arrivals)
        finally:
            meeting.over.set()

    async def _meet(self, meeting: _Meeting, one: _Arrival, two: _Arrival) -> None:
        self._meetings += 1
        farther_s = max(one.round_trip_s, two.round_trip_s)
        for arrival, other in ((one, two), (two, one)):
            wait_s = min(1.0, max(0.0, (farther_s - arrival.round_trip_s) / 2))
            host, port = other.address
            await self._tell(arrival.channel, Go(host=host, port=port, wait_s=wait_s if meeting.purpose == "punched" else 0.0))
        if meeting.purpose == "relay":
            return await self._relay(meeting.group, one.channel.sock, two.channel.sock)
        # The connections keep the translations of both addresses until the members have met, or given up.
        async with asyncio.timeout(self.limits.ticket_s):
            await asyncio.gather(*(_ended(arrival.channel.sock) for arrival in (one, two)))

    async def _relay(self, group: _Group, one: socket.socket, two: socket.socket) -> None:
        self._relayed_pairs += 1
        loop, moved = asyncio.get_running_loop(), [0]

        async def pass_on(source: socket.socket, target: socket.socket) -> None:
            buffer = memoryview(bytearray(_CHUNK))
            while nbytes := await loop.sock_recv_into(source, buffer):
                await loop.sock_sendall(target, buffer[:nbytes])
                moved[0] += nbytes
                group.relayed_bytes += nbytes
                self._relayed_bytes += nbytes
                if group.relayed_bytes > self.limits.relayed_bytes:
                    _log.warning("a run has used up the %d bytes that are relayed for it", self.limits.relayed_bytes)
                    return
                await asyncio.sleep(0)  # the two calls above do not give way while they find the sockets ready

        async def watch() -> None:
            seen = -1
            while seen != moved[0]:
                seen = moved[0]
                await asyncio.sleep(self.limits.idle_s)

        tasks = [loop.create_task(work) for work in (pass_on(one, two), pass_on(two, one), watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._relayed_pairs -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            _log.info("relayed %d bytes for a pair, %d for its run", moved[0], group.relayed_bytes)


async def _ended(sock: socket.socket) -> None:
    """Waits until the other end closes; what it sends instead is an error."""
    try:
        if await asyncio.get_running_loop().sock_recv(sock, 1):
            raise ProtocolError("a message on a connection for a meeting")
    except ConnectionError:
        pass
