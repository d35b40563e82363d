"""Pooled memory for received data, used again once nothing refers to it.

Fresh memory costs more than the copy into it: the system must first provide and clear its pages (1.2 ms/MB where
this was measured). So large data sections are received into memory that was used before. The pool lends a
`memoryview` whose owner is a fresh object; every view, slice and array made from it keeps that owner alive, and
a weak reference returns the memory when the owner is gone. So a kept view is never overwritten, and no explicit release is
needed.

Up to 1/8 of the lent memory is rounding. Small requests are not pooled. A forked child has copies of its
own (private memory), and views in them stay valid.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque

from ephemeron.communication.fresh_memory import fresh_memory

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
