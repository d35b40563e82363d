"""Better connections for members that are connected already: tried in the background, measured, and switched to without a loss.

    who has tried  UPGRADE          ──▶  over the new connection
    lower rank     MEASURE          ──▶  over both; MEASURED comes back
                   SWITCH           ──▶  over the new one, LAST over the old one: all that follows is sent over the new one
    higher rank    LAST             ──▶  over the old one, and the same
    both           RECEIVED              over the old one once LAST has arrived there; then the higher rank closes it

What arrives over the new connection before LAST has arrived over the old one is kept back until then: messages stay in order. If the
old connection is lost before both ends have received everything, that counts as a loss of the connection: `Mesh.on_connect` is called.

A pair that is relayed changes to whatever else can be had; another one where a large message is answered in half the time.
Pairs on one machine, and members with one transport, try nothing.

The order in which a member tries transports, learned from its own attempts. Pure.

A transport that has failed with a machine since it last succeeded with it comes last there; one that has failed with two machines and
succeeded with none comes last with machines that were not tried: behind a symmetric NAT no pair then waits for punching first.
The others are tried by the time that a connection takes and that large messages take over it, the relay after all of them: its
bytes are paid for. What was not measured counts as quick, so that it is tried.

Times differ by less than a factor of two: the given order holds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ephemeron.communication.direct.connection import Connection, ConnectionHandler, LinkFailed
from ephemeron.communication.direct.message import Head, Kind

if TYPE_CHECKING:
    from ephemeron.communication.direct.endpoint import Endpoint
    from ephemeron.communication.direct.mesh import Mesh
    from ephemeron.communication.direct.transport import Transport

_log = logging.getLogger(__name__)

FIRST_S, MOST_S = 5.0, 300.0
"""Pauses between attempts to find a better connection for a pair."""
MEASURED_BYTES = 256 << 10
MEASURE_TIMEOUT_S = 5.0
_ON_ONE_MACHINE = ("shared", "unix")
KINDS = frozenset((Kind.UPGRADE, Kind.MEASURE, Kind.MEASURED, Kind.SWITCH, Kind.LAST, Kind.RECEIVED))


class _New(ConnectionHandler):
    """A new connection of a pair, from its offer until messages are delivered from it as they come."""

    def __init__(self, upgrades: Upgrades, rank: int, old: Connection, connection: Connection) -> None:
        self.rank, self.old, self.connection = rank, old, connection
        self.switched_at: float | None = None
        """Loop time from which on this end sends over it; None: it does not."""
        self.all_received = self.all_arrived = False
        """Whether this end, and the other one, has everything that came over the old connection."""
        self.held: list[tuple[Head, memoryview]] = []
        self._upgrades = upgrades

    def allocate(self, connection: Connection, head: Head, nbytes: int) -> memoryview | None:
        return None

    def on_message(self, connection: Connection, head: Head, body: memoryview) -> None:
        if head.kind in KINDS:
            self._upgrades.take(connection, head)
        elif head.kind == Kind.PING:  # an answer that waits would count as silence
            connection.send(self._upgrades.head(Kind.PONG, self.rank))
        else:
            self.held.append((head, body))

    def on_closed(self, connection: Connection, why: str) -> None:
        self._upgrades.lost(self, why)


class Upgrades:
    """Attempts of one member, and what others offer it.

    Args:
        mesh: of the member.
        transports: by name.
        dials: its attempts so far.
    """

    def __init__(self, mesh: Mesh, transports: dict[str, Transport], dials: DialHistory) -> None:
        self._mesh, self._transports, self._dials = mesh, transports, dials
        self._offers: dict[Connection, _New] = {}
        """By new connection, before the switch."""
        self._switches: dict[Connection, _New] = {}
        """By old connection."""
        self._waiting: dict[tuple[Connection, int], asyncio.Future[None]] = {}
        self._number = 0

    def head(self, kind: int, rank: int, number: int = 0) -> Head:
        """Head of a message of this member."""
        return Head(kind, self._mesh.rank, rank, number, attempt=self._mesh.attempt)

    @property
    def old(self) -> list[Connection]:
        """Connections over which earlier messages still come or go."""
        return list(self._switches)

    def retired(self, connection: Connection) -> None:
        """A connection of the mesh has ended, or was replaced."""
        for new in [*self._offers.values(), *self._switches.values()]:
            if new.connection is connection:
                self._end(new)
            elif new.old is connection and new.switched_at is None:
                self._give_up(new)

    def close(self) -> None:
        """Closes connections that were offered; those of pairs are the mesh's."""
        for new in [*self._offers.values(), *self._switches.values()]:
            self._drop(new)
            new.connection.close()

    # -- attempts ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tries pair by pair, with growing pauses, as long as the member lives. The higher rank of a pair begins later."""
        loop, due = asyncio.get_running_loop(), dict[Connection, tuple[float, float]]()
        while True:
            await asyncio.sleep(FIRST_S)
            ranks = (rank for rank in range(self._mesh.ranks) if rank != self._mesh.rank)
            current = {connection: rank for rank in ranks if (connection := self._mesh.connection_to(rank))}
            for connection, rank in current.items():
                first_s = 0.0 if self._mesh.rank < rank else 3 * FIRST_S
                at, pause_s = due.setdefault(connection, (loop.time() + first_s, FIRST_S))
                if at <= loop.time():
                    await self._try(rank, connection)
                    due[connection] = loop.time() + pause_s, min(2 * pause_s, MOST_S)
            due = {connection: due[connection] for connection in current}

    async def _try(self, rank: int, old: Connection) -> None:
        endpoint = self._mesh.endpoint_of(rank)
        if endpoint is None or old.transport in _ON_ONE_MACHINE:
            return
        others = [
            name
            for name, transport in self._transports.items()
            if name not in (old.transport, LAST) and transport.reaches(self._mesh.endpoint, endpoint)
        ]
        if others and old.transport != LAST and not self._dials.has_carried(old.transport, endpoint.machine):
            self._dials.carried(old.transport, endpoint.machine, await self._measure(rank, old))
        for name in self._dials.better(endpoint.machine, than=old.transport):
            if self._mesh.connection_to(rank) is not old or old in self._switches:
                return
            if name in others:
                await self._try_transport(name, rank, old, endpoint)

    async def _try_transport(self, name: str, rank: int, old: Connection, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            connection = await self._mesh.dial(name, endpoint)
        except LinkFailed as e:
            _log.debug("rank %d finds no better connection to rank %d: %s", self._mesh.rank, rank, e)
            self._dials.failed(name, endpoint.machine)
            return
        self._dials.connected(name, endpoint.machine, loop.time() - began)
        new = self._offers[connection] = _New(self, rank, old, connection)
        connection.start(new)
        connection.send(self.head(Kind.UPGRADE, rank))
        if self._mesh.rank < rank:
            await self._decide(new)
        else:  # the other one decides; this one learns for its next attempts
            loop.call_later(4 * MEASURE_TIMEOUT_S, self._give_up_offer, new)
            self._dials.carried(name, endpoint.machine, await self._measure(rank, connection))

    async def _decide(self, new: _New) -> None:
        """Switches to a new connection, or closes it."""
        rank, old, connection = new.rank, new.old, new.connection
        before_s = None if old.transport == LAST else await self._measure(rank, old)
        seconds = await self._measure(rank, connection)
        if (endpoint := self._mesh.endpoint_of(rank)) is not None:
            self._dials.carried(connection.transport, endpoint.machine, seconds)
        better = seconds < MEASURE_TIMEOUT_S if before_s is None else FASTER * seconds <= before_s
        if connection not in self._offers or not better or self._mesh.connection_to(rank) is not old:
            return self._give_up_offer(new)
        _log.info("rank %d is connected to rank %d by %s in place of %s", self._mesh.rank, rank, connection.transport, old.transport)
        connection.send(self.head(Kind.SWITCH, rank))
        self._switch(new)

    def _give_up_offer(self, new: _New) -> None:
        if new.connection in self._offers:
            self._give_up(new)

    def _give_up(self, new: _New) -> None:
        self._drop(new)
        self._mesh.count(new.connection)
        new.connection.close()

    async def _measure(self, rank: int, connection: Connection) -> float:
        """Seconds until a large message is answered; at most `MEASURE_TIMEOUT_S`."""
        loop = asyncio.get_running_loop()
        self._number += 1
        key = (connection, self._number)
        answer = self._waiting[key] = loop.create_future()
        began = loop.time()
        connection.send(self.head(Kind.MEASURE, rank, self._number), [bytes(MEASURED_BYTES)])
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                await answer
        except TimeoutError:
            return MEASURE_TIMEOUT_S
        finally:
            del self._waiting[key]
        return loop.time() - began

    # -- both ends ---------------------------------------------------------------------------------------

    def offered(self, connection: Connection, head: Head) -> None:
        """Takes the first message of a connection that another member offers in place of the present one."""
        rank, decides = head.sender, self._mesh.rank < head.sender
        old, busy = self._mesh.connection_to(rank), any(new.rank == rank for new in self._offers.values())
        if old is None or head.attempt != self._mesh.attempt_of(rank) or old in self._switches or (decides and busy):
            connection.close()
            return
        new = self._offers[connection] = _New(self, rank, old, connection)
        connection.start(new)
        if decides:
            self._mesh.start(self._decide(new))

    def take(self, connection: Connection, head: Head) -> None:
        """Takes a message of one of the `KINDS`, over an old or a new connection."""
        if head.kind == Kind.MEASURE:
            connection.send(self.head(Kind.MEASURED, head.sender, head.number))
        elif head.kind == Kind.MEASURED:
            answer = self._waiting.get((connection, head.number))
            if answer is not None and not answer.done():
                answer.set_result(None)
        elif head.kind == Kind.SWITCH and connection in self._offers:
            new = self._offers[connection]
            if self._mesh.connection_to(new.rank) is new.old:
                self._switch(new)
            else:
                self._give_up(new)
        elif head.kind == Kind.LAST:
            for new in [*self._offers.values(), *self._switches.values()]:
                if new.old is connection:
                    new.all_received = True
                    self._go_on(new)
        elif head.kind == Kind.RECEIVED and connection in self._switches:
            new = self._switches[connection]
            new.all_arrived = True
            self._go_on(new)

    def _switch(self, new: _New) -> None:
        self._offers.pop(new.connection, None)
        self._switches[new.old] = new
        new.switched_at = asyncio.get_running_loop().time()
        new.old.send(self.head(Kind.LAST, new.rank))
        self._mesh.replace(new.rank, new.connection)
        self._go_on(new)

    def _go_on(self, new: _New) -> None:
        if new.switched_at is None or not new.all_received:
            return
        if new.held is not _RELEASED:
            new.old.send(self.head(Kind.RECEIVED, new.rank))
            self._release(new)
        if new.all_arrived and self._mesh.rank > new.rank:
            self._mesh.start(self._close_old(new))

    def _release(self, new: _New) -> None:
        held, new.held = new.held, _RELEASED
        new.connection.start(self._mesh)
        for head, body in held:
            self._mesh.on_message(new.connection, head, body)

    async def _close_old(self, new: _New) -> None:
        await new.old.drained()
        if self._switches.get(new.old) is new:
            self._end(new)

    def _end(self, new: _New) -> None:
        self._drop(new)
        self._mesh.count(new.old)
        new.old.close()

    # -- losses ------------------------------------------------------------------------------------------

    def lost(self, new: _New, why: str) -> None:
        """A new connection has ended."""
        if new.switched_at is None:
            self._give_up(new)
        else:
            self._mesh.on_closed(new.connection, why)

    def closed(self, connection: Connection, why: str) -> None:
        """A connection that is not the present one of any pair has ended; of no effect if it is no old one."""
        new = self._switches.get(connection)
        if new is None:
            return
        whole, released = new.all_received and new.all_arrived, new.held is _RELEASED
        self._end(new)
        if not whole:
            self._mesh.lost_messages(new.rank, why)
        if not released:
            self._release(new)

    def watch(self, silence_s: float, heard_since: float) -> None:
        """Gives up old connections from which nothing comes any more."""
        now = asyncio.get_running_loop().time()
        for old, new in list(self._switches.items()):
            silent_s = now - max(old.last_received, new.switched_at or 0.0, heard_since)
            if silent_s > silence_s:
                self.closed(old, f"silent for {silent_s:.1f} s")

    def _drop(self, new: _New) -> None:
        self._offers.pop(new.connection, None)
        if self._switches.get(new.old) is new:
            del self._switches[new.old]


_RELEASED: list[tuple[Head, memoryview]] = []
"""In place of messages that are kept back, once none is any more."""


# -- the order in which a member tries transports -----------------------------------------------------------------


LAST = "relay"
FASTER = 2.0
"""How many times as fast another transport must be for a change."""
_FAILED_WITH = 2
_FIRST_S = {"shared": 0.001, "unix": 0.001, "tcp": 0.004, "websocket": 0.1, "punched": 0.2}
"""Expected seconds to connect, which count as one measurement."""
_MESSAGES = 100
"""Large messages for which a connection is made, as far as its choice is concerned."""


class DialHistory:
    """Attempts of one member.

    Args:
        transports: names, the preferred first.
    """

    def __init__(self, transports: Sequence[str]) -> None:
        self._transports = list(transports)
        self._seconds: dict[str, list[float]] = {}
        self._failed: dict[str, dict[str, bool]] = {}
        """By transport and machine: whether the last attempt has failed."""
        self._message_s: dict[str, dict[str, float]] = {}
        """By transport and machine: seconds of the last large message."""

    def connected(self, transport: str, machine: str, seconds: float) -> None:
        """An attempt has succeeded within so many seconds."""
        self._seconds.setdefault(transport, []).append(seconds)
        self._failed.setdefault(transport, {})[machine] = False

    def failed(self, transport: str, machine: str) -> None:
        """An attempt has failed."""
        self._failed.setdefault(transport, {})[machine] = True

    def carried(self, transport: str, machine: str, seconds: float) -> None:
        """A large message was answered within so many seconds; see `upgrades.MEASURED_BYTES`."""
        self._message_s.setdefault(transport, {})[machine] = seconds

    def has_carried(self, transport: str, machine: str) -> bool:
        """Whether a large message was measured."""
        return machine in self._message_s.get(transport, {})

    def order(self, machine: str) -> list[str]:
        """Names of all transports, in the order in which to try them with a machine."""
        return sorted(self._by_time(machine), key=lambda name: self._fails(name, machine))

    def better(self, machine: str, *, than: str) -> list[str]:
        """Names of the transports worth a change from another one if they worked, the best first: `FASTER`, or any for the relay."""
        limit = math.inf if than == LAST else self._seconds_of(than, machine) / FASTER
        return [n for n in self._by_time(machine) if n not in (than, LAST) and self._seconds_of(n, machine) <= limit]

    def _by_time(self, machine: str) -> list[str]:
        def power_of_two(name: str) -> int:
            return math.floor(math.log2(max(1e-4, self._seconds_of(name, machine))))

        return sorted(self._transports, key=lambda name: (name == LAST, power_of_two(name)))

    def _fails(self, transport: str, machine: str) -> bool:
        outcomes = self._failed.get(transport, {})
        return outcomes.get(machine, len(outcomes) >= _FAILED_WITH and all(outcomes.values()))

    def _seconds_of(self, transport: str, machine: str) -> float:
        """Mean time to connect, and that of messages."""
        first = [_FIRST_S[transport]] if transport in _FIRST_S else [_FIRST_S["tcp"]]
        times = first + self._seconds.get(transport, [])
        measured = self._message_s.get(transport, {})
        message_s = measured.get(machine, sum(measured.values()) / max(1, len(measured)))
        return sum(times) / len(times) + _MESSAGES * message_s
