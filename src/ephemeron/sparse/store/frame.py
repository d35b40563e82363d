"""Frames between client and shard, and the asyncio protocol that receives them in place.

A frame is a head of 48 bytes and a body, padded to a multiple of 8. Multi-get and push have no JSON: their heads and two arrays
say everything. A connection begins with the proof of the shared token, as in `communication.rpc`; before it, no frame is read.
Frames are neither encrypted nor signed.

    head    magic "ES", kind u8, code u8 (indices + 16 * values), table u16, width u16, body u64, count u32, id u64,
            more u32, sequence u64, base i64; little-endian

`communication.rpc` costs a task, JSON and several system calls for each call; measured side by side in `benchmarks.sparse_store`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import struct
from collections.abc import Generator
from enum import IntEnum
from typing import Any, NamedTuple, cast

import numpy as np

from ephemeron.communication.rpc.auth import NONCE_BYTES, Offer, handshake
from ephemeron.errors import ProtocolError, TokenRefused

_HEAD = struct.Struct("<2sBBHHQIQIQq")
_MAGIC = b"ES"
HEAD_BYTES = _HEAD.size
MAX_BODY = 1 << 30
"""Bytes of one frame's body."""
_BUFFER_BYTES = 256 << 10
_PROOF_S = 10.0
_PADDING = bytes(8)


class Kind(IntEnum):
    """Kind of a frame."""

    OPEN = 1
    """First frame of a client: JSON with its name and attempt."""
    GET = 2
    PUSH = 3
    ASSIGN = 4
    CALL = 5
    """JSON of `count` bytes and data. With a sequence number, it changes something."""
    ACKNOWLEDGE = 6
    """Asks for an acknowledgement; with `more`, for a sign of life at once, which `more` marks in the answer, too."""
    VALUES = 16
    """Reply to GET. All replies carry the last sequence number of the client that is safe."""
    REPLY = 17
    """Reply to OPEN and CALL, in the form of CALL."""
    ERROR = 18
    ACKNOWLEDGED = 19


class Head(NamedTuple):
    """The fixed part of a frame."""

    kind: int
    code: int
    table: int
    width: int
    body: int
    """Bytes that follow."""
    length: int
    """Number of indices, or of bytes of JSON; `count` of the layout."""
    id: int
    more: int
    """GET: encoding that the reply's values shall have."""
    sequence: int
    base: int


def pack(
    kind: Kind,
    parts: tuple[Any, ...] = (),
    *,
    code: int = 0,
    table: int = 0,
    width: int = 0,
    count: int = 0,
    id: int = 0,
    more: int = 0,
    sequence: int = 0,
    base: int = 0,
) -> bytes:
    """A frame. Every part, an object with the buffer interface, begins at a multiple of 8."""
    body: list[Any] = []
    nbytes = 0
    for part in parts:
        size = memoryview(part).nbytes
        body.append(part)
        if -size % 8:
            body.append(_PADDING[: -size % 8])
        nbytes += size + -size % 8
    return b"".join([_HEAD.pack(_MAGIC, kind, code, table, width, nbytes, count, id, more, sequence, base), *body])


