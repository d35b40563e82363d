"""Data sections in memory that two processes share (DPFlow section 4.3.1: IPC).

A sender owns segments: anonymous files whose descriptors the receiver gets over their Unix socket. The sender copies
a data section into a free one and names it in the frame; the receiver's views refer directly to it. The first
byte of a segment marks it as in use: the sender sets it, and the receiver clears it when no view is left,
so a kept view is never overwritten. The files have no names: the memory is freed when both processes are gone, however
they ended.

A segment can be neither shrunk nor grown (sealed), or a receiver could be killed by touching it. A forked child
shares the parent's segments: it must copy views that it wants to keep beyond the parent's use.

Pooled memory for received data, used again once nothing refers to it.

Fresh memory costs more than the copy into it: the system must first provide and clear its pages (1.2 ms/MB where
this was measured). So large data sections are received into memory that was used before. The pool lends a
`memoryview` whose owner is a fresh object; every view, slice and array made from it keeps that owner alive, and
a weak reference returns the memory when the owner is gone. So a kept view is never overwritten, and no explicit release is
needed.

Up to 1/8 of the lent memory is rounding. Small requests are not pooled. A forked child has copies of its
own (private memory), and views in them stay valid.

Memory that is about to be filled, without clearing it first where that costs time.

NumPy gives such memory, but its import takes a third of the start of a process that needs nothing else of it (0.1 s of CPU time), such
as the host of local functions. So small memory is Python's, and NumPy is imported with the first large one.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence

from ephemeron.errors import ProtocolError

_DATA_AT = 64
LIMIT_BYTES = 256 << 20
_MOST = 64
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)


def available() -> bool:
    """Whether this system can share memory without names."""
    return hasattr(os, "memfd_create") and hasattr(socket, "SCM_RIGHTS")


class Segments:
    """The segments that this end writes. For one thread at a time.

    Args:
        limit_bytes: of all segments together; where it does not suffice, data goes through the socket.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._maps: dict[int, mmap.mmap] = {}

    def put(self, parts: Sequence[memoryview], at: Sequence[int], nbytes: int) -> tuple[int, int | None]:
        """Copies a data section into a free segment.

        Returns:
            The segment's number, from 1, and its handle if the receiver does not have it yet (the caller closes it);
            0 and None if there is no free segment and no room for another.
        """
        number, handle = self._find(nbytes + _DATA_AT)
        if not number:
            return 0, None
        target = memoryview(self._maps[number])
        for part, begin in zip(parts, at, strict=True):
            target[_DATA_AT + begin : _DATA_AT + begin + part.nbytes] = part
        target[0] = 1
        return number, handle

    def forget(self, number: int) -> None:
        """Releases a segment whose frame was not sent."""
        del self._maps[number]

    def close(self) -> None:
        """Forgets all segments. The other end's views keep their memory."""
        self._maps.clear()

    def _find(self, nbytes: int) -> tuple[int, int | None]:
        free = [number for number, held in self._maps.items() if not held[0]]
        fitting = [number for number in free if nbytes <= len(self._maps[number]) <= 8 * nbytes + (1 << 20)]
        if fitting:
            return min(fitting, key=lambda number: len(self._maps[number])), None
        size = size_class(nbytes)
        while free and (self._held() + size > self._limit or len(self._maps) == _MOST):
            del self._maps[free.pop()]  # the number may be given anew: the receiver then forgets the old one
        if self._held() + size > self._limit or len(self._maps) == _MOST:
            return 0, None
        try:
            handle = _create(size)
        except OSError:
            return 0, None
        number = next(n for n in range(1, _MOST + 1) if n not in self._maps)
        self._maps[number] = mmap.mmap(handle, size)
        return number, handle

    def _held(self) -> int:
        return sum(len(held) for held in self._maps.values())


