"""The host's side of fork servers: one for all functions of a run with the same environment variables.

A server that is killed or stops answering is replaced at the next start; functions that it has forked go on. Where forking
does not work (no Linux, an old kernel, imports that fail or start threads), functions get fresh processes, and the log of the
host says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

import psutil

from ephemeron.config import own_processes
from ephemeron.config.typed import build
from ephemeron.errors import JobError
from ephemeron.functions.forking import ForkReply

_log = logging.getLogger(__name__)
_START_S = 300.0
_ANSWER_S = 30.0
"""For a fork, which takes some milliseconds."""
_ATTEMPTS = 2
_PR_SET_CHILD_SUBREAPER = 36


class Process(Protocol):
    """A child process: asyncio's, or a forked one."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...


async def spawn(connection: socket.socket, env: Mapping[str, str], out: IO[bytes], *more: str) -> asyncio.subprocess.Process:
    """Starts a fresh process of `ephemeron.functions.function_main`.

    Raises:
        OSError: no process can be made.
    """
    return await asyncio.create_subprocess_exec(
        *own_processes.command(
            "function", str(connection.fileno()), str(os.getpid()), *more, python=env.get(own_processes.PYTHON_VARIABLE, "")
        ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=env,
        cwd="/",
        pass_fds=[connection.fileno()],
        start_new_session=True,
    )


class ForkedProcess:
    """A process that a server has forked, and whose parent this process is.

    Raises:
        OSError: there is no such child.
    """

    def __init__(self, pid: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _reap(self) -> None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self.returncode = os.waitstatus_to_exitcode(status)
            self._ended.set()


class _Gone(Exception):
    """The server has ended, or does not answer and was killed."""


class _Refused(Exception):
    """Forking does not work here; says why."""


class _Server:
    """A fork server that is ready. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.process = process
        self._control = control
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def start(cls, env: Mapping[str, str], log: Path) -> _Server:
        """Starts one and waits until its imports are made.

        Raises:
            _Gone: it was killed.
            _Refused: it cannot serve; its log says more.
            OSError: no process can be made.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, log.open("ab") as out:
            server = cls(await spawn(theirs, env, out, "forks"), ours)
        try:
            await server._reply(_START_S)
        except BaseException:
            await server.close()
            raise
        return server

    async def fork(self, connection: socket.socket, log: IO[bytes]) -> ForkedProcess:
        """Has a process forked, which takes these two descriptors. If the caller is cancelled, the process ends by itself.

        Raises:
            _Gone, _Refused: it cannot be had.
        """
        descriptors = [os.dup(connection.fileno()), os.dup(log.fileno())]
        return await asyncio.shield(asyncio.create_task(self._fork(descriptors)))

    async def close(self) -> None:
        """Kills it; functions go on."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)  # asyncio's `kill` reaps what is dead, which asyncio then misses
        await self.process.wait()
        self._control.close()

    async def _fork(self, descriptors: list[int]) -> ForkedProcess:
        try:
            async with self._one_at_a_time:
                try:
                    socket.send_fds(self._control, [b"f"], descriptors)
                except OSError as e:
                    await self.close()
                    raise _Gone from e
                reply = await self._reply(_ANSWER_S)
        finally:
            for fd in descriptors:
                os.close(fd)
        try:
            return ForkedProcess(reply.pid)
        except OSError as e:
            raise _Refused(f"process {reply.pid} is not a child of the host") from e

    async def _reply(self, limit_s: float) -> ForkReply:
        try:
            said = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._control, 4096), limit_s)
        except (OSError, TimeoutError):
            said = b""
        try:
            reply = build(ForkReply, json.loads(said), where="reply of a fork server")
        except (ValueError, JobError):
            await self.close()
            raise _Gone from None
        if reply.kind == "refused":
            raise _Refused(reply.text)
        return reply


class Forks:
    """Fork servers of one host, started when they are needed. Made by `make`.

    Args:
        logs: folder for the output of the servers.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._servers: dict[frozenset[tuple[str, str]], asyncio.Task[_Server]] = {}
        self._given_up: set[frozenset[tuple[str, str]]] = set()
        self._closed = False

    @classmethod
    def make(cls, logs: Path) -> Forks | None:
        """None where this system cannot fork so. Afterwards this process is the parent of orphaned descendants: see `reap`."""
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            return None
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return None
        failed = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return None if failed else cls(logs)

    @property
    def pids(self) -> list[int]:
        """Processes of the servers that are ready."""
        ready = [t for t in self._servers.values() if t.done() and not t.cancelled() and t.exception() is None]
        return [t.result().process.pid for t in ready if t.result().process.returncode is None]

    def begin(self, env: Mapping[str, str]) -> asyncio.Task[_Server]:
        """The server for these environment variables, which is started if there is none."""
        key = frozenset(env.items())
        if key not in self._servers:
            log = self._logs / f"fork-server-{len(self._servers) + 1}.txt"
            self._servers[key] = asyncio.create_task(_Server.start(env, log))
        return self._servers[key]

    async def fork(self, env: Mapping[str, str], connection: socket.socket, log: IO[bytes]) -> ForkedProcess | None:
        """A process with its imports made, which waits for `Start`; None: forking does not work.

        Args:
            env: its environment variables.
            connection: the function's end.
            log: file for its output.
        """
        key = frozenset(env.items())
        for _ in range(_ATTEMPTS):
            if self._closed or key in self._given_up:
                return None
            starting = self.begin(env)
            try:
                server = await asyncio.shield(starting)
                return await server.fork(connection, log)
            except _Gone:
                _log.warning("a fork server was killed or did not answer; another one is started")
                if self._servers.get(key) is starting:
                    del self._servers[key]
            except (_Refused, OSError) as e:
                if key not in self._given_up:
                    _log.warning("functions get fresh processes, forking does not work: %s", e)
                self._given_up.add(key)
        return None

    def reap(self) -> None:
        """Reaps orphaned zombies. Session leaders are left out: these were started here, and have their own waits."""
        with contextlib.suppress(ChildProcessError, psutil.Error):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
            for child in psutil.Process().children():
                with contextlib.suppress(ProcessLookupError, ChildProcessError, psutil.Error):
                    if child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) != child.pid:
                        os.waitpid(child.pid, os.WNOHANG)

    async def close(self) -> None:
        """Ends the servers; `fork` gives None from here on."""
        self._closed = True
        for starting in self._servers.values():
            starting.cancel()
        for end in await asyncio.gather(*self._servers.values(), return_exceptions=True):
            if isinstance(end, _Server):
                await end.close()
