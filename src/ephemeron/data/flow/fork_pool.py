"""Loader processes of this machine, which load chunks of samples and may die.

Each chunk has exactly one result: a chunk whose loader died is loaded again by another one, a chunk that is overdue (its loader
was stopped, or hangs) is given to a second one, and the first result counts. A sample that keeps killing its loader is found by
dividing its chunk, and reported as failed.

Loaders are forked, so flows need not be pickled and imports are paid for once. They are forked from a process (the fork server)
that was itself forked when the pool was made and has done nothing since: loaders that are forked in the middle of training, beside
PyTorch's threads and those of this package, may hang. Results come back as pickle protocol 5 with arrays and tensors out of band.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import statistics
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn, TypeAlias

from ephemeron.data.flow.collate import Collator, Stacking
from ephemeron.data.flow.pickle_socket import Arena, PickleSocket
from ephemeron.data.flow.sample_loader import COLLATE, NETWORK, SampleLoader, SampleRequest, StageTimings
from ephemeron.data.randomness import mark_loader_process
from ephemeron.errors import JobError, LoadersLost, SampleFailed
from ephemeron.user_code import guarded, never_interrupted, text_of

AT_ONCE = 2
"""Chunks of a loader: one under way, one queued, so that it never waits for the trainer."""
STRIKES = 3
"""Loaders that a single sample may kill before it counts as failed."""
DEATHS_IN_A_ROW = 16
LEAST_LEASE_S = 30.0
_SIZE = struct.Struct("!Q")
_REMEMBERED = 1_000
_BUFFER = 4 << 20
_PR_SET_PDEATHSIG = 1
_FORKING = threading.Lock()
"""Prevents forks while another pool has a loader's end of a connection open, which would hide the loader's death."""


Collate: TypeAlias = Callable[[list[Any]], Any] | None
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Collated:
    """A batch that its loader has collated."""

    value: Any
    samples: int


@dataclass(slots=True)
class ChunkDone:
    """A chunk's result."""

    chunk: int
    results: Any
    """For each item its sample or `SampleFailed`; or `Collated` in place of them all."""
    seconds: StageTimings
    nbytes: int


@dataclass(slots=True)
class _PoolChunk:
    number: int
    items: Sequence[SampleRequest]
    strikes: int = 0
    assigned_at: float = 0.0
    parent: tuple[int, int] | None = None
    """For a piece: the chunk that was divided, and the place in it."""


@dataclass(slots=True)
class _Loader:
    sock: socket.socket
    pid: int
    line: PickleSocket
    chunks: deque[_PoolChunk] = field(default_factory=deque)
    overdue: bool = False
    """Whether it is overdue, so that its chunks have been given to others."""


