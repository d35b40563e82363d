"""A shard behind a socket: each frame is answered in the same turn of the event loop, without a task, and in order.

Replies to what arrived together leave together. A client that does not take its replies is not read from. Where the shard keeps a
log, changes are acknowledged once they are in it (`Journal`); multi-gets do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.communication.rpc.sockets import listen_tcp
from ephemeron.communication.unproved import UnprovedConnections, origin
from ephemeron.config.typed import build, plain
from ephemeron.errors import ChannelError, JobError, ProtocolError
from ephemeron.sparse.store import codec
from ephemeron.sparse.store.frame import HEAD_BYTES, FrameProtocol, Head, Kind, pack, pack_json, prefilled, unpack_json
from ephemeron.sparse.store.messages import ErrorReply, NameRequest, OpenReply, OpenRequest, ShardStatus
from ephemeron.sparse.store.state import ClientReplaced, ClientState, ShardState

_log = logging.getLogger(__name__)
_SMALLER = "use more shards, on more machines, or a smaller table"


class Recorder(Protocol):
    """What makes changes outlive the process, and knows whether another process has taken over."""

    @property
    def loses_none(self) -> bool:
        """Whether changes are safe before they are acknowledged."""

    @property
    def confirmed(self) -> bool:
        """Whether this process was the shard's a moment ago. If not, nothing is answered until `confirm`."""

    async def confirm(self) -> None:
        """Returns once this process is known to be the shard's."""

    def record(self, client: ClientState, frame: bytes) -> None:
        """Takes a change that has just been made. When more is safe, `ShardServer.acknowledge` is called."""

    @property
    def recorded(self) -> int:
        """Number of changes taken."""

    @property
    def safe(self) -> int:
        """How many of these a restart does not lose."""

    async def snapshot(self) -> None:
        """Stores the whole state now."""

    @property
    def statistics(self) -> tuple[int, int]:
        """Snapshots and objects of the log that this process has written."""


