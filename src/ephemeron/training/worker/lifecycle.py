"""The life cycle of one invocation after its start: iterations, lease, hand-off to a successor, late peers.

Four parts decide, each pure and tested by itself: `budget` (time and cost left), `lease` (whether this attempt still acts for
its rank), `handoff` (when the successor starts and takes over) and `failure_detector` with `timeouts` (whether a late peer is
replaced). This module feeds them with what happens and carries out what they decide.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from ephemeron.events import LimitReached, Traffic
from ephemeron.functions.base import Reason
from ephemeron.training.collectives import StalledPeers, all_of
from ephemeron.training.collectives.sync_policy import UNBOUNDED, policy_for
from ephemeron.training.job import parse_fault
from ephemeron.training.tensors import HAND_OFF, RESIZE, STOP, SUCCESSOR
from ephemeron.training.worker.budget import Budget
from ephemeron.training.worker.control import ResizeRequest, decode_control
from ephemeron.training.worker.invocation import InvocationContext, InvocationExit, NextGeneration
from ephemeron.training.worker.recovery import fencing
from ephemeron.training.worker.recovery.failure_detector import FailureDetector
from ephemeron.training.worker.recovery.fencing import Claim, Lease
from ephemeron.training.worker.recovery.handoff import NO_EVALUATION, Evaluation, HandOff
from ephemeron.training.worker.recovery.replacement import PeerReplacement
from ephemeron.training.worker.recovery.wait_for_graph import WaitForGraph
from ephemeron.training.worker.request import OVER, Recovery, WorkerRequest
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.timeouts import IterationTimes, Timeouts
from ephemeron.units import human_seconds, human_usd

_log = logging.getLogger(__name__)

EARLY_SHARE = 0.2
"""Share of the usual timeout after which a successor suspects peers that its predecessors already waited for."""
CONTROL_EVERY_S = 2.0
CHECK_EVERY_S = 5.0
"""Interval at which a function that waits looks whether the run is over, or was stopped."""
FULL = 0.9
"""Share of an invocation's time limit that suffices for an evaluation of unknown length, if any does."""
STOPPING = 3
"""Iterations, besides the staleness, between the decision to stop and the last checkpoint."""


