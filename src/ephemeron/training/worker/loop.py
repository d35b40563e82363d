"""The life of one function: fence, load, train, hand over or finish.

The workers carry the run themselves. No coordinator is needed after the launch: whoever waits too long for a peer
replaces it, whoever comes near its lifetime limit invokes its own successor, and rank 0 closes the run. A client
that watches only makes this faster.

State of a worker: the iteration `t` it is about to compute, and `applied`, the number of merged versions its
parameters have seen. Everything that a successor needs is in the checkpoint; everything else is derived from `t`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ephemeron.events import Checkpointed, Evaluated, Note, Progress
from ephemeron.functions.context import Context
from ephemeron.training.collectives import Collective, Group, ReductionStatus, SingleRank, collective_for
from ephemeron.training.collectives.sync_policy import Policy, policy_for
from ephemeron.training.tensors import RELAY, STOP
from ephemeron.training.worker.finalize import clear_if_over, finish
from ephemeron.training.worker.invocation import InvocationContext, InvocationExit, first_leaf
from ephemeron.training.worker.non_finite import FiniteCheck
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.startup import StartedWorker, load
from ephemeron.training.worker.trainer import EvaluationSums, TrainingStep

T = TypeVar("T")


LEAST_WORTH_S, MOST_WORTH_S = 0.002, 0.02


def poll_worth_s(spec: RunSpec) -> float:
    """Seconds of all functions' time that cost as much as a poll, within bounds: polls take time, too, and time counts."""
    c, prices = spec.configuration, spec.prices
    second_usd = prices.functions_usd(c.workers * c.memory_mb / 1024, 0)
    worth_s = prices.get_usd / second_usd if second_usd > 0 else 0.0
    return min(max(worth_s, LEAST_WORTH_S), MOST_WORTH_S)


async def run_worker(ctx: Context) -> dict[str, Any]:
    """Runs one invocation to its end. A request with `transfer` measures the channel instead (`worker.probe`).

    Returns:
        `outcome` (finished, relayed, stopped, duplicate or fenced), `traffic`, and what rank 0 knows of the result.
    """
    if ctx.call.request.get("transfer") is not None:
        from ephemeron.training.worker.probe import run_probe

        return await run_probe(ctx)
    life = InvocationContext(ctx)
    value: dict[str, Any] = {}
    try:
        with life.at_end:
            async with asyncio.TaskGroup() as tasks:
                loaded = await load(life)
                value = await _worker(life, loaded, tasks).run()
                outcome = "finished"
    except BaseExceptionGroup as group:
        cause = first_leaf(group)
        if not isinstance(cause, InvocationExit):
            raise cause from None
        outcome = cause.outcome
        if outcome in ("finished", "fenced", "duplicate"):
            await clear_if_over(life)
    return {"outcome": outcome, "traffic": life.traffic_dict(), **value}


def _worker(life: InvocationContext, loaded: StartedWorker, tasks: asyncio.TaskGroup) -> Worker:
    if loaded.spec.stages is None:
        return Worker(life, loaded, tasks)
    from ephemeron.training.worker.pipeline.loop import StageWorker  # needs torch

    return StageWorker(life, loaded, tasks)


