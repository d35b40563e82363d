"""Messages between loader processes and trainer: pickle protocol 5, with arrays and tensors out of band.

Large arrays go through anonymous memory that both sides map (Linux): it has no name, so nothing is left behind when either side is
killed. A batch that is collated in such an `Arena` is not copied at all on its way. Received arrays are writable and belong to the
receiver; when the last reference to them is gone, the sender uses the memory again.

Only for processes that were forked from one another: there is no authentication.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.user_code import guarded, line_of

SHARED = 1 << 20
"""Bytes from which on arrays go through shared memory."""
KEPT_BYTES = 1 << 30
"""Bytes of shared memory that a sender keeps for later messages."""
_MOST = 64
_DATA_AT = 64
_HEAD = struct.Struct("!IQIB")
"""Number of parts; bytes of the arena (0: there is none), its number (0: it is not reused), whether it is new."""
_PART = struct.Struct("!QQ")
"""Bytes of a part and its offset in the arena."""
_HERE = 2**64 - 1
"""Offset of a part that is in the stream, not in the arena."""


class Arena:
    """Anonymous memory for some arrays, mapped by two processes. Its first byte is 1 while it is in use.

    Args:
        nbytes: of the arrays together, each rounded up by `aligned`.
        number: identifies it to the receiver; 0: it is used once.

    Raises:
        OSError: there is no memory, or this system has no anonymous files.
    """

    def __init__(self, nbytes: int, number: int = 0) -> None:
        self.nbytes, self.number = nbytes, number
        self._used = _DATA_AT
        self.fd: int | None = os.memfd_create("ephemeron-batch")
        """Its file; None once the receiver has it."""
        try:
            os.ftruncate(self.fd, _DATA_AT + nbytes)
            self.memory = memoryview(mmap.mmap(self.fd, _DATA_AT + nbytes))
        except OSError:
            self.close()
            raise
        self._base = np.frombuffer(self.memory, dtype=np.uint8).ctypes.data

    @property
    def in_use(self) -> bool:
        """Whether the receiver refers to it, or it is being filled."""
        return bool(self.memory[0])

    def begin(self) -> None:
        """Marks it as in use, and empty."""
        self.memory[0], self._used = 1, _DATA_AT

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """The next part, as an array to fill."""
        start, nbytes = self._used, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._used += aligned(nbytes)
        return np.frombuffer(self.memory[start : start + nbytes], dtype=dtype).reshape(shape)

    def offset(self, part: memoryview) -> int | None:
        """Offset of a buffer in the arena; None: it is elsewhere."""
        if part.nbytes == 0:
            return None
        at = np.frombuffer(part, dtype=np.uint8).ctypes.data - self._base
        return int(at) if at >= 0 and at + part.nbytes <= len(self.memory) else None

    def close(self) -> None:
        """Closes the file. The memory stays as long as it is mapped."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def aligned(nbytes: int) -> int:
    """Space that a part of so many bytes takes."""
    return -(-nbytes // 64) * 64


def can_share() -> bool:
    """True if this system has anonymous files."""
    return hasattr(os, "memfd_create")


class TensorPickler(pickle.Pickler):
    """Pickles tensors as arrays, whose memory is sent without a copy."""

    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules.get("torch")  # another thread may be importing it
        if type(obj) is getattr(torch, "Tensor", None) and obj.device.type == "cpu" and not obj.requires_grad:
            try:
                return torch.from_numpy, (obj.contiguous().numpy(),)
            except (TypeError, RuntimeError):
                return NotImplemented  # a dtype that NumPy lacks
        return NotImplemented


class PickleSocket:
    """A connection for any picklable values; large arrays are sent in memory that both ends map.

    A sender keeps the memory that it has shared and reuses it once the other end no longer refers to it: fresh memory
    costs more than the copy into it.

    Args:
        sock: a Unix socket, blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._arenas: list[Arena] = []
        self._mapped: dict[int, mmap.mmap] = {}

    def arena(self, nbytes: int) -> Arena:
        """Memory to fill and send.

        Raises:
            OSError: there is no memory left.
        """
        free = [arena for arena in self._arenas if not arena.in_use]
        fitting = [arena for arena in free if nbytes <= arena.nbytes <= 2 * nbytes]
        if fitting:
            found = min(fitting, key=lambda arena: arena.nbytes)
        else:
            while free and (len(self._arenas) == _MOST or self._kept + nbytes > KEPT_BYTES):
                old = free.pop()
                old.close()
                self._arenas.remove(old)
            room = len(self._arenas) < _MOST and self._kept + nbytes <= KEPT_BYTES
            numbers = {arena.number for arena in self._arenas}
            found = Arena(nbytes, next(n for n in range(1, _MOST + 1) if n not in numbers) if room else 0)
            if room:
                self._arenas.append(found)
        found.begin()
        return found

    @property
    def _kept(self) -> int:
        return sum(arena.nbytes for arena in self._arenas)

    def send(self, value: Any, arena: Arena | None = None) -> None:
        """Sends a value.

        Args:
            value: anything that can be pickled.
            arena: holds some of its arrays; from `arena`.

        Raises:
            PicklingError: the value cannot be pickled; nothing was sent.
            OSError: the other side is gone.
        """
        buffers: list[pickle.PickleBuffer] = []
        head = io.BytesIO()
        try:
            with guarded():
                TensorPickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
        except BaseException as e:
            if arena is not None:
                arena.memory[0] = 0
            raise pickle.PicklingError(line_of(e)) from e
        parts = [b.raw() for b in buffers]
        places = [None if arena is None else arena.offset(part) for part in parts]
        loose = [part for part, place in zip(parts, places, strict=True) if place is None]
        if arena is None and can_share() and sum(part.nbytes for part in loose) >= SHARED:
            arena, places = self._moved(parts)
            loose = []
        where = (0, 0, 0) if arena is None else (len(arena.memory), arena.number, arena.fd is not None)
        table = _HEAD.pack(len(parts) + 1, *where) + _PART.pack(head.tell(), _HERE)
        table += b"".join(_PART.pack(part.nbytes, _HERE if place is None else place) for part, place in zip(parts, places, strict=True))
        begun = arena is not None and arena.fd is not None
        if arena is not None and arena.fd is not None:
            socket.send_fds(self.sock, [table[:1]], [arena.fd])
            arena.close()
        _write_all(self.sock, [memoryview(table)[begun:], memoryview(head.getbuffer()), *loose])

    def _moved(self, parts: Sequence[memoryview]) -> tuple[Arena, list[int | None]]:
        arena = self.arena(sum(aligned(part.nbytes) for part in parts))
        places: list[int | None] = []
        for part in parts:
            array = arena.array((part.nbytes,), np.dtype(np.uint8))
            array[:] = np.frombuffer(part, dtype=np.uint8)
            places.append(arena.offset(array.data) if part.nbytes else 0)
        return arena, places

    def receive(self) -> tuple[Any, int]:
        """The next value, and its size in bytes.

        Raises:
            EOFError, OSError: the other side closed the connection.
        """
        first, fds, _, _ = socket.recv_fds(self.sock, _HEAD.size, 1)
        if not first:
            raise EOFError
        try:
            count, nbytes, number, new = _HEAD.unpack(first + bytes(_read(self.sock, _HEAD.size - len(first))))
            table = list(_PART.iter_unpack(_read(self.sock, _PART.size * count)))
            memory = self._lent(nbytes, number, fds[0] if new else None) if nbytes else memoryview(b"")
            head, *buffers = (_read(self.sock, n) if at == _HERE else memory[at : at + n] for n, at in table)
        finally:
            for fd in fds:
                os.close(fd)
        return pickle.loads(head, buffers=buffers), sum(n for n, _ in table)

    def _lent(self, nbytes: int, number: int, fd: int | None) -> memoryview:
        """The memory of an arena, which is free again when no object refers to it."""
        held = mmap.mmap(fd, nbytes) if fd is not None else self._mapped[number]
        if number:
            self._mapped[number] = held
        owner = np.frombuffer(held, np.uint8)
        weakref.finalize(owner, _free, held, os.getpid()).atexit = False
        return owner.data


def _free(held: mmap.mmap, owner: int) -> None:
    if os.getpid() == owner:
        held[0] = 0


def _write_all(sock: socket.socket, parts: list[memoryview]) -> None:
    parts = [part.cast("B") if part.format != "B" else part for part in parts if part.nbytes]
    while parts:
        sent = sock.sendmsg(parts[:64])
        while parts and sent >= parts[0].nbytes:
            sent -= parts.pop(0).nbytes
        if sent:
            parts[0] = parts[0][sent:]


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data