class InvocationLifecycle:
    """One invocation whose run is known.

    Args:
        invocation: the invocation.
        spec: of the run.
    """

    def __init__(self, invocation: InvocationContext, spec: RunSpec) -> None:
        call, request = invocation.call, invocation.request
        self.invocation, self.spec = invocation, spec
        self.rank, self.attempt, self.keys, self.channel = (call.rank, invocation.attempt, invocation.keys, invocation.channel)
        invocation.inject([parse_fault(f) for f in spec.faults])
        self.budget = Budget(
            began_s=self._billed_from(),
            deadline_s=invocation.ctx.deadline,
            memory_mb=call.memory_mb,
            workers=spec.configuration.workers,
            prices=spec.prices,
            limit_usd=spec.budget_usd,
            traffic_before=invocation.channel.traffic if invocation.stays else Traffic(),
        )
        self.lease = Lease(rank=call.rank, attempt=self.attempt, tries=request.tries)
        self.handoff = HandOff(
            lifetime_s=call.lifetime_s,
            cold_start_s=spec.cold_start_s,
            start_s=invocation.started_after_s,
            attempt=fencing.number_of(self.attempt),
        )
        self.timeouts = Timeouts(least_s=spec.peer_timeout_s)
        self.timeouts.load(IterationTimes(slowest_s=request.slowest_s, typical_s=request.typical_s), waited=request.waited)
        self.detector = FailureDetector(
            self.timeouts, lifetime_s=call.lifetime_s, cold_start_s=spec.cold_start_s, checkpoint_every=spec.configuration.checkpoint_every
        )
        self.replacement = PeerReplacement(
            self.channel,
            self.keys,
            self.detector,
            rank=call.rank,
            most=spec.most_replacements,
            now=self.now,
            run_now=self.run_now,
            invoke=self._invoke_replacement,
            warn=invocation.warn,
        )
        generation = spec.current_generation
        if generation.number:  # all that came before has been received
            self.detector.progress_seen = dict.fromkeys(range(generation.workers), generation.from_iteration - 1)
        self.detector.progress_seen.update(request.seen)
        self.not_after = request.not_after
        """Iteration whose objects peers miss until this rank has sent them again; None: there is none."""
        self.back: int | None = None if not request.together else request.not_after
        """Iteration to whose checkpoints all ranks go back; None: they do not."""
        self.is_left_behind: Callable[[], Awaitable[bool]] | None = None
        """Whether peers have what this rank waits for behind them, and cannot give it; None: they always can."""
        self._limit = ""
        """Limit that ends the run, in words."""
        self._asked_to_stop = False
        self.stop_requested = False
        """Whether the user has asked to stop the run."""
        self.resize_request: ResizeRequest | None = None
        """The latest request of the user to change the functions of the run."""
        self.resizes = False
        """Whether the next generation is agreed on, which this rank's contributions say."""
        policy = policy_for(spec.configuration.sync)
        self.has_barriers = policy.name == "hsp"
        self.staleness = 0 if spec.configuration.group == 1 or self.has_barriers else policy.other_staleness
        """Versions that a rank's parameters may lack."""
        self.stop_lag = self.staleness if self.staleness < UNBOUNDED else 0
        """Iterations by which ranks learn of a stop at most later than the first."""
        self._stops_once = not policy.exact
        """Whether one contribution alone asks for a stop: a resumed run goes on with versions of later ones."""
        self._leave_lock = asyncio.Lock()
        self._iteration = -1
        self._iteration_began = invocation.began
        self._outages_before_s = self._evaluated_s = 0.0
        self.evaluation_follows_s = 0.0
        """Expected seconds of the evaluation after this iteration; 0: none follows."""
        self._wait_for_graph = WaitForGraph(self.channel, self.keys, rank=call.rank, now=self.run_now, timeout_s=self.wait_timeout_s)

    def now(self) -> float:
        """Loop time."""
        return self.invocation.now()

    def run_now(self) -> float:
        """Seconds since the launch of the run."""
        return self.invocation.run_now()

    # -- iterations and cost ------------------------------------------------------------------------------

    def begin_iteration(self, iteration: int) -> None:
        """This rank computes `iteration` from now on."""
        self._iteration_began = self.now()
        self.timeouts.begin(self._iteration_began)
        self._outages_before_s, self._evaluated_s, self.evaluation_follows_s = self.channel.outages_s, 0.0, 0.0
        self.invocation.faults.iteration = self._iteration = iteration

    def end_iteration(self) -> None:
        """The iteration is over, with all that this rank had to wait for."""
        outages_s = self.channel.outages_s - self._outages_before_s
        busy_s = max(0.0, self.invocation.trace.busy_s - outages_s)
        self.timeouts.end(self.now() - outages_s, busy_s=busy_s, evaluated_s=self._evaluated_s)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of an evaluation, whose time is no part of its iteration's."""
        began, outages_s = self.now(), self.channel.outages_s
        yield
        took = max(0.0, self.now() - began - (self.channel.outages_s - outages_s))
        self.timeouts.record_evaluation(took)
        self._evaluated_s += took

    def _billed_from(self) -> float:
        """Time from which this invocation is billed: its call, not the end of its cold start."""
        invocation = self.invocation
        if invocation.stays:
            return invocation.now()
        first = self.attempt == 0
        return invocation.began - (invocation.started_after_s if first else self.spec.cold_start_s)

    def spent_usd(self) -> float:
        """Cost of this rank so far, as far as earlier invocations have handed it on."""
        return self.budget.spent_usd(self.now(), self.channel.traffic)

    def run_usd(self) -> float:
        """Cost of the run so far, as this rank estimates it."""
        return self.budget.run_usd(self.now(), self.channel.traffic)

    def over_limits(self) -> bool:
        """Whether the run has to stop now to keep its budget, or has used up its time. The first time, an event says which.

        Rank 0 watches them: it hears from all others what they cost.
        """
        if not self._limit and self.rank == 0:
            limit_s, limit_usd = self.spec.time_limit_s, self.spec.budget_usd
            if limit_s is not None and self.run_now() >= limit_s:
                self._limit = f"the time limit of {human_seconds(limit_s)} is reached"
            elif limit_usd is not None and self._exceeds_budget():
                spent = human_usd(self.run_usd())
                self._limit = f"the budget of {human_usd(limit_usd)} is reached: {spent} are spent, and a stop costs the rest"
            if self._limit:
                self.invocation.emit(LimitReached(t=self.run_now(), rank=self.rank, text=self._limit))
        return bool(self._limit)

    def _exceeds_budget(self) -> bool:
        now = self.now()
        stopping_s = (STOPPING + self.stop_lag) * self.timeouts.typical_s + self.handoff.write_s
        started_s = self.budget.ahead_since_s + self.spec.cold_start_s + self.handoff.load_s
        ahead_s = max(stopping_s, started_s - now) + CHECK_EVERY_S
        return self.budget.is_exceeded(now, self.channel.traffic, stopping_s=stopping_s, ahead_stopping_s=ahead_s)

    def flags(self) -> int:
        """Flags of this rank's next contribution."""
        stops = self.stop_requested or self.over_limits()
        flags = STOP if stops and not (self._stops_once and self._asked_to_stop) else 0
        self._asked_to_stop |= stops
        flags |= RESIZE if self.resizes else 0
        flags |= SUCCESSOR if self.lease.has_successor else 0
        return flags | (HAND_OFF if self.will_hand_off() else 0)

    async def watch_control(self) -> None:
        """Polls every two seconds what the user wants. One rank does it for all."""
        while not self.stop_requested:
            await asyncio.sleep(CONTROL_EVERY_S)
            self._take_request(await self.channel.fetch(self.keys.control))
        _log.info("the user has asked to stop the run")

    def _take_request(self, data: memoryview | None) -> None:
        if data is None:
            return
        request = decode_control(data, key=self.keys.control)
        if isinstance(request, ResizeRequest):
            self.resize_request = request
        else:
            self.stop_requested = True

    # -- hand-off -----------------------------------------------------------------------------------------

    def must_hand_off(self) -> bool:
        """Whether another iteration may not fit into this invocation."""
        return self.handoff.is_due(self._left_s(), self.timeouts.typical_s)

    def must_hand_off_before_evaluation(self, evaluation_s: float, others: bool) -> bool:
        """Whether an evaluation may not fit into this invocation, and its successor does it.

        Args:
            evaluation_s: expected.
            others: whether other ranks hand off now.
        """
        left_s, known = self._left_s(), self.timeouts.evaluation_s > 0
        if self.invocation.reason == "replacement" and not known and left_s < FULL * self.handoff.lifetime_s:
            return True  # its predecessor may have been lost in the evaluation, whose length nobody has seen yet
        return self.handoff.is_due_before(left_s, evaluation_s, others=others)

    def will_hand_off(self) -> bool:
        """Whether this iteration tells the others to hand off after it."""
        passed_s = self.now() - self._iteration_began
        return self.handoff.is_announced(self._left_s(), self.timeouts.typical_s, passed_s, evaluation_s=self.evaluation_follows_s)

    def is_past_middle(self) -> bool:
        """Whether a hand-off now wastes less than half of this invocation."""
        return self.handoff.is_past_middle(self._left_s())

    def needs_successor(self, iterations_left: int, evaluation: Evaluation = NO_EVALUATION) -> bool:
        """Whether the successor has to be started before the next iteration."""
        if self.lease.has_successor:
            return False
        return self.handoff.needs_successor(self._left_s(), self.timeouts.typical_s, iterations_left, evaluation)

    async def invoke_successor(self) -> None:
        """Starts the next attempt of this rank; it loads meanwhile, and waits for the hand-off.

        Raises:
            InvocationExit: another party has claimed that attempt: this one is superseded.
        """
        if self.lease.has_successor:
            return
        not_after = self._still_missed(self._iteration)
        if not await self._claim_next(not_after=not_after):
            raise InvocationExit("fenced")
        self.lease.has_successor = True
        _log.info("invokes its successor, attempt %d", self.attempt + 1)
        hand_within_s = max(0.0, round(self._left_s(), 3))  # by then this invocation has handed off, or was killed
        request = WorkerRequest(hand_within_s=hand_within_s, reached=self._reached(), not_after=not_after)
        await self.invoke(self.rank, self.attempt + 1, "relay", request)

    async def wait_in_successor(self) -> None:
        """Starts the next attempt of this rank, which waits for the beginning of the generation in its place.

        Raises:
            ReplacementsFailed: the run may replace no more functions: this one has made no progress.
        """
        await self.replacement.spend(self.rank, max(self.invocation.request.reached, 0))
        if await self._claim_next(not_after=None):
            await self.invoke(self.rank, self.attempt + 1, "replacement", WorkerRequest())

    def taken_over(self, iteration: int) -> None:
        """This attempt goes on at `iteration`, where its predecessor has handed off."""
        self.not_after = self._still_missed(iteration)

    async def delete_predecessor_objects(self) -> None:
        """Deletes claim, start marker and hand-off message of the attempt before, so that hand-offs leave nothing behind."""
        before = self.attempt - 1
        keys = self.keys
        await self.channel.delete([keys.claim(self.rank, before), keys.start(self.rank, before), keys.hand(self.rank, self.attempt)])

    async def hand_off(self, iteration: int) -> None:
        """Tells the successor from which iteration's checkpoint it goes on."""
        await self._tell_successor(str(iteration).encode())
        _log.info("handed off at iteration %d", iteration)

    async def dismiss_successor(self) -> bool:
        """Ends a successor that waits, since the run is over; returns whether there is one."""
        if self.lease.has_successor:
            await self._tell_successor(OVER)
        return self.lease.has_successor

    async def _tell_successor(self, message: bytes) -> None:
        await self.channel.put(self.keys.hand(self.rank, self.attempt + 1), [message])

    async def invoke(self, rank: int, attempt: int, reason: Reason, request: WorkerRequest, *, memory_mb: int | None = None) -> None:
        """Starts an attempt of a rank.

        Args:
            rank, attempt, reason: of the call.
            request: arguments; iteration times are filled in.
            memory_mb: quota; None: that of this generation.

        Raises:
            InvocationRefused: the platform refuses.
        """
        own, times = self.invocation.request, self.timeouts.state()
        request = dataclasses.replace(request, channel_retry_s=own.channel_retry_s, slowest_s=times.slowest_s, typical_s=times.typical_s)
        if rank == self.rank:
            request = dataclasses.replace(
                request, tries=request.tries or own.tries, reached=max(request.reached, own.reached), seen=self._seen()
            )
        call = dataclasses.replace(
            self.invocation.call,
            rank=rank,
            attempt=attempt,
            reason=reason,
            request=request.to_json(),
            memory_mb=memory_mb or self.spec.configuration.memory_mb,
        )
        await self.invocation.ctx.invoke(call)

    async def _invoke_replacement(self, rank: int, attempt: int, claim: Claim) -> None:
        request = WorkerRequest(not_after=claim.not_after, tries=claim.tries)
        await self.invoke(rank, attempt, "replacement", request)

    async def _claim_next(self, *, not_after: int | None) -> bool:
        claim = self.lease.claim_for_successor(self.run_now(), not_after=not_after)
        return await fencing.claim(self.channel, self.keys, self.rank, self.attempt + 1, claim)

    def _still_missed(self, iteration: int) -> int | None:
        """What the next attempt gets as `not_after` if this one ends at `iteration`."""
        return None if self.not_after is None or iteration > self.not_after else self.not_after

    def _reached(self, awaited: int = -1) -> int:
        return max(self._iteration, awaited, self.invocation.request.reached)

    def _seen(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self.detector.progress_seen.items()))

    def _left_s(self) -> float:
        return self.budget.time_left_s(self.now())

    # -- peers --------------------------------------------------------------------------------------------

    def on_message(self, rank: int, busy_s: float, spent_usd: float = 0.0) -> None:
        """A new object of a peer has arrived, which knows iterations to take `busy_s`, and has cost `spent_usd`; 0: not told."""
        self.timeouts.record_message(rank, self.now(), busy_s)
        if spent_usd:
            self.budget.record(rank, spent_usd, self.now())

    def wait_timeout_s(self, times: float = 1) -> float:
        """Seconds until a wait for a peer times out: it is suspected, or this invocation has to end.

        Args:
            times: multiple of the usual timeout.
        """
        left_s = self._left_s() - 0.95 * self.handoff.closing_s()
        # Functions that live shorter than the usual timeout would never suspect a peer.
        limit_s = self.timeouts.limit_s(lifetime_s=self.invocation.call.lifetime_s, cold_start_s=self.spec.cold_start_s)
        timeout_s = min(times * self.timeouts.timeout_s(), limit_s)
        # The wait of earlier attempts counts, so that a successor suspects soon.
        before_s = max(self.timeouts.waited_before_s.values(), default=0.0)
        return min(max(timeout_s - before_s, EARLY_SHARE * timeout_s), max(left_s, 0.01))

    async def check_fence(self) -> None:
        """Raises `InvocationExit` if another party has claimed a newer attempt of this rank."""
        if await self.channel.fetch(self._fence()) is not None:
            raise InvocationExit("fenced")

    def _fence(self) -> str:
        return self.keys.claim(self.rank, self.lease.fencing_attempt)

    async def on_timeout(self, stalled: StalledPeers) -> None:
        """A peer is late: ends this invocation if the run does not need it any more, else replaces stalled peers.

        Raises:
            InvocationExit: superseded, stopped, finished, or at the end of this invocation's own time.
            ReplacementsFailed: replacing does not help, or the run has used up its replacements.
        """
        self.timeouts.mark_disturbed()
        now = self.keys.generation
        wanted = (self._fence(), self.keys.result, self.keys.control, self.keys.over(now))

        async def has_begun() -> memoryview | None:  # whole or not: who needs the object finds that out
            return memoryview(b"") if await self.channel.exists(self.keys.begin(now + 1)) else None

        requests = [*(self.channel.fetch(key) for key in wanted), has_begun()]
        fence, result, control, over, begun = await all_of(requests)
        self._take_request(control)
        fenced, finished, stopped = fence is not None, result is not None, self.stop_requested
        if (begun is not None or over is not None) and not fenced and not finished:
            async with self.replacement.launching:
                raise NextGeneration(await fencing.latest_begun(self.channel, self.keys))
        outcome = self.lease.exit_after_timeout(fenced=fenced, finished=finished, stopped=stopped)
        if outcome is None and not self.handoff.is_closing(self._left_s()):
            if stalled.ranks or self.is_left_behind is None or not await self.is_left_behind():
                return await self.suspect(stalled)
            _log.warning("the others are past iteration %d, and this rank is not", stalled.iteration)
        async with self._leave_lock:  # several waits end at once
            if outcome is None and self.lease.pass_on():
                await self._leave_waiting(stalled)
            async with self.replacement.launching:
                raise InvocationExit("relayed" if outcome is None or self.lease.passed_on else outcome)

    async def _leave_waiting(self, stalled: StalledPeers) -> None:
        """Ends this invocation in the middle of an iteration: the next attempt recovers from a checkpoint and waits on.

        It is told how long the late peers have been waited for: a wait may be longer than one invocation.
        """
        _log.info("ends while it waits for ranks %s at iteration %d", list(stalled.ranks), stalled.iteration)
        request, iteration = self.invocation.request, stalled.iteration
        if iteration <= request.reached:
            await self.replacement.spend(self.rank, iteration)  # this invocation has made no progress
        peers = [rank for rank in stalled.ranks if rank != self.rank]
        await all_of(self.replacement.has_progressed(rank) for rank in peers)
        now = self.now()
        waited = tuple((rank, iteration, round(self.timeouts.waited_s(rank, iteration, now), 3)) for rank in peers)
        not_after = self._still_missed(iteration)
        if self.lease.has_successor:
            recovery = Recovery(waited=waited, seen=self._seen(), sent=not_after is None)
            return await self._tell_successor(recovery.to_bytes())
        if await self._claim_next(not_after=not_after):
            more = WorkerRequest(reached=self._reached(iteration), not_after=not_after, waited=waited)
            await self.invoke(self.rank, self.attempt + 1, "replacement", more)

    async def go_back(self, iteration: int) -> None:
        """Ends this attempt in favour of the next one, which goes on from the checkpoint of an iteration, as all ranks do.

        Raises:
            InvocationExit: always.
        """
        async with self._leave_lock:
            if self.lease.pass_on():
                if self.lease.has_successor:
                    await self._tell_successor(Recovery(seen=self._seen(), back=iteration).to_bytes())
                elif await self._claim_next(not_after=iteration):
                    request = WorkerRequest(reached=self._reached(), not_after=iteration, together=True)
                    await self.invoke(self.rank, self.attempt + 1, "replacement", request)
            raise InvocationExit("relayed")

    async def suspect(self, stalled: StalledPeers) -> None:
        """Replaces stalled peers that the failure detector takes for dead.

        Raises:
            ReplacementsFailed: replacing does not help, or the run has used up its replacements.
        """
        late = [(rank, stalled.iteration) for rank in stalled.ranks]
        keys = dict(zip(stalled.ranks, stalled.keys, strict=False))
        if self.spec.stages is not None:
            late, keys = await self._wait_for_graph.suspects(stalled), {}
        await all_of(self.replacement.replace(rank, iteration, missed=keys.get(rank)) for rank, iteration in late)
        if any(rank == self.rank for rank, _ in late):  # this rank's own object was lost: its replacement sends it again
            await self.check_fence()