class Mappings:
    """The other end's segments, as this end sees them. For one thread at a time."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._handles: list[int] = []

    def read(self, sock: socket.socket, into: memoryview, flags: int) -> int:
        """Receives like `recv_into`, and keeps handles that come along."""
        room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        got, ancillary, how, _ = sock.recvmsg_into([into], room, flags | getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._handles.extend(array.array("i", data[: len(data) - len(data) % 4]))
        if how & socket.MSG_CTRUNC or len(self._handles) > 1:
            raise ProtocolError("the other end sends more handles than frames")
        return got

    def admit(self, number: int, *, most_bytes: int) -> None:
        """Maps the segment whose handle has come.

        Raises:
            ProtocolError: no handle has come, or it is not a segment, or one too many or too large.
        """
        if not self._handles:
            raise ProtocolError("a new segment comes without its handle")
        handle = self._handles.pop()
        try:
            size = os.fstat(handle).st_size
            sealed = fcntl.fcntl(handle, getattr(fcntl, "F_GET_SEALS", 1034)) & _SEALS == _SEALS
            if not sealed or number > _MOST or not _DATA_AT < size <= most_bytes:
                raise ProtocolError(f"segment {number} of {size} bytes is not one of ours")
            self._maps[number] = mmap.mmap(handle, size)
        except OSError as e:
            raise ProtocolError(f"segment {number} cannot be mapped: {e}") from e
        finally:
            os.close(handle)

    def lend(self, number: int, nbytes: int) -> memoryview:
        """The data section in a segment; the segment is free again when nothing refers to it any more.

        Raises:
            ProtocolError: no such segment, or it is shorter, or the sender has not marked it.
        """
        held = self._maps.get(number)
        if held is None or len(held) < _DATA_AT + nbytes or not held[0]:
            raise ProtocolError(f"a frame names segment {number}, which does not hold {nbytes} bytes for us")
        import numpy as np

        owner = np.frombuffer(held, np.uint8, nbytes, _DATA_AT)
        weakref.finalize(owner, _release, held, os.getpid()).atexit = False
        return owner.data

    def close(self) -> None:
        """Forgets all segments. Views keep their memory."""
        self._maps.clear()
        while self._handles:
            os.close(self._handles.pop())


def _create(size: int) -> int:
    handle = os.memfd_create("ephemeron", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(handle, 0, size)  # fails here, where memory is short, and not at the first touch
        fcntl.fcntl(handle, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _release(held: mmap.mmap, owner: int) -> None:
    if os.getpid() == owner:
        held[0] = 0


# -- pooled memory for received data, used again once nothing refers to it ----------------------------------------


_SMALL = 64 << 10


class BufferPool:
    """Lends memory. May be used by any number of threads.

    Args:
        idle_limit_bytes: unused memory that is kept.
    """

    def __init__(self, *, idle_limit_bytes: int = 64 << 20) -> None:
        self._limit = idle_limit_bytes
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        # Owners may end in any thread at any moment, also while this one holds the lock: appending is all they do.
        self._returned: deque[mmap.mmap] = deque()
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Memory kept for later use."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def lend(self, nbytes: int) -> memoryview:
        """Writable memory of that many bytes; its contents are arbitrary. At least 64-aligned where pooled."""
        if nbytes < _SMALL:
            return fresh_memory(nbytes)
        import numpy as np

        size = size_class(nbytes)
        with self._lock:
            self._collect()
            found = self._idle.get(size)
            memory = found.pop() if found else None
            if memory is not None:
                self._idle_bytes -= size
        if memory is None:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        owner = np.frombuffer(memory, np.uint8, nbytes)
        weakref.finalize(owner, self._returned.append, memory).atexit = False
        return owner.data

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            if self._idle_bytes + len(memory) > self._limit:
                continue  # its last reference: the system has it back
            self._idle.setdefault(len(memory), []).append(memory)
            self._idle_bytes += len(memory)


def size_class(nbytes: int) -> int:
    """The size that is lent for a request: one of eight between powers of two, so that others can use it again."""
    step = max(1 << max(nbytes - 1, 1).bit_length() - 4, mmap.PAGESIZE)
    return -(-nbytes // step) * step


POOL = BufferPool()
"""The process's pool, used where no other is given."""


def _after_fork() -> None:
    # The parent's threads may have held the lock; they do not exist here.
    POOL._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def keep_freed(nbytes: int) -> bool:
    """Tells the C library to keep that much freed memory instead of giving it back to the system at once.

    For processes that receive real `bytes` of more than 128 KiB again and again (`Receive.COPIES`): glibc returns
    memory when more than a little is free at the end of its heap, so every message would fetch its pages anew, which
    here takes longer than receiving them. Concerns all of the process, and is therefore never done unasked.

    Returns:
        Whether this system's C library can be told.
    """
    import ctypes  # the only one who needs it

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim, mapped = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    return bool(mallopt(trim, min(nbytes, 2**31 - 1)) and mallopt(mapped, min(nbytes, 32 << 20)))


# -- memory that is about to be filled ----------------------------------------------------------------------------


def fresh_memory(nbytes: int) -> memoryview:
    """Writable bytes with any contents."""
    if nbytes < _SMALL:
        return memoryview(bytearray(nbytes))
    import numpy as np

    return np.empty(nbytes, np.uint8).data
