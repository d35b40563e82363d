"""One replica: the function's process under its limits, behind an emulated of-watchdog in HTTP mode.

max_inflight     more requests at once: 429
exec_timeout     no answer by then: 504 with X-OpenFaaS-Internal; the process is left as it is
write_timeout    nor by then: the connection is cut, which the gateway makes a 502
ready_path       whether `/_/ready` says yes; not while max_inflight requests run
the process ends the replica ends with it, and is started again
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from ephemeron.communication.rpc.http import HttpRequest, Response, ask
from ephemeron.functions.cgroups import Enforcement
from ephemeron.testing._emulation.limited_process import LimitedProcess, inherited, on_loopback
from ephemeron.testing._emulation.service import ReservedPort
from ephemeron.testing.openfaas_gateway.functions import GatewayFunction, Image, seconds

_DEFAULT_S = 30.0
_START_POLL_S = 0.05
_RESTART_S = 0.2
_PROBE_S = 2.0
_LOG_LINES = 1_000
_HOP = ("connection", "host", "content-length", "transfer-encoding")
_numbers = itertools.count(1)


class Gone(Exception):
    """The connection to the replica was lost: it died, or of-watchdog cut it."""


class Replica:
    """One replica of a function, started again whenever its process ends.

    Args:
        function: as it was deployed.
        image: what it runs.
        enforcement: how limits are imposed on this machine.
        variables: of every replica.
        folder: for its temporary files; removed in the end.
    """

    def __init__(
        self, function: GatewayFunction, image: Image, enforcement: Enforcement, *, variables: Mapping[str, str], folder: Path
    ) -> None:
        self.function = function
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self.pid = 0
        self.ready = False
        self.leaving = False
        self.serving: list[HttpRequest] = []
        self.log: deque[tuple[float, str]] = deque(maxlen=_LOG_LINES)
        self._n = next(_numbers)
        self._image, self._enforcement, self._more = image, enforcement, variables
        self._tmp = folder / f"replica-{self._n}"
        env = {**image.variables, **function.variables}
        self._max_inflight = int(env.get("max_inflight", "0"))
        self._exec_s = seconds(env.get("exec_timeout", ""), _DEFAULT_S)
        self._write_s = seconds(env.get("write_timeout", ""), _DEFAULT_S)
        self._ready_path = env.get("ready_path", "")
        self._probe_s = seconds(function.annotations.get("com.openfaas.ready.http.periodSeconds", ""), _PROBE_S)
        self._probed = "com.openfaas.ready.http.path" in function.annotations
        self._process: LimitedProcess | None = None
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the replica."""
        self._task = asyncio.create_task(self._live())

    async def handle(self, request: HttpRequest) -> Response:
        """Answer of of-watchdog.

        Raises:
            Gone: none came.
        """
        if self._max_inflight and len(self.serving) >= self._max_inflight:
            text = f"Concurrent request limit exceeded. Max concurrent requests: {self._max_inflight}\n"
            return Response(status=429, body=text.encode(), headers={"X-OpenFaaS-Internal": "faas-middleware"})
        self.serving.append(request)
        began = time.monotonic()
        try:
            answer = await self._forward(request)
            took = {"X-Duration-Seconds": f"{time.monotonic() - began:f}"}
            if answer is None:
                return Response(status=504, headers={**took, "X-OpenFaaS-Internal": "of-watchdog"})
            kept = {name: value for name, value in answer.headers.items() if name not in _HOP}
            return Response(status=answer.status, headers={**kept, **took}, body=answer.body)
        finally:
            self.serving.remove(request)

    async def _forward(self, request: HttpRequest) -> Response | None:
        """The handler's answer; None if it takes longer than `exec_timeout`."""
        exec_s = min(self._exec_s, seconds(request.headers.get("x-timeout", ""), self._exec_s))
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        target = request.path + (f"?{request.query}" if request.query else "")
        asking = asyncio.create_task(ask("127.0.0.1", self.port, request.method, target, headers=headers, body=request.body))
        ended = asyncio.create_task(self._ended.wait())
        try:
            limit_s = min(exec_s or self._write_s, self._write_s)
            await asyncio.wait({asking, ended}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            if ended.done():
                raise Gone("the function's process has ended")
            if self._write_s < exec_s or not exec_s:
                raise Gone("write_timeout")
            return None
        except (OSError, asyncio.IncompleteReadError, ValueError, IndexError) as e:
            raise Gone(str(e)) from e
        finally:
            asking.cancel()
            ended.cancel()
            await asyncio.gather(asking, ended, return_exceptions=True)

    async def leave(self) -> None:
        """Goes as a pod goes: SIGTERM, time to finish what runs, SIGKILL."""
        self.leaving, self.ready = True, False
        if self._process is not None and self._process.returncode is None and self.serving:
            self._process.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self._write_s)
        await self.dispose()

    async def dispose(self) -> None:
        """Kills it, and removes its control group and its files."""
        self.leaving, self.ready = True, False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._clear()
        self._reserved.close()
        await asyncio.to_thread(shutil.rmtree, self._tmp, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL to everything in it, as when its node dies."""
        if self._process is not None:
            self._process.kill()

    # -- the process ----------------------------------------------------------------------------------------

    async def _live(self) -> None:
        while not self.leaving:
            await self._run_once()
            self.ready = False
            await self._clear()
            await asyncio.sleep(_RESTART_S)

    async def _run_once(self) -> None:
        self._ended.clear()
        self._tmp.mkdir(parents=True, exist_ok=True)
        command = shlex.split(self.function.process or self._image.variables["fprocess"])
        if command[0] in ("python", "python3"):
            command[0] = sys.executable
        self._process = await LimitedProcess.start(
            command,
            self._enforcement,
            memory_mb=self.function.memory_mb or 1 << 20,
            env=self._environment(),
            folder=self._image.folder,
            on_line=self._print,
        )
        self.pid = self._process.pid
        self._process.group.set_cpu(self.function.cpus)
        probing = asyncio.create_task(self._probe())
        try:
            await self._process.wait()
        finally:
            self.ready = False
            self._ended.set()
            self.kill()  # processes that it has started hold its output open
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    def _environment(self) -> dict[str, str]:
        return {
            **inherited(),
            "LANG": "C.UTF-8",
            "HOME": str(self._tmp),
            "TMPDIR": str(self._tmp),
            **self._image.variables,
            **self._more,
            **on_loopback(self.function.variables),
            "http_upstream_url": f"http://127.0.0.1:{self.port}",
        }

    async def _probe(self) -> None:
        """Probes like the kubelet: often until the first success, then at the period of the function."""
        while True:
            if self._max_inflight and len(self.serving) >= self._max_inflight:
                self.ready = self.ready and not self._probed
            else:
                self.ready = await self._answers() and not self.leaving
            await asyncio.sleep(self._probe_s if self.ready and not self.serving else _START_POLL_S)

    async def _answers(self) -> bool:
        try:
            return (await ask("127.0.0.1", self.port, "GET", self._ready_path or "/")).status < 400 or not self._ready_path
        except (OSError, asyncio.IncompleteReadError, ValueError, IndexError):
            return False

    def _print(self, line: str) -> None:
        self.log.append((time.time(), line.rstrip("\n")))

    async def _clear(self) -> None:
        if self._process is not None:
            await self._process.dispose()
