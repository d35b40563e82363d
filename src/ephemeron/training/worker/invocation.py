"""What one invocation knows of itself: its clock, its bill, its lease, its successor, and whom it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

from ephemeron.communication.channels.retry import RetryPolicy
from ephemeron.communication.channels.retrying import Outage
from ephemeron.communication.channels.run_channel import RunChannel, outage_text
from ephemeron.communication.keys import Keys
from ephemeron.errors import CorruptMessage, EphemeronError
from ephemeron.events import Event, FaultFired, Note
from ephemeron.functions.base import Reason
from ephemeron.functions.context import Compute, Context
from ephemeron.training.collectives import StalledPeers, all_of
from ephemeron.training.job import Fault, parse_fault
from ephemeron.training.planner.model import lives
from ephemeron.training.worker import fencing
from ephemeron.training.worker.failure_detector import FailureDetector
from ephemeron.training.worker.faults import Delayed, FaultInjector
from ephemeron.training.worker.fencing import Claim
from ephemeron.training.worker.request import OVER, Recovery, WorkerRequest
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.timeouts import Timeouts
from ephemeron.training.worker.trace import PhaseTrace
from ephemeron.training.worker.wait_for_graph import WaitForGraph

SOONEST = 0.2
"""Share of the patience after which a successor asks about what its predecessors waited for in vain."""
CONTROL_EVERY_S = 2.0
LEAST_ITERATION_S = 0.001
"""Where none has ended yet as others do."""


class InvocationExit(EphemeronError):
    """This invocation is over, and well."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def first_leaf(group: BaseException) -> BaseException:
    """The cause that matters in a group of exceptions: a failure before a leave, a leave before a cancellation."""
    if not isinstance(group, BaseExceptionGroup):
        return group
    leaves = [first_leaf(e) for e in group.exceptions]
    return next((e for e in leaves if not isinstance(e, (InvocationExit, asyncio.CancelledError))), leaves[0])


