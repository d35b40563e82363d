"""The computation of an iteration where a function holds one stage: passes that exchange values with other functions.

A rank reduces gradients with the replicas of its stage; it exchanges activations and their gradients with the other stages of
its replica.

A replaced function starts from its checkpoint and repeats iterations with the messages that are still stored. Random operations
draw by seed, iteration and micro-batch, so the messages that it sends again are the same.

All ranks have to stop after the same iteration. The flags of a rank travel with each of its messages, forwards to the last
stage, from there back with the gradients, and on with the stage's reduction: after that all ranks have them. Flags are ignored
in an iteration in which some replica has no samples and sends nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ephemeron.communication.keys import Keys
from ephemeron.data.batch_source import EVALUATION_BATCH
from ephemeron.errors import JobError
from ephemeron.partition.runtime.boundaries import StageBoundary, stage_boundaries
from ephemeron.partition.runtime.device import StageMessage
from ephemeron.partition.runtime.micro_batches import sizes
from ephemeron.partition.schedule_simulator.schedule import Pass
from ephemeron.runs.metrics import EvaluationSums
from ephemeron.training.collectives import Collective, Group, StalledPeers
from ephemeron.training.collectives.group import Arrivals
from ephemeron.training.collectives.sync_policy import Policy
from ephemeron.training.tensors import STOP
from ephemeron.training.worker.pipeline.activation_channel import ActivationChannel, MessageKey
from ephemeron.training.worker.pipeline.trainer import StageTrainer
from ephemeron.training.worker.startup import StartedWorker
from ephemeron.training.worker.trainers.step import IterationStep, poll_worth_s
from ephemeron.training.worker.trainers.trainer import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageStream:
    """Messages of one kind from one stage to another, in the order of micro-batches."""

    direction: Pass
    source: int
    target: int
    sender: int
    """Function that sends them."""


class PipelineStep(IterationStep):
    """A rank that holds one stage of the model.

    Args:
        started: the worker at its start.

    Raises:
        JobError: the run does not divide its model.
    """

    def __init__(self, started: StartedWorker) -> None:
        super().__init__(started)
        if self.spec.stages is None:
            raise JobError("this run does not divide its model into stages", remedy="call the entry 'worker'")
        assert isinstance(started.trainer, StageTrainer)
        self.stages, self.stage_trainer = self.spec.stages, started.trainer
        self.stage, self.replica = self.stages.place(self.invocation.rank)
        split = self.stage_trainer.split
        names = split.devices
        self._function = {b.stage: names.index(b.device) for b in stage_boundaries(split)}
        self._partners = {d: names.index(d) for d in self.stage_trainer.device.partners}
        self._streams = tuple(self._all_streams())
        self.activations = ActivationChannel(
            self.lifecycle, self.stages, replica=self.replica, poll_worth_s=poll_worth_s(self.spec), wanted=self._wanted
        )
        every = self.spec.configuration.checkpoint_every
        self.activations.skip_deletion_before(max(0, started.checkpoints.durable - every))
        if started.state is not None:
            self.activations.load(started.state.meta.activations)

    def group(self, policy: Policy) -> Group:
        group = self.new_group(policy)
        group.keys, group.rank = Keys(self.lifecycle.keys.run, group=self.stage), self.replica
        group.world, group.on_timeout = self.stages.replicas, self._on_timeout_in_group
        group.members = [self.stages.rank(self.stage, replica) for replica in range(self.stages.replicas)]
        # One timeout for all waits: this rank has to have published its wait when another stage looks for the suspect.
        group.on_message = lambda replica, busy_s, spent_usd: self.on_message(self.stages.rank(self.stage, replica), busy_s, spent_usd)
        group.wait_timeout_s = lambda times: self.lifecycle.wait_timeout_s()
        return group

    async def _on_timeout_in_group(self, stalled: StalledPeers) -> None:
        ranks = [self.stages.rank(self.stage, replica) for replica in stalled.ranks]
        await self.lifecycle.on_timeout(stalled._replace(ranks=ranks))

    # -- one iteration ------------------------------------------------------------------------------------

    async def run(self, iteration: int, *, early: Collective | None = None) -> tuple[TrainingStep, int]:
        samples, lifecycle = self.batch(iteration), self.lifecycle
        if lifecycle.over_limits() and not lifecycle.stop_requested:
            # A rank that repeats iterations reads messages from before this flag: it learns of the stop here.
            await lifecycle.channel.put(lifecycle.keys.control, [b"stop"])
            lifecycle.stop_requested = True
        self.activations.begin(lifecycle.flags())
        if samples:
            await self.compute(partial(self.stage_trainer.begin, iteration, samples), samples=0)
            await self._passes(iteration, samples)
            await self._sum_shared(iteration)
        step = await self.compute(lambda: self.finite.step(self.trainer.compute(iteration), iteration), samples=0)
        all_have_samples = all(self.split.batch_at(r, iteration % self.split.iterations) for r in range(self.stages.replicas))
        return step, self.activations.flags if all_have_samples else self.activations.flags & ~STOP

    async def _passes(self, iteration: int, samples: int) -> None:
        """All passes of the iteration, in the order in which values arrive and the schedule allows."""
        trainer, count = self.stage_trainer, len(sizes(samples, self.stages.micro_batches))
        each = samples * self.stages.shares[self.stage] / (2 * count * len(trainer.boundaries))
        inbox: deque[StageMessage] = deque()
        arrived = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(self._receive(iteration, stream, count, inbox, arrived))
            while not trainer.device.computed:
                while inbox:
                    trainer.device.accept(inbox.popleft())
                if not trainer.device.ready:
                    arrived.clear()
                    await arrived.wait()
                    continue
                for message in await self.compute(trainer.turn, samples=each):
                    tasks.create_task(self._send(iteration, message))

    async def _send(self, iteration: int, message: StageMessage) -> None:
        key = MessageKey(iteration, message.direction[0], message.source, message.target, message.micro_batch, sender=self.stage)
        loss = weight = None
        if message.direction == "backward":
            loss = self.stage_trainer.losses.get(message.micro_batch)
            weight = self.stage_trainer.terms.get(message.micro_batch)
        await self.activations.send(key, message.values, loss=loss, weight=weight)

    async def _receive(self, iteration: int, s: _MessageStream, count: int, inbox: deque[StageMessage], arrived: asyncio.Event) -> None:
        for m in range(count):
            head, values = await self.activations.receive(MessageKey(iteration, s.direction[0], s.source, s.target, m, sender=s.sender))
            if head.loss is not None:
                self.stage_trainer.losses[m] = head.loss
            if head.weight is not None:
                self.stage_trainer.terms[m] = head.weight
            inbox.append(
                StageMessage(iteration=iteration, source=s.source, target=s.target, direction=s.direction, micro_batch=m, values=values)
            )
            arrived.set()

    async def _sum_shared(self, t: int) -> None:
        """Sums the gradients of parameters that several functions have, in the same order everywhere."""
        shares = await self.compute(self.stage_trainer.shares, samples=0)
        if not self._partners:
            return

        async def exchanged(device: str, other: int) -> tuple[str, dict[str, torch.Tensor]]:
            await self.activations.send(MessageKey(t, "s", self.stage, other, 0, sender=self.stage), shares[device])
            _, values = await self.activations.receive(MessageKey(t, "s", other, self.stage, 0, sender=other))
            return device, {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(exchanged(d, other)) for d, other in self._partners.items()]
        received = dict(task.result() for task in found)
        await self.compute(partial(self.stage_trainer.sum_shared, received), samples=0)

    # -- evaluation ---------------------------------------------------------------------------------------

    async def evaluate(self, iteration: int) -> EvaluationSums:
        trainer, samples = self.stage_trainer, self.stages.test_samples[self.replica]
        if samples == 0 or not self.stages.evaluates:
            return EvaluationSums()
        each = EVALUATION_BATCH * self.stages.shares[self.stage] / (3 * len(trainer.boundaries))
        self.activations.begin(0)
        await self.compute(trainer.begin_evaluation, samples=0)
        async with asyncio.TaskGroup() as tasks:
            for k, (given, test) in enumerate(trainer.tests(samples)):
                values = dict(given)
                for boundary in trainer.boundaries:
                    for source in boundary.received:
                        if self._function[source] != self.stage:
                            a = MessageKey(iteration, "e", source, boundary.stage, k, sender=self._function[source])
                            values |= (await self.activations.receive(a))[1]
                    made = await self.compute(partial(trainer.forward_only, boundary, values, test), samples=each)
                    values |= made
                    for target, names in boundary.sent.items():
                        if self._function[target] != self.stage:
                            a = MessageKey(iteration, "e", boundary.stage, target, k, sender=self.stage)
                            tasks.create_task(self.activations.send(a, {n: made[n] for n in names}))
        return await self.compute(trainer.evaluate, samples=0)

    # -- state --------------------------------------------------------------------------------------------

    def state(self) -> Arrivals:
        return self.activations.state()

    async def collect_garbage(self) -> None:
        await self.activations.collect_garbage(self.status.durable)

    # -- messages of an iteration -------------------------------------------------------------------------

    def _all_streams(self) -> Iterator[_MessageStream]:
        for boundary in self.stage_trainer.boundaries:
            yield from self._streams_of(boundary)

    def _streams_of(self, boundary: StageBoundary) -> Iterator[_MessageStream]:
        for source in boundary.received:
            if self._function[source] != self.stage:
                yield _MessageStream(direction="forward", source=source, target=boundary.stage, sender=self._function[source])
        for target in boundary.sent:
            if self._function[target] != self.stage:
                yield _MessageStream(direction="backward", source=target, target=boundary.stage, sender=self._function[target])

    def _wanted(self, t: int) -> Iterator[MessageKey]:
        """Messages that this rank reads in iteration `t`, and in the evaluation before it."""
        samples = self.split.batch_at(self.replica, t % self.split.iterations)
        if samples:
            for s in self._streams:
                for m in range(len(sizes(samples, self.stages.micro_batches))):
                    yield MessageKey(t, s.direction[0], s.source, s.target, m, sender=s.sender)
            for other in self._partners.values():
                yield MessageKey(t, "s", other, self.stage, 0, sender=other)
        if self.spec.evaluates_at(t) and self.stages.evaluates:
            parts = -(-self.stages.test_samples[self.replica] // EVALUATION_BATCH)
            for s in self._streams:
                if s.direction == "forward":
                    for k in range(parts):
                        yield MessageKey(t, "e", s.source, s.target, k, sender=s.sender)