class Worker:
    """The training loop of one rank."""

    def __init__(self, life: InvocationContext, loaded: StartedWorker, tasks: asyncio.TaskGroup) -> None:
        self.life, self.loaded, self.tasks = life, loaded, tasks
        self.spec, self.trainer, self.checkpoints = loaded.spec, loaded.trainer, loaded.checkpoints
        self.configuration = self.spec.configuration
        self.split = self.spec.split
        self.member = self._member()
        self.finite = FiniteCheck(spec=self.spec, rank=life.rank, member=self.member)
        self.iterations = self.spec.iterations
        self.t = self.first = loaded.iteration
        self.replaying = loaded.replaying
        self.status = ReductionStatus(
            applied=loaded.applied, durable=self.checkpoints.durable, intact=self.checkpoints.intact
        )  # fmt: skip
        # One rank has nobody to wait for and nobody to run ahead of: every protocol is BSP.
        self.policy = policy_for(self.configuration.sync if self.configuration.group > 1 else "bsp")
        self.collective = self._make_collective()
        if self.collective.self_paced:
            self.policy = policy_for("bsp")
        self.stopping = self.relaying = False
        self.evaluation = EvaluationSums(0.0, 0, 0)
        self._skipped = 0
        self._background: dict[str, asyncio.Task[None]] = {}
        self._pending: Callable[[], Progress] | None = None

    def _member(self) -> int:
        """Number of this rank among those that share the batch."""
        return self.life.rank

    def _make_collective(self) -> Collective:
        c = self.configuration
        group = self._group(self.policy)
        alone = self.spec.stages is not None and group.world == 1
        collective = SingleRank(group) if alone else collective_for(
            c.pattern, group, asynchronous=c.sync == "asp", chunk_bytes=self.spec.chunk_bytes
        )  # fmt: skip
        if self.loaded.collective is not None:
            collective.load(*self.loaded.collective)
        return collective

    def _group(self, policy: Policy) -> Group:
        """With whom this rank reduces gradients."""
        life, c = self.life, self.configuration
        return Group(
            keys=life.keys, rank=life.rank, world=c.workers, aggregators=c.aggregators, channel=life.channel,
            policy=policy, size=self.trainer.size, dtype=self.trainer.dtype, attempt=life.attempt,
            compression=c.compression, iterations=self.iterations, status=self.status, trace=life.trace,
            poll_worth_s=poll_worth_s(self.spec), wait_timeout_s=life.patience,
            silence_timeout_s=life.timeouts.usual_s, on_message=self._heard, suspect=life.suspect, on_timeout=life.overdue,
        )  # fmt: skip

    def _heard(self, rank: int, busy_s: float) -> None:
        """What a peer knows of paces counts at once for what we say."""
        self.life.heard(rank, busy_s)
        self.status.busy_s = self.life.timeouts.slowest_s

    async def run(self) -> dict[str, Any]:
        """Trains from where the state stands to the end, and closes the run."""
        self.life.timeouts.listen(self.life.now())
        self.life.replacing.latest_iteration = self.collective.latest_iteration
        await self.collective.setup(self.trainer.parameters())
        if self.life.call.reason == "relay" and not self.replaying:
            self._start("forget", self.life.forget_predecessor())
        if self.life.rank == 0 or self.collective.self_paced:
            self._start("control", self.life.watch_control())
        while True:
            await self._catch_up()
            self._emit_progress()
            if self.t % self.split.iterations == 0 and (self.t > self.first or self.t == self.iterations):
                await self._evaluate()
            if self.t == self.iterations:
                break
            if self.stopping or (self.collective.self_paced and self.life.wants_stop):
                await self._save()
                await self.checkpoints.delete_superseded()
                await self.life.dismiss_successor()
                raise InvocationExit("stopped")
            self.life.end_iteration()
            await self._checkpoint_or_relay()
            await self._iterate()
            self.t += 1
        await self._settle("reduce")
        await self._settle("garbage")
        self._cancel("control")
        await self._check_parameters()
        final = await finish(self.life, self.loaded, self.collective, self.evaluation)
        self._cancel("checkpoint")
        return final

    # -- one iteration ------------------------------------------------------------------------------------

    async def _iterate(self) -> None:
        self.life.begin_iteration(self.t)
        await self._settle("upload")
        upload = reduce = True
        if self.replaying:
            upload, reduce = await self.collective.pending(self.t)
            self.replaying = not (upload and reduce)
        version = self.status.applied
        step, flags = await self._step()
        self.collective.submit(self.t, step.vector, step.samples, flags)
        if not reduce:
            self.collective.take_over(self.t, uploaded=not upload)
        if upload:
            await self._exchange(reduce=reduce)
        if self._background_free("garbage"):
            self._start("garbage", self._collect_garbage())
        self._pending = self._progress_of(step, version)
        self._tell_skipped(step)

    async def _step(self) -> tuple[TrainingStep, int]:
        """This rank's contribution to iteration `t`, and what it tells the others."""
        t = self.t
        step = await self._compute(lambda: self.finite.step(self.trainer.compute(t), t), samples=self._batch())
        return step, self._flags()

    def _flags(self) -> int:
        flags = STOP if self.life.wants_stop or self.life.over_budget() else 0
        return flags | (RELAY if self.life.will_hand_over() else 0)

    async def _collect_garbage(self) -> None:
        await self.collective.collect_garbage()

    async def _exchange(self, *, reduce: bool) -> None:
        self._start("upload", self.collective.upload(self.t))
        if not self.collective.overlaps:
            await self._settle("upload")
        if reduce:
            self._start("reduce", self._after(self._background.get("reduce"), self.t))

    async def _after(self, previous: asyncio.Task[None] | None, iteration: int) -> None:
        if previous is not None:
            await previous
        await self.collective.reduce(iteration)

    async def _catch_up(self) -> None:
        """Applies the versions that the policy demands before iteration `t`, and those that it allows."""
        role = self.member < self.configuration.aggregators
        last = self.t == self.iterations
        must = self.t if last else self.policy.must_have_applied(self.t, aggregator=role)
        while self.status.applied < must:
            await self._apply()
            if last and self.status.applied < must and self.life.must_hand_over():
                # Whoever may run ahead waits for several versions at the end, each as long as an iteration.
                self._emit_progress()
                await self._relay()
        if not self.policy.exact:
            while self._may_apply(role) and await self.collective.poll(self.status.applied):
                await self._apply()

    def _may_apply(self, aggregator: bool) -> bool:
        return self.policy.may_apply(self.status.applied, self.t, aggregator=aggregator)

    async def _apply(self) -> None:
        merged = await self.collective.wait(self.status.applied)
        await self._settle("upload")  # it reads the memory that the step is about to write
        version = self.status.applied
        await self._compute(lambda: self.trainer.apply(self.finite.merged(merged.vector, version)), samples=0)
        if self.policy.waits_for_all and not self.collective.self_paced:
            self.life.timeouts.delivered(version)
        self.status.applied += 1
        self.stopping |= bool(merged.flags & STOP)
        self.relaying = bool(merged.flags & RELAY)

    async def _compute(self, work: Callable[[], T], *, samples: float) -> T:
        began = self.life.now()
        result = await self.life.compute(work, samples=samples)
        self.life.trace.record("compute", began, self.life.now())
        self.life.timeouts.computed(self.life.now() - began)
        self.status.busy_s = self.life.timeouts.slowest_s
        return result

    def _batch(self) -> int:
        return self.split.batch_at(self.member, self.t % self.split.iterations)

    async def _evaluated(self) -> EvaluationSums:
        samples = self.loaded.test_samples / 3  # a forward pass is about a third of a step
        return await self._compute(self.trainer.evaluate, samples=samples)

    async def _evaluate(self) -> None:
        self.evaluation = e = await self._evaluated()
        self.life.emit(
            Evaluated(
                t=self.life.run_now(),
                rank=self.life.rank,
                attempt=self.life.attempt,
                iteration=self.t,
                epoch=self.t // self.split.iterations,
                loss_sum=e.loss_sum,
                correct=e.correct,
                samples=e.samples,
                counted=e.counted,
            )
        )

    def _progress_of(self, step: TrainingStep, version: int) -> Callable[[], Progress]:
        iteration, samples, loss = self.t, step.samples, step.loss
        return lambda: Progress(
            t=self.life.run_now(), rank=self.life.rank, attempt=self.life.attempt, iteration=iteration,
            epoch=iteration // self.split.iterations, samples=samples, loss=loss, version=version,
            spans=self.life.trace.flush(), traffic=self.life.channel.traffic,
            cpu_s=self.life.cpu_s(),
        )  # fmt: skip

    def _tell_skipped(self, step: TrainingStep) -> None:
        """The first one, and whenever there are twice as many."""
        before, self._skipped = self._skipped, self._skipped + step.skipped
        if self._skipped.bit_length() > before.bit_length():
            text = f"rank {self.life.rank}: {self._skipped} samples could not be loaded and were passed over: {step.failure}"
            self.life.emit(Note(t=self.life.run_now(), level="warning", text=text))

    def _emit_progress(self) -> None:
        if self._pending is not None:
            self.life.emit(self._pending())
            self._pending = None

    # -- state --------------------------------------------------------------------------------------------

    async def _checkpoint_or_relay(self) -> None:
        if self.t > self.first:
            if self.life.must_hand_over() or (self.relaying and self.life.is_past_middle()):
                await self._relay()
            if self.life.should_prepare(self.iterations - self.t):
                await self.life.invoke_successor()
        due = self.t > self.first and self.t % self.configuration.checkpoint_every == 0
        if due and self._background_free("checkpoint"):
            await self.life.check_fence()
            self._start("checkpoint", self._checkpoint(*await self._state(), self.t, self.status.applied))

    async def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        await self._settle("upload")
        await self._settle("reduce")  # or a replacement would start past a version that nobody has made
        await self._check_parameters()
        arrays, meta = await self.life.compute(self.trainer.state, samples=0)
        more, lists = self.collective.state()
        arrays.update({f"c/{name}": array for name, array in more.items()})
        meta["collective"] = lists
        meta.update(iteration=self.t, applied=self.status.applied, spent_usd=self.life.spent_usd())
        meta["timeouts"] = self.life.timeouts.state()
        return arrays, meta

    async def _check_parameters(self) -> None:
        if self.finite.stops:
            await self.life.compute(lambda: self.finite.parameters(self.trainer.parameters(), self.t), samples=0)

    async def _checkpoint(self, arrays: dict[str, Any], meta: dict[str, Any], t: int, applied: int) -> None:
        await self._write(arrays, meta, t, applied)
        await self.checkpoints.delete_superseded()

    async def _write(self, arrays: dict[str, Any], meta: dict[str, Any], t: int, applied: int) -> None:
        acknowledged = self.collective.acknowledged(t)
        before = self.life.channel.outages_s
        nbytes = await self.checkpoints.write(arrays, meta, iteration=t, applied=applied, acknowledged=acknowledged)
        self.life.write_s = max(0.0, self.checkpoints.last_write_s - (self.life.channel.outages_s - before))
        self.status.durable = self.checkpoints.durable
        self.life.emit(
            Checkpointed(
                t=self.life.run_now(), rank=self.life.rank, attempt=self.life.attempt, iteration=t, nbytes=nbytes
            )
        )

    async def _save(self) -> None:
        arrays, meta = await self._state()
        await self._settle("checkpoint")
        await self._write(arrays, meta, self.t, self.status.applied)

    async def _relay(self) -> None:
        await self.life.invoke_successor()
        await self._save()
        await self.life.hand_over(self.t)
        await self.checkpoints.delete_superseded()
        raise InvocationExit("relayed")

    # -- background ---------------------------------------------------------------------------------------

    def _start(self, name: str, work: Any) -> None:
        self._background[name] = self.tasks.create_task(work)

    def _background_free(self, name: str) -> bool:
        task = self._background.get(name)
        return task is None or task.done()

    async def _settle(self, name: str) -> None:
        task = self._background.get(name)
        if task is not None and not task.done():
            await task

    def _cancel(self, name: str) -> None:
        task = self._background.pop(name, None)
        if task is not None:
            task.cancel()
