"""Frames through a socket, step by step.

Sending and receiving are generators that yield when they would block and go on when resumed. So the same code
serves a blocking socket (which waits in the kernel, for the whole data section in one call) and asyncio's
non-blocking ones, and a reader that ends at its deadline leaves a half-read frame to the next one. Sockets are
used directly because asyncio's streams copy every byte twice.

Sending is vectored (`sendmsg`), from the caller's memory to the socket. Data is received into pooled memory, or
directly into real `bytes` where those are wanted. Where both ends share memory, large data sections use it.

Bytes of a connection as the kernel has counted them (Linux, `struct tcp_info` of linux/tcp.h): TCP's payload, repeated segments included.

Beside what a program meters itself, this shows what was sent again on a link that loses, and what encryption adds.
"""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ephemeron.communication.rpc import compression, memory
from ephemeron.communication.rpc.auth import NONCE_BYTES, Offer, Token, handshake
from ephemeron.communication.rpc.frame import (
    ALIGN,
    ENTRY_BYTES,
    HEAD_BYTES,
    NEW_SEGMENT,
    OBJECT,
    Frame,
    FrameEntry,
    FrameLimits,
    FrameMark,
    FrameMessage,
    Head,
    Kind,
    Receive,
    Tag,
    offsets,
    pack,
    section_bytes,
    unpack_head,
    unpack_rest,
)
from ephemeron.communication.rpc.memory import BufferPool, fresh_memory
from ephemeron.communication.rpc.sockets import not_in_children
from ephemeron.errors import ProtocolError

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields when it would block."""

_BYTES = (FrameMark.BYTES, FrameMark.VIEW, FrameMark.STATE)
_PADDING = memoryview(bytes(ALIGN))
_VECTOR = 512
_GONE = "the other end closed the connection"
_SHARE_BYTES = 16 << 10
_OWN_BYTES = 16 << 10
"""From this mean size on, a system call per buffer costs less than copying it."""
_TELLING_BYTES = 64 << 10
"""From this size on, the time that a data section takes is a measure of the link."""


class FrameSocket:
    """A connected socket that carries frames. One may send and another receive at a time.

    Args:
        sock: connected; owned from now on.
        limits: of received frames.
        pool: memory for what arrives.
        clock: seconds; measures the link.
        shared_bytes: of memory to share with the other end at most, where that is possible.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        limits: FrameLimits,
        pool: BufferPool,
        clock: Callable[[], float],
        shared_bytes: int = memory.LIMIT_BYTES,
    ) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            _tune(sock)
        not_in_children(sock)
        self.limits = limits
        self.midway = False
        """Whether part of a frame has left: only its rest may follow."""
        self.link_bps: float | None = None
        """Rate at which large data sections arrive at the other end, as it reports."""
        self.bytes_sent = self.bytes_received = 0
        """Through the socket so far, frames included; not what shared memory carries."""
        self._kernel_bytes = (0, 0)
        self._sock = sock
        self._blocking = sock.getblocking()
        self._pool = pool
        self._clock = clock
        self._shared_bytes = shared_bytes
        self._arrival_bps = 0.0
        self._timeouts: dict[int, float] = {}
        self._squeezer: compression.Squeezer | None = None
        self._segments: memory.Segments | None = None
        self._mappings: memory.Mappings | None = None

    @property
    def sock(self) -> socket.socket:
        """For waiting, not for reading."""
        return self._sock

    @property
    def kernel_bytes(self) -> tuple[int, int]:
        """Bytes sent and received as the kernel has counted them, until it was closed; zeros where it does not count."""
        self._kernel_bytes = kernel_bytes(self._sock) or self._kernel_bytes
        return self._kernel_bytes

    @property
    def transport(self) -> str:
        """`tcp`, `unix` or `shared`."""
        if self._segments is not None:
            return "shared"
        return "unix" if self._sock.family == socket.AF_UNIX else "tcp"

    def greeting(self, token: Token, *, client: bool, offer: Offer) -> Steps[Offer]:
        """Proves the token, checks the other end's proof, and agrees on what both can do. First on a connection.

        Raises:
            TokenRefused, ProtocolError, ConnectionError: see `handshake`.
        """
        steps = handshake(token, client=client, offer=offer, nonce=secrets.token_bytes(NONCE_BYTES))
        got = b""
        try:
            step = next(steps)
            while True:
                try:
                    got = b"" if isinstance(step, bytes) else (yield from self._take(step))
                    if isinstance(step, bytes):
                        yield from self._give([memoryview(step)], None)
                except ConnectionError as e:
                    step = steps.throw(e)
                else:
                    step = steps.send(got)
        except StopIteration as done:
            theirs: Offer = done.value
        if self._sock.family != socket.AF_UNIX:
            codec = compression.common(offer.codecs, theirs.codecs)
            self._squeezer = compression.Squeezer(codec, clock=self._clock) if codec else None
        elif offer.shared and theirs.shared and memory.available():
            self._segments, self._mappings = memory.Segments(self._shared_bytes), memory.Mappings()
        return theirs

    def receiving(self, receives: Callable[[Kind, int], Receive]) -> Steps[Frame]:
        """Receives the next frame.

        Args:
            receives: which type its buffers are to have.

        Raises:
            ConnectionError: the other end is gone.
            ProtocolError: the bytes are not a frame.
        """
        raw = bytearray(HEAD_BYTES)
        yield from self._fill(memoryview(raw), handles=True)
        head = unpack_head(raw, self.limits)
        if head.rate:
            self.link_bps = head.rate * 1024.0
        entries: list[FrameEntry] = []
        tag: Tag = {}
        if head.buffers or head.tag_bytes:
            rest = bytearray(ENTRY_BYTES * head.buffers + head.tag_bytes)
            yield from self._fill(memoryview(rest))
            entries, tag = unpack_rest(memoryview(rest), head, self.limits)
        copies = receives(head.kind, head.id) is Receive.COPIES
        begun = self._clock()
        buffers = yield from self._data(head, entries, copies)
        if head.data >= _TELLING_BYTES and not head.segment:
            # The fastest recent rate counts: a receiver that waited for a core does not measure the link.
            self._arrival_bps = max(head.data / max(self._clock() - begun, 1e-9), 0.9 * self._arrival_bps)
        cost = HEAD_BYTES + head.tag_bytes + ENTRY_BYTES * head.buffers + sum([entry.nbytes for entry in entries])
        marks = [entry.mark for entry in entries]
        return Frame(head.kind, head.id, tag, buffers, marks, head.flags, cost)

    def sending(self, message: FrameMessage) -> Steps[None]:
        """Sends a frame. Once `midway`, it must be finished, or the connection is of no more use.

        Raises:
            ConnectionError: the other end is gone.
        """
        entries, parts = self._stored(message)
        lengths = [entry.stored for entry in entries]
        begins = list(offsets(lengths))
        data = section_bytes(lengths)
        number, handle = 0, None
        if self._segments is not None and data >= _SHARE_BYTES:
            number, handle = self._segments.put(parts, begins, data)
        flags = message.flags | (0 if handle is None else NEW_SEGMENT)
        rate = min(int(self._arrival_bps / 1024), 0xFFFFFFFF)
        head = Head(message.kind, flags, number, message.id, len(message.tag), len(entries), data, rate)
        vector = [memoryview(pack(head, entries, message.tag))]
        if not number:
            vector += _padded(parts, begins)
        left = False
        try:
            yield from self._give(vector, handle)
            left = True
        finally:
            if handle is not None:
                os.close(handle)
            if number and not left and self._segments is not None:
                self._segments.forget(number)

    def set_timeout(self, seconds: float, *, writing: bool) -> None:
        """Sets the time for which a blocking socket waits before a step yields."""
        option = socket.SO_SNDTIMEO if writing else socket.SO_RCVTIMEO
        if self._timeouts.get(option) != seconds:
            self._timeouts[option] = seconds
            whole = int(seconds)
            parts = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)) if not whole else 0)
            self._sock.setsockopt(socket.SOL_SOCKET, option, parts)

    def interrupt(self) -> None:
        """Makes pending sends and receives fail with `ConnectionError`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Closes at once, and releases unused shared memory. No send or receive may be pending."""
        self._sock.close()
        if self._mappings is not None:
            self._mappings.close()
        if self._segments is not None:
            self._segments.close()

    def _data(self, head: Head, entries: Sequence[FrameEntry], copies: bool) -> Steps[list[Any]]:
        if not head.data:
            return [b"" if copies else memoryview(b"") for _ in entries]
        plain = not head.segment and not any(entry.codec for entry in entries)
        if copies and plain and self._blocking and head.data >= _OWN_BYTES * len(entries):
            return (yield from self._owned(head, entries))
        if head.segment:
            whole = self._shared(head)
        else:
            whole = self._pool.lend(head.data)
            yield from self._fill(whole)
        begins = offsets([entry.stored for entry in entries])
        stored = [whole[begin : begin + entry.stored] for begin, entry in zip(begins, entries, strict=True)]
        return [self._whole(part, entry, head, copies) for part, entry in zip(stored, entries, strict=True)]

    def _owned(self, head: Head, entries: Sequence[FrameEntry]) -> Steps[list[Any]]:
        # Straight from the socket into objects of their own; the padding is read and dropped.
        buffers: list[Any] = []
        for index, entry in enumerate(entries):
            if _is_bytes(entry, head):
                buffers.append((yield from self._take(entry.nbytes)))
            else:
                buffers.append(fresh_memory(entry.nbytes))
                yield from self._fill(buffers[-1])
            if index + 1 < len(entries):
                yield from self._take(-entry.nbytes % ALIGN)
        return buffers

    def _whole(self, part: memoryview, entry: FrameEntry, head: Head, copies: bool) -> Any:
        own = copies and _is_bytes(entry, head)
        if entry.codec:
            data = compression.expand(entry.codec, part, entry.nbytes)
            if own:
                return data
            part = memoryview(data)
        elif own:
            return bytes(part)
        elif not copies:
            return part
        fresh = fresh_memory(part.nbytes)
        fresh[:] = part
        return fresh

    def _shared(self, head: Head) -> memoryview:
        if self._mappings is None:
            raise ProtocolError("a frame names shared memory, which was not agreed upon")
        if head.flags & NEW_SEGMENT:
            self._mappings.admit(head.segment, most_bytes=2 * self.limits.max_frame + (1 << 20))
        return self._mappings.lend(head.segment, head.data)

    def _stored(self, message: FrameMessage) -> tuple[list[FrameEntry], list[memoryview]]:
        entries, parts = [], []
        for part, mark in zip(message.buffers, message.marks, strict=True):
            small = self._squeezer.squeeze(part, link_bps=self.link_bps) if self._squeezer is not None else None
            codec = self._squeezer.codec.id if self._squeezer is not None and small is not None else 0
            parts.append(part if small is None else memoryview(small))
            entries.append(FrameEntry(part.nbytes, parts[-1].nbytes, FrameMark(mark), codec))
        return entries, parts

    def _take(self, nbytes: int) -> Steps[bytes]:
        # With a blocking socket, the usual case is one call that fills an object of its own.
        got = b""
        if nbytes:
            try:
                got = self._sock.recv(nbytes, socket.MSG_WAITALL)
            except BlockingIOError:
                yield
            except OSError as e:
                raise _as_connection_error(e) from e
            else:
                if not got:
                    raise ConnectionResetError(_GONE)
                self.bytes_received += len(got)
        if len(got) < nbytes:
            rest = fresh_memory(nbytes - len(got))
            yield from self._fill(rest)
            return b"".join([got, rest])
        return got

    def _fill(self, view: memoryview, *, handles: bool = False) -> Steps[None]:
        mappings = self._mappings if handles else None
        while view:
            try:
                if mappings is not None:
                    got = mappings.read(self._sock, view, socket.MSG_WAITALL)
                else:
                    got = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                yield
                continue
            except OSError as e:
                raise _as_connection_error(e) from e
            if not got:
                raise ConnectionResetError(_GONE)
            self.bytes_received += got
            view = view[got:]
            if view and self._blocking:
                yield  # its timeout has passed, though data came

    def _give(self, parts: list[memoryview], handle: int | None) -> Steps[None]:
        at = 0
        rights = [] if handle is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))]
        try:
            while at < len(parts):
                try:
                    sent = self._sock.sendmsg(parts[at : at + _VECTOR], rights)
                except BlockingIOError:
                    yield
                    continue
                self.midway, rights = True, []
                self.bytes_sent += sent
                while at < len(parts) and sent >= parts[at].nbytes:
                    sent -= parts[at].nbytes
                    at += 1
                if sent:
                    parts[at] = parts[at][sent:]
                    if self._blocking:
                        yield
        except OSError as e:
            raise _as_connection_error(e) from e
        self.midway = False