class InvocationContext:
    """One invocation, from its start to its end."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.call = ctx, ctx.call
        self.request = WorkerRequest.of(ctx.call.request)
        self.rank, self.attempt = ctx.call.rank, ctx.call.attempt
        self.keys = Keys(ctx.call.run)
        self.began = self.now()
        self._cpu_began = ctx.cpu_time()
        self._started_after_s = self.run_now()
        self.faults = FaultInjector((), rank=self.rank, attempt=self.attempt, die=ctx.die, fired=self._fired)
        self.retry = RetryPolicy(total_s=self.request.channel_retry_s)
        self.channel = RunChannel(
            ctx.channel, owner=ctx.invocation, retry=self.retry, told=self._outage, damaged=self._damaged,
            latest=ctx.deadline - 0.05 * ctx.call.lifetime_s, run=ctx.call.run, drops=lambda key: self.faults.drops(key),
        )  # fmt: skip
        self.trace = PhaseTrace(ctx.origin, self.faults)
        self.compute: Compute = ctx.compute
        self.spec: RunSpec | None = None
        self.wants_stop = False
        self.spent_before_usd = 0.0
        self.request_s = 0.0
        """About what a request takes."""
        self.load_s = 0.0
        self.write_s = 0.0
        self.timeouts = Timeouts(least_s=0.0)
        self.timeouts.load(
            slowest_s=self.request.slowest_s, typical_s=self.request.typical_s, waited=self.request.waited
        )
        self._outages_before = 0.0
        self.at_end = contextlib.ExitStack()
        """What the invocation has to let go of."""
        self._successor = False
        self._leave_lock = asyncio.Lock()
        self._has_left = False
        self._iteration = -1
        self._iteration_began = self.began
        self._waiting = WaitForGraph(
            self.channel, self.keys, rank=self.rank, now=self.run_now, patience_s=self.patience
        )

    # -- clock and bill -----------------------------------------------------------------------------------

    @staticmethod
    def now() -> float:
        """Loop time."""
        return asyncio.get_running_loop().time()

    def run_now(self) -> float:
        """Seconds since the run was launched."""
        return self.now() - self.ctx.origin

    def cpu_s(self) -> float:
        """CPU seconds of this invocation so far."""
        return round(self.ctx.cpu_time() - self._cpu_began, 6)

    def adopt(self, spec: RunSpec) -> None:
        """The specification is here: faults and limits apply from now on."""
        self.spec = spec
        faults = [parse_fault(f) for f in spec.faults]
        self.faults = FaultInjector(faults, rank=self.rank, attempt=self.attempt, die=self.ctx.die, fired=self._fired)
        self.trace = PhaseTrace(self.ctx.origin, self.faults)
        self.timeouts.least_s = spec.patience_s
        self.replacing = FailureDetector(
            self.channel, self.keys, spec, self.timeouts, rank=self.rank, lifetime_s=self.call.lifetime_s, now=self.now,
            run_now=self.run_now, invoke=self._replacement, note=self._warn,
        )  # fmt: skip
        self.replacing.seen.update(self.request.seen)
        if self.faults.delay != 1:
            self.compute = Delayed(self.ctx.compute, self.faults.delay)

    def emit(self, event: Event) -> None:
        self.ctx.emit(event)

    def traffic_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self.channel.traffic)

    def spent_usd(self) -> float:
        """By this rank, predecessors included, as far as they handed it on."""
        assert self.spec is not None
        prices, traffic = self.spec.prices, self.channel.traffic
        gb_seconds = self.call.memory_mb / 1024 * (self.now() - self.began)
        return self.spent_before_usd + prices.functions_usd(gb_seconds, 1) + prices.storage_usd(traffic)

    def over_budget(self) -> bool:
        """Whether this rank has used up its share of the budget."""
        assert self.spec is not None
        budget = self.spec.budget_usd
        return budget is not None and self.spent_usd() * self.spec.configuration.workers >= budget

    def begin_iteration(self, iteration: int) -> None:
        self._iteration_began = self.now()
        self.timeouts.begin(self._iteration_began)
        self._outages_before = self.channel.outages_s
        self.faults.iteration = self._iteration = iteration

    def end_iteration(self) -> None:
        """It is over, with all that this rank had to wait for."""
        outages_s = self.channel.outages_s - self._outages_before
        self.timeouts.end(self.now() - outages_s, busy_s=max(0.0, self.trace.busy_s - outages_s))

    @property
    def typical_s(self) -> float:
        """Of an iteration; 0: none is known."""
        return self.timeouts.typical_s

    def patience(self, times: float = 1) -> float:
        """How long a peer may keep us waiting before it is suspected, or before our own life is too short to wait."""
        assert self.spec is not None
        left = self.ctx.deadline - self.now() - 0.95 * self._closing()
        # Nobody can be suspected by functions that never live long enough to lose patience.
        patience_s = min(times * self.timeouts.usual_s(), self._within_a_life_s())
        # What predecessors have waited for is asked about soon.
        before_s = max(self.timeouts.before_s.values(), default=0.0)
        return min(max(patience_s - before_s, SOONEST * patience_s), max(left, 0.01))

    def _within_a_life_s(self) -> float:
        assert self.spec is not None
        return self.timeouts.within_s(lifetime_s=self.call.lifetime_s, cold_start_s=self.spec.cold_start_s)

    def heard(self, rank: int, busy_s: float) -> None:
        """Something new of a peer is there."""
        self.timeouts.heard(rank, self.now(), busy_s)

    async def watch_control(self) -> None:
        """Looks every two seconds whether the user wants the run to stop. One rank does it for all."""
        while not self.wants_stop:
            await asyncio.sleep(CONTROL_EVERY_S)
            self.wants_stop = await self.channel.fetch(self.keys.control) is not None

    # -- lifetime -----------------------------------------------------------------------------------------

    def _left(self) -> float:
        """Seconds until the end of this invocation."""
        return self.ctx.deadline - self.now()

    def _closing(self) -> float:
        return float(lives.closing_s(self.call.lifetime_s, self.write_s, self.request_s))

    def _reserve(self) -> float:
        return float(lives.reserve_s(self.call.lifetime_s, self.typical_s, self._closing()))

    def _leaving(self) -> float:
        return float(lives.leaving_s(self.call.lifetime_s, self.typical_s, self._closing()))

    def _is_closing(self) -> bool:
        """Whether waiting any longer, or replacing somebody first, would leave no time to say so."""
        return self._left() < 2 * self._closing()

    def must_hand_over(self) -> bool:
        """Whether another iteration might not fit."""
        return self._left() < self._reserve()

    def will_hand_over(self) -> bool:
        """Whether it is time to tell the others, in this iteration, so that all hand over after it and the run stands still but once."""
        passed = self.now() - self._iteration_began
        return self._left() - max(self.typical_s - passed, 0.0) < self._leaving()

    def is_past_middle(self) -> bool:
        """Whether handing over now would not waste most of this invocation."""
        return self._left() < 0.5 * self.call.lifetime_s

    def should_prepare(self, iterations_left: int) -> bool:
        """Whether a successor would not be ready in time if it were started an iteration later, and is needed."""
        assert self.spec is not None
        life_s, each, left = self.call.lifetime_s, max(self.typical_s, LEAST_ITERATION_S), self._left()
        if self._successor:
            return False
        if left > self._reserve() + 1.5 * iterations_left * each + 0.2 * life_s:
            return False  # we shall have finished, also if we have to wait for the others then
        # From the second relay on, the environment of our predecessor is warm and free. The first successors will
        # start as the first functions did: all at once, and maybe more slowly than one alone.
        cold = self.attempt == 0
        start = max(self.spec.cold_start_s, self._started_after_s) if cold else lives.WARM_START_S
        leaving, stop = self._leaving(), float(lives.stop_s(self.write_s, self.request_s))
        share = lives.FIRST_SHARE if cold else lives.SHARE
        early = lives.ahead(life_s, each, leaving, lead_s=start + 2 * self.load_s, stop_s=stop, share=share)
        return bool(lives.iterations_until(left, each, leaving) <= early)

    async def invoke_successor(self) -> None:
        """Starts the next attempt of this rank; it loads while we go on, and waits for us to hand over.

        Raises:
            Leave: somebody else has: we are superseded.
        """
        if self._successor:
            return
        if not await self._claim(self.attempt + 1):
            raise InvocationExit("fenced")
        self._successor = True
        left = self.ctx.deadline - self.now()  # by then we have handed over, or were killed
        await self._invoke(self.rank, self.attempt + 1, "relay", hand_within_s=round(left, 3), reached=self._reached())

    async def forget_predecessor(self) -> None:
        """Deletes the traces of the attempt before ours, so that relays leave nothing behind."""
        before = self.attempt - 1
        keys = self.keys
        await self.channel.delete(
            [keys.claim(self.rank, before), keys.start(self.rank, before), keys.hand(self.rank, self.attempt)]
        )

    async def hand_over(self, iteration: int) -> None:
        """Tells the successor where to go on."""
        await self.channel.put(self.keys.hand(self.rank, self.attempt + 1), [str(iteration).encode()])

    async def dismiss_successor(self) -> bool:
        """Lets a successor that waits for us go, since there is nothing left to do; whether there is one."""
        if self._successor:
            await self.channel.put(self.keys.hand(self.rank, self.attempt + 1), [OVER])
        return self._successor

    async def _invoke(self, rank: int, attempt: int, reason: Reason, **more: Any) -> None:
        own, pace = rank == self.rank, self.timeouts.state()
        request = WorkerRequest(
            channel_retry_s=self.request.channel_retry_s, tries=self.request.tries if own else 0,
            reached=self.request.reached if own else -1, seen=self._seen() if own else (), slowest_s=pace["slowest_s"],
            typical_s=pace["typical_s"],
        )  # fmt: skip
        request = dataclasses.replace(request, **more)
        await self.ctx.invoke(
            dataclasses.replace(self.call, rank=rank, attempt=attempt, reason=reason, request=request.to_json())
        )

    def _seen(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self.replacing.seen.items()))

    # -- peers --------------------------------------------------------------------------------------------

    async def check_fence(self) -> None:
        """Raises `InvocationExit` if a newer attempt of this rank exists that we did not start."""
        if await self.channel.fetch(self._newer()) is not None:
            raise InvocationExit("fenced")

    def _newer(self) -> str:
        """The claim of the first attempt of this rank that is not ours to start."""
        return self.keys.claim(self.rank, self.attempt + (2 if self._successor else 1))

    async def overdue(self, blame: StalledPeers) -> None:
        """Somebody is late. Leaves if the run does not need us any more, else replaces whoever is to blame.

        Raises:
            Leave: superseded, stopped, finished, or at the end of our own lifetime.
            ReplacementsFailed: replacing does not help, or the run has used up its replacements.
        """
        self.timeouts.disturbed()
        marks = {"fenced": self._newer(), "finished": self.keys.result, "stopped": self.keys.control}
        there = await all_of(self.channel.fetch(key) for key in marks.values())
        outcome = next((outcome for outcome, data in zip(marks, there, strict=True) if data is not None), None)
        if outcome is None and not self._is_closing():
            return await self.suspect(blame)
        async with self._leave_lock:  # several waits end at once
            if outcome is None and not self._has_left:
                self._has_left = True
                await self._leave_waiting(blame)
            async with self.replacing.launching:
                raise InvocationExit("relayed" if outcome is None or self._has_left else outcome)

    async def _leave_waiting(self, blame: StalledPeers) -> None:
        """Ends this life in the middle of an iteration: the next attempt recovers from a checkpoint, and waits on.

        It is told how long whoever is late has been waited for: waits that are longer than what a life leaves for them count
        all the same.
        """
        if blame.iteration <= self.request.reached:
            await self.replacing.spend(self.rank, blame.iteration)  # a life that has brought nothing
        iteration = blame.iteration
        peers = [rank for rank in blame.ranks if rank != self.rank]
        await all_of(self.replacing.goes_on(rank) for rank in peers)
        now = self.now()
        waited = tuple((rank, iteration, round(self.timeouts.waited_s(rank, iteration, now), 3)) for rank in peers)
        if self._successor:
            message = Recovery(waited=waited, seen=self._seen()).to_bytes()
            await self.channel.put(self.keys.hand(self.rank, self.attempt + 1), [message])
        else:
            still = self.request.not_after
            told = still if still is not None and iteration <= still else None
            if not await self._claim(self.attempt + 1, not_after=told):
                return
            await self._invoke(
                self.rank,
                self.attempt + 1,
                "replacement",
                reached=self._reached(iteration),
                not_after=told,
                waited=waited,
            )

    async def suspect(self, blame: StalledPeers) -> None:
        """Replaces whoever is to blame.

        Raises:
            ReplacementsFailed: replacing does not help, or the run has used up its replacements.
        """
        late = [(rank, blame.iteration) for rank in blame.ranks]
        keys = dict(zip(blame.ranks, blame.keys, strict=False))
        if self.spec is not None and self.spec.stages is not None:
            late, keys = await self._waiting.culprits(blame), {}
        await all_of(self.replacing.replace(rank, iteration, missed=keys.get(rank)) for rank, iteration in late)
        if any(rank == self.rank for rank, _ in late):  # what we had sent was lost: our replacement sends it again
            await self.check_fence()

    def _reached(self, awaited: int = -1) -> int:
        return max(self._iteration, awaited, self.request.reached)

    async def _replacement(self, rank: int, attempt: int, claim: Claim) -> None:
        await self._invoke(rank, attempt, "replacement", not_after=claim.not_after, tries=claim.tries)

    async def _claim(self, attempt: int, *, not_after: float | None = None) -> bool:
        """Whether we may launch this attempt of our own rank."""
        said = Claim(at_s=self.run_now(), not_after=not_after, tries=self.request.tries)
        return await fencing.claim(self.channel, self.keys, self.rank, attempt, said)

    def _warn(self, text: str) -> None:
        self.emit(Note(t=self.run_now(), level="warning", text=text))

    def _outage(self, outage: Outage) -> None:
        text = outage_text(outage, who=f"rank {self.rank}", policy=self.retry)
        self.emit(Note(t=self.run_now(), level="info" if outage.over else "warning", text=text))

    def _damaged(self, error: CorruptMessage) -> None:
        self.emit(Note(t=self.run_now(), level="warning", text=f"rank {self.rank}: {error}; it is read again"))

    def _fired(self, fault: Fault, iteration: int) -> None:
        self.emit(
            FaultFired(t=self.run_now(), rank=self.rank, attempt=self.attempt, fault=str(fault), iteration=iteration)
        )
