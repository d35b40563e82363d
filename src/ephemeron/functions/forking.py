"""The fork server: a process that has imported what functions need, does nothing else, and is forked for each function.

The host starts it like a function (`function_main`), with `forks` as third argument. The host asks for a process with one
byte and two descriptors (the function's connection and its log), over a socket that preserves message boundaries. The server
answers each request, and the start itself, with a `ForkReply`.

- **Parent of a function.** The host, which is a subreaper (prctl(2)): the server forks twice, and the process in
  between ends at once. So the host reaps its functions itself, they die with it, and they outlive the server.
- **Memory of a function.** It is charged for everything it holds, as if it had made the imports itself: before its code runs,
  and within its memory quota, `take_over` copies each private page of the server and maps each page of a file that the
  server had mapped. The kernel charges a shared page to the first process that touches it, and a copy to the writer.
- **State that a function must not inherit.** Threads: a server with more than one refuses to fork. Random states:
  drawn anew. Descriptors: the server keeps only its own connection, which functions close.

The same ideas: the zygotes of Android and of SOCK (Oakes et al., USENIX ATC 2018), Python's `multiprocessing.forkserver`.
"""

from __future__ import annotations

import array
import ctypes
import json
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_PROT_READ, _PROT_WRITE = 1, 2
_PRESENT, _OF_FILE = 1 << 63, 1 << 61
"""Bits of an entry of /proc/PID/pagemap; private copies of a file's pages do not count as the file's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkReply:
    """Answer of the server."""

    kind: Literal["ready", "forked", "refused"]
    pid: int = 0
    """Process id of the server once it is ready, or of the forked process; 0 if refused."""
    text: str = ""
    """Reason of a refusal."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Adjacent resident pages of one mapping, all of a file or all private."""

    start: int
    length: int
    of_file: bool
    writable: bool


def serve_forks(control: socket.socket, prepare: Callable[[], None]) -> tuple[socket.socket, list[Pages]]:
    """Forks a process for each request, until the host closes the connection; returns in these processes only.

    Args:
        control: the server's connection to the host.
        prepare: makes the imports.

    Returns: the function's connection to the host, and the pages for `take_over`.

    Raises:
        Exception: any error of `prepare`, after the host was told.
        OSError: this kernel cannot copy pages in advance (Linux can since 5.14); the host was told.
    """
    try:
        prepare()
        libc = _libc()
        _try_to_populate(libc)
        libc.fflush(None)  # or each function would write the rest of the server's output
        pages = list(_resident())
    except Exception as e:
        _send(control, ForkReply(kind="refused", text=f"{type(e).__name__}: {e}"[:1_000]))
        raise
    _send(control, ForkReply(kind="ready", pid=os.getpid()))
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 64, 2, socket.MSG_CMSG_CLOEXEC)
        if not request:
            os._exit(0)
        reply = _forked()
        if reply is None:
            control.close()
            connection, log = descriptors
            for fd in (1, 2):
                os.dup2(log, fd)
            os.close(log)
            return socket.socket(fileno=connection), pages
        for fd in descriptors:
            os.close(fd)
        _send(control, reply)


def take_over(pages: list[Pages]) -> None:
    """Copies inherited memory into this process, and draws random states anew."""
    libc = _libc()
    for p in pages:
        # A page that is no longer resident is no loss, so the results of these calls are ignored.
        if p.of_file:
            libc.madvise(p.start, p.length, _MADV_POPULATE_READ)
        elif p.writable:
            libc.madvise(p.start, p.length, _MADV_POPULATE_WRITE)
        elif libc.mprotect(p.start, p.length, _PROT_READ | _PROT_WRITE) == 0:  # relocations
            libc.madvise(p.start, p.length, _MADV_POPULATE_WRITE)
            libc.mprotect(p.start, p.length, _PROT_READ)
    numpy_random: Any = sys.modules.get("numpy.random")  # NumPy imports it on first use
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.random.default_generator.seed()


def _forked() -> ForkReply | None:
    """Answer to a request; None in the process that was forked for it."""
    threads = max(len(os.listdir("/proc/self/task")), threading.active_count())
    if threads > 1:
        return ForkReply(kind="refused", text=f"imports have started {threads - 1} threads")
    try:
        pid = fork_away()
    except OSError as e:
        return ForkReply(kind="refused", text=f"no process can be forked: {e}")
    return ForkReply(kind="forked", pid=pid) if pid else None


def fork_away(*, leads_session: bool = True) -> int:
    """Forks a process whose parent is the nearest subreaper; returns 0 in it.

    Args:
        leads_session: it leads a session of its own.

    Raises:
        OSError: the kernel does not let us.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            last = os.fork()
        except OSError:
            os._exit(1)
        if last:
            os._exit(0)
        os.close(reading)
        if leads_session:
            os.setsid()
        os.write(writing, str(os.getpid()).encode())
        os.close(writing)
        return 0
    os.close(writing)
    with open(reading, "rb", buffering=0) as said:
        pid = int(said.read(32) or 0)
    os.waitpid(between, 0)  # from here on the subreaper is the parent
    if not pid:
        raise OSError("it ended at once")
    return pid


def _resident() -> Iterator[Pages]:
    """Pages of private mappings that are in memory."""
    size = mmap.PAGESIZE
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for line in lines:
            span, access, _, _, _, *name = line.split(None, 5)
            writable = access[1] == "w"
            if access[0] != "r" or access[3] != "p" or (name and name[0].startswith("[v")):  # the kernel's own
                continue
            start, end = (int(address, 16) for address in span.split("-"))
            pagemap.seek(start // size * 8)
            entries = array.array("Q", pagemap.read((end - start) // size * 8))
            kinds = [bool(e & _OF_FILE) if e & _PRESENT else None for e in entries]
            first = 0
            for i in range(1, len(kinds) + 1):
                if i == len(kinds) or kinds[i] != kinds[first]:
                    of_file = kinds[first]
                    if of_file is not None and (of_file or writable or access[2] != "x"):
                        yield Pages(start + first * size, (i - first) * size, of_file, writable)
                    first = i


def _try_to_populate(libc: Any) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        here = ctypes.c_char.from_buffer(page)
        failed = libc.madvise(ctypes.addressof(here), mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        del here  # or the mapping cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "this kernel cannot copy pages in advance")


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _send(control: socket.socket, reply: ForkReply) -> None:
    try:
        control.send(json.dumps(asdict(reply)).encode())
    except OSError:
        os._exit(0)  # the host is gone