class LoaderPool:
    """Loader processes, and a thread that distributes chunks to them.

    Args:
        loading: the flow with its dataset.
        loaders: number of processes.
        collate: makes a batch of each chunk, in the loader, unless one of its samples failed.
        lease_s: time after which a chunk is given to a second loader; None: twenty times the usual time of a chunk, at
            least half a minute.

    Raises:
        JobError: this system cannot fork processes.
    """

    def __init__(
        self, loading: SampleLoader, loaders: int, *, lease_s: float | None = None, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        if not hasattr(os, "fork"):
            raise JobError("loader processes need fork, which this system lacks", remedy="use workers=0")
        self.lost = 0
        """Loaders that died."""
        self.under_way = 0
        """Chunks submitted whose results have not been taken."""
        self._lease_s = lease_s
        self._took: deque[float] = deque(maxlen=32)
        self._todo: deque[_PoolChunk] = deque()
        self._finished: set[int] = set()
        self._pieces: dict[int, list[Any]] = {}
        self._deaths = 0
        self._results: queue.SimpleQueue[ChunkDone | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._server, self._server_pid = _start_fork_server(loading, collate)
        self._loaders = [self._start() for _ in range(loaders)]
        _log.debug("%d loader processes are started for flow %s", loaders, loading.flow.name)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ephemeron-loaders", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the loaders."""
        with self._lock:
            return [loader.pid for loader in self._loaders]

    def submit(self, number: int, items: Sequence[SampleRequest]) -> None:
        """Requests a chunk; numbers are the caller's and unique. Earlier chunks are loaded first."""
        self.under_way += 1
        with self._lock:
            self._todo.append(_PoolChunk(number, items))
        self._wake.send(b"w")

    def announce(self, epoch: int, seed: int, order: Callable[[], Any], *, ordered: bool) -> None:
        """Does nothing: this pool keeps no samples."""

    def result(self) -> ChunkDone:
        """The next chunk that is finished, in any order.

        Raises:
            LoadersLost: loaders die repeatedly.
        """
        found = self._results.get()
        if isinstance(found, BaseException):
            raise found
        self.under_way -= 1
        return found

    def close(self) -> None:
        """Kills all loaders."""
        if self._closed:
            return
        self._closed = True
        self._wake.send(b"c")
        self._thread.join()
        for loader in self._loaders:
            loader.sock.close()
            _kill(loader.pid)
        self._server.close()
        _kill(self._server_pid)  # pools that were made later hold its connection open
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._server_pid, 0)
        self._wake.close()
        self._woken.close()
        self._results.put(LoadersLost("the loaders have been closed"))  # for a caller that still waits in another thread

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._assign()
                self._receive(self._wait())
                self._look_for_overdue()
        except BaseException as e:  # noqa: BLE001 - it is raised in the consumer, which would wait for ever without it
            self._results.put(e)

    def _wait(self) -> list[socket.socket]:
        readable = [self._woken, *(loader.sock for loader in self._loaders)]
        return [sock for sock in wait(readable, timeout=1.0) if isinstance(sock, socket.socket)]

    def _assign(self) -> None:
        with self._lock:
            for loader in self._loaders:
                while self._todo and len(loader.chunks) < AT_ONCE and not loader.overdue:
                    if loader.chunks and any(not other.chunks and not other.overdue for other in self._loaders):
                        break  # idle loaders come first
                    chunk = self._todo.popleft()
                    if chunk.number in self._finished:
                        continue
                    chunk.assigned_at = time.monotonic()
                    loader.chunks.append(chunk)
                    with contextlib.suppress(OSError):  # dead: detected when its connection is read
                        loader.line.send((chunk.number, chunk.items))

    def _receive(self, readable: list[socket.socket]) -> None:
        for sock in readable:
            if sock is self._woken:
                sock.recv(4096)
                continue
            loader = next(x for x in self._loaders if x.sock is sock)
            try:
                (number, results, seconds), nbytes = loader.line.receive()
            except (OSError, EOFError):
                self._replace(loader)
                continue
            self._deaths = 0
            chunk = loader.chunks.popleft()
            assert chunk.number == number
            loader.overdue = False
            if loader.chunks:
                loader.chunks[0].assigned_at = time.monotonic()
            self._finish(chunk, results, seconds, nbytes)

    def _finish(self, chunk: _PoolChunk, results: list[Any], seconds: StageTimings, nbytes: int) -> None:
        if chunk.number in self._finished:
            return  # a second loader was quicker
        self._took.append(time.monotonic() - chunk.assigned_at)
        self._finished.add(chunk.number)
        if len(self._finished) > _REMEMBERED:  # only chunks given to two loaders can finish twice
            held = {c.number for loader in self._loaders for c in loader.chunks}
            self._finished &= held | {c.number for c in self._todo}
        if chunk.parent is None:
            self._results.put(ChunkDone(chunk.number, results, seconds, nbytes))
            return
        number, place = chunk.parent
        gathered = self._pieces[number]
        gathered[place] = results[0]
        if not any(piece is _MISSING for piece in gathered):
            self._finished.add(number)
            self._results.put(ChunkDone(number, self._pieces.pop(number), seconds, nbytes))

    def _replace(self, loader: _Loader) -> None:
        """Replaces a loader that has died, and gives its chunks to others."""
        self.lost += 1
        _log.warning("loader process %d died and is replaced", loader.pid)
        self._deaths += 1
        loader.sock.close()
        if self._deaths >= DEATHS_IN_A_ROW + STRIKES * len(self._loaders):
            raise LoadersLost(f"{self._deaths} loader processes died in a row; is there enough memory for them?")
        again = [chunk for chunk in loader.chunks if chunk.number not in self._finished]
        for i, chunk in enumerate(reversed(again)):
            if i == len(again) - 1:  # the chunk that was under way
                self._strike(chunk)
            else:
                self._todo.appendleft(chunk)
        with self._lock:
            self._loaders[self._loaders.index(loader)] = self._start()

    def _strike(self, chunk: _PoolChunk) -> None:
        chunk.strikes += 1
        if chunk.strikes < STRIKES:
            self._todo.appendleft(chunk)
        elif len(chunk.items) > 1:
            self._pieces[chunk.number] = [_MISSING] * len(chunk.items)
            for place, item in reversed(list(enumerate(chunk.items))):
                number = -(chunk.number * 1_000_000 + place + 1)  # callers use numbers from 0
                self._todo.appendleft(_PoolChunk(number, [item], parent=(chunk.number, place)))
        else:
            (item,) = chunk.items
            _log.warning("sample %d has killed its loader process %d times and counts as failed", item.index, STRIKES)
            failed = SampleFailed(f"killed its loader process {STRIKES} times", flow="", dataset="", index=item.index, step="?")
            self._finish(chunk, [failed], StageTimings(), 0)

    def _look_for_overdue(self) -> None:
        now, lease = time.monotonic(), self._lease()
        for loader in self._loaders:
            if loader.chunks and not loader.overdue and now - loader.chunks[0].assigned_at > lease:
                loader.overdue = True
                _log.warning("loader process %d has not answered for %.0f s; others get its chunks", loader.pid, lease)
                for chunk in reversed(loader.chunks):
                    if chunk.number not in self._finished:
                        self._todo.appendleft(_PoolChunk(chunk.number, chunk.items, chunk.strikes, parent=chunk.parent))
        if self._loaders and all(loader.overdue for loader in self._loaders):
            for loader in list(self._loaders):  # no loader is left to take over
                _kill(loader.pid)

    def _lease(self) -> float:
        if self._lease_s is not None:
            return self._lease_s
        return max(LEAST_LEASE_S, 20 * statistics.median(self._took)) if self._took else 10 * LEAST_LEASE_S

    def _start(self) -> _Loader:
        with _FORKING:
            ours, theirs = socket.socketpair()
            with theirs:
                for sock in (ours, theirs):  # whole chunks, so that a loader need not wait until they are read
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
                socket.send_fds(self._server, [b"f"], [theirs.fileno()])
        answer = self._server.recv(8)
        if len(answer) < 8:
            raise LoadersLost("no loader process can be started")
        return _Loader(ours, _SIZE.unpack(answer)[0], PickleSocket(ours))


class _Missing:
    pass


_MISSING = _Missing()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


# -- processes ----------------------------------------------------------------------------------------------


def _start_fork_server(loading: SampleLoader, collate: Collate) -> tuple[socket.socket, int]:
    """Starts a fork server: a process that forks loaders on request from its present state."""
    with _FORKING:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _child(lambda: _run_fork_server(theirs, loading, collate), [ours])
        theirs.close()
    return ours, pid


def _run_fork_server(sock: socket.socket, loading: SampleLoader, collate: Collate) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # loaders are not waited for
    _begin_store_process(loading)
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1, 1)
        if not data:
            return  # the trainer has ended, and the loaders end with this process
        connection = socket.socket(fileno=fds[0])
        pid = os.fork()
        if pid == 0:
            _child(partial(_serve, connection, loading, collate), [sock], dies_with_parent=True)
        connection.close()
        sock.sendall(_SIZE.pack(pid))


