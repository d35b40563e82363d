"""The process that owns local functions, of one run or of all runs of a session, so that they outlive the client that has
started them.

A client may be killed: its functions train on, invoke their successors and write their events, and another client
attaches later. The daemon ends by itself when no client is connected and no function has run for two seconds, and ends all
function processes. `daemon_process` is its process. Secrets come in its environment and are never written.

An invocation is billed from the acceptance of its call to its end, including a cold start (as AWS Lambda does since August
2025), rounded up to the millisecond.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ephemeron import logs
from ephemeron.config.typed import build, plain
from ephemeron.errors import DaemonGone, InvocationRefused, PlatformError
from ephemeron.events import Invoked, to_json
from ephemeron.functions import entries
from ephemeron.functions.base import Call, Limits, Outcome, Reason, ended_event
from ephemeron.functions.cgroups import Enforcement
from ephemeron.functions.daemon_messages import DaemonAddress, DaemonStatus, InvocationParams, InvokeParams, OpenParams, RunParams
from ephemeron.functions.fork_server import Forks
from ephemeron.functions.function_process import FunctionProcess, ProcessOutcome, WarmPool
from ephemeron.functions.hosted_run import HostedRun
from ephemeron.functions.process_messages import (
    EventMessage,
    HostMessage,
    InvocationReply,
    InvokeMessage,
    InvokeSuccessor,
    Ready,
    SuccessorAccepted,
    SuccessorRefused,
)
from ephemeron.functions.validation import check_call

P = TypeVar("P")

_TICK_S = 0.2
_SPARE_AFTER_S = 2.0
"""Time for which a function has run when a spare process of its quota is begun: later than what all functions do first."""

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Started:
    """An invocation, running or ended."""

    id: str
    call: Call
    run: HostedRun
    accepted: float
    environment: FunctionProcess | None = None
    cancelled: bool = False
    outcome: asyncio.Future[Outcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LocalDaemon:
    """Runs the functions of one run, or of several that share warm processes.

    A warm process serves runs whose functions have the same environment variables. Each run has its events, logs, scratch
    folders and channel folder in its own folder.

    Args:
        folder: of the run, or of the session whose runs are opened later.
        limits: beyond which calls are refused.
        enforcement: how quotas are imposed.
        idle_s: time after which a warm process is ended.
        linger_s: time for which to stay without clients and functions.
        forks: fork servers; None: each function gets a fresh process.
        spare: see `DaemonSettings`; where functions are forked.
        begun: function processes that were begun before there was a run, and serve it first.
        home: HOME and TMPDIR of function processes until they serve an invocation; None: the folder of scratch folders.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        enforcement: Enforcement,
        *,
        idle_s: float,
        linger_s: float,
        forks: Forks | None = None,
        spare: bool = False,
        begun: Sequence[FunctionProcess] = (),
        home: Path | None = None,
    ) -> None:
        self.stopping = asyncio.Event()
        self._folder = folder
        self._own = HostedRun(folder, os.environ, home=home)
        """Takes the calls of every run that was not opened."""
        self._runs: dict[str, HostedRun] = {}
        self.address: DaemonAddress | None = None
        """Where clients reach this daemon."""
        self._limits = limits
        self._enforcement = enforcement
        self._linger_s = linger_s
        self._forks = forks
        self._spare = spare and forks is not None
        self._pool = WarmPool(self._make, idle_s=idle_s)
        self._started: dict[str, _Started] = {}
        self._running: dict[str, _Started] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._environments = max((f.number for f in begun), default=0)
        for environment in begun:
            self._pool.give(environment)
        self._born = time.time()
        self._busy = time.monotonic()

    async def handle(
        self, method: str, params: Mapping[str, object], buffers: Sequence[memoryview]
    ) -> tuple[Mapping[str, object], Sequence[memoryview]]:
        """Answers one request of a client."""
        if self.stopping.is_set():
            raise DaemonGone("the process that hosts the functions is ending")
        reply: object = {}
        match method:
            case "attend":
                await asyncio.Event().wait()  # the client learns from its end that this process is gone
            case "invoke":
                reply = InvocationParams(invocation=self.invoke(_read(InvokeParams, params).call))
            case "wait":
                reply = await asyncio.shield(self._find(params).outcome)
            case "cancel":
                await self._cancel([self._find(params)])
            case "open":
                self._open(_read(OpenParams, params))
            case "leave":
                await self._leave(self._hosted(params))
            case "cancel_all":
                await self.cancel_all(self._hosted(params))
            case "status":
                reply = self._status(self._hosted(params) if params else None)
            case "shutdown":
                self.stopping.set()
            case _:
                raise ValueError(f"no method {method!r}")
        return plain(reply), ()

    def invoke(self, call: Call) -> str:
        """Accepts a call and starts it, twice if it asks for a duplicate.

        Raises:
            InvocationRefused: memory, lifetime, payload or concurrency is beyond the limits, or there is no such entry.
        """
        entries.check_entry(call.entry, entries.known(self._runs.get(call.run, self._own).env))
        check_call(call, self._limits)
        twice, call = call.duplicate, dataclasses.replace(call, duplicate=False)
        first = self._begin(call, call.reason)
        if twice and len(self._running) < self._limits.concurrency:
            self._begin(call, "duplicate")
        return first

    async def cancel_all(self, run: HostedRun | None = None) -> None:
        """Ends all invocations, of one run or of all, also those that functions start meanwhile."""
        while running := self._running_of(run):
            await self._cancel(running)

    async def tend(self, clients: Callable[[], int]) -> None:
        """Ends idle processes, and at last the daemon itself.

        Args:
            clients: how many are connected. What they ask for may be long in coming: a client is busy, or waits for a core.
        """
        while not self.stopping.is_set():
            await asyncio.sleep(_TICK_S)
            wanted = self._spares()
            await self._pool.expire(keep=wanted)
            for memory_mb, env in wanted:
                self._pool.prepare(memory_mb, env)
            if self._forks is not None:
                self._forks.reap()
            for run in (self._own, *self._runs.values()):
                if run.journal.problem:
                    run.journal.flush()
            if clients() or self._running:
                self._busy = time.monotonic()
            elif time.monotonic() - self._busy > self._linger_s:
                self.stopping.set()

    def _spares(self) -> list[tuple[int, Mapping[str, str]]]:
        """Quotas and environment variables of the functions that have run for a while: a process of each is kept ready."""
        found: list[tuple[int, Mapping[str, str]]] = []
        since = time.monotonic() - _SPARE_AFTER_S
        for s in self._running.values() if self._spare else ():
            if s.accepted < since and (s.call.memory_mb, s.run.env) not in found:
                found.append((s.call.memory_mb, s.run.env))
        return found

    async def close(self) -> None:
        """Ends all processes and removes control groups and scratch folders."""
        _log.info("the daemon of %s ends", self._folder)
        self.stopping.set()
        await self.cancel_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.expire(everything=True)
        if self._forks is not None:
            await self._forks.close()
        for run in (self._own, *self._runs.values()):
            await asyncio.to_thread(run.release)

    def close_unfinished(self) -> None:
        """Writes the end of invocations that died with an earlier daemon of this folder."""
        self._own.close_unfinished()

    def _open(self, params: OpenParams) -> None:
        """Hosts a further run. Opening it again changes nothing but the environment variables of functions started later."""
        run = HostedRun(params.folder, params.env, home=self._own.home)  # the same for all: they share warm processes
        known = self._runs.get(params.run)
        if known is not None and known.folder == params.folder:
            known.env = run.env
            return
        if known is not None:
            raise PlatformError(f"run {params.run} is in {known.folder} already")
        assert self.address is not None
        self._own.scratch.mkdir(parents=True, exist_ok=True)
        run.acquire(self.address)
        self._runs[params.run] = run
        _log.info("hosts run %s, too", params.run)

    async def _leave(self, run: HostedRun) -> None:
        """Ends the functions of a run that was opened, and lets go of it."""
        await self.cancel_all(run)
        for name, known in list(self._runs.items()):
            if known is run:
                del self._runs[name]
                await asyncio.to_thread(run.release)

    def _hosted(self, params: Mapping[str, object]) -> HostedRun:
        folder = _read(RunParams, params).folder
        return next((run for run in self._runs.values() if run.folder == folder), self._own)

    def _running_of(self, run: HostedRun | None) -> list[_Started]:
        return [s for s in self._running.values() if run is None or s.run is run]

    def _begin(self, call: Call, reason: Reason) -> str:
        if len(self._running) >= self._limits.concurrency:
            raise InvocationRefused(f"{len(self._running)} functions run already; the limit of concurrency is {self._limits.concurrency}")
        run = self._runs.get(call.run, self._own)
        started = _Started(id=secrets.token_hex(6), call=call, run=run, accepted=time.monotonic())
        self._started[started.id] = self._running[started.id] = started
        invoked = Invoked(t=self._t(call), rank=call.rank, attempt=call.attempt, invocation=started.id, reason=reason)
        run.journal.append(to_json(invoked))
        with logs.context(**call.log_fields):
            _log.info("invocation %s (%s) is accepted", started.id, reason)
            self._in_background(self._run(started))
        return started.id

    async def _run(self, started: _Started) -> None:
        scratch = started.run.scratch / started.id
        environment = started.environment = self._pool.take(started.call.memory_mb, started.run.env)
        reply: InvocationReply | None = None
        try:
            scratch.mkdir(parents=True)
            reply = await self._serve(started, environment, scratch)
            ended = environment.outcome(reply)
        except Exception as e:  # noqa: BLE001 - also a fault of the daemon must not leave the caller waiting
            _log.exception("invocation %s failed in the daemon", started.id)
            ended = ProcessOutcome(status="error", error=f"{type(e).__name__}: {e}")
        if started.cancelled and ended.status != "ok":
            ended = ProcessOutcome(status="cancelled", error="cancelled")
        outcome = self._outcome(started, ended)
        _log.info("invocation %s has ended: %s, billed %g s", started.id, outcome.status, outcome.billed_s)
        started.run.journal.append(to_json(ended_event(started.call, started.id, outcome, t=self._t(started.call))))
        fit = environment.fit(reply)
        if fit:
            self._pool.give(environment)
        del self._running[started.id]
        started.outcome.set_result(outcome)
        if not fit:
            await environment.dispose()
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def _serve(self, started: _Started, environment: FunctionProcess, scratch: Path) -> InvocationReply | None:
        if environment.cold:
            first = await environment.start()
            if not isinstance(first, Ready):
                return first
        call = started.call
        message = InvokeMessage(
            call=call,
            invocation=started.id,
            origin=self._origin(call),
            lifetime_s=call.lifetime_s,
            vcpus=self._limits.vcpus(call.memory_mb),
            scratch=str(scratch),
            base=str(started.run.channel),
            cold=environment.cold,
            log=str(started.run.logs / f"{started.id}.txt"),
        )

        def on_message(received: EventMessage | InvokeSuccessor) -> None:
            if isinstance(received, EventMessage):
                started.run.journal.append(received.line)
            else:
                environment.send(self._answer(received))

        return await environment.serve(message, on_message)

    def _answer(self, asked: InvokeSuccessor) -> HostMessage:
        """Starts the function that another one asks for."""
        try:
            self.invoke(asked.call)
        except InvocationRefused as e:
            _log.info("rank %d, attempt %d is refused: %s", asked.call.rank, asked.call.attempt, e)
            return SuccessorRefused(number=asked.number, text=str(e))
        return SuccessorAccepted(number=asked.number)

    def _outcome(self, started: _Started, ended: ProcessOutcome) -> Outcome:
        billed_s = math.ceil((time.monotonic() - started.accepted) * 1000) / 1000
        assert started.environment is not None
        return Outcome(
            status=ended.status,
            value=ended.value,
            error=ended.error,
            billed_s=billed_s,
            gb_seconds=started.call.memory_mb / 1024 * billed_s,
            peak_memory_mb=round(started.environment.peak_mb, 1),
        )

    async def _cancel(self, victims: list[_Started]) -> None:
        for victim in victims:
            victim.cancelled = True
            if victim.environment is not None and not victim.outcome.done():
                victim.environment.kill("cancelled")
        await asyncio.gather(*(asyncio.shield(victim.outcome) for victim in victims))

    def _find(self, params: Mapping[str, object]) -> _Started:
        invocation = _read(InvocationParams, params).invocation
        if invocation not in self._started:
            raise PlatformError(f"this host knows no invocation {invocation!r}")
        return self._started[invocation]

    def _status(self, run: HostedRun | None) -> DaemonStatus:
        return DaemonStatus(
            pid=os.getpid(),
            folder=self._folder,
            limits=self._limits,
            enforcement=self._enforcement.kind,
            unenforced=tuple(self._enforcement.unenforced),
            running={s.id: s.environment.pid if s.environment else 0 for s in self._running_of(run)},
            warm=len(self._pool),
            fork_servers=tuple(self._forks.pids if self._forks else ()),
            problem=(run or self._own).journal.problem,
        )

    def _make(self, memory_mb: int, env: Mapping[str, str]) -> FunctionProcess:
        self._environments += 1
        return FunctionProcess(
            self._enforcement,
            self._environments,
            memory_mb=memory_mb,
            vcpus=self._limits.vcpus(memory_mb),
            env=env,
            folder=self._folder,
            forks=self._forks,
        )

    def _origin(self, call: Call) -> float:
        return call.origin or self._born

    def _t(self, call: Call) -> float:
        return time.time() - self._origin(call)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _read(cls: type[P], params: Mapping[str, object]) -> P:
    return build(cls, params, where="request to the daemon")
