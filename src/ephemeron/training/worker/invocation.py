"""One invocation of a worker: identity, clock, channel, trace of phases, events. Complete from its first moment.

Everything that depends on the run's specification, which is read later, is in `lifecycle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from pathlib import Path

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.retrying import Outage, RetryPolicy
from ephemeron.communication.channels.run_channel import RunChannel, outage_text
from ephemeron.communication.keys import Keys
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import CorruptMessage
from ephemeron.events import PHASES, Continued, Event, FaultFired, Note, Phase, Traffic
from ephemeron.functions.base import Reason
from ephemeron.functions.context import Compute, Context
from ephemeron.training.job import Fault
from ephemeron.training.job.generation import Generation
from ephemeron.training.worker.direct_exchange import DirectExchange
from ephemeron.training.worker.faults import Delayed, FaultInjector
from ephemeron.training.worker.recovery import fencing
from ephemeron.training.worker.recovery.fencing import Exit
from ephemeron.training.worker.request import WorkerRequest
from ephemeron.training.worker.timeouts import IterationTimes

Span = tuple[Phase, float, float]


class PhaseTrace:
    """Time by phase, in seconds of the run: spans between two flushes. Reports the end of every operation to the fault injector."""

    def __init__(self, origin: float, faults: FaultInjector) -> None:
        self._origin = origin
        self._faults = faults
        self._spans: list[Span] = []
        self.busy_s = 0.0
        """Seconds between the last two flushes without waits."""
        self.totals: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        """Seconds of each phase until the last flush."""

    def record(self, phase: Phase, start: float, end: float) -> None:
        self._spans.append((phase, start - self._origin, end - self._origin))
        self._faults.ended(phase)

    def run_time(self) -> float:
        return asyncio.get_running_loop().time() - self._origin

    def flush(self) -> list[Span]:
        """Spans since the last flush: united by phase; a wait only where no other phase was active."""
        spans, self._spans = exclusive(self._spans), []
        self.busy_s = sum(end - start for phase, start, end in spans if phase != "wait")
        for phase, start, end in spans:
            self.totals[phase] += end - start
        return spans


def exclusive(spans: list[Span]) -> list[Span]:
    """Spans with overlapping ones of a phase united, and `wait` without the times of other phases."""
    by_phase: dict[Phase, list[tuple[float, float]]] = {}
    for phase, start, end in spans:
        by_phase.setdefault(phase, []).append((start, end))
    united = {phase: _unite(parts) for phase, parts in by_phase.items()}
    if "wait" in united:
        busy = _unite([part for phase, parts in united.items() if phase != "wait" for part in parts])
        united["wait"] = _minus(united["wait"], busy)
    out = [(phase, round(a, 6), round(b, 6)) for phase, parts in united.items() for a, b in parts]
    return sorted(out, key=lambda s: (s[1], s[2]))


def _unite(parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for start, end in sorted(parts):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _minus(parts: list[tuple[float, float]], holes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out = []
    for start, end in parts:
        for a, b in holes:
            if b <= start or a >= end:
                continue
            if a > start:
                out.append((start, a))
            start = max(start, b)
        if start < end:
            out.append((start, end))
    return out


_log = logging.getLogger(__name__)


class InvocationExit(Exception):
    """End of this invocation without an error. Control flow: it never leaves the worker."""

    def __init__(self, outcome: Exit) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class NextGeneration(InvocationExit):
    """This rank's part of a generation is over. Control flow, like its base."""

    def __init__(self, number: int, begin: bytes | None = None, members: Generation | None = None) -> None:
        super().__init__("left")
        self.number = number
        self.begin = begin
        """The state in which it begins; None: not known."""
        self.members = members
        """The next generation, as all ranks have agreed on it; None: not known."""


def first_leaf(group: BaseException) -> BaseException:
    """The decisive cause in a group of exceptions: an error before an exit, an exit before a cancellation."""
    if not isinstance(group, BaseExceptionGroup):
        return group
    leaves = [first_leaf(e) for e in group.exceptions]
    return next((e for e in leaves if not isinstance(e, (InvocationExit, asyncio.CancelledError))), leaves[0])


