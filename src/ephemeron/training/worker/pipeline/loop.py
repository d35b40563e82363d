"""The worker's loop where a function holds a stage: its passes exchange values with other stages' functions.

All else is the loop that every worker has: versions, checkpoints, relays, the end. A rank's group for reducing
gradients are the replicas of its stage; a rank's neighbours are the other stages of its replica.

A replaced function starts from its checkpoint and repeats iterations with the letters that are still there; random
steps draw by seed, iteration and micro-batch, so what it sends again is the same.

All ranks have to stop after the same iteration. What a rank wants all to know goes with every letter, forwards to the
last stage and from there back with the gradients, and on with the stage's reduction: after that all have heard of it.
In an iteration in which some replica has no samples, and sends nothing, nobody listens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ephemeron.communication.keys import Keys
from ephemeron.data.batch_source import EVALUATION_BATCH
from ephemeron.partition.runtime.boundaries import StageBoundary, borders
from ephemeron.partition.runtime.device import StageMessage
from ephemeron.partition.runtime.micro_batches import sizes
from ephemeron.partition.schedule_simulator.schedule import Pass
from ephemeron.training.collectives import Group, StalledPeers
from ephemeron.training.collectives.sync_policy import Policy
from ephemeron.training.tensors import STOP
from ephemeron.training.worker.invocation import InvocationContext
from ephemeron.training.worker.loop import Worker, poll_worth_s
from ephemeron.training.worker.pipeline.activation_channel import ActivationChannel, MessageKey
from ephemeron.training.worker.pipeline.trainer import StageTrainer
from ephemeron.training.worker.startup import StartedWorker
from ephemeron.training.worker.trainer import EvaluationSums, TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageStream:
    """Letters of one kind from one stage to another, in the order of micro-batches."""

    direction: Pass
    source: int
    target: int
    sender: int
    """Function."""


class StageWorker(Worker):
    """The training loop of one rank that holds a stage."""

    def __init__(self, life: InvocationContext, loaded: StartedWorker, tasks: asyncio.TaskGroup) -> None:
        assert loaded.spec.stages is not None
        assert isinstance(loaded.trainer, StageTrainer)
        self.stages, self.stage_trainer = loaded.spec.stages, loaded.trainer
        self.stage, self.replica = self.stages.place(life.rank)
        split = self.stage_trainer.split
        names = split.devices
        self._function = {b.stage: names.index(b.device) for b in borders(split)}
        self._partners = {d: names.index(d) for d in self.stage_trainer.device.partners}
        self._streams = tuple(self._all_streams())
        super().__init__(life, loaded, tasks)
        self.post = ActivationChannel(
            life, self.stages, replica=self.replica, poll_worth_s=poll_worth_s(self.spec), wanted=self._wanted
        )
        self.post.forget_before(max(0, self.checkpoints.durable - self.configuration.checkpoint_every))
        if loaded.collective is not None:
            self.post.load(loaded.collective[1]["post"])

    def _member(self) -> int:
        return self.replica

    def _group(self, policy: Policy) -> Group:
        group = super()._group(policy)
        group.keys, group.rank = Keys(self.life.keys.run, group=self.stage), self.replica
        group.world, group.on_timeout = self.stages.replicas, self._overdue_in_group
        # One patience for all waits: whoever waits has to have said so when another stage looks for the one to blame.
        group.on_message = lambda replica, busy_s: self._heard(self.stages.rank(self.stage, replica), busy_s)
        group.wait_timeout_s = lambda times: self.life.patience()
        return group

    async def _overdue_in_group(self, blame: StalledPeers) -> None:
        await self.life.overdue(blame._replace(ranks=[self.stages.rank(self.stage, r) for r in blame.ranks]))

    # -- one iteration ------------------------------------------------------------------------------------

    async def _step(self) -> tuple[TrainingStep, int]:
        samples = self._batch()
        if self.life.over_budget() and not self.life.wants_stop:
            # Those who repeat iterations would not hear of it: what they read was said before.
            await self.life.channel.put(self.life.keys.control, [b"stop"])
            self.life.wants_stop = True
        self.post.begin(self._flags())
        if samples:
            await self._compute(partial(self.stage_trainer.begin, self.t, samples), samples=0)
            await self._passes(samples)
            await self._sum_shared()
        t = self.t
        step = await self._compute(lambda: self.finite.step(self.trainer.compute(t), t), samples=0)
        all_heard = all(self.split.batch_at(r, self.t % self.split.iterations) for r in range(self.stages.replicas))
        return step, self.post.flags if all_heard else self.post.flags & ~STOP

    async def _passes(self, samples: int) -> None:
        """All passes of the iteration, in the order in which values arrive and the schedule allows."""
        trainer, count = self.stage_trainer, len(sizes(samples, self.stages.micro_batches))
        each = samples * self.stages.shares[self.stage] / (2 * count * len(trainer.borders))
        inbox: deque[StageMessage] = deque()
        arrived = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(self._receive(stream, count, inbox, arrived))
            while not trainer.device.computed:
                while inbox:
                    trainer.device.accept(inbox.popleft())
                if not trainer.device.ready:
                    arrived.clear()
                    await arrived.wait()
                    continue
                for parcel in await self._compute(trainer.turn, samples=each):
                    tasks.create_task(self._send(parcel))

    async def _send(self, parcel: StageMessage) -> None:
        a = MessageKey(
            self.t, parcel.direction[0], parcel.source, parcel.target, parcel.micro_batch, sender=self.stage
        )  # fmt: skip
        loss = self.stage_trainer.losses.get(parcel.micro_batch) if parcel.direction == "backward" else None
        await self.post.send(a, parcel.values, loss=loss)

    async def _receive(self, s: _MessageStream, count: int, inbox: deque[StageMessage], arrived: asyncio.Event) -> None:
        iteration = self.t
        for m in range(count):
            head, values = await self.post.receive(
                MessageKey(iteration, s.direction[0], s.source, s.target, m, sender=s.sender)
            )
            if head["loss"] is not None:
                self.stage_trainer.losses[m] = head["loss"]
            inbox.append(
                StageMessage(
                    iteration=iteration, source=s.source, target=s.target, direction=s.direction, micro_batch=m,
                    values=values,
                )
            )  # fmt: skip
            arrived.set()

    async def _sum_shared(self) -> None:
        """Parameters that several functions have get the sum of all their gradients, in one order everywhere."""
        shares = await self._compute(self.stage_trainer.shares, samples=0)
        if not self._partners:
            return

        async def exchanged(device: str, other: int) -> tuple[str, dict[str, Any]]:
            await self.post.send(MessageKey(self.t, "s", self.stage, other, 0, sender=self.stage), shares[device])
            return device, (await self.post.receive(MessageKey(self.t, "s", other, self.stage, 0, sender=other)))[1]

        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(exchanged(d, other)) for d, other in self._partners.items()]
        received = dict(task.result() for task in found)
        await self._compute(partial(self.stage_trainer.sum_shared, received), samples=0)

    # -- evaluation ---------------------------------------------------------------------------------------

    async def _evaluated(self) -> EvaluationSums:
        """Forward passes over this replica's slice of the test set, part after part."""
        trainer, samples = self.stage_trainer, self.stages.test_samples[self.replica]
        if samples == 0 or not self.stages.evaluates:
            return EvaluationSums(0.0, 0, 0)
        each = EVALUATION_BATCH * self.stages.shares[self.stage] / (3 * len(trainer.borders))
        self.post.begin(0)
        await self._compute(trainer.begin_evaluation, samples=0)
        async with asyncio.TaskGroup() as tasks:
            for k, (given, test) in enumerate(trainer.tests(samples)):
                values = dict(given)
                for border in trainer.borders:
                    for source in border.received:
                        if self._function[source] != self.stage:
                            a = MessageKey(self.t, "e", source, border.stage, k, sender=self._function[source])
                            values |= (await self.post.receive(a))[1]
                    made = await self._compute(partial(trainer.forward_only, border, values, test), samples=each)
                    values |= made
                    for target, names in border.sent.items():
                        if self._function[target] != self.stage:
                            a = MessageKey(self.t, "e", border.stage, target, k, sender=self.stage)
                            tasks.create_task(self.post.send(a, {n: made[n] for n in names}))
        return await self._compute(trainer.evaluate, samples=0)

    # -- state --------------------------------------------------------------------------------------------

    async def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays, meta = await super()._state()
        meta["collective"]["post"] = self.post.state()
        return arrays, meta

    async def _collect_garbage(self) -> None:
        await super()._collect_garbage()
        await self.post.collect_garbage(self.status.durable)

    # -- what is read -------------------------------------------------------------------------------------

    def _all_streams(self) -> Iterator[_MessageStream]:
        for border in self.stage_trainer.borders:
            yield from self._streams_of(border)

    def _streams_of(self, border: StageBoundary) -> Iterator[_MessageStream]:
        for source in border.received:
            if self._function[source] != self.stage:
                yield _MessageStream(
                    direction="forward", source=source, target=border.stage, sender=self._function[source]
                )  # fmt: skip
        for target in border.sent:
            if self._function[target] != self.stage:
                yield _MessageStream(
                    direction="backward", source=target, target=border.stage, sender=self._function[target]
                )  # fmt: skip

    def _wanted(self, t: int) -> Iterator[MessageKey]:
        """Letters that this rank reads in iteration `t`, and in the evaluation before it."""
        samples = self.split.batch_at(self.replica, t % self.split.iterations)
        if samples:
            for s in self._streams:
                for m in range(len(sizes(samples, self.stages.micro_batches))):
                    yield MessageKey(t, s.direction[0], s.source, s.target, m, sender=s.sender)
            for other in self._partners.values():
                yield MessageKey(t, "s", other, self.stage, 0, sender=other)
        if t > 0 and t % self.split.iterations == 0 and self.stages.evaluates:
            parts = -(-self.stages.test_samples[self.replica] // EVALUATION_BATCH)
            for s in self._streams:
                if s.direction == "forward":
                    for k in range(parts):
                        yield MessageKey(t, "e", s.source, s.target, k, sender=s.sender)
