"""Connection of a client to one shard, made anew when it is lost: what the shard has not acknowledged is sent again, in order.

The client keeps each frame until it is answered. After a reconnect, the shard says which of the client's changes it has, and ignores
what it sees twice; so whatever is lost in between, a change is made once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.config.typed import build, plain
from ephemeron.errors import ChannelError, JobError, ProtocolError, RemoteError, ServiceRefused, ServiceUnreachable, TokenRefused
from ephemeron.sparse.store.frame import HEAD_BYTES, FrameProtocol, Head, Kind, pack, pack_json, unpack_json
from ephemeron.sparse.store.messages import ErrorReply, OpenReply, OpenRequest

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.5
"""Between attempts to connect."""
_REFUSALS = 1
"""Refusals of the token that a first connection survives."""


class Sink(Protocol):
    """What waits for a reply."""

    def take(self, head: Head, body: memoryview) -> None:
        """Takes the reply; the body is valid until this returns."""

    def fail(self, error: Exception) -> None:
        """No reply will come."""


class ShardLink:
    """Requests to one shard. Not thread-safe.

    Args:
        where: finds the shard's address; asked for each connection.
        token: the shared secret.
        opening: the client's name, and the shard it means.
        connect_s: seconds without a connection after which all that waits fails.
        answer_s: seconds without any answer after which the shard counts as frozen, and the connection is made anew.
    """

    def __init__(
        self, where: Callable[[], Awaitable[tuple[str, int]]], *, token: str, opening: OpenRequest, connect_s: float, answer_s: float
    ) -> None:
        self.opening = opening
        self.sequence = 0
        """Last sequence number of a push that the shard has."""
        self.calls = 0
        """Last number of another change that the shard had when it was connected to."""
        self.waiting_bytes = 0
        """Of changes that are not acknowledged."""
        self.reconnects = 0
        self.bytes_up = self.bytes_down = 0
        """Sent and received, frames and repetitions included."""
        self.failure: Exception | None = None
        self._where, self._token = where, token
        self._connect_s, self._answer_s = connect_s, answer_s
        self._changes: deque[tuple[int, int, bytes]] = deque()
        """Sequence number, id, frame."""
        self._requests: dict[int, tuple[bytes, Sink]] = {}
        self._drained: list[asyncio.Future[None]] = []
        self._wire: _Wire | None = None
        self._ids = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = self._opened = False
        self._loses_none = False
        """What the shard acknowledges, it does not lose."""
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._asked = False

    @property
    def unacknowledged(self) -> bool:
        """Whether changes may be lost with this link."""
        return bool(self._changes)

    async def open(self) -> None:
        """Connects.

        Raises:
            TokenRefused: the store has another token.
            ServiceRefused: another client has taken over this one's name.
            ServiceUnreachable: no answer in time.
            JobError: this is another shard.
        """
        self._task = asyncio.get_running_loop().create_task(self._connect())
        await asyncio.wait({self._task})
        if self.failure is not None:
            raise self.failure

    def next_id(self) -> int:
        """Number of a new frame."""
        self._ids += 1
        return self._ids

    def request(self, id: int, frame: bytes, sink: Sink) -> None:
        """Sends a frame whose reply goes to the sink."""
        if self.failure is not None:
            sink.fail(self.failure)
            return
        if not self._requests:
            self._watch()
        self._requests[id] = (frame, sink)
        self._send(frame)

    def change(self, sequence: int, id: int, frame: bytes) -> None:
        """Sends a change, and again until it is acknowledged; not at all, if the shard has its number.

        Raises:
            ServiceUnreachable, ServiceRefused: the connection is lost for good.
        """
        if self.failure is not None:
            raise self.failure
        if sequence <= self.sequence:  # acknowledgements, which name the last number, would never cover it again
            return
        self._changes.append((sequence, id, frame))
        self.waiting_bytes += len(frame)
        self._send(frame)
        self._watch()

    def ask(self) -> None:
        """Asks for an acknowledgement of all changes."""
        if self._changes and not self._asked:
            self._asked = True
            self._send(pack(Kind.ACKNOWLEDGE))
            self._watch()

    def drained(self) -> asyncio.Future[None]:
        """Done when all changes are acknowledged."""
        future = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            future.set_exception(self.failure)
        elif not self._changes:
            future.set_result(None)
        else:
            self._drained.append(future)
            self.ask()
        return future

    async def close(self) -> None:
        """Ends the connection; what waits fails."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(ServiceUnreachable("this client of the sparse store was closed"))

    def arrived(self, head: Head, body: memoryview) -> None:
        """Takes a frame of the shard."""
        self._heard = asyncio.get_running_loop().time()
        self.bytes_down += HEAD_BYTES + head.body
        if head.sequence > self.sequence:
            self._acknowledged(head.sequence)
        if head.kind == Kind.ACKNOWLEDGED:
            if not head.more:
                self._asked = False
                if self._drained:
                    self.ask()
        elif head.kind == Kind.ERROR:
            self._refused(head, build(ErrorReply, unpack_json(head, body)[0], where="error of a shard"))
        elif head.kind in (Kind.VALUES, Kind.REPLY):
            waiting = self._requests.pop(head.id, None)
            if waiting is not None:
                waiting[1].take(head, body)
        else:
            raise ProtocolError(f"a client is not sent frames of kind {head.kind}")

    def lost(self, wire: _Wire, cause: Exception) -> None:
        """Connects again, unless this was meant."""
        if self._wire is not wire:
            return
        self._wire = None
        if self._closed or self.failure is not None:
            return
        self.reconnects += 1
        _log.info("shard %d: connection lost (%s); connecting again", self.opening.shard, cause)
        self._task = asyncio.get_running_loop().create_task(self._connect())

    def _send(self, frame: bytes) -> None:
        if self._wire is not None:
            self.bytes_up += len(frame)
            self._wire.send(frame)

    def _acknowledged(self, sequence: int) -> None:
        self.sequence = sequence
        changes = self._changes
        while changes and changes[0][0] <= sequence:
            self.waiting_bytes -= len(changes.popleft()[2])
        if not changes:
            self._settle()

    def _settle(self) -> None:
        for future in self._drained:
            if not future.done():
                future.set_result(None)
        self._drained.clear()

    def _refused(self, head: Head, reply: ErrorReply) -> None:
        error: Exception
        if reply.kind == "user":
            error = JobError(reply.text, remedy=reply.remedy)
        elif reply.kind == "replaced":
            self._fail(ServiceRefused(reply.text))
            return
        else:
            error = RemoteError(reply.kind, reply.text)
        waiting = self._requests.pop(head.id, None)
        for index, (_, id, frame) in enumerate(self._changes):
            if id == head.id:  # a refused change is never repeated
                del self._changes[index]
                self.waiting_bytes -= len(frame)
                break
        if waiting is not None:
            waiting[1].fail(error)
        else:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends everything that waits; later requests fail likewise."""
        self.failure = self.failure or error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.end(ConnectionAbortedError(str(error)))
        requests, self._requests = self._requests, {}
        for _, sink in requests.values():
            sink.fail(self.failure)
        for future in self._drained:
            if not future.done():
                future.set_exception(self.failure)
        self._drained.clear()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        deadline, pause, problem = loop.time() + self._connect_s, _FIRST_PAUSE_S, "no address"
        place, refusals = "", 0
        while True:
            wire: _Wire | None = None
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + self._answer_s)):  # a frozen shard is left
                    host, port = await self._where()
                    place = f" at {host}:{port}"
                    _, wire = await loop.create_connection(lambda: _Wire(self, self._token), host, port)
                    reply = await wire.opened
            except (ServiceRefused, JobError) as e:
                self._fail(e)
                return
            except (OSError, ProtocolError, TokenRefused, ChannelError) as e:  # a timeout is an OSError
                # A process that is killed in the middle of the proof looks like one that refuses the token.
                refusals += isinstance(e, TokenRefused)
                if refusals > _REFUSALS and not self._opened:
                    self._fail(e)
                    return
                if wire is not None:
                    wire.end(ConnectionAbortedError("no answer in time"))
                problem = str(e) or problem
                if loop.time() + pause >= deadline:
                    text = f"shard {self.opening.shard} of the sparse store{place} does not answer ({problem})"
                    self._fail(ServiceUnreachable(text))
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
                continue
            self._resume(wire, reply)
            return

    def _resume(self, wire: _Wire, reply: OpenReply) -> None:
        """Sends again, in their order, what was not answered."""
        if self._loses_none and reply.loses_none and reply.sequence < self.sequence:
            text = (
                f"shard {self.opening.shard} of the sparse store has lost acknowledged changes: it has {reply.sequence} of {self.sequence}"
            )
            wire.end(ConnectionAbortedError(text))
            return self._fail(ServiceUnreachable(text))
        self._loses_none = reply.loses_none
        self._wire, self._asked, self._opened = wire, False, True
        self.calls = reply.calls
        self._acknowledged(max(self.sequence, reply.sequence))
        frames = [(id, frame) for _, id, frame in self._changes]
        frames += [(id, frame) for id, (frame, _) in self._requests.items() if all(id != i for i, _ in frames)]
        for _, frame in sorted(frames):
            self._send(frame)
        if self._drained:
            self.ask()
        self._heard = asyncio.get_running_loop().time()

    def _watch(self) -> None:
        if self._timer is None:
            self._heard = asyncio.get_running_loop().time()
            self._look_later()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + self._answer_s / 4, self._check)

    def _check(self) -> None:
        """Finds a frozen shard: it has something to answer, and does not. While this process did not run, nothing was heard."""
        assert self._timer is not None
        late_s, self._timer = asyncio.get_running_loop().time() - self._timer.when(), None
        if self.failure is not None or not (self._requests or self._changes):
            return
        self._heard += late_s
        if self._wire is not None:
            if asyncio.get_running_loop().time() - self._heard > self._answer_s:
                self._wire.end(ConnectionAbortedError(f"no answer for {self._answer_s:g} s"))
            else:  # what it has to answer may wait for its journal
                self._send(pack(Kind.ACKNOWLEDGE, more=1))
                self.ask()
        self._look_later()


class _Wire(FrameProtocol):
    """One connection of a link."""

    def __init__(self, link: ShardLink, token: str) -> None:
        super().__init__(token, client=True)
        self._link = link
        self.opened: asyncio.Future[OpenReply] = asyncio.get_running_loop().create_future()

    def greeted(self) -> None:
        self.send(pack_json(Kind.OPEN, plain(self._link.opening)))

    def arrived(self, head: Head, body: memoryview) -> None:
        if self.opened.done():
            self._link.arrived(head, body)
        elif head.kind == Kind.REPLY:
            self.opened.set_result(build(OpenReply, unpack_json(head, body)[0], where="reply of a shard"))
        elif head.kind == Kind.ERROR:
            reply = build(ErrorReply, unpack_json(head, body)[0], where="error of a shard")
            refused = JobError(reply.text, remedy=reply.remedy) if reply.kind == "user" else ServiceRefused(reply.text)
            self.opened.set_exception(refused)
        else:
            raise ProtocolError("a shard answers OPEN first")

    def lost(self, cause: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(cause)
        self._link.lost(self, cause)


class Reply:
    """A sink for one reply to a CALL."""

    def __init__(self) -> None:
        self.future: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()

    def take(self, head: Head, body: memoryview) -> None:
        if not self.future.done():
            self.future.set_result(unpack_json(head, body))

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


# -- how a client finds the shards of a store and connects to all of them -----------------------------------------


Locate = Callable[[int], Awaitable[tuple[str, int]]]
"""Finds the address of a shard by its index."""


async def open_links(
    addresses: Sequence[str] | Locate, token: Token, *, shards: int | None, client: str, attempt: int, connect_s: float, answer_s: float
) -> list[ShardLink]:
    """Connections to all shards; see `SparseStore.connect`."""
    token = token_text(token)
    if callable(addresses):
        locate, count = addresses, shards or 1
    else:
        places = [parse_address(address) for address in addresses]
        locate, count = partial(_listed, places), len(places)
    if not count:
        raise JobError("a sparse store has no addresses", remedy="give HOST:PORT of each shard")
    name = client or f"anonymous-{secrets.token_hex(8)}"
    links = [
        ShardLink(
            partial(locate, shard),
            token=token,
            connect_s=connect_s,
            answer_s=answer_s,
            opening=OpenRequest(client=name, attempt=attempt, shard=shard, shards=count),
        )
        for shard in range(count)
    ]
    try:
        await asyncio.gather(*(link.open() for link in links))
    except BaseException:
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)
        raise
    return links


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        JobError: the text has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise JobError(f"address {address!r} of a sparse store", remedy="write HOST:PORT, such as 127.0.0.1:7090")
    return host.strip("[]"), int(port)


async def _listed(places: Sequence[tuple[str, int]], shard: int) -> tuple[str, int]:
    return places[shard]