def _begin_store_process(loading: SampleLoader) -> None:
    """Starts one process that reads object stores for all loaders, if the dataset is in one."""
    from ephemeron.data.catalog import DatasetReader

    if isinstance(loading.dataset, DatasetReader) and not loading.dataset.is_local:
        from ephemeron.data.catalog import objects, store_process

        if objects.is_forked():
            store_process.begin()


def _child(work: Callable[[], None], not_ours: list[socket.socket], *, dies_with_parent: bool = False) -> NoReturn:
    """Runs `work` in a process that was just forked, and ends it."""
    status = 1
    try:
        for sock in not_ours:
            sock.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which closes the pool
        if dies_with_parent and sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        work()
        status = 0
    finally:
        os._exit(status)


def _serve(sock: socket.socket, loading: SampleLoader, collate: Collate) -> None:
    mark_loader_process()
    never_interrupted()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    line, sending = PickleSocket(sock), 0.0
    collator = None if collate is None else Collator(collate)
    while True:
        try:
            (number, items), _ = line.receive()
        except (OSError, EOFError):
            return
        loading.seconds = StageTimings()
        loading.seconds.add(NETWORK, sending)  # of the chunk before: that of this one is not known yet
        results: Any = loading.load(items)
        arena = None
        if collator is not None and number >= 0:  # the trainer collates the pieces of a divided chunk
            results, arena = collated(results, items, collator, loading, line)
        began = time.perf_counter()
        try:
            line.send((number, results, loading.seconds), arena)
        except pickle.PicklingError as e:
            line.send((number, [_unsendable(loading, item, e) for item in items], loading.seconds))
        sending = time.perf_counter() - began
        del results, arena, items


def collated(
    results: list[Any], items: Sequence[SampleRequest], collator: Collator, loading: SampleLoader, line: PickleSocket
) -> tuple[Any, Arena | None]:
    """The batch; or the uncollated samples, if one of them or collating failed: the trainer raises the error."""
    if any(isinstance(result, SampleFailed) for result in results):
        return results, None
    began = time.perf_counter()
    try:
        with guarded():
            if isinstance(collator.function, Stacking):
                value, arena = collator.function.into_arena(results, line)
            else:
                value, arena = collator(results, items), None
        return Collated(value, len(results)), arena
    except Exception:  # noqa: BLE001 - it is raised again in the trainer
        return results, None
    finally:
        loading.seconds.add(COLLATE, time.perf_counter() - began)


def _unsendable(loading: SampleLoader, item: SampleRequest, e: Exception) -> SampleFailed:
    return SampleFailed(
        f"its result cannot be sent: {text_of(e)}",
        flow=loading.flow.name,
        dataset=str(loading.flow.source),
        index=item.index,
        step=loading.flow.steps[-1].name if loading.flow.steps else "read",
    )
