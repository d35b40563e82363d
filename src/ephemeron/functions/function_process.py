"""The host's side of function processes: starting, limiting, killing and keeping them warm.

An `FunctionProcess` serves one invocation at a time and is thrown away at the first sign of trouble: only an
invocation that ended well, left no threads and no children makes its process fit for the next. Imports run without
a CPU quota, as in clouds, and with the memory quota; where processes are forked (`fork_server`), what was imported counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import psutil  # type: ignore[import-untyped]

from ephemeron.events import Status
from ephemeron.functions.cgroups import ControlGroup, Enforcement
from ephemeron.functions.fork_server import ForkedProcess, Forks, Process, spawn
from ephemeron.units import MIB

_HAS_PROC = Path("/proc/self/status").exists()

Hear: TypeAlias = Callable[[dict[str, Any]], None]

_LINE = 64 * MIB
_INIT_S = 300.0
_DRAIN_S = 2.0
_WATCH_S = 0.2
_WATCH_CLOSELY_S = 0.03
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


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
        self, enforcement: Enforcement, n: int, *, memory_mb: int, vcpus: float, env: Mapping[str, str], folder: Path,
        forks: Forks | None = None,
    ) -> None:  # fmt: skip
        self.memory_mb = memory_mb
        self.peak_mb = 0.0
        self.cold = True
        """Nothing has run in it yet."""
        self.idle_since = 0.0
        self.pid = 0
        self._enforcement = enforcement
        self._n = n
        self._vcpus = vcpus
        self._env = {**env, **dict.fromkeys(_THREADS, str(max(1, int(vcpus))))}
        self._folder = folder
        self._log = f"{n}.txt"
        self._group: ControlGroup | None = None
        self._forks = forks
        self._forking: asyncio.Task[ForkedProcess | None] | None = None
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._killed_as: Status | None = None
        self._hear: Hear = lambda _: None
        self._heard: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> dict[str, Any] | None:
        """Starts the process and waits for its hello; None if it ended instead, see `why_dead`.

        Raises:
            PlatformError: no control group can be made.
            OSError: no process can be made.
        """
        self._group = self._enforcement.group(os.getpid(), self._n, memory_mb=self.memory_mb)
        ours, theirs = socket.socketpair()
        with theirs:
            log = self._folder / "logs" / f"{self._n}.txt"
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
            self.tell({"go": True})
        else:
            self.kill(self._killed_as)
        return await self._next(_INIT_S)

    @property
    def alive(self) -> bool:
        """Whether it can take another invocation."""
        return self._killed_as is None and self._process is not None and self._process.returncode is None

    async def serve(self, message: dict[str, Any], lifetime_s: float, hear: Hear) -> dict[str, Any] | None:
        """Runs one invocation; None if the process died, see `why_dead`.

        Args:
            message: for the function process.
            lifetime_s: from the moment its handler starts.
            hear: takes what the function says meanwhile.
        """
        assert self._group is not None
        self._hear = hear
        self._log = Path(message.get("log", self._log)).name
        if self.cold:
            self.peak_mb = max(self.peak_mb, self._resident_mb())
        else:
            self._forget_peak()
        self._group.set_cpu(self._vcpus)
        self.tell(message)
        reply = await self._next(lifetime_s)
        if reply is not None and "running" in reply:
            reply = await self._next(lifetime_s)
        self.cold = False
        self._hear = lambda _: None
        if reply is not None:
            self.peak_mb = max(self.peak_mb, self._resident_mb())
        return reply

    def rest(self) -> None:
        """Between invocations nobody pays for CPU time, and nothing but tidying up uses it."""
        assert self._group is not None
        self._group.set_cpu(None)
        self.idle_since = time.monotonic()

    def fit(self, reply: Mapping[str, Any] | None) -> bool:
        """Whether another invocation may follow the one that answered so."""
        if reply is None or "ok" not in reply or not reply.get("reusable") or self._killed_as is not None:
            return False
        try:
            return not psutil.Process(self.pid).children()
        except psutil.Error:
            return False

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a message; of no effect once the process is dead."""
        assert self._writer is not None
        self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def kill(self, why: Status) -> None:
        """SIGKILL for the process and everything it started. The first reason is kept."""
        self._killed_as = self._killed_as or why
        if self._forking is not None:
            self._forking.cancel()
        if self._process is not None:
            if self._process.returncode is None:  # else the number may be somebody else's by now
                _kill_group(self.pid)
            if self._group is not None:
                self._group.kill()

    def oom_killed(self) -> bool:
        """Whether something in it was killed for want of memory."""
        return self._killed_as == "out_of_memory" or (self._group is not None and self._group.oom_killed())

    def why_dead(self) -> tuple[Status, str]:
        """Status and sentence, once the process has ended on its own or by `kill`."""
        if self._killed_as in ("timed_out", "cancelled"):
            return self._killed_as, "killed at its lifetime limit" if self._killed_as == "timed_out" else "cancelled"
        if self.oom_killed():
            self.peak_mb = max(self.peak_mb, float(self.memory_mb))
            return "out_of_memory", f"killed at its memory quota of {self.memory_mb} MB"
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return "lost", f"killed by {signal.Signals(-code).name}"
        return "lost", f"ended with exit code {code} in the midst of its work; see logs/{self._log}"

    async def dispose(self) -> None:
        """Kills what is left and removes the control group."""
        self.kill("cancelled" if self._process is None or self._process.returncode is None else "lost")
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

    async def _next(self, limit_s: float) -> dict[str, Any] | None:
        try:
            return await asyncio.wait_for(self._heard.get(), limit_s)
        except TimeoutError:
            self.kill("timed_out")
            # What was said before the kill still counts as said.
            return await self._heard.get()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        assert self._process is not None
        lines = asyncio.create_task(self._read_lines(reader))
        await self._process.wait()
        # Its children may hold the connection open; then the end of the stream comes with theirs.
        _kill_group(self.pid)
        self.kill(self._killed_as or "lost")
        await asyncio.wait([lines], timeout=_DRAIN_S)
        lines.cancel()
        self._heard.put_nowait(None)

    async def _read_lines(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "event" in message or "invoke" in message:
                    self._hear(message)
                else:
                    self._heard.put_nowait(message)
        except (OSError, ValueError):
            self.kill("lost")  # no more can be understood of what it says

    async def _watch(self) -> None:
        """Samples memory for the peak, and kills above the quota where the kernel does not."""
        close = self._enforcement.kind == "none"
        while True:
            used = self._resident_mb(tree=close)
            self.peak_mb = max(self.peak_mb, used)
            if close and used > self.memory_mb:
                self.kill("out_of_memory")
                return
            await asyncio.sleep(_WATCH_CLOSELY_S if close else _WATCH_S)

    def _resident_mb(self, *, tree: bool = False) -> float:
        """Peak so far where the kernel keeps one, else the present."""
        try:
            if tree:
                process = psutil.Process(self.pid)
                return float(sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))) / MIB
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
            pass  # then the peak is that of the process, an upper bound


