"""What loaders and trainer say to each other: pickle protocol 5, with arrays and tensors out of band.

Large arrays go through anonymous memory that both sides map (Linux): nothing of it has a name, so nothing is left behind
when either side is killed. A batch that is put together in such an `Arena` is not copied at all on its way. What arrives is
writable, belongs to the receiver, and lives as long as somebody holds a part of it.

Only for processes that were forked from one another: nothing here is authenticated.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

SHARED = 1 << 20
"""Bytes from which arrays go through shared memory."""
_HEAD = struct.Struct("!IQ")
"""Number of parts, and bytes of the arena (0: there is none)."""
_PART = struct.Struct("!QQ")
"""Bytes of a part and where it is in the arena."""
_HERE = 2**64 - 1
"""Not in the arena but in the stream."""


class Arena:
    """Anonymous memory for some arrays.

    Args:
        nbytes: that they take together, each rounded up by `aligned`.

    Raises:
        OSError: there is no memory, or this system has no such thing.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._used = nbytes, 0
        self.fd = os.memfd_create("ephemeron-batch")
        try:
            os.ftruncate(self.fd, nbytes)
            self._memory = memoryview(mmap.mmap(self.fd, nbytes))
        except OSError:
            os.close(self.fd)
            raise
        self._base = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """The next part, as an array to be filled."""
        start, nbytes = self._used, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._used += aligned(nbytes)
        return np.frombuffer(self._memory[start : start + nbytes], dtype=dtype).reshape(shape)

    def offset(self, part: memoryview) -> int | None:
        """Where in the arena a buffer lies; None: elsewhere."""
        if part.nbytes == 0:
            return None
        at = np.frombuffer(part, dtype=np.uint8).ctypes.data - self._base
        return int(at) if at >= 0 and at + part.nbytes <= self.nbytes else None

    def close(self) -> None:
        """Lets go of the file. The memory stays as long as it is mapped."""
        os.close(self.fd)


def aligned(nbytes: int) -> int:
    """The space that a part of so many bytes takes."""
    return -(-nbytes // 64) * 64


def can_share() -> bool:
    """Whether this system has anonymous files."""
    return hasattr(os, "memfd_create")


class TensorPickler(pickle.Pickler):
    """Tensors travel as arrays, whose memory is sent as it is."""

    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules.get("torch")  # perhaps another thread is just importing it
        if type(obj) is getattr(torch, "Tensor", None) and obj.device.type == "cpu" and not obj.requires_grad:
            try:
                return torch.from_numpy, (obj.contiguous().numpy(),)
            except (TypeError, RuntimeError):
                return NotImplemented  # a dtype that NumPy lacks
        return NotImplemented


def send(sock: socket.socket, value: Any, arena: Arena | None = None) -> None:
    """Sends anything that can be pickled.

    Args:
        sock: a Unix socket, blocking.
        value: what to send.
        arena: that some of its arrays lie in; closed here.

    Raises:
        PicklingError, TypeError, AttributeError: it cannot be pickled; nothing was sent.
        OSError: the other side is gone.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    try:
        TensorPickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
        parts = [b.raw() for b in buffers]
        places = [None if arena is None else arena.offset(part) for part in parts]
        loose = [part for part, place in zip(parts, places, strict=True) if place is None]
        if arena is None and can_share() and sum(part.nbytes for part in loose) >= SHARED:
            arena, places = _moved(parts)
            loose = []
        table = _HEAD.pack(len(parts) + 1, 0 if arena is None else arena.nbytes) + _PART.pack(head.tell(), _HERE)
        table += b"".join(
            _PART.pack(part.nbytes, _HERE if place is None else place)
            for part, place in zip(parts, places, strict=True)
        )
        if arena is not None:
            socket.send_fds(sock, [table[:1]], [arena.fd])
        _write_all(sock, [memoryview(table)[arena is not None :], memoryview(head.getbuffer()), *loose])
    finally:
        if arena is not None:
            arena.close()


def _moved(parts: Sequence[memoryview]) -> tuple[Arena, list[int | None]]:
    arena = Arena(sum(aligned(part.nbytes) for part in parts))
    places: list[int | None] = []
    for part in parts:
        array = arena.array((part.nbytes,), np.dtype(np.uint8))
        array[:] = np.frombuffer(part, dtype=np.uint8)
        places.append(arena.offset(array.data) if part.nbytes else 0)
    return arena, places


def _write_all(sock: socket.socket, parts: list[memoryview]) -> None:
    parts = [part.cast("B") if part.format != "B" else part for part in parts if part.nbytes]
    while parts:
        sent = sock.sendmsg(parts[:64])
        while parts and sent >= parts[0].nbytes:
            sent -= parts.pop(0).nbytes
        if sent:
            parts[0] = parts[0][sent:]


def receive(sock: socket.socket) -> tuple[Any, int]:
    """A message and its bytes.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    first, fds, _, _ = socket.recv_fds(sock, _HEAD.size, 1)
    if not first:
        raise EOFError
    try:
        count, nbytes = _HEAD.unpack(first + bytes(_read(sock, _HEAD.size - len(first))))
        table = list(_PART.iter_unpack(_read(sock, _PART.size * count)))
        memory = memoryview(mmap.mmap(fds[0], nbytes)) if nbytes else memoryview(b"")
        head, *buffers = (_read(sock, n) if at == _HERE else memory[at : at + n] for n, at in table)
    finally:
        for fd in fds:
            os.close(fd)
    return pickle.loads(head, buffers=buffers), sum(n for n, _ in table)


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data