def _padded(parts: Sequence[memoryview], begins: Sequence[int]) -> Iterator[memoryview]:
    at = 0
    for part, begin in zip(parts, begins, strict=True):
        if begin > at:
            yield _PADDING[: begin - at]
        if part.nbytes:
            yield part
        at = begin + part.nbytes


def _is_bytes(entry: FrameEntry, head: Head) -> bool:
    return not head.flags & OBJECT or entry.mark in _BYTES


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _as_connection_error(e: OSError) -> ConnectionError:
    return e if isinstance(e, ConnectionError) else ConnectionResetError(str(e))


# -- bytes of a connection as the kernel has counted them (Linux --------------------------------------------------


_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_RECEIVED_AT, _SENT_AT, _LENGTH = 128, 200, 208
_carriers: WeakKeyDictionary[socket.socket, Any] = WeakKeyDictionary()


def carry(plain: socket.socket, carrier: Any) -> None:
    """Says that what passes a plain socket of this process travels over another one, such as encrypted."""
    _carriers[plain] = carrier


def kernel_bytes(sock: socket.socket) -> tuple[int, int] | None:
    """Bytes that the kernel has sent and received over a connection; None: it is closed, is no TCP connection, or they are not counted."""
    carrier = _carriers.get(sock, sock)
    if carrier is None or _TCP_INFO is None or carrier.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        info = carrier.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
    except (OSError, ValueError):
        return None
    if len(info) < _LENGTH:  # before Linux 4.19
        return None
    (received,), (sent,) = struct.unpack_from("=Q", info, _RECEIVED_AT), struct.unpack_from("=Q", info, _SENT_AT)
    return sent, received
