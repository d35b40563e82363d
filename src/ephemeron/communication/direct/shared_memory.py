"""Bodies of messages in memory that both ends of a connection share: members on one machine.

The connection is a Unix socket over which the two ends have passed each other an anonymous file of slots. A body is copied
into a free slot, and its head, which goes over the socket, names the slot; the receiver copies it to where it belongs and frees
the slot. A socket copies twice, too, but with system calls and buffers of the kernel that take five times as long. Where
no slot is free, or a body does not fit, it goes over the socket: nothing ever waits for a slot. The lowest free slot is
taken, so that little memory is touched, and stays in caches.

The files have no names and are gone with the last of the two processes. They are sealed: a peer cannot shrink one while the
other end reads it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.connection import Connection, SocketConnection, bytes_of
from ephemeron.communication.direct.message import IN_PLACE, SHARED, Head, Incoming, pack_head
from ephemeron.communication.direct.transport import UnixTransport
from ephemeron.communication.rpc.shared_memory import available
from ephemeron.errors import ProtocolError

SLOT_BYTES = 1 << 20
SLOTS = 24
"""Per direction of a connection: more than a round of a few members has under way at once."""
LEAST_BYTES = 16 << 10
"""Smaller bodies go over the socket with their heads."""
_FIRST = mmap.PAGESIZE
"""Place of the first slot; before it there is one byte per slot, which is 1 while the slot is in use."""
_FILE_BYTES = _FIRST + SLOTS * SLOT_BYTES
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)


class SharedConnection(SocketConnection):
    """See `Connection`.

    Args:
        sock, dialled: see `SocketConnection`.
        mine: slots that this end writes.
        theirs: slots that the other end writes.
    """

    def __init__(self, sock: socket.socket, *, dialled: bool, mine: mmap.mmap, theirs: mmap.mmap) -> None:
        super().__init__(sock, transport="shared", dialled=dialled, checksums=False)
        self._mine, self._theirs = (np.frombuffer(m, dtype=np.uint8) for m in (mine, theirs))
        self._used = memoryview(mine)[:SLOTS]

    def send(self, head: Head, buffers: Sequence[Buffer] = ()) -> None:
        views = [bytes_of(buffer) for buffer in buffers]
        nbytes = sum(view.nbytes for view in views)
        slot = self._free_slot() if LEAST_BYTES <= nbytes <= SLOT_BYTES and not self.closed else -1
        if slot < 0:
            return super().send(head, buffers)
        at = _FIRST + slot * SLOT_BYTES
        for view in views:
            self._mine[at : at + view.nbytes] = np.frombuffer(view, dtype=np.uint8)
            at += view.nbytes
        self._used[slot] = 1
        self.sent_bytes += nbytes
        self._queue(pack_head(head._replace(flags=head.flags | SHARED), nbytes=nbytes, checksum=slot), [])

    def _free_slot(self) -> int:
        return bytes(self._used).find(0)

    def _memory(self, incoming: Incoming) -> memoryview:
        if not incoming.head.flags & SHARED:
            return super()._memory(incoming)
        slot, nbytes = incoming.checksum, incoming.nbytes
        if slot >= SLOTS or nbytes > SLOT_BYTES:
            raise ProtocolError(f"{nbytes} bytes in slot {slot} of shared memory")
        at = _FIRST + slot * SLOT_BYTES
        there, handler = self._theirs[at : at + nbytes], self._handler
        place = handler.allocate(self, incoming.head, nbytes) if handler is not None else None
        self.received_bytes += nbytes
        if place is IN_PLACE:
            return memoryview(there.data)
        if place is None or place.nbytes != nbytes:
            place = memoryview(np.empty(nbytes, dtype=np.uint8).data)
        np.frombuffer(place, dtype=np.uint8)[:] = there
        head = incoming.head._replace(flags=incoming.head.flags & ~SHARED)
        self._theirs[slot] = 0
        self._incoming = incoming._replace(head=head, checksum=0)
        return place.cast("B")

    def _present(self, incoming: Incoming) -> int:
        return incoming.nbytes if incoming.head.flags & SHARED else 0

    def _deliver(self) -> None:
        incoming = self._incoming
        if incoming is None or not incoming.head.flags & SHARED:
            return super()._deliver()
        self._incoming = incoming._replace(checksum=0)
        super()._deliver()
        self._theirs[incoming.checksum] = 0


class SharedTransport(UnixTransport):
    """Unix sockets with shared memory for large bodies: members on one machine, in one network namespace."""

    name = "shared"

    async def _connection(self, sock: socket.socket, *, dialled: bool) -> Connection:
        handle = os.memfd_create("ephemeron-direct", getattr(os, "MFD_CLOEXEC", 1) | getattr(os, "MFD_ALLOW_SEALING", 2))
        try:
            os.ftruncate(handle, _FILE_BYTES)
            fcntl.fcntl(handle, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
            mine = mmap.mmap(handle, _FILE_BYTES)
            sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))])
        finally:
            os.close(handle)
        return SharedConnection(sock, dialled=dialled, mine=mine, theirs=await _received(sock))


async def _received(sock: socket.socket) -> mmap.mmap:
    """The other end's slots.

    Raises:
        ProtocolError: it has sent something else.
        OSError: the connection is lost.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(array.array("i", [0]).itemsize))
            break
        except (BlockingIOError, InterruptedError):
            readable: asyncio.Future[Any] = loop.create_future()
            loop.add_reader(sock.fileno(), _mark, readable)
            try:
                await readable
            finally:
                loop.remove_reader(sock.fileno())
    handles = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            handles.frombytes(content[: len(content) - len(content) % handles.itemsize])
    try:
        if not data or len(handles) != 1:
            raise ProtocolError("no shared memory from the other end")
        sealed = fcntl.fcntl(handles[0], getattr(fcntl, "F_GET_SEALS", 1034)) & _SEALS == _SEALS
        if not sealed or os.fstat(handles[0]).st_size != _FILE_BYTES:
            raise ProtocolError("the shared memory of the other end has another size, or may change it")
        return mmap.mmap(handles[0], _FILE_BYTES)
    finally:
        for handle in handles:
            with contextlib.suppress(OSError):
                os.close(handle)


def _mark(readable: asyncio.Future[Any]) -> None:
    if not readable.done():
        readable.set_result(None)


__all__ = ["LEAST_BYTES", "SLOTS", "SLOT_BYTES", "SharedConnection", "SharedTransport", "available"]