def pack_json(kind: Kind, value: Any, data: bytes = b"", *, id: int = 0, sequence: int = 0) -> bytes:
    """A frame of JSON and data; `base` is the data's length."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return pack(kind, (text, data), count=len(text), id=id, sequence=sequence, base=len(data))


def unpack_json(head: Head, body: memoryview) -> tuple[dict[str, Any], bytes]:
    """JSON and data of a frame.

    Raises:
        ProtocolError: the frame is damaged.
    """
    begin = head.length + -head.length % 8
    try:
        value = json.loads(bytes(body[: head.length]))
    except (ValueError, RecursionError) as e:
        raise ProtocolError("a frame's JSON is damaged") from e
    if not isinstance(value, dict) or not 0 <= head.base <= head.body - begin:
        raise ProtocolError("a frame's JSON or length is damaged")
    return value, bytes(body[begin : begin + head.base])


def prefilled(kind: Kind, nbytes: int, **fields: int) -> tuple[bytearray, memoryview]:
    """A frame whose body of so many bytes is still to be written, and that body."""
    padded = nbytes + -nbytes % 8
    frame = bytearray(HEAD_BYTES + padded)
    get = fields.get
    _HEAD.pack_into(
        frame,
        0,
        _MAGIC,
        kind,
        get("code", 0),
        get("table", 0),
        get("width", 0),
        padded,
        get("count", 0),
        get("id", 0),
        get("more", 0),
        get("sequence", 0),
        get("base", 0),
    )
    return frame, memoryview(frame)[HEAD_BYTES : HEAD_BYTES + nbytes]


def unpack(raw: bytes | memoryview, offset: int = 0) -> Head:
    """Reads a head.

    Raises:
        ProtocolError: not the head of a frame, or its body is too large.
    """
    magic, *fields = _HEAD.unpack_from(raw, offset)
    if magic != _MAGIC:
        raise ProtocolError(f"not a frame of a sparse store: it begins with {bytes(raw[offset : offset + 4])!r}")
    head = Head(*fields)
    if head.body > MAX_BODY or head.body % 8:
        raise ProtocolError(f"a frame has a body of {head.body} bytes; at most {MAX_BODY} are taken")
    return head


class FrameProtocol(asyncio.BufferedProtocol):
    """One end of a connection: proves the token, then hands out frames from the memory that they were received into.

    Subclasses implement `greeted`, `arrived`, `batch_over` and `lost`.

    Args:
        token: the shared secret.
        client: whether this end connected.
    """

    def __init__(self, token: str, *, client: bool) -> None:
        self.transport: asyncio.Transport | None = None
        self.writable = True
        """False while much is waiting to be sent."""
        self._memory = memoryview(np.empty(_BUFFER_BYTES, np.uint8).data)
        self._begin = self._end = 0
        self._steps: Generator[bytes | int, bytes, Offer] | None = handshake(
            token, client=client, offer=Offer(max_calls=1), nonce=secrets.token_bytes(NONCE_BYTES)
        )
        self._wanted = 0
        self._cause: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def greeted(self) -> None:
        """Both ends have proved the token."""

    def arrived(self, head: Head, body: memoryview) -> None:
        """Takes a frame; the body is valid until this returns.

        Raises:
            ProtocolError: the other end must not send this. The connection is closed.
        """

    def batch_over(self) -> None:
        """All frames that had arrived in full have been taken."""

    def lost(self, cause: Exception) -> None:
        """The connection has ended."""

    def send(self, frame: bytes | bytearray) -> None:
        """Sends, now as far as the socket takes it."""
        if self.transport is not None:
            self.transport.write(frame)

    def end(self, cause: Exception) -> None:
        """Closes the connection, for that reason."""
        if self._cause is None:
            self._cause = cause
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # asyncio does this for sockets that name their protocol, which accepted ones do not: replies would wait up to 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer = asyncio.get_running_loop().call_later(
            _PROOF_S, self.end, ConnectionResetError(f"no proof of the token within {_PROOF_S:g} s")
        )
        self._advance(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._begin == self._end:
            self._begin = self._end = 0
        free = len(self._memory) - self._end
        needed = self._needed()
        if free == 0 or (needed > len(self._memory) - self._begin):
            held = self._end - self._begin
            memory = self._memory
            if needed > len(memory):
                memory = memoryview(np.empty(needed, np.uint8).data)
            memory[:held] = bytes(self._memory[self._begin : self._end])
            self._memory, self._begin, self._end = memory, 0, held
        return self._memory[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        try:
            while self._steps is not None and self._wanted and self._end - self._begin >= self._wanted:
                step = bytes(self._memory[self._begin : self._begin + self._wanted])
                self._begin += self._wanted
                self._advance(step)
            if self._steps is None:
                self._take()
        except (ProtocolError, TokenRefused) as e:
            self.end(e)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, cause: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._steps is not None and self._wanted and self._cause is None:
            try:  # the other end hangs up on a wrong proof
                self._steps.throw(ConnectionResetError("the other end closed the connection"))
            except (ConnectionError, ProtocolError, TokenRefused) as e:
                self._cause = e
        self.transport = None
        self.lost(self._cause or cause or ConnectionResetError("the other end closed the connection"))

    def _needed(self) -> int:
        """Bytes of the frame that has begun to arrive."""
        if self._steps is not None or self._end - self._begin < HEAD_BYTES:
            return HEAD_BYTES
        return HEAD_BYTES + unpack(self._memory, self._begin).body

    def _take(self) -> None:
        while self._end - self._begin >= HEAD_BYTES:
            head = unpack(self._memory, self._begin)
            body = self._begin + HEAD_BYTES
            if self._end - body < head.body:
                break
            self._begin = body + head.body
            self.arrived(head, self._memory[body : self._begin])
            if self.transport is None or self.transport.is_closing():
                return
        self.batch_over()

    def _advance(self, got: bytes) -> None:
        """Continues the proof until it waits for bytes or is over."""
        assert self._steps is not None
        self._wanted = 0
        try:
            step = next(self._steps) if not got else self._steps.send(got)
            while isinstance(step, bytes):
                self.send(step)
                step = self._steps.send(b"")
            self._wanted = step
        except StopIteration:
            self._steps = None
            if self._timer is not None:
                self._timer.cancel()
            self.greeted()