class InvocationContext:
    """One invocation, from its start to its end.

    Args:
        ctx: the platform's context.
        request: of the call.
    """

    def __init__(self, ctx: Context, request: WorkerRequest) -> None:
        self.ctx, self.call = ctx, ctx.call
        self.request = request
        self.rank, self.attempt = ctx.call.rank, ctx.call.attempt
        self.keys = Keys(ctx.call.run, generation=fencing.generation_of(self.attempt))
        self.reason: Reason = ctx.call.reason
        """Why this attempt was started."""
        self.left: int | None = None
        """Number of the generation that this invocation was a member of before; None: it has been in one only."""
        self.spec: bytes | None = None
        """Specification of the run, once it was read."""
        self.members: Generation | None = None
        """Generation that this invocation has joined, if it was told."""
        self.begin: bytes | None = None
        """State in which that generation begins, if it was told."""
        self.code: list[Path] | None = None
        """Folders of the user's code; None: it is not unpacked yet."""
        self.request_s = 0.0
        """Duration of a request at the start of the invocation."""
        self.load_s = 0.0
        """Time from the start of the invocation until all but the state was loaded."""
        self.began = self.now()
        self.started_after_s = self.run_now()
        """Seconds from the launch of the run to the start of this invocation."""
        self._cpu_began = ctx.cpu_time()
        self.faults = FaultInjector(rank=self.rank, attempt=fencing.number_of(self.attempt), die=ctx.die, fired=self._fired)
        self.retry = RetryPolicy(total_s=self.request.channel_retry_s)
        self.channel = RunChannel(
            ctx.channel,
            owner=ctx.invocation,
            retry=self.retry,
            told=self.outage,
            damaged=self.damaged,
            latest=ctx.deadline - 0.05 * ctx.call.lifetime_s,
            run=ctx.call.run,
            drops=self.faults.drops,
            signing=SigningKey.from_text(ctx.call.key),
        )
        self.direct: DirectExchange | None = None
        """Connections to the other ranks, on a direct channel."""
        self._direct_before = Traffic()
        self.trace = PhaseTrace(ctx.origin, self.faults)
        self.compute: Compute = ctx.compute
        self.at_end = contextlib.ExitStack()
        """Resources of the invocation, closed at its end."""

    def join(self, members: Generation, times: IterationTimes, begin: bytes | None) -> None:
        """Goes on as the first attempt of this rank in another generation.

        Args:
            members: the generation.
            times: iteration times that are known so far.
            begin: state in which it begins, if known.
        """
        self.left = self.keys.generation
        before, self.attempt = self.attempt, fencing.first_attempt(members.number)
        self.keys = dataclasses.replace(self.keys, generation=members.number)
        self.members, self.begin = members, begin
        self.reason = "start"
        self.request = WorkerRequest(channel_retry_s=self.request.channel_retry_s, slowest_s=times.slowest_s, typical_s=times.typical_s)
        self.faults.attempt = 0
        self.emit(Continued(t=self.run_now(), rank=self.rank, attempt=self.attempt, before=before, invocation=self.ctx.invocation))

    @property
    def stays(self) -> bool:
        """Whether this invocation has been a member of an earlier generation."""
        return self.left is not None

    @staticmethod
    def now() -> float:
        """Loop time."""
        return asyncio.get_running_loop().time()

    def run_now(self) -> float:
        """Seconds since the launch of the run."""
        return self.now() - self.ctx.origin

    def cpu_s(self) -> float:
        """CPU seconds of this invocation so far."""
        return round(self.ctx.cpu_time() - self._cpu_began, 6)

    @property
    def exchange(self) -> Channel:
        """Channel for contributions, merged shards and activations."""
        return self.channel if self.direct is None else self.direct.channel

    @property
    def traffic(self) -> Traffic:
        """Requests to the store and bytes over direct connections so far."""
        now = Traffic() if self.direct is None else self.direct.traffic
        return self.channel.traffic + self._direct_before + now

    async def leave_members(self) -> None:
        """Closes the connections to the other ranks, once all that was sent has left."""
        if self.direct is not None:
            direct, self.direct = self.direct, None
            await direct.close()
            self._direct_before += direct.traffic

    def inject(self, faults: list[Fault]) -> None:
        """Injects these faults from now on, as far as they concern this attempt."""
        self.faults.arm(faults)
        if self.faults.delay != 1 or self.faults.longer_s:
            self.compute = Delayed(self.ctx.compute, self.faults.delay, self.faults.longer_s)

    def emit(self, event: Event) -> None:
        """Hands an event to the platform."""
        self.ctx.emit(event)

    def warn(self, text: str) -> None:
        """Tells the user, and the log."""
        _log.warning("%s", text)
        self.emit(Note(t=self.run_now(), level="warning", text=text))

    def outage(self, outage: Outage) -> None:
        """Tells of an outage of a store."""
        text = outage_text(outage, who=f"rank {self.rank}", policy=self.retry)
        _log.log(logging.INFO if outage.over else logging.WARNING, "%s", text)
        self.emit(Note(t=self.run_now(), level="info" if outage.over else "warning", text=text))

    def damaged(self, error: CorruptMessage) -> None:
        """Tells of an object that is read again."""
        self.warn(f"rank {self.rank}: {error}; it is read again")

    def _fired(self, fault: Fault, iteration: int) -> None:
        _log.warning("injected fault %s at iteration %d", fault, iteration)
        self.emit(FaultFired(t=self.run_now(), rank=self.rank, attempt=self.attempt, fault=str(fault), iteration=iteration))
