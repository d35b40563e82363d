"""The host's side of function processes: starting, limiting, killing and keeping them warm.

A `FunctionProcess` serves one invocation at a time. It serves another one only if the last has ended well and has left no
threads and no child processes. Imports run without a CPU quota, as in clouds, and under the memory quota; a forked process
(`fork_server`) is charged for the imports of the process it was forked from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeAlias

import psutil

from ephemeron.errors import CorruptMessage
from ephemeron.events import Status
from ephemeron.functions.cgroups import ControlGroup, Enforcement
from ephemeron.functions.fork_server import ForkedProcess, Forks, Process, spawn
from ephemeron.functions.process_messages import (
    EventMessage,
    HostMessage,
    InvocationReply,
    InvokeMessage,
    InvokeSuccessor,
    Ready,
    Returned,
    Running,
    Start,
    StartFailed,
    encode,
    function_message,
)
from ephemeron.units import MIB

_HAS_PROC = Path("/proc/self/status").exists()
_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()

OnMessage: TypeAlias = Callable[[EventMessage | InvokeSuccessor], None]
_Queued: TypeAlias = Ready | Running | InvocationReply

_LINE = 64 * MIB
_INIT_S = 300.0
_DRAIN_S = 2.0
_WATCH_S = 0.2
_WATCH_CLOSELY_S = 0.03
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "POLARS_MAX_THREADS", "LOKY_MAX_CPU_COUNT")
"""Environment variables that limit the threads of a function process. The last one is that of joblib, by which LightGBM counts cores, whatever OpenMP says."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """End of an invocation in a function process."""

    status: Status
    error: str = ""
    value: Mapping[str, object] = field(default_factory=dict)
    """Result of the code."""


class FunctionProcess:
    """One function process.

    Args:
        enforcement: how limits are imposed on this machine.
        n: number, unique within this host; names the control group and the log.
        memory_mb: its quota.
        vcpus: CPU share while a handler runs.
        env: its environment variables.
        folder: of the run; output goes to `logs/<n>.txt` below it, that of an invocation where its message says (`log`).
        forks: what its process is forked from; None: it is a fresh one.
    """

    def __init__(
        self,
        enforcement: Enforcement,
        n: int,
        *,
        memory_mb: int,
        vcpus: float,
        env: Mapping[str, str],
        folder: Path,
        forks: Forks | None = None,
    ) -> None:
        self.memory_mb = memory_mb
        self.env = env
        self.peak_mb = 0.0
        self.cold = True
        """Nothing has run in it yet."""
        self.idle_since = 0.0
        self.pid = 0
        self.number = n
        self._enforcement = enforcement
        self._vcpus = vcpus
        self._env = with_threads(env, vcpus)
        self._folder = folder
        self._log_name = f"{n}.txt"
        self._group: ControlGroup | None = None
        self._forks = forks
        self._forking: asyncio.Task[ForkedProcess | None] | None = None
        self._starting: asyncio.Task[Ready | StartFailed | None] | None = None
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._killed_as: Status | None = None
        self._on_message: OnMessage = lambda _: None
        self._replies: asyncio.Queue[_Queued | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> asyncio.Task[Ready | StartFailed | None]:
        """Starts the process, once. `start` waits for it."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return self._starting

    async def start(self) -> Ready | StartFailed | None:
        """Starts the process, unless it was begun, and waits for its first message; None if it ended instead, see `outcome`.

        Raises:
            PlatformError: no control group can be made.
            OSError: no process can be made.
        """
        return await asyncio.shield(self.begin())

    async def _start(self) -> Ready | StartFailed | None:
        self._group = self._enforcement.group(os.getpid(), self.number, memory_mb=self.memory_mb)
        ours, theirs = socket.socketpair()
        with theirs:
            log = self._folder / "logs" / f"{self.number}.txt"
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as out:
                self._process = await self._fork(theirs, out)
                if self._process is None and self._killed_as is None:
                    self._process = await spawn(theirs, self._env, out)
        if self._process is None:
            ours.close()
            return None
        self.pid = self._process.pid
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LINE)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._watch())]
        if self._killed_as is None:
            try:
                self._group.add(self.pid)
            except ProcessLookupError:
                pass  # it has ended already, which is noticed below
            self.send(Start())
        else:
            self.kill(self._killed_as)
        first = await self._next(_INIT_S)
        return first if first is None or isinstance(first, (Ready, StartFailed)) else None

    @property
    def alive(self) -> bool:
        """Whether it can take another invocation, perhaps once it has started."""
        if self._process is None:
            return self._killed_as is None and self._starting is not None and not self._starting.done()
        return self._killed_as is None and self._process.returncode is None

    async def serve(self, message: InvokeMessage, on_message: OnMessage) -> InvocationReply | None:
        """Runs one invocation; None if the process died, see `outcome`.

        Args:
            message: the invocation; its lifetime counts from the start of the handler.
            on_message: takes events and requests of the code.
        """
        assert self._group is not None
        self._on_message = on_message
        if message.log is not None:
            self._log_name = Path(message.log).name
        if self.cold:
            self.peak_mb = max(self.peak_mb, self._resident_mb())
        else:
            self._forget_peak()
        self._group.set_cpu(self._vcpus)
        self.send(message)
        reply = await self._next(message.lifetime_s)
        if isinstance(reply, Running):
            reply = await self._next(message.lifetime_s)
        self.cold = False
        self._on_message = lambda _: None
        if reply is None or isinstance(reply, (Running, Ready)):
            return None
        self.peak_mb = max(self.peak_mb, self._resident_mb())
        return reply

    def rest(self) -> None:
        """Lifts the CPU quota between invocations: CPU time is not billed, and only cleaning up uses it."""
        if self._group is not None:  # else it is just starting
            self._group.set_cpu(None)
        self.idle_since = time.monotonic()

    def fit(self, reply: InvocationReply | None) -> bool:
        """Whether another invocation may follow the one with this reply."""
        if not isinstance(reply, Returned) or not reply.reusable or self._killed_as is not None:
            return False
        try:
            return not psutil.Process(self.pid).children()
        except psutil.Error:
            return False

    def send(self, message: HostMessage) -> None:
        """Sends a message; of no effect once the process is dead."""
        assert self._writer is not None
        self._writer.write(encode(message))

    def kill(self, why: Status) -> None:
        """SIGKILL for the process and everything it started. The first reason is kept."""
        self._killed_as = self._killed_as or why
        if self._forking is not None:
            self._forking.cancel()
        if self._process is not None:
            if self._process.returncode is None:  # else the number may belong to another process by now
                _kill_group(self.pid)
            if self._group is not None:
                self._group.kill()

    def outcome(self, reply: InvocationReply | StartFailed | None) -> ProcessOutcome:
        """End of an invocation.

        Args:
            reply: its last message, or the `StartFailed` of the process; None: the process has ended without one.
        """
        if isinstance(reply, Returned):
            return ProcessOutcome(status="ok", value=reply.value)
        if reply is None or self.oom_killed():  # a child of the function may have been killed, and the function went on
            status, error = self._why_dead()
            return ProcessOutcome(status=status, error=error)
        return ProcessOutcome(status="error", error=f"{reply.error}\n{reply.traceback}")

    def oom_killed(self) -> bool:
        """Whether a process in it was killed because memory ran out."""
        return self._killed_as == "out_of_memory" or (self._group is not None and self._group.oom_killed())

    def _why_dead(self) -> tuple[Status, str]:
        """Status and error, once the process has ended on its own or by `kill`."""
        if self._killed_as in ("timed_out", "cancelled"):
            return self._killed_as, "killed at its lifetime limit" if self._killed_as == "timed_out" else "cancelled"
        if self.oom_killed():
            self.peak_mb = max(self.peak_mb, float(self.memory_mb))
            return "out_of_memory", f"killed at its memory quota of {self.memory_mb} MB"
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return "lost", f"killed by {signal.Signals(-code).name}"
        return "lost", f"ended with exit code {code} in the midst of its work; see logs/{self._log_name}"

    async def dispose(self) -> None:
        """Kills what is left and removes the control group."""
        self.kill("cancelled" if self._process is None or self._process.returncode is None else "lost")
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._process is not None:
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        end = time.monotonic() + _DRAIN_S
        while self._group is not None and not self._group.remove() and time.monotonic() < end:
            self._group.kill()
            await asyncio.sleep(0.01)

    async def _fork(self, connection: socket.socket, out: IO[bytes]) -> ForkedProcess | None:
        """None: forking does not work here, or it was killed meanwhile."""
        if self._forks is None or self._killed_as is not None:
            return None
        self._forking = asyncio.create_task(self._forks.fork(self._env, connection, out))
        await asyncio.wait([self._forking])
        return None if self._forking.cancelled() else self._forking.result()

    async def _next(self, limit_s: float) -> _Queued | None:
        try:
            return await asyncio.wait_for(self._replies.get(), limit_s)
        except TimeoutError:
            _log.info("process %d is killed at its time limit of %g s", self.pid, limit_s)
            self.kill("timed_out")
            return await self._replies.get()  # a message that was sent before the kill counts

    async def _read(self, reader: asyncio.StreamReader) -> None:
        assert self._process is not None
        lines = asyncio.create_task(self._read_lines(reader))
        await self._process.wait()
        # Its children may hold the connection open; then the stream ends when they do.
        _kill_group(self.pid)
        self.kill(self._killed_as or "lost")
        await asyncio.wait([lines], timeout=_DRAIN_S)
        lines.cancel()
        self._replies.put_nowait(None)

    async def _read_lines(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = function_message(line)
                if isinstance(message, (EventMessage, InvokeSuccessor)):
                    self._on_message(message)
                else:
                    self._replies.put_nowait(message)
        except (OSError, ValueError, CorruptMessage) as e:
            _log.warning("process %d is killed: its messages cannot be read: %s", self.pid, e)
            self.kill("lost")

    async def _watch(self) -> None:
        """Samples memory for the peak, and kills above the quota where the kernel does not."""
        close = self._enforcement.kind == "none"
        while True:
            used = self._resident_mb(tree=close)
            self.peak_mb = max(self.peak_mb, used)
            if close and used > self.memory_mb:
                _log.info("process %d is killed: %.0f MB are above its quota of %d MB", self.pid, used, self.memory_mb)
                self.kill("out_of_memory")
                return
            await asyncio.sleep(_WATCH_CLOSELY_S if close else _WATCH_S)

    def _resident_mb(self, *, tree: bool = False) -> float:
        """Peak so far where the kernel keeps one, else the present size."""
        try:
            if tree:
                return float(sum(p.memory_info().rss for p in family(self.pid))) / MIB
            if _HAS_PROC:
                for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        return int(line.split()[1]) / 1024
                return 0.0
            return float(psutil.Process(self.pid).memory_info().rss) / MIB
        except (psutil.Error, OSError):
            return 0.0

    def _forget_peak(self) -> None:
        """A warm process starts its peak anew."""
        self.peak_mb = 0.0
        try:
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        except OSError:
            pass  # then the peak is that of the process, which is an upper bound


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started, found without a look at the machine's other processes where the kernel lists children.

    Raises:
        psutil.Error, OSError: it has ended.
    """
    first = psutil.Process(pid)
    if not _LISTS_CHILDREN:
        return [first, *first.children(recursive=True)]
    pids, found = [pid], [first]
    for parent in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            for listed in Path(f"/proc/{parent}/task").glob("*/children"):
                pids += map(int, listed.read_text().split())
    for child in pids[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(child))
    return found


def with_threads(env: Mapping[str, str], vcpus: float) -> dict[str, str]:
    """Environment variables of a function process: it has as many threads as whole cores, at least one."""
    return {**env, **dict.fromkeys(THREADS, str(max(1, int(vcpus))))}


class WarmPool:
    """Idle environments by memory quota and environment variables. `ProcessSnapshot` removes the code of earlier invocations.

    Args:
        make: a new environment for a memory quota and environment variables; not started.
        idle_s: after which an idle one is given up.
    """

    def __init__(self, make: Callable[[int, Mapping[str, str]], FunctionProcess], *, idle_s: float) -> None:
        self._make = make
        self._idle_s = idle_s
        self._idle: list[FunctionProcess] = []
        self._spares: list[FunctionProcess] = []
        """Those that `prepare` has begun, and that were neither taken nor given up."""

    def take(self, memory_mb: int, env: Mapping[str, str]) -> FunctionProcess:
        """The most recently used warm environment of that quota and those variables, else a new one that is to be started."""
        environment = self._find(memory_mb, env)
        if environment is None:
            return self._make(memory_mb, env)
        self._idle.remove(environment)
        self._spares = [e for e in self._spares if e is not environment]
        return environment

    def prepare(self, memory_mb: int, env: Mapping[str, str]) -> None:
        """Begins an environment if none is idle. One that has died by itself is not replaced: the next one would, too."""
        if self._find(memory_mb, env) is None and not any(e.memory_mb == memory_mb and e.env == env for e in self._spares):
            environment = self._make(memory_mb, env)
            environment.begin()
            self._spares.append(environment)
            self.give(environment)

    def give(self, environment: FunctionProcess) -> None:
        """Keeps an environment for the next invocation: a fit one, or one that was begun."""
        environment.rest()
        self._idle.append(environment)

    async def expire(self, *, everything: bool = False, keep: Collection[tuple[int, Mapping[str, str]]] = ()) -> None:
        """Gives up what has been idle for too long, but the last environment of each quota and variables in `keep`."""
        now = time.monotonic()
        kept = [self._find(memory_mb, env) for memory_mb, env in keep]
        old = [e for e in self._idle if everything or not e.alive or (now - e.idle_since > self._idle_s and not any(e is k for k in kept))]
        for environment in old:
            self._idle.remove(environment)
            if environment.alive:
                self._spares = [e for e in self._spares if e is not environment]
        await asyncio.gather(*(e.dispose() for e in old))

    def _find(self, memory_mb: int, env: Mapping[str, str]) -> FunctionProcess | None:
        """The environment that was given last."""
        fitting = (e for e in reversed(self._idle) if e.memory_mb == memory_mb and e.env == env and e.alive)
        return next(fitting, None)

    def __len__(self) -> int:
        return len(self._idle)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # empty, or (macOS) only zombies