def bind(host: str, port: int, *, allow_remote: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one. Clients that connect wait until it is served.

    Raises:
        JobError: the port is occupied, or other machines could reach it and `allow_remote` is not set.
    """
    try:
        return listen_tcp(host, port, allow_remote=allow_remote)
    except OSError as e:
        raise JobError(
            f"cannot listen at {host}:{port}: {(e.strerror or str(e)).partition(' (while')[0]}", remedy="give another address"
        ) from None


class ShardServer:
    """Serves one shard.

    Args:
        state: of the shard.
        token: what clients must know; not empty.
        attempt: of the process that serves it.
        journal: None: changes are lost with the process.
    """

    def __init__(self, state: ShardState, *, token: Token, attempt: int = 0, journal: Recorder | None = None) -> None:
        if not token:
            raise ValueError("a store without a token would answer anybody")
        self.state, self.token, self.attempt, self.journal = state, token_text(token), attempt, journal
        self.connections: set[_Connection] = set()
        """Of clients that have proved the token."""
        self.sockets: set[_Connection] = set()
        """All."""
        self.unproved = UnprovedConnections()
        """Those whose client has not proved the token yet."""
        self.on_stop: Callable[[], None] = lambda: None
        """Called when a client ends the shard."""
        self.stopped = False
        self.address = ("", 0)
        self._server: asyncio.Server | None = None

    async def listen(self, host: str = "127.0.0.1", port: int = 0, *, allow_remote: bool = False) -> tuple[str, int]:
        """Listens and returns the address; see `bind`."""
        sock = bind(host, port, allow_remote=allow_remote)
        await self.serve(sock)
        return self.address

    async def serve(self, sock: socket.socket) -> None:
        """Answers the clients of a listening socket, also those that have connected already."""
        host, port, *_ = sock.getsockname()
        self.address = (str(host), int(port))
        try:
            self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), sock=sock)
        except BaseException:
            sock.close()
            raise

    def stop_answering(self) -> None:
        """Takes no more requests. Acknowledgements of earlier ones may follow."""
        self.stopped = True
        if self._server is not None:
            self._server.close()
        for connection in self.sockets:
            connection.pause_reading()

    async def close(self) -> None:
        """Stops listening and closes all connections."""
        self.stop_answering()
        for connection in list(self.sockets):
            connection.end(ConnectionResetError("this shard was closed"))
        await asyncio.sleep(0)

    def acknowledge(self) -> None:
        """Tells clients that asked what is safe now; the journal calls it when more is."""
        for connection in self.connections:
            connection.acknowledge()

    def admitted(self, newcomer: _Connection) -> None:
        """Closes connections of the same client's earlier attempts."""
        for other in list(self.connections):
            if other is not newcomer and other.client is newcomer.client and other.attempt < newcomer.attempt:
                other.replaced()

    def status(self) -> ShardStatus:
        """State and counts."""
        state = self.state
        snapshots, log_objects = self.journal.statistics if self.journal is not None else (0, 0)
        return ShardStatus(
            shard=state.shard,
            attempt=self.attempt,
            tables={t.spec.name: t.spec for t in state.tables},
            keys=len(state.keys),
            clients=len(state.clients),
            connections=len(self.connections),
            gets=state.gets,
            pushes=state.pushes,
            repeated=state.repeated,
            nbytes=sum(t.nbytes for t in state.tables),
            snapshots=snapshots,
            log_objects=log_objects,
            cpu_s=time.process_time(),
        )


class _Connection(FrameProtocol):
    """One client's connection."""

    def __init__(self, server: ShardServer) -> None:
        super().__init__(server.token, client=False)
        self._server = server
        self._state = server.state
        self._out: list[bytes | bytearray] = []
        self._asked = False
        self._held: list[tuple[int, bytes]] = []
        """Replies to changes, until as many changes of the journal are safe."""
        self._told = 0
        self._confirming: asyncio.Task[None] | None = None
        self.client: ClientState | None = None
        self.attempt = 0
        self._settle: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.sockets.add(self)
        stranger = ConnectionResetError("too many connections without a proof of the token")
        self._settle = self._server.unproved.admit(origin(transport.get_extra_info("socket")), lambda: self.end(stranger))
        super().connection_made(transport)
        if self._server.stopped:  # accepted in its last moment
            self.end(ConnectionResetError("this shard was closed"))

    def greeted(self) -> None:
        self._settle()
        self._server.connections.add(self)

    def lost(self, cause: Exception) -> None:
        self._settle()
        self._server.sockets.discard(self)
        self._server.connections.discard(self)
        if self._confirming is not None:
            self._confirming.cancel()
        _log.debug("a connection ends: %s", cause)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume_reading()

    def pause_reading(self) -> None:
        """Takes nothing more from the socket for now."""
        if self.transport is not None:
            self.transport.pause_reading()

    def buffer_updated(self, nbytes: int) -> None:
        journal = self._server.journal
        if self._server.stopped:
            return  # the successor is sent it again
        if journal is None or journal.confirmed:
            super().buffer_updated(nbytes)
        else:
            self._end += nbytes
            self.pause_reading()
            self._confirming = asyncio.get_running_loop().create_task(self._confirm(journal))

    async def _confirm(self, journal: Recorder) -> None:
        await journal.confirm()
        if self.transport is not None and not self._server.stopped:
            self._resume_reading()
            super().buffer_updated(0)

    def _resume_reading(self) -> None:
        if self.transport is not None and self.writable and not self._server.stopped:
            self.transport.resume_reading()

    def arrived(self, head: Head, body: memoryview) -> None:
        try:
            if head.kind == Kind.OPEN:
                self._open(head, body)
                return
            if self.client is None:
                raise ProtocolError("the first frame of a client must be OPEN")
            if self.attempt < self.client.attempt:
                self.replaced()
            elif head.kind == Kind.GET:
                self._get(head, body)
            elif head.sequence:
                self._change(self.client, head, body)
            elif head.kind == Kind.CALL:
                self._call(head, body)
            elif head.kind == Kind.ACKNOWLEDGE and head.more:
                self._out.append(pack(Kind.ACKNOWLEDGED, sequence=self.client.durable, more=1))
            elif head.kind == Kind.ACKNOWLEDGE:
                self._asked = True
            else:
                raise ProtocolError(f"a shard is not sent frames of kind {head.kind}")
        except JobError as e:
            self._refuse(head, ErrorReply(kind="user", text=e.problem, remedy=e.remedy))
        except ClientReplaced as e:
            self._refuse(head, ErrorReply(kind="replaced", text=str(e)))
        except ProtocolError:
            raise
        except MemoryError as e:
            said = str(e) or "it does not fit into memory"
            _log.warning("a request is refused: %s", said)
            self._refuse(head, ErrorReply(kind="user", text=f"the shard refuses this: {said}", remedy=_SMALLER))
        except Exception as e:  # noqa: BLE001 - whatever it is, it is sent to the client, and others go on
            _log.exception("a request failed")
            self._refuse(head, ErrorReply(kind=type(e).__name__, text=str(e)))

    def batch_over(self) -> None:
        self.acknowledge()

    def acknowledge(self) -> None:
        """Sends replies whose changes are safe, and an acknowledgement where one was asked for."""
        client, journal = self.client, self._server.journal
        if client is not None:
            if journal is None:
                client.durable = client.sequence
            while self._held and (journal is None or self._held[0][0] <= journal.safe):
                self._out.append(self._held.pop(0)[1])
            if self._asked and (client.durable > self._told or client.durable == client.sequence):
                self._out.append(pack(Kind.ACKNOWLEDGED, sequence=client.durable))
                self._asked, self._told = client.durable < client.sequence, client.durable
        if self._out:
            self.send(self._out[0] if len(self._out) == 1 else b"".join(self._out))
            self._out.clear()

    def replaced(self) -> None:
        """Tells the client that another one has its name, and ends the connection."""
        assert self.client is not None
        text = f"client {self.client.name!r}, attempt {self.attempt}, has been replaced by attempt {self.client.attempt}"
        self.send(pack_json(Kind.ERROR, plain(ErrorReply(kind="replaced", text=text))))
        if self.transport is not None:
            self.transport.close()

    def _open(self, head: Head, body: memoryview) -> None:
        request = build(OpenRequest, unpack_json(head, body)[0], where="client")
        self.client = self._state.open(request)
        self.attempt = request.attempt
        self._record(self.client, head, body)
        self._server.admitted(self)
        if self._server.journal is None:
            self.client.durable = self.client.sequence
        reply = OpenReply(
            sequence=self.client.durable,
            calls=self.client.calls,
            shard=self._state.shard,
            attempt=self._server.attempt,
            loses_none=self._server.journal is not None and self._server.journal.loses_none,
        )
        self._out.append(pack_json(Kind.REPLY, plain(reply), id=head.id, sequence=self.client.durable))

    def _get(self, head: Head, body: memoryview) -> None:
        assert self.client is not None
        table, rows = self._state.values(head, body)
        if self._server.journal is None:
            self.client.durable = self.client.sequence
        n = head.length * head.width
        fields = {"id": head.id, "count": head.length, "width": head.width, "sequence": self.client.durable}
        if head.more == codec.ValueCode.FLOAT32:
            frame, out = prefilled(Kind.VALUES, 4 * n, **fields)
            table.take(rows, np.frombuffer(out, np.float32))
            self._out.append(frame)
        elif head.more == codec.ValueCode.FLOAT16:
            data = codec.encode_values(codec.ValueCode.FLOAT16, table.take(rows))
            self._out.append(pack(Kind.VALUES, (data,), code=head.more << 4, **fields))
        else:
            raise ProtocolError(f"values cannot be sent with encoding {head.more}")

    def _change(self, client: ClientState, head: Head, body: memoryview) -> None:
        try:
            reply, changed = self._state.change(client, head, body)
        except JobError:
            self._record(client, head, body)  # its number is used
            raise
        if changed:
            self._record(client, head, body)
        if head.kind == Kind.CALL:
            journal = self._server.journal
            recorded = 0 if journal is None else journal.recorded
            self._held.append((recorded, pack_json(Kind.REPLY, reply, id=head.id, sequence=client.durable)))

    def _record(self, client: ClientState, head: Head, body: memoryview) -> None:
        if self._server.journal is not None:
            # The frame as it lies in memory: head and body are neighbours.
            self._server.journal.record(client, bytes(self._memory[self._begin - HEAD_BYTES - head.body : self._begin]))

    def _call(self, head: Head, body: memoryview) -> None:
        request, _ = unpack_json(head, body)
        method, params = request.get("m"), request.get("p", {})
        data = b""
        reply: Any = {}
        match method:
            case "find":
                reply = plain(self._state.find(build(NameRequest, params, where="table").name))
            case "get":
                found = self._state.keys.get(build(NameRequest, params, where="key").name)
                data, reply = found or b"", {"found": found is not None}
            case "status":
                reply = plain(self._server.status())
            case "leave":
                if self.client is not None:
                    self._state.leave(self.client)
            case "stop":
                self._server.on_stop()
            case "snapshot":
                asyncio.get_running_loop().create_task(self._snapshot(head))
                return
            case _:
                raise ProtocolError(f"a sparse store has no method {method!r}")
        self._reply(head, reply, data)

    async def _snapshot(self, head: Head) -> None:
        journal = self._server.journal
        if journal is None:
            error = ErrorReply(kind="user", text="this store keeps no snapshots", remedy="start it with a place for them")
            self._refuse(head, error)
        else:
            try:
                await journal.snapshot()
                self._reply(head, {}, b"")
            except ChannelError as e:
                self._refuse(head, ErrorReply(kind=type(e).__name__, text=str(e)))
        self.acknowledge()

    def _reply(self, head: Head, reply: Any, data: bytes) -> None:
        self._out.append(pack_json(Kind.REPLY, reply, data, id=head.id))

    def _refuse(self, head: Head, error: ErrorReply) -> None:
        self._out.append(pack_json(Kind.ERROR, plain(error), id=head.id))
