"""Object stores for forked processes, which send their requests to a process that was never forked.

obstore's threads do not survive `fork`, and loaders are forked (so that flows need not be pickled). A forked process that
reads an object store therefore starts this module in a new process, by `exec`, and sends requests over a Unix socket;
children forked later use the same one (a pool of loaders starts one for all of them, `begin`). Its sockets are unnamed,
so only descendants can connect, and it ends with the last of them. It takes 0.2 to 0.6 s to start and 30 to 45 MB; a
request adds 0.15 ms per call and 3 ms per MB (development machine, 2 cores), less than the latency of a store.

A request is a pickled (number, url, method, arguments), its answer (number, kind, value), both prefixed by their length.
A process that dies is replaced and the request repeated: reading is idempotent, and so is create-only writing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ephemeron.errors import DatasetUnreachable, FileVersionChanged

_LENGTH = struct.Struct("!Q")
_TRIES = 3
MAX_IN_FLIGHT = 8 << 20
"""Bytes under way in a connection, including its socket."""
_MAIN = "import sys; sys.path.append(sys.argv[1]); from ephemeron.data.catalog.store_server import main; main(int(sys.argv[2]))"

_control: socket.socket | None = None
"""Socket that passes the other ends of connections to the store process; forked children inherit it."""
_connections: dict[tuple[int, int], asyncio.Task[_Connection]] = {}
"""Connections by process and event loop."""
_starting = threading.Lock()
_log = logging.getLogger(__name__)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: globals().update(_starting=threading.Lock(), _connections={}))


async def call(url: str, method: str, *arguments: Any) -> Any:
    """The result of a method of the `Files` at a URL, called in a process that may use object stores.

    Raises:
        FileNotFoundError, FileVersionChanged, DatasetUnreachable, JobError: raised by that method.
        DatasetUnreachable: store processes die repeatedly.
    """
    here = os.getpid(), id(asyncio.get_running_loop())
    for _ in range(_TRIES):
        opening = _connections.get(here) or _connections.setdefault(here, asyncio.ensure_future(_open()))
        try:
            kind, value = await (await asyncio.shield(opening)).ask(url, method, arguments)
        except ConnectionError:
            _log.warning("the process that reads object stores has died; %s is repeated", method)
            if _connections.get(here) is opening:
                del _connections[here]
            continue
        if kind == "absent":
            raise FileNotFoundError(value)
        if kind == "changed":
            raise FileVersionChanged(*value)
        if kind == "refused":
            raise pickle.loads(value)
        if kind == "failed":
            raise DatasetUnreachable(f"the process that reads object stores failed: {value}", file=url)
        return value
    raise DatasetUnreachable(f"the process that reads object stores died {_TRIES} times in a row", file=url)


def begin() -> None:
    """Starts a store process for this process and all that will be forked from it.

    Raises:
        OSError: no process can be started.
    """
    global _control
    with _starting:
        _control = _started()


# -- connections --------------------------------------------------------------------------------------------


class _Connection:
    """Calls of one event loop, any number at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._number = 0
        self._task = asyncio.ensure_future(self._listen())

    async def ask(self, url: str, method: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
        """The answer to a call. Raises ConnectionError if the connection ends before."""
        if self._task.done():
            raise ConnectionError
        self._number += 1
        number = self._number
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            send_message(self._writer, (number, url, method, arguments))
            await self._writer.drain()
            found: tuple[str, Any] = await answer
            return found
        finally:
            self._waiting.pop(number, None)

    async def _listen(self) -> None:
        try:
            while True:
                number, kind, value = await receive_message(self._reader)
                answer = self._waiting.get(number)
                if answer is not None and not answer.done():
                    answer.set_result((kind, value))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionError())


async def _open() -> _Connection:
    sock = await asyncio.to_thread(_connect)
    return _Connection(*await asyncio.open_connection(sock=sock, limit=MAX_IN_FLIGHT))


def _connect() -> socket.socket:
    """A connection to the store process, which is started if it does not exist or has died."""
    global _control
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_IN_FLIGHT)
    with theirs, _starting:
        for _ in range(2):
            _control = _control or _started()
            try:
                socket.send_fds(_control, [b"c"], [theirs.fileno()])
                break
            except OSError:
                _control.close()
                _control = None
    ours.setblocking(False)
    return ours


def _started() -> socket.socket:
    ours, theirs = socket.socketpair()
    root = str(Path(__file__).parents[3])
    with theirs:
        # Not waited for: it ends when the last process that could call it has ended.
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, root, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        _log.info("process %d is started to read object stores", process.pid)
        process.returncode = 0
    return ours


# -- messages ----------------------------------------------------------------------------------------------


def send_message(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message, protocol=5)
    writer.write(_LENGTH.pack(len(data)))
    writer.write(data)


async def receive_message(reader: asyncio.StreamReader) -> Any:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(size))
