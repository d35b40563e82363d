"""One emulated MicroVM: a process tree with a life of states, hooks and a clock of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from ephemeron.communication.rpc.http import Response, ask
from ephemeron.functions.cgroups import Enforcement
from ephemeron.functions.function_process import family
from ephemeron.testing._emulation.limited_process import LimitedProcess, inherited, on_loopback
from ephemeron.testing._emulation.service import ReservedPort
from ephemeron.testing.microvm_service.images import BURST, ImageVersion

HOOKS = "/aws/lambda-microvms/runtime/v1"
ADDRESS = "EPHEMERON_HOOKS"
"""Variable with the address at which the image's command listens: MicroVMs of one machine cannot share a port."""
_GUEST = Path(__file__).with_name("guest")
_POLL_S = 0.05
_BUILD_S = 300.0
_MB_PER_VCPU = 2048


class Microvm:
    """A MicroVM, or the process of an image that is built.

    Args:
        id: of the MicroVM.
        arn: of the image.
        version: of the image.
        request: of RunMicrovm; empty while an image is built.
        folder: for its files; removed in the end.
        enforcement: how limits are imposed on this machine.
        variables: of the service, for every MicroVM; the image's own come after them.
        on_line: takes each line of its output.
    """

    def __init__(
        self,
        id: str,
        arn: str,
        version: ImageVersion,
        request: Mapping[str, Any],
        *,
        folder: Path,
        enforcement: Enforcement,
        variables: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        self.id, self.arn, self.version, self.request = id, arn, version, request
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        """Where its hooks listen."""
        self.state, self.reason = "PENDING", ""
        self.started_at, self.terminated_at = time.time(), 0.0
        self.last_request = time.monotonic()
        self.suspended_at = 0.0
        self.suspended_s = 0.0
        """Of all suspensions so far."""
        self.changing = asyncio.Lock()
        self._folder, self._enforcement, self._on_line = folder, enforcement, on_line
        self._variables = variables
        self._process: LimitedProcess | None = None

    @property
    def maximum_s(self) -> int:
        """Seconds after which it is terminated."""
        return int(self.request.get("maximumDurationInSeconds", 28_800))

    @property
    def pid(self) -> int:
        """Its first process; 0 before it has one."""
        return 0 if self._process is None else self._process.pid

    @property
    def exited(self) -> bool:
        """Whether its first process has ended."""
        return self._process is not None and self._process.returncode is not None

    async def boot(self) -> None:
        """Starts its command, and waits until the hook `ready` says so.

        Raises:
            RuntimeError: the command ends, or is not ready in time.
        """
        self._folder.mkdir(parents=True)
        clock = self._folder / "clock"
        clock.write_bytes(struct.pack("d", 0.0))
        root, memory_mb = self.version.folder, BURST * self.version.memory_mb
        mine = on_loopback({**self._variables, **self.version.request.get("environmentVariables", {})})
        path = os.pathsep.join(filter(None, (str(_GUEST), str(root), mine.get("PYTHONPATH"))))
        env = {
            **inherited(),
            "LANG": "C.UTF-8",
            "TMPDIR": str(self._folder),
            "HOME": str(self._folder),
            **mine,
            "PYTHONPATH": path,
            ADDRESS: f"127.0.0.1:{self.port}",
            "EPHEMERON_GUEST_CLOCK": str(clock),
        }
        command = [sys.executable if part.startswith("python") else part for part in self.version.command]
        self._process = await LimitedProcess.start(
            command, self._enforcement, memory_mb=memory_mb, env=env, folder=root, on_line=self._on_line
        )
        self._process.group.set_cpu(BURST * self.version.memory_mb / _MB_PER_VCPU)
        end = time.monotonic() + float(self.version.hooks.get("readyTimeoutInSeconds", _BUILD_S))
        while not self.exited and time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
                answer = await self.hook("ready", {}, limit_s=end - time.monotonic())
                if answer.status == 200:
                    return
            await asyncio.sleep(_POLL_S)
        raise RuntimeError("the command has ended" if self.exited else "the command is not ready in time")

    async def hook(self, name: str, body: Mapping[str, Any], *, limit_s: float = 0.0) -> Response:
        """Calls a hook as Lambda does; 200 where the image has none.

        Raises:
            OSError, ValueError, asyncio.IncompleteReadError: nothing answers.
            TimeoutError: it takes too long.
        """
        hooks = self.version.hooks
        if hooks.get(name) != "ENABLED":
            return Response()
        headers = {"Host": "localhost", "Content-Type": "application/json"}
        async with asyncio.timeout(limit_s or float(hooks.get(f"{name}TimeoutInSeconds", 1))):
            return await ask("127.0.0.1", self.port, "POST", f"{HOOKS}/{name}", headers=headers, body=json.dumps(dict(body)).encode())

    def port_of(self, wanted: int) -> int:
        """Port of this machine for a port of the MicroVM: that, if one of its processes listens there, else that of its hooks."""
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                for found in process.net_connections("tcp"):
                    if found.status == psutil.CONN_LISTEN and found.laddr.port == wanted:
                        return wanted
        return self.port

    def stop(self) -> None:
        """Stops every process of it, and its clock."""
        self.suspended_at = time.monotonic()
        for _ in range(2):  # a process that is started meanwhile is found the second time
            for process in self._tree():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets its processes go on, its clock where it stood."""
        self.suspended_s += time.monotonic() - self.suspended_at
        with (self._folder / "clock").open("r+b") as file:
            file.write(struct.pack("d", self.suspended_s))
        self.last_request = time.monotonic()
        for process in reversed(self._tree()):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL for every process of it."""
        tree = self._tree()
        if self._process is not None:
            self._process.kill()
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()

    async def dispose(self) -> None:
        """Kills it, and removes its control group and its files."""
        self.kill()
        if self._process is not None:
            await self._process.dispose()
        self._reserved.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _tree(self) -> list[psutil.Process]:
        if self._process is None or self._process.returncode is not None:
            return []
        try:
            return family(self.pid)
        except (psutil.Error, OSError):
            return []
