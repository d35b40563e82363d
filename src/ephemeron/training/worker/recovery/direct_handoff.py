"""Hand-off over a direct connection: the successor connects to its predecessor while that one trains, and gets the state in memory.

The successor is no member before it has the state: the others go on with its predecessor. Where it cannot connect, or does not
answer, the predecessor stores a checkpoint and a message in the store instead, as without direct connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from ephemeron.communication.direct.connecting import DIAL_TIMEOUT_S
from ephemeron.communication.direct.connection import Connection, LinkFailed
from ephemeron.communication.direct.endpoint import Endpoint, machine
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.communication.direct.transport import Transport
from ephemeron.training.worker.invocation import InvocationContext
from ephemeron.training.worker.trainers.private_copies import PrivateCopies, PrivateMark

_log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Seconds in which a successor confirms that it has the state; then it gets it through the store."""
AGAIN_S = 0.2


class _End:
    """One end of the connection between an attempt and the next one."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, PrivateMark, memoryview]] = []
        """Private states of other ranks that the predecessor has kept."""
        self.arrived: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        """The state at the successor; the confirmation at the predecessor."""
        self.awaited = Kind.STATE

    def allocate(self, connection: Connection, head: Head, nbytes: int) -> memoryview | None:
        """See `ConnectionHandler`."""
        return None

    def on_message(self, connection: Connection, head: Head, body: memoryview) -> None:
        """See `ConnectionHandler`."""
        if head.kind == Kind.PRIVATE:
            self.copies.append((head.part, PrivateMark.of(head.number, head.extra), body))
        elif head.kind == self.awaited and not self.arrived.done():
            self.arrived.set_result(body)

    def on_closed(self, connection: Connection, why: str) -> None:
        """See `ConnectionHandler`."""
        if not self.arrived.done():
            self.arrived.set_exception(LinkFailed(why))
            self.arrived.exception()  # there may be no caller that waits


class HandedOver(NamedTuple):
    """What a successor gets."""

    state: memoryview
    """A checkpoint as it is stored."""
    copies: list[tuple[int, PrivateMark, memoryview]]
    """Private states of other ranks: rank, mark and body."""


class Predecessor:
    """Predecessor's side.

    Args:
        mesh: of this attempt; successors connect to it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._successor: tuple[int, Connection] | None = None
        self._end = _End()
        mesh.on_successor = self._came

    def _came(self, connection: Connection, attempt: int) -> None:
        if self._successor is not None:
            self._successor[1].close()
        self._successor, self._end = (attempt, connection), _End()
        self._end.awaited = Kind.TAKEN
        connection.start(self._end)

    async def hand_over(self, attempt: int, data: bytes, copies: PrivateCopies) -> bool:
        """Sends a state; whether the successor has it.

        Args:
            attempt: of the successor.
            data: a checkpoint as it is stored.
            copies: of other ranks' private states.
        """
        if self._successor is None or self._successor[0] != attempt:
            return False
        connection, own = self._successor[1], self._mesh.rank
        for rank, mark, body in copies.all():
            connection.send(Head(Kind.PRIVATE, own, own, mark.iteration, rank, mark.pack(), self._mesh.attempt), [body])
        connection.send(Head(Kind.STATE, own, own, attempt=self._mesh.attempt), [data])
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.shield(self._end.arrived)
        except (LinkFailed, TimeoutError) as e:
            _log.info("the successor has not confirmed the state (%s); it gets it through the store", e)
            return False
        finally:
            connection.close()
        return True


@asynccontextmanager
async def from_predecessor(
    invocation: InvocationContext, *, token: str, transports: list[Transport]
) -> AsyncIterator[asyncio.Task[HandedOver]]:
    """Context in which this attempt is connected to its predecessor; gives a task that waits for the state.

    Args:
        invocation: of the successor.
        token: of the run.
        transports: ways to connect.
    """
    task = asyncio.get_running_loop().create_task(_received(invocation, token, transports))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for transport in transports:
            await transport.close()


async def _received(invocation: InvocationContext, token: str, transports: list[Transport]) -> HandedOver:
    rank, attempt = invocation.rank, invocation.attempt
    while True:
        connection = await _connection(invocation, token, transports)
        if connection is not None:
            end = _End()
            connection.start(end)
            connection.send(Head(Kind.SUCCESSOR, rank, rank, attempt=attempt))
            try:
                state = await end.arrived
                connection.send(Head(Kind.TAKEN, rank, rank, attempt=attempt))
                await connection.drained()
                return HandedOver(state, end.copies)
            except LinkFailed as e:
                _log.debug("not connected to the predecessor: %s", e)
            finally:
                connection.close()
        await asyncio.sleep(AGAIN_S)


async def _connection(invocation: InvocationContext, token: str, transports: list[Transport]) -> Connection | None:
    rank, before = invocation.rank, invocation.attempt - 1
    key = invocation.keys.peer(rank, before)
    data = await invocation.channel.fetch(key)
    if data is None:
        return None
    theirs = Endpoint.of(bytes(data), where=key)
    if theirs is None:
        return None
    own = Endpoint(rank=rank, attempt=invocation.attempt, machine=machine())
    for transport in transports:
        if transport.reaches(own, theirs):
            try:
                return await transport.dial(theirs.addresses[transport.name], token, timeout_s=DIAL_TIMEOUT_S)
            except LinkFailed as e:
                _log.debug("%s: %s", transport.name, e)
    return None
