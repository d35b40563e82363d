"""The training loop of one function, and the entry `worker`: fence, load, train, hand off or finish.

The workers carry the run themselves. No coordinator is needed after the launch: a rank that waits too long for a peer
replaces it, a rank near its time limit invokes its own successor, and rank 0 closes the run. A client that watches
only makes this faster.

State of a worker: the iteration `t` that it computes next, and `applied`, the number of merged versions that its parameters
contain. Everything that a successor needs is in the checkpoint; everything else is derived from `t`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import NoReturn

from ephemeron import logs
from ephemeron.communication.keys import is_merged, is_put_again
from ephemeron.events import Checkpointed, Evaluated, Measured, Note, Progress
from ephemeron.functions.context import Context
from ephemeron.runs.metrics import EvaluationSums, Metrics
from ephemeron.training.collectives import Collective, SingleRank, collective_for
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.task.schedule import decision_of
from ephemeron.training.tensors import HAND_OFF, STOP, SUCCESSOR, encode_state
from ephemeron.training.worker.background import BackgroundTasks
from ephemeron.training.worker.control import StopRequest, encode_control
from ephemeron.training.worker.decisions import decide
from ephemeron.training.worker.evaluation_exchange import EvaluationExchange
from ephemeron.training.worker.finalize import clear_if_over, finish
from ephemeron.training.worker.group_exchange import GroupExchange, Unneeded, group_exchange
from ephemeron.training.worker.invocation import InvocationContext, InvocationExit, NextGeneration, first_leaf
from ephemeron.training.worker.recovery.checkpoint import Checkpoint, CheckpointMeta
from ephemeron.training.worker.recovery.fencing import Exit
from ephemeron.training.worker.recovery.generations import GenerationChange
from ephemeron.training.worker.recovery.handoff import Evaluation
from ephemeron.training.worker.recovery.next_generation import EpochDecision, begin_next_generation, delete_left_generation, join_generation
from ephemeron.training.worker.recovery.state_sharing import StateSharing
from ephemeron.training.worker.request import WorkerRequest
from ephemeron.training.worker.result import RunResult, WorkerResult
from ephemeron.training.worker.startup import StartedWorker, load
from ephemeron.training.worker.timeouts import IterationTimes
from ephemeron.training.worker.trainers.step import IterationStep, WholeModelStep
from ephemeron.training.worker.trainers.trainer import TrainingStep

_log = logging.getLogger(__name__)


async def run_worker(ctx: Context, request: WorkerRequest) -> WorkerResult:
    """Runs one invocation of a rank that holds the whole model, to its end.

    Raises:
        JobError: the run divides its model into stages.
    """
    return await run_rank(ctx, request, WholeModelStep)


async def run_rank(ctx: Context, request: WorkerRequest, step: Callable[[StartedWorker], IterationStep]) -> WorkerResult:
    """Runs one invocation of a rank to its end.

    Args:
        ctx: of the invocation.
        request: of its call.
        step: makes the computation of the rank's contributions.
    """
    with logs.context(**ctx.call.log_fields):
        return await _run(InvocationContext(ctx, request), step)


async def _run(invocation: InvocationContext, step: Callable[[StartedWorker], IterationStep]) -> WorkerResult:
    summary: RunResult | None = None
    outcome: Exit = "finished"
    while True:
        known = IterationTimes()
        try:
            with invocation.at_end:
                async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
                    try:
                        started = await load(invocation, stack)
                        try:
                            summary = await TrainingLoop(started, step(started), tasks).run()
                        finally:
                            known = started.lifecycle.timeouts.state()
                    finally:
                        await invocation.leave_members()
            break
        except BaseExceptionGroup as group:
            cause = first_leaf(group)
            if isinstance(cause, NextGeneration) and (members := await join_generation(invocation, cause)) is not None:
                invocation.join(members, known, cause.begin)
                continue
            if not isinstance(cause, InvocationExit):
                raise cause from None
            outcome = cause.outcome
            if outcome in ("finished", "fenced", "duplicate", "left"):
                await clear_if_over(invocation)
            break
    _log.info("ends: %s", outcome)
    return WorkerResult(outcome=outcome, traffic=invocation.traffic, summary=summary)


class TrainingLoop:
    """The training loop of one rank.

    Args:
        started: the worker at its start.
        step: computes its contributions.
        tasks: group for what goes on beside the computation.
    """

    def __init__(self, started: StartedWorker, step: IterationStep, tasks: asyncio.TaskGroup) -> None:
        self.started, self.step = started, step
        self.lifecycle, self.invocation = started.lifecycle, started.lifecycle.invocation
        self.spec, self.trainer, self.checkpoints = started.spec, started.trainer, started.checkpoints
        self.configuration, self.timeline, self.iterations = (self.spec.configuration, self.spec.timeline, self.spec.iterations)
        self.status = started.status
        self.t = self.first = started.iteration
        self.replaying = started.replaying
        # A rank alone waits for no other and runs ahead of no other: every protocol is BSP.
        sync = self.configuration.sync if self.configuration.group > 1 else "bsp"
        self.policy = policy_for(sync, epoch_length=self.spec.split.iterations, first=started.beginning)
        self.sharing = StateSharing(started, self._described)
        self.collective = self._make_collective()
        if self.collective.self_paced:
            self.policy = policy_for("bsp", first=started.beginning)
        self.handing_off = self.others_prepare = False
        self.stops_at: int | None = None
        """Iteration before which every rank stops."""
        self.evaluation = EvaluationSums()
        self.decisions = started.decisions
        self.change = GenerationChange(self.lifecycle, started.agreed)
        policy = self.configuration.resize.policy
        decides = self.invocation.rank == 0 and policy is not None
        self.deciding = (
            EpochDecision(self.lifecycle, decision_of(policy, self.invocation.code or []), started.ended) if decides and policy else None
        )
        self.change.announce()
        self.background = BackgroundTasks(tasks)
        self.groups: GroupExchange | None = None
        self._skipped = 0
        self._merged: Metrics = {}
        self._unreported: Callable[[], Progress] | None = None

    def _make_collective(self) -> Collective:
        c, group = self.configuration, self.step.group(self.policy)
        group.replays = not self.sharing.live
        single = self.spec.stages is not None and group.world == 1
        collective = (
            SingleRank(group)
            if single
            else collective_for(c.pattern, group, asynchronous=c.sync == "asp", chunk_bytes=self.spec.chunk_bytes)
        )
        if not self.policy.deterministic:  # versions are create-only: those who have read one go on from it
            self.lifecycle.invocation.channel.put_again = lambda key: is_put_again(key) and not is_merged(key)
        if self.started.state is not None:
            collective.load(self.started.state.collective, self.started.state.meta.collective)
        return collective

    async def run(self) -> RunResult | None:
        """Trains from the state at the start to the end, and closes the run.

        Returns:
            For rank 0: the result of the run.

        Raises:
            InvocationExit: the invocation ends before the run does.
        """
        async with group_exchange(self.lifecycle, self.collective, self.started.entry) as self.groups:
            return await self._run()

    async def _run(self) -> RunResult | None:
        lifecycle, background = self.lifecycle, self.background
        lifecycle.timeouts.listen(lifecycle.now())
        lifecycle.replacement.latest_iteration = self.collective.latest_iteration
        await self.collective.setup(self.trainer.parameters())
        if self.invocation.reason == "relay" and not self.replaying:
            background.start("predecessor", lifecycle.delete_predecessor_objects())
        if self.invocation.rank == 0 or self.collective.self_paced:
            background.start("control", lifecycle.watch_control())
        if self.invocation.rank == 0 and lifecycle.keys.generation:
            background.start("generation", delete_left_generation(lifecycle))
        await self.sharing.begin(self.collective, background)
        if self.groups is not None:
            own = await self.invocation.compute(self.trainer.parameters, samples=0)
            async with self.sharing.idle():
                await self.groups.begin(self.t, own, exchanged=self.started.exchanged)
        applied = self.status.applied
        handed_off_waiting = applied < self._must_have_applied()  # the predecessor has not evaluated
        while True:
            await self._catch_up()
            begins_here = self.t == self.first and self.started.exchanged
            if self.groups is not None and not begins_here and self.groups.is_due(self.t):
                await self._exchange_with_groups(self.groups)
            self._emit_progress()
            evaluates = self.spec.evaluates_at(self.t) and (
                self.t > self.first or self.t == self.iterations or handed_off_waiting or self.started.evaluates
            )
            if evaluates:
                if self.t > self.first or self.status.applied > applied:  # a successor has more time
                    await self._hand_off_before_evaluation()
                await self._evaluate()
            if self.t == self.iterations:
                break
            if self._stops_now() or await self._stops_alone():
                await self._stop()
            if self.change.begins_at(self.t):
                await self._end_generation()
            advanced = self.t > self.first or evaluates
            if self.deciding is not None and (self.t > self.first or self.started.ended is not None):
                await self.deciding.after(self.t, self._metrics())
            await self.change.prepare(self.t)
            lifecycle.end_iteration()
            if advanced:
                await self._checkpoint_or_hand_off()
            await self._iterate()
            self.t += 1
        await background.settle("reduce")
        await background.settle("garbage")
        background.cancel("control")
        background.cancel("generation")
        await self._check_parameters()
        async with self.sharing.idle():
            final = await finish(self.started, self.collective, self.evaluation, iterations=self.t, decisions=self.decisions)
        background.cancel("checkpoint")
        background.cancel("back")
        return final

    # -- one iteration ------------------------------------------------------------------------------------

    async def _iterate(self) -> None:
        t, background = self.t, self.background
        self.lifecycle.begin_iteration(t)
        if self.spec.evaluates_at(t + 1):
            self.lifecycle.evaluation_follows_s = self.step.expected_evaluation_s(t)
        await background.settle("upload")
        upload = reduce = True
        await self.sharing.before(t)
        # Where the state is that of live ranks, not before it has computed: this may wait for a rank that is dead, and others wait
        # for this one meanwhile. Elsewhere at once, while those live that hold the versions to repeat.
        if self.replaying and not self.sharing.live:
            upload, reduce = await self._pending(t)
        version = self.status.applied
        step, flags = await self.step.run(t, early=None if self.replaying else self.collective)
        if self.replaying and self.sharing.live:
            upload, reduce = await self._pending(t)
        weight = step.samples if step.weight is None else step.weight
        self.collective.submit(t, step.vector, weight, flags)
        self.sharing.submitted(t)
        if not reduce:
            self.collective.take_over(t, uploaded=not upload)
        if upload:
            background.start("upload", self.collective.upload(t))
            if not self.collective.overlaps:
                await background.settle("upload")
            if reduce:
                background.start_after("reduce", lambda: self.collective.reduce(t))
        if background.is_free("garbage"):
            background.start("garbage", self._collect_garbage())
        if self.deciding is not None:
            self.deciding.record(step.loss, step.samples if step.terms is None else step.terms)
        self._unreported = self._progress_of(step, version)
        self._warn_of_skipped(step)

    async def _pending(self, iteration: int) -> tuple[bool, bool]:
        """See `Collective.pending`."""
        async with self.sharing.idle():
            upload, reduce = await self.collective.pending(iteration)
        self.replaying = not (upload and reduce)
        return upload, reduce

    async def _collect_garbage(self) -> None:
        await self.collective.collect_garbage()
        await self.step.collect_garbage()

    async def _catch_up(self) -> None:
        """Applies the versions that the policy demands before iteration `t`, and those that it allows."""
        must = self._must_have_applied()
        barrier = self._must_end() or self.policy.is_barrier(self.t)
        while self.status.applied < must:
            await self._apply()
            if barrier and self.status.applied < must:
                # A rank that may run ahead waits for several versions at a barrier, each as long as an iteration.
                if self._stops_now():
                    await self._stop()
                if self.lifecycle.must_hand_off():
                    self._emit_progress()
                    await self._hand_off(evaluated=not self.spec.evaluates_at(self.t))
        if not self.policy.exact:
            while self._may_apply() and await self.collective.poll(self.status.applied):
                await self._apply()

    def _stops_now(self) -> bool:
        return self.stops_at is not None and self.t >= self.stops_at

    async def _stops_alone(self) -> bool:
        """Whether this rank stops for itself: contributions to an asynchronous server tell others nothing, and all watch what is asked."""
        lifecycle = self.lifecycle
        if self.collective.self_paced and lifecycle.over_limits() and not lifecycle.stop_requested:
            await lifecycle.channel.put(lifecycle.keys.control, [encode_control(StopRequest())])
            lifecycle.stop_requested = True
        return self.collective.self_paced and lifecycle.stop_requested

    def _must_end(self) -> bool:
        """Whether the run, or this generation, ends before iteration `t`."""
        return self.t == self.iterations or self.change.begins_at(self.t)

    def _must_have_applied(self) -> int:
        if self._must_end():
            return self.t
        return self.policy.must_have_applied(self.t, aggregator=self._aggregates)

    def _may_apply(self) -> bool:
        return self.policy.may_apply(self.status.applied, self.t, aggregator=self._aggregates)

    @property
    def _aggregates(self) -> bool:
        return self.step.member < self.configuration.aggregators

    async def _apply(self) -> None:
        version = self.status.applied
        async with self.sharing.idle():
            merged = await self.collective.wait(version)
        await self.background.settle("upload")  # it reads the memory that the step is about to write
        finite = self.step.finite
        await self.step.compute(lambda: self.trainer.apply(finite.merged(merged.vector, version)), samples=0)
        if self.policy.waits_for_all and not self.collective.self_paced:
            self.lifecycle.timeouts.mark_delivered(version)
        self.status.applied += 1
        if merged.flags & STOP and self.stops_at is None:
            # Ranks that may run ahead learn of it at different iterations, and wait for each other until the last of these.
            self.stops_at = version + 1 if self.policy.exact else version + 1 + self.lifecycle.stop_lag
        self.handing_off = bool(merged.flags & HAND_OFF)
        self.others_prepare = bool(merged.flags & SUCCESSOR) and self.sharing.hands_over
        await self.change.learn(merged.flags)

    async def _exchange_with_groups(self, groups: GroupExchange) -> None:
        own = await self.invocation.compute(self.trainer.parameters, samples=0)
        self.sharing.exchanging = True
        async with self.sharing.idle():
            try:
                merged = await groups.exchange(self.t, own, durable=self.collective.durable())
            except Unneeded:
                await self._release(groups)
                merged = await groups.exchange(self.t, own, durable=self.collective.durable())
        await self.step.compute(lambda: self.trainer.set_parameters(merged), samples=0)
        self.sharing.exchanging = False

    async def _release(self, groups: GroupExchange) -> None:
        """Ends this invocation, which would only wait for other groups. The rank is started again when they are done."""
        state = await self._state()
        await self.background.settle("checkpoint")
        meta = dataclasses.replace(state.meta, exchanged=False)
        await self._write(Checkpoint(state.trainer, state.collective, meta))
        if await groups.release():
            return
        self._emit_progress()
        raise InvocationExit("released")

    async def _evaluate(self) -> None:
        with self.lifecycle.evaluating():
            self.evaluation = e = await self.step.evaluate(self.t)
        self.invocation.emit(
            Evaluated(
                t=self.lifecycle.run_now(),
                rank=self.invocation.rank,
                attempt=self.invocation.attempt,
                iteration=self.t,
                epoch=self.timeline.epoch_of(self.t),
                samples=e.samples,
                sums=dict(e.sums),
            )
        )
        if not self.spec.shares_evaluations:
            return
        if self.started.evaluates and self.started.evaluated and self.t == self.first:  # the state of the peers has what follows from it
            return
        async with self.sharing.idle():
            metrics = await EvaluationExchange(self.lifecycle, self.trainer, self.collective).merged(self.t, e)
        self._merged = metrics
        await self.step.compute(lambda: self.trainer.take_metrics(metrics), samples=0)
        stop = await self._decide(metrics)
        self.sharing.evaluated_at = self.t
        if self.invocation.rank == 0:
            self.invocation.emit(
                Measured(
                    t=self.lifecycle.run_now(),
                    rank=0,
                    attempt=self.invocation.attempt,
                    iteration=self.t,
                    epoch=self.timeline.epoch_of(self.t),
                    metrics=dict(metrics),
                    decision=stop,
                )
            )
        if stop and self.t < self.iterations:
            await self._end_here()

    def _metrics(self) -> Metrics:
        """Metrics of the last evaluation, of this rank's slice where functions do not merge them."""
        return self._merged or (self.trainer.metrics([self.evaluation]) if self.evaluation.samples else {})

    async def _decide(self, metrics: Metrics) -> str:
        """Takes an evaluation into account; rank 0 keeps weights. Returns why the run ends, if it does."""
        decision = decide(self.spec.options, self.decisions, metrics, self.t)
        before, self.decisions = self.decisions.kept, decision.state
        if self.invocation.rank == 0 and self.t in self.decisions.kept:
            weights = await self.invocation.compute(self.trainer.weights, samples=0)
            await self.lifecycle.channel.put(self.lifecycle.keys.kept(self.t), [encode_state(*weights)])
        gone = [self.lifecycle.keys.kept(t) for t in before if t not in self.decisions.kept]
        if self.invocation.rank == 0 and gone:
            await self.lifecycle.channel.delete(gone)
        return decision.stop

    async def _end_here(self) -> None:
        """The run ends before its last iteration. Where parameters lag behind, they are brought up to date and evaluated again."""
        self.iterations, applied = self.t, self.status.applied
        await self._catch_up()
        if self.status.applied > applied:
            self.evaluation = await self.step.evaluate(self.t)

    def _progress_of(self, step: TrainingStep, version: int) -> Callable[[], Progress]:
        invocation, iteration, samples, loss, metrics = self.invocation, self.t, step.samples, step.loss, step.metrics
        weight = None if step.terms == samples else step.terms
        return lambda: Progress(
            t=invocation.run_now(),
            rank=invocation.rank,
            attempt=invocation.attempt,
            iteration=iteration,
            epoch=self.timeline.epoch_of(iteration),
            samples=samples,
            loss=loss,
            weight=weight,
            version=version,
            spans=invocation.trace.flush(),
            traffic=invocation.traffic,
            cpu_s=invocation.cpu_s(),
            metrics=dict(metrics),
        )

    def _warn_of_skipped(self, step: TrainingStep) -> None:
        """Warns of the first skipped sample, and whenever their number has doubled."""
        before, self._skipped = self._skipped, self._skipped + step.skipped
        if self._skipped.bit_length() > before.bit_length():
            text = f"rank {self.invocation.rank}: {self._skipped} samples could not be loaded and were passed over: {step.failure}"
            self.invocation.emit(Note(t=self.lifecycle.run_now(), level="warning", text=text))

    def _emit_progress(self) -> None:
        if self._unreported is not None:
            self.invocation.emit(self._unreported())
            self._unreported = None

    async def _end_generation(self) -> NoReturn:
        """All versions are applied: the next generation begins, of which this rank is a member or not.

        Raises:
            NextGeneration: the state in which it begins is there.
        """
        await self.background.settle("upload")
        await self.background.settle("reduce")
        await self._check_parameters()
        if self.lifecycle.lease.has_successor:  # it goes on from here
            await self._hand_off()
        if self.groups is not None:
            await self.groups.settle()
        async with self.sharing.idle():
            await begin_next_generation(
                self.lifecycle,
                self.change,
                self.collective,
                self.trainer,
                iteration=self.t,
                decisions=self.decisions,
                ended=None if self.deciding is None else self.deciding.ended(self._metrics()),
            )

    # -- state --------------------------------------------------------------------------------------------

    def _described(self) -> CheckpointMeta:
        """Plain values of the state that all ranks share."""
        return CheckpointMeta(
            iteration=self.t,
            applied=self.status.applied,
            times=self.lifecycle.timeouts.state(),
            decisions=self.decisions,
            agreed=self.change.agreed,
        )

    async def _hand_off_before_evaluation(self) -> None:
        expected_s = self.step.expected_evaluation_s(self.t)
        if expected_s > 0 and self.lifecycle.must_hand_off_before_evaluation(expected_s, self.handing_off):
            self._emit_progress()
            await self._hand_off(evaluated=False)

    async def _checkpoint_or_hand_off(self) -> None:
        if self.lifecycle.must_hand_off() or (self.handing_off and self.lifecycle.is_past_middle()):
            await self._hand_off()
        # Where hand-offs take no longer than an iteration, all ranks wait for a successor that is started late.
        together = self.others_prepare and self.lifecycle.is_past_middle()
        evaluation = Evaluation(
            after=max(1, self.spec.next_evaluation(self.t) - self.t),
            every=self.spec.evaluation_interval,
            seconds=self.step.expected_evaluation_s(self.t),
        )
        if together or self.lifecycle.needs_successor(self.iterations - self.t, evaluation):
            await self.lifecycle.invoke_successor()
        if self.t % self.configuration.checkpoint_every == 0 and self.background.is_free("checkpoint"):
            await self.lifecycle.check_fence()
            self.background.start("checkpoint", self._checkpoint(await self._state()))

    async def _state(self, *, evaluated: bool = True) -> Checkpoint:
        await self.background.settle("upload")
        await self.background.settle("reduce")  # or a replacement would start past a version that no rank has reduced
        await self._check_parameters()
        arrays, trainer = await self.invocation.compute(self.trainer.state, samples=0)
        more, collective = self.collective.state()
        meta = CheckpointMeta(
            iteration=self.t,
            applied=self.status.applied,
            spent_usd=self.lifecycle.spent_usd(),
            times=self.lifecycle.timeouts.state(),
            collective=collective,
            activations=self.step.state(),
            decisions=self.decisions,
            agreed=self.change.agreed,
            trainer=trainer,
            evaluated=evaluated,
            ended=None if evaluated or self.deciding is None else self.deciding.ended({}),
        )
        return Checkpoint(arrays, more, meta)

    async def _check_parameters(self) -> None:
        finite = self.step.finite
        if finite.stops:
            await self.invocation.compute(lambda: finite.parameters(self.trainer.parameters(), self.t), samples=0)

    async def _checkpoint(self, state: Checkpoint) -> None:
        await self._write(state)
        await self.checkpoints.delete_superseded()

    async def _write(self, state: Checkpoint, before: Callable[[bytes], Awaitable[bool]] | None = None) -> bool:
        """Stores a checkpoint, and returns what `before` has returned: see `Checkpoints.write`."""
        if self.groups is not None:
            await self.groups.settle()
        t = state.meta.iteration
        acknowledged = self.collective.acknowledged(t)
        before_s = self.lifecycle.channel.outages_s
        nbytes, done = await self.checkpoints.write(state, acknowledged=self.sharing.acknowledged(acknowledged), before=before)
        self.sharing.stored([s.iteration for s in self.checkpoints.saved])
        outages_s = self.lifecycle.channel.outages_s - before_s
        self.lifecycle.handoff.write_s = max(0.0, self.checkpoints.last_write_s - outages_s)
        self.status.durable = self.checkpoints.durable
        _log.debug("checkpoint of iteration %d: %d bytes in %.3f s", t, nbytes, self.checkpoints.last_write_s)
        self.invocation.emit(
            Checkpointed(t=self.lifecycle.run_now(), rank=self.invocation.rank, attempt=self.invocation.attempt, iteration=t, nbytes=nbytes)
        )
        return done

    async def _save(self) -> None:
        state = await self._state()
        await self.background.settle("checkpoint")
        await self._write(state)

    async def _stop(self) -> None:
        await self._save()
        await self.checkpoints.delete_superseded()
        await self.lifecycle.dismiss_successor()
        if self.invocation.rank == 0 and self.lifecycle.budget.ahead_gb:  # functions that wait for the next generation end, too
            await self.lifecycle.channel.put(self.lifecycle.keys.control, [encode_control(StopRequest())])
        raise InvocationExit("stopped")

    async def _hand_off(self, *, evaluated: bool = True) -> None:
        await self.lifecycle.invoke_successor()
        state = await self._state(evaluated=evaluated)
        await self.background.settle("checkpoint")
        if not await self._write(state, before=self.sharing.hand_over):
            await self.lifecycle.hand_off(self.t)
        await self.checkpoints.delete_superseded()
        raise InvocationExit("relayed")
