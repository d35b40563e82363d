"""Frames on a socket, and the proof of the token.

    magic   4 bytes   b"EPH1"
    kind    u8        request, reply, error, cancel
    id      u64       chosen by the caller, repeated in the answer
    header  u32       length of the JSON that follows
    body    u64       length of all buffers together

The JSON header's `"b"` lists the length of each buffer. Sockets are used directly (`loop.sock_sendall`,
`loop.sock_recv_into`) and not through asyncio's streams, because streams copy every byte twice on the way in
and, before Python 3.12, join or copy on the way out.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ephemeron.rpc.errors import ProtocolError, TokenRefused

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_FRAME = 2 << 30
"""Bytes of all buffers of one frame, unless told otherwise."""
MAX_HEADER = 1 << 20
"""Bytes of one frame's JSON."""

_MAGIC = b"EPH1"
_HEAD = struct.Struct("!4sBQIQ")
_HELLO = b"ephemeron-rpc-1\n"
_NONCE = 32
_SMALL = 64 << 10


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    CANCEL = 4


_KINDS = frozenset(int(k) for k in Kind)


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    id: int
    header: dict[str, Any]
    buffers: list[memoryview]


class Connection:
    """A connected, non-blocking socket that speaks frames. Any number may send; one task receives.

    Args:
        sock: connected; owned from now on.
        max_frame: largest sum of buffers accepted, bytes.
    """

    def __init__(self, sock: socket.socket, *, max_frame: int = MAX_FRAME) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self._max_frame = max_frame
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    async def send(self, kind: Kind, id: int, header: dict[str, Any], buffers: Sequence[Buffer] = ()) -> None:
        """Sends one frame. Cancelling it half-way ruins the connection: shield it, or close.

        Raises:
            ConnectionError: the other end is gone.
            ProtocolError: the frame exceeds a limit; nothing was sent.
        """
        views = [flat(b) for b in buffers]
        sizes = [v.nbytes for v in views]
        text = json.dumps({**header, "b": sizes}, separators=(",", ":")).encode()
        if len(text) > MAX_HEADER or sum(sizes) > self._max_frame:
            raise ProtocolError(f"a frame of {sum(sizes)} bytes (header {len(text)}) exceeds {self._max_frame}")
        head = _HEAD.pack(_MAGIC, kind, id, len(text), sum(sizes)) + text
        async with self._sending:
            if len(head) + sum(sizes) <= _SMALL:
                await self._write(b"".join([head, *views]))
                return
            await self._write(head)
            for view in views:
                await self._write(view)

    async def receive(self) -> Frame:
        """The next frame.

        Raises:
            ConnectionError: the other end is gone.
            ProtocolError: these bytes are no frame of ours.
        """
        magic, kind, id, n_header, n_body = _HEAD.unpack(await self._read(_HEAD.size))
        if magic != _MAGIC or kind not in _KINDS or n_header > MAX_HEADER or n_body > self._max_frame:
            raise ProtocolError("not a frame, or too large")
        try:
            header = json.loads(bytes(await self._read(n_header)))
            sizes = [int(n) for n in header.pop("b")]
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise ProtocolError("a frame's header is damaged") from e
        if sum(sizes) != n_body or any(n < 0 for n in sizes):
            raise ProtocolError("a frame's lengths do not add up")
        return Frame(Kind(kind), id, header, [await self._read(n) for n in sizes])

    async def prove(self, token: str, *, client: bool) -> None:
        """Challenges the other end and answers its challenge. First thing on a connection, on both sides.

        The client proves itself first, so a stranger learns nothing that could be tried offline from a server.

        Raises:
            TokenRefused: the other end has another token.
            ConnectionError: the other end is gone.
            ProtocolError: the other end speaks something else.
        """
        mine = secrets.token_bytes(_NONCE)
        await self._write(_HELLO + mine)
        hello = bytes(await self._read(len(_HELLO) + _NONCE))
        if not hello.startswith(_HELLO):
            raise ProtocolError("the other end does not speak this protocol")
        theirs = hello[len(_HELLO) :]
        nonces = mine + theirs if client else theirs + mine
        proofs = {role: hmac.digest(token.encode(), role + nonces, hashlib.sha256) for role in (b"client", b"server")}
        if client:
            await self._write(proofs[b"client"])
            await self._check(proofs[b"server"])
        else:
            await self._check(proofs[b"client"])
            await self._write(proofs[b"server"])

    def close(self) -> None:
        """Closes at once. Tasks that send or receive must have been cancelled before."""
        self._sock.close()

    def interrupt(self) -> None:
        """Makes whoever sends or receives fail with `ConnectionError`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    async def _check(self, proof: bytes) -> None:
        try:
            given = bytes(await self._read(len(proof)))
        except ConnectionError as e:
            raise TokenRefused("the other end refused our token") from e
        if not hmac.compare_digest(given, proof):
            raise TokenRefused("the other end does not know our token")

    async def _write(self, data: Buffer) -> None:
        if self._sock.fileno() < 0:
            raise ConnectionResetError("the connection is closed")
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError as e:
            raise _as_connection_error(e) from e

    async def _read(self, n: int) -> memoryview:
        # np.empty does not touch the pages first, as bytearray(n) would.
        out = np.empty(n, np.uint8).data
        at = 0
        while at < n:
            try:
                got = await self._loop.sock_recv_into(self._sock, out[at:])
            except OSError as e:
                raise _as_connection_error(e) from e
            if not got:
                raise ConnectionResetError("the other end closed the connection")
            at += got
        return out


def flat(buffer: Buffer) -> memoryview:
    """The same memory as a flat view of bytes."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def _as_connection_error(e: OSError) -> ConnectionError:
    return e if isinstance(e, ConnectionError) else ConnectionResetError(str(e))