class WarmPool:
    """Idle environments by memory quota. One pool serves one run, hence one bundle of code.

    Args:
        make: a new environment for a memory quota; not started.
        idle_s: after which an idle one is given up.
    """

    def __init__(self, make: Callable[[int], FunctionProcess], *, idle_s: float) -> None:
        self._make = make
        self._idle_s = idle_s
        self._idle: list[FunctionProcess] = []

    def take(self, memory_mb: int) -> FunctionProcess:
        """The most recently used warm environment of that quota, else a new one that is to be started."""
        for environment in reversed(self._idle):
            if environment.memory_mb == memory_mb and environment.alive:
                self._idle.remove(environment)
                return environment
        return self._make(memory_mb)

    def give(self, environment: FunctionProcess) -> None:
        """Keeps a fit environment for the next invocation."""
        environment.rest()
        self._idle.append(environment)

    async def expire(self, *, everything: bool = False) -> None:
        """Gives up what has been idle for too long."""
        now = time.monotonic()
        old = [e for e in self._idle if everything or not e.alive or now - e.idle_since > self._idle_s]
        for environment in old:
            self._idle.remove(environment)
        await asyncio.gather(*(e.dispose() for e in old))

    def __len__(self) -> int:
        return len(self._idle)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # empty, or (macOS) only zombies
