"""A process under a memory quota and a CPU share, whose output is read line by line."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ephemeron.communication.direct.transport import HOST_VARIABLE, LOOPBACK
from ephemeron.functions.cgroups import ControlGroup, Enforcement
from ephemeron.units import MIB

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_DRAIN_S = 1.0
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "OMP_NUM_THREADS")
_REMOVALS = 200
_numbers = itertools.count(500_000)
"""Of control groups: one sequence for all services of a process, apart from those of functions that it hosts itself."""


def inherited() -> dict[str, str]:
    """Variables of this process that functions need to start."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def on_loopback(variables: Mapping[str, str]) -> dict[str, str]:
    """A function's variables, with which it listens on this machine alone whatever its deployment says."""
    return {name: LOOPBACK if name == HOST_VARIABLE else value for name, value in variables.items()}


class LimitedProcess:
    """One process in a control group of its own. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, group: ControlGroup, on_line: Callable[[str], None]) -> None:
        self.pid = process.pid
        self.group = group
        self._process = process
        self._output = asyncio.create_task(self._read(on_line))

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        enforcement: Enforcement,
        *,
        memory_mb: int,
        env: Mapping[str, str],
        folder: Path | None,
        on_line: Callable[[str], None],
    ) -> LimitedProcess:
        """Starts a process that runs the command once its limits are set.

        Args:
            command: program and arguments.
            enforcement: how limits are imposed on this machine.
            memory_mb: quota.
            env: its environment variables.
            folder: its working folder; None: that of this process.
            on_line: takes each line of its output.
        """
        group = enforcement.group(os.getpid(), next(_numbers), memory_mb=memory_mb)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(_BOOTSTRAP),
            str(os.getpid()),
            *command,
            env=env,
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=MIB,
        )
        with contextlib.suppress(ProcessLookupError):
            group.add(process.pid)
        assert process.stdin is not None
        process.stdin.write(b"!")
        process.stdin.close()
        return cls(process, group, on_line)

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.returncode

    async def wait(self) -> None:
        """Waits for its end."""
        await self._process.wait()

    def kill(self) -> None:
        """SIGKILL to the process and everything it has started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.group.kill()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone; of no effect once it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def dispose(self) -> None:
        """Kills it, reads the rest of its output, and removes the control group."""
        self.kill()
        with contextlib.suppress(TimeoutError):  # `wait` waits for the pipes, which a child may hold open
            await asyncio.wait_for(self._process.wait(), _DRAIN_S)
        await asyncio.wait([self._output], timeout=_DRAIN_S)
        self._output.cancel()
        await asyncio.gather(self._output, return_exceptions=True)
        transport: asyncio.SubprocessTransport = vars(self._process)["_transport"]
        transport.close()  # the pipes, also where a child holds their other ends
        for _ in range(_REMOVALS):
            if self.group.remove():
                break
            self.group.kill()
            await asyncio.sleep(0.01)

    async def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            on_line(line.decode(errors="replace"))
