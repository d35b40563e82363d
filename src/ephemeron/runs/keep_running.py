"""A driver for runs whose functions need nothing but to be kept running until each has said that it is done.

A kind that is no more than that (`examples/own-kind`) calls `keep_running` where it launches, attaches to and resumes a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ephemeron.blocking import Interrupts
from ephemeron.config.typed import plain
from ephemeron.errors import EphemeronError
from ephemeron.events import Event, Invoked, RunEnded
from ephemeron.functions.base import Call, Outcome, Platform
from ephemeron.runs import run_platform
from ephemeron.runs.client_run import summarized
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import RESULT_FILE, RunFolder, events_of
from ephemeron.runs.function_set import Fail, FunctionSet, How, Start, end_of
from ephemeron.runs.header import RunHeader, started, write_header
from ephemeron.runs.stop_requests import stop_requested, withdraw_stop
from ephemeron.runs.summary import RunResult, RunSummary, write_summary

_LOOK_S = 0.2
"""Between two looks for a request to stop."""
_LAST_S = 10.0
"""Longest wait for the last events."""


async def keep_running(
    folder: RunFolder,
    header: RunHeader,
    *,
    entry: str,
    requests: Sequence[object],
    env: Mapping[str, str] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    interrupts: Interrupts | None = None,
) -> RunResult:
    """Runs one function for each request until it says that it is done, another one where one was lost or has run out of time, within the
    budget of losses of `FunctionSet`; writes and returns the result. Call it with the run's lock.

    Args:
        folder, header: of the run. Its functions are of `header.platform`, `header.memory_mb` and `header.lifetime_s`.
        entry: that every function runs (`functions.entries`). It returns `outcome`: `done`, or `unfinished` for another one to go on.
        requests: arguments of the entry, by slot.
        env: variables for functions of this machine, such as `EPHEMERON_ENTRIES` and `PYTHONPATH`.
        on_event: called with every event from now on.
        interrupts: of the command; Ctrl-C then stops the run, which can be resumed.
    """
    began = time.time()
    meter = CostMeter(header.prices, servers=header.servers, memory_mb=header.memory_mb)
    old = list(events_of(folder)) if folder.events.exists() else []
    for event in old:  # of earlier drivers
        meter.feed(event)
    origin = began - meter.ended_at
    header = replace(header, started_at=origin)
    write_header(folder, header)
    (folder.path / RESULT_FILE).unlink(missing_ok=True)  # of an earlier driver
    platform = await run_platform.start(folder, header, dict(env or {}))
    try:
        await platform.cancel_all(header.run_id)  # what a driver before this one has left
        run = _Run(platform, folder, header, entry=entry, requests=requests, origin=origin, meter=meter)
        for slot in range(len(requests)):
            run.keep(slot, 1 + max((e.attempt for e in old if isinstance(e, Invoked) and e.rank == slot), default=-1))
        listening = asyncio.ensure_future(run.listen(len(old), on_event))
        await platform.emit(header.run_id, started(header, t=run.now(), wall_time=began))
        with contextlib.nullcontext() if interrupts is None else interrupts.handled(run.stop):
            status, causes = await run.drive()
        await platform.emit(header.run_id, RunEnded(t=run.now(), status=status, causes=causes))
        await asyncio.wait([listening], timeout=_LAST_S)
        listening.cancel()
    finally:
        await platform.cancel_all(header.run_id)
        await platform.shutdown()
    summary = summarized(RunSummary, folder, header, status=status, causes=tuple(causes))
    write_summary(folder, summary)
    return RunResult(summary, folder, summary.causes)


class _Run:
    def __init__(
        self,
        platform: Platform,
        folder: RunFolder,
        header: RunHeader,
        *,
        entry: str,
        requests: Sequence[object],
        origin: float,
        meter: CostMeter,
    ) -> None:
        self._platform, self._folder, self._header = platform, folder, header
        self._entry, self._requests, self._origin, self._meter = entry, requests, origin, meter
        self.functions = FunctionSet()
        self._first: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def keep(self, slot: int, attempt: int) -> None:
        """A function is needed in a slot, from this attempt on."""
        self._first[slot] = attempt
        self.functions.keep(slot, attempt)

    def stop(self) -> None:
        """Ends the run where it can be resumed."""
        self._is_stopping = True

    def now(self) -> float:
        """Seconds of the run."""
        return time.time() - self._origin

    async def listen(self, known: int, on_event: Callable[[Event], None]) -> None:
        """Feeds the meter with what follows the known events, until the run has ended."""
        async for event in self._platform.events(self._header.run_id):
            if known:
                known -= 1
                continue
            self._meter.feed(event)
            on_event(event)
            if isinstance(event, RunEnded):
                return

    async def drive(self) -> tuple[Literal["finished", "stopped", "failed"], list[str]]:
        """Keeps functions running; how that has ended, and why."""
        loop, budget = asyncio.get_running_loop(), self._header.budget_usd
        withdraw_stop(self._folder)
        try:
            while True:
                for action in self.functions.decide(loop.time()):
                    if isinstance(action, Fail):
                        return "failed", [f"function {action.slot}: {action}"]
                    self._tasks.add(asyncio.ensure_future(self._one(action)))
                if not self.functions.open:
                    return "finished", []
                if self._is_stopping or stop_requested(self._folder):
                    return "stopped", []
                if budget is not None and (cost := self._meter.cost_usd(self.now())) >= budget:
                    return "stopped", [f"it has cost ${cost:.4f}, and its budget is ${budget:g}"]
                if self._tasks:
                    done, self._tasks = await asyncio.wait(self._tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                else:
                    await asyncio.sleep(_LOOK_S)
        finally:
            self.functions.stop()
            await self._platform.cancel_all(self._header.run_id)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_LAST_S)

    async def _one(self, start: Start) -> None:
        h = self._header
        call = Call(
            run=h.run_id,
            rank=start.slot,
            attempt=start.attempt,
            memory_mb=h.memory_mb,
            lifetime_s=h.lifetime_s,
            channel=h.channel,
            entry=self._entry,
            origin=self._origin,
            key=self._folder.signing_key().text,
            labels=h.labels,
            reason="replacement" if start.attempt > self._first[start.slot] else "resume" if start.attempt else "start",
            request=plain(self._requests[start.slot]),
        )
        try:
            how, said = judge(await (await self._platform.invoke(call)).wait())
        except EphemeronError as e:
            how, said = end_of(e), str(e)
        self.functions.ended(start.slot, how, said, now=asyncio.get_running_loop().time())


def judge(outcome: Outcome) -> tuple[How, str]:
    """What the end of a function is, whose entry returns `outcome`."""
    if outcome.status == "ok":
        return ("done" if outcome.value.get("outcome") == "done" else "unfinished"), "its time was up"
    lines = outcome.error.strip().splitlines()
    said = f"{outcome.status}: {lines[-1] if lines else outcome.status}"
    return ("cancelled" if outcome.status == "cancelled" else "failed" if outcome.status == "error" else "lost"), said
