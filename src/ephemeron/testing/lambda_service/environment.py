"""One execution environment: a process that runs the real runtime client, and the Runtime API for it.

    next      the client asks for work; until there is some the process is frozen, as on AWS
    response  the value of an invocation
    error     what an invocation raised
    init/error   what importing the handler raised

The quota of memory and the share of CPU are imposed by control groups where there are any, else memory is watched.
Time runs from the moment an invocation is handed over; who exceeds it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ephemeron.communication.direct.transport import LOOPBACK
from ephemeron.communication.rpc.http import Handler, HttpRequest, Listener, Response, json_response, listen
from ephemeron.functions.cgroups import Enforcement
from ephemeron.testing._emulation.limited_process import LimitedProcess, inherited, on_loopback
from ephemeron.testing.lambda_service.functions import LambdaFunction
from ephemeron.units import MIB

_API = "/2018-06-01/runtime/"
_INIT_S = 10.0
"""Longest initialisation before it counts against the function's own time limit."""
_WATCH_S = 0.1
_WATCH_CLOSELY_S = 0.02
_numbers = itertools.count(1)

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One invocation for the runtime client."""

    request_id: str
    payload: bytes
    arn: str
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationDone:
    """End of an invocation."""

    payload: bytes
    error: str = ""
    """Value of the header X-Amz-Function-Error; empty: none."""


class LambdaEnvironment:
    """One process of one function, which serves one invocation at a time.

    Args:
        function: what it runs; later changes do not matter to it.
        enforcement: how limits are imposed on this machine.
        variables: of the service, for every function; the function's own come after them.
        region: of the function.
        folder: for its temporary files; removed in the end.
        log: takes its lines.
        stream: name of its log stream.
        host: where its Runtime API listens.
        launcher: command that runs the one which follows it, in a network of the process's own; empty: on this machine's.
    """

    def __init__(
        self,
        function: LambdaFunction,
        enforcement: Enforcement,
        *,
        variables: Mapping[str, str],
        region: str,
        folder: Path,
        log: Log,
        stream: str,
        host: str = LOOPBACK,
        launcher: Sequence[str] = (),
    ) -> None:
        self.function, self.stream = function, stream
        self.pid = 0
        self.work: Work | None = None
        self.idle_since = time.monotonic()
        self.init_s = 0.0
        """Seconds from the start of the process to its first request for work; billed with the first invocation."""
        self._n = next(_numbers)
        self._enforcement, self._region, self._log = enforcement, region, log
        self._variables, self._host, self._launcher = variables, host, launcher
        self._tmp = folder / f"tmp-{self._n}"
        self._process: LimitedProcess | None = None
        self._server: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._next: asyncio.Queue[Work] = asyncio.Queue()
        self._ready = asyncio.Event()
        self._over = asyncio.Event()
        self._done: asyncio.Future[InvocationDone] | None = None
        self._init_error: InvocationDone | None = None
        self._peak_mb = 0.0
        self._out_of_memory = False
        self._fresh = True

    @property
    def alive(self) -> bool:
        """Whether it can take another invocation."""
        return not self._over.is_set() and self._init_error is None

    async def start(self) -> None:
        """Starts the process; returns before it is ready."""
        self._tmp.mkdir(parents=True)
        self._server = await listen(self._runtime_api(), host=self._host)
        self._began = time.monotonic()
        self._process = await LimitedProcess.start(
            [*self._launcher, sys.executable, "-P", "-m", "awslambdaric", self.function.handler],
            self._enforcement,
            memory_mb=self.function.memory_mb,
            env=self._environment(),
            folder=self.function.folder,
            on_line=self._log,
        )
        self.pid = self._process.pid
        self._tasks = [asyncio.create_task(work()) for work in (self._watch, self._await_end)]

    async def run(self, work: Work) -> InvocationDone:
        """Runs one invocation, and returns its end. At the time limit the process is killed."""
        assert self._process is not None
        self.work = work
        self._log(f"START RequestId: {work.request_id} Version: $LATEST")
        limit = float(self.function.timeout_s)
        began = time.monotonic()
        done = None
        if await self._initialised(limit):
            if not self._fresh:
                self._forget_peak()
            began = time.monotonic()
            self._done = asyncio.get_running_loop().create_future()
            self._process.group.set_cpu(self.function.memory_mb / 1769)
            self._thaw()
            self._next.put_nowait(work)
            ended = asyncio.create_task(self._over.wait())
            either: set[asyncio.Future[Any]] = {self._done, ended}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            done = self._done.result() if self._done.done() else None
        done = done or self._init_error or self._why(work, began, limit)
        self._report(work, time.monotonic() - began, done)
        self._fresh = False
        self.work = self._done = None
        self.idle_since = time.monotonic()
        return done

    def kill(self) -> None:
        """SIGKILL to the process and everything it started."""
        if self._process is not None:
            self._process.kill()

    async def dispose(self) -> None:
        """Kills it, and removes its control group and its files."""
        if self._process is not None:
            await self._process.dispose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
        await asyncio.to_thread(shutil.rmtree, self._tmp, ignore_errors=True)

    # -- Runtime API ----------------------------------------------------------------------------------------

    def _runtime_api(self) -> Handler:
        async def answer(request: HttpRequest) -> Response:
            what = request.path.removeprefix(_API)
            if what == "invocation/next":
                return await self._hand_over()
            if what == "init/error":
                self._init_error = InvocationDone(payload=request.body, error="Unhandled")
                self._ready.set()
            elif self.work is None or not what.startswith(f"invocation/{self.work.request_id}/"):
                return json_response({"errorType": "InvalidRequestID"}, status=400)
            elif self._done is not None and not self._done.done():
                error = "Unhandled" if what.endswith("/error") else ""
                self._done.set_result(InvocationDone(payload=request.body, error=error))
            return json_response({"status": "OK"}, status=202)

        return answer

    async def _hand_over(self) -> Response:
        if not self._ready.is_set():
            self.init_s = time.monotonic() - self._began
            self._ready.set()
        if self._next.empty() and self.work is None:
            self._freeze()
        work = await self._next.get()
        deadline_ms = int((time.time() + self.function.timeout_s) * 1000)
        return Response(
            headers={
                "Content-Type": "application/json",
                "Lambda-Runtime-Aws-Request-Id": work.request_id,
                "Lambda-Runtime-Deadline-Ms": str(deadline_ms),
                "Lambda-Runtime-Invoked-Function-Arn": work.arn,
                "Lambda-Runtime-Trace-Id": work.trace,
            },
            body=work.payload,
        )

    async def _initialised(self, limit: float) -> bool:
        ended = asyncio.create_task(self._over.wait())
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, ended}, timeout=max(_INIT_S, limit), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        ready.cancel()
        return self._ready.is_set() and self.alive

    # -- the process ----------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        function = self.function
        assert self._server is not None
        wanted = {**self._variables, **function.environment}
        mine = wanted if self._launcher else on_loopback(wanted)
        # The deployed code comes first, as where the runtime client puts its folder before all others.
        path = os.pathsep.join(filter(None, (str(function.folder), mine.get("PYTHONPATH"))))
        return {
            **inherited(),
            "LANG": "en_US.UTF-8",
            "TZ": ":UTC",
            "TMPDIR": str(self._tmp),
            "HOME": str(self._tmp),
            "AWS_ACCESS_KEY_ID": "ASIALOCALFUNCTION",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_SESSION_TOKEN": "local",
            **mine,
            "PYTHONPATH": path,
            "AWS_LAMBDA_RUNTIME_API": f"{self._host}:{self._server.port}",
            "AWS_LAMBDA_FUNCTION_NAME": function.name,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_mb),
            "AWS_LAMBDA_LOG_GROUP_NAME": function.log_group,
            "AWS_LAMBDA_LOG_STREAM_NAME": self.stream,
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
            "AWS_REGION": self._region,
            "AWS_DEFAULT_REGION": self._region,
            "LAMBDA_TASK_ROOT": str(function.folder),
            "_HANDLER": function.handler,
        }

    def _freeze(self) -> None:
        assert self._process is not None
        self._process.group.set_cpu(None)
        self._process.signal(signal.SIGSTOP)

    def _thaw(self) -> None:
        assert self._process is not None
        self._process.signal(signal.SIGCONT)

    async def _await_end(self) -> None:
        assert self._process is not None
        await self._process.wait()
        self._out_of_memory |= self._process.group.oom_killed()
        self._over.set()

    async def _watch(self) -> None:
        watched = self._enforcement.kind == "none"
        while not self._over.is_set():
            self._peak_mb = max(self._peak_mb, used := self._resident_mb())
            if watched and used > self.function.memory_mb:
                self._out_of_memory = True
                self.kill()
            await asyncio.sleep(_WATCH_CLOSELY_S if watched else _WATCH_S)

    def _resident_mb(self) -> float:
        try:
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
            return 0.0
        except OSError:
            with contextlib.suppress(psutil.Error):
                return float(psutil.Process(self.pid).memory_info().rss) / MIB
            return 0.0

    def _forget_peak(self) -> None:
        self._peak_mb = 0.0
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    # -- the end --------------------------------------------------------------------------------------------

    def _why(self, work: Work, began: float, limit: float) -> InvocationDone:
        """It did not answer: it has ended, or is late and is killed now."""
        if not self._over.is_set() and not self._out_of_memory:
            self.kill()
            self._over.set()
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
            if not self.function.calls:
                self._log(f"{stamp}.000Z {work.request_id} Task timed out after {limit:.2f} seconds")
            text = f"RequestId: {work.request_id} Error: Task timed out after {limit:.2f} seconds"
            return _failure("Sandbox.Timedout", text)
        code = None if self._process is None else self._process.returncode
        how = "signal: killed" if code == -signal.SIGKILL or code is None else f"exit status {code}"
        text = f"RequestId: {work.request_id} Error: Runtime exited with error: {how}"
        if not self.function.calls:
            self._log(f"{text}\nRuntime.ExitError")
        return _failure("Runtime.ExitError", text)

    def _report(self, work: Work, took_s: float, done: InvocationDone) -> None:
        self._peak_mb = max(self._peak_mb, self._resident_mb())
        size = self.function.memory_mb
        used = size if self._out_of_memory else min(size, math.ceil(self._peak_mb))
        init_ms = self.init_s * 1000 if self._fresh else 0.0
        took_ms = took_s * 1000
        if self.function.calls:
            return self._log(_json_report(work, took_ms, done))
        line = f"REPORT RequestId: {work.request_id}\tDuration: {took_ms:.2f} ms\tBilled Duration: {math.ceil(took_ms + init_ms)} ms\tMemory Size: {size} MB\tMax Memory Used: {used} MB\t"
        if init_ms:
            line += f"Init Duration: {init_ms:.2f} ms\t"
        if done.error:
            kind = json.loads(done.payload or b"{}").get("errorType", "")
            line += "Status: timeout\t" if kind == "Sandbox.Timedout" else f"Status: error\tError Type: {kind}\t"
        self._log(f"END RequestId: {work.request_id}")
        self._log(line)


def _json_report(work: Work, took_ms: float, done: InvocationDone) -> str:
    """The report of a function on managed instances."""
    record: dict[str, object] = {"requestId": work.request_id, "metrics": {"durationMs": round(took_ms, 3)}, "status": "success"}
    if done.error:
        kind = str(json.loads(done.payload or b"{}").get("errorType", ""))
        record |= {"status": "timeout" if kind == "Sandbox.Timedout" else "error", "errorType": kind}
    return json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "type": "platform.report", "record": record})


def _failure(kind: str, text: str) -> InvocationDone:
    return InvocationDone(payload=json.dumps({"errorType": kind, "errorMessage": text}).encode(), error="Unhandled")
