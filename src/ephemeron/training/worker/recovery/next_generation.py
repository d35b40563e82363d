"""The way from one generation into the next: what the user's code decides after an epoch, state that is stored or awaited, and ranks that join or leave.

How ranks agree on the next generation is in `generations`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import NoReturn

from ephemeron.events import GenerationStarted
from ephemeron.runs.metrics import Metrics
from ephemeron.training.collectives import Collective, StalledPeers, wait_for_object
from ephemeron.training.job.generation import Generation
from ephemeron.training.task.schedule import Decide, EpochMeasurements
from ephemeron.training.worker.control import ResizeRequest
from ephemeron.training.worker.decisions import DecisionState
from ephemeron.training.worker.invocation import InvocationContext, NextGeneration
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.recovery.generations import Begin, BeginMeta, EndedEpoch, GenerationChange, delete_generation, members_of
from ephemeron.training.worker.trainers.trainer import Trainer

LEFT_EVERY_S = 0.5
"""Interval at which rank 0 looks whether all ranks have left the generation before."""


async def begin_next_generation(
    lifecycle: InvocationLifecycle,
    change: GenerationChange,
    collective: Collective,
    trainer: Trainer,
    *,
    iteration: int,
    decisions: DecisionState,
    ended: EndedEpoch | None = None,
) -> NoReturn:
    """All versions are applied: rank 0 stores the state in which the next generation begins, all others wait for it.

    Args:
        lifecycle, change, collective, trainer: of this rank.
        iteration: with which the next generation begins.
        decisions: what evaluations have decided so far.
        ended: see `BeginMeta`.

    Raises:
        NextGeneration: it is there.
    """
    following = change.next
    assert following is not None
    key = lifecycle.keys.begin(following.number)
    begun = None
    if lifecycle.rank == 0:
        begun = await _store_begin(lifecycle, change, trainer, following, decisions, ended)
    await change.start_members()
    if begun is not None:
        raise NextGeneration(following.number, begun, change.agreed)

    async def stalled() -> StalledPeers:
        return await collective.stalled_before(iteration, 0, key)

    arrived = await wait_for_object(
        lifecycle.channel,
        key,
        timeout_s=lifecycle.wait_timeout_s,
        stalled=stalled,
        on_timeout=lifecycle.on_timeout,
        accept=lambda data: data,
    )
    raise NextGeneration(following.number, bytes(arrived.value), change.agreed)


async def _store_begin(
    lifecycle: InvocationLifecycle,
    change: GenerationChange,
    trainer: Trainer,
    following: Generation,
    decisions: DecisionState,
    ended: EndedEpoch | None,
) -> bytes | None:
    """Stores the state in which the next generation begins, and returns what is stored; None: it may be lost."""
    invocation, spec = lifecycle.invocation, lifecycle.spec
    arrays, notes = await invocation.compute(trainer.state, samples=0)
    meta = BeginMeta(
        iteration=following.from_iteration,
        spent_usd=lifecycle.run_usd(),
        run_s=lifecycle.run_now(),
        times=lifecycle.timeouts.state(),
        decisions=decisions,
        ended=ended,
        trainer=notes,
    )
    stored = await change.store_begin(Begin(arrays, meta))
    invocation.emit(
        GenerationStarted(
            t=lifecycle.run_now(),
            generation=following.number,
            from_iteration=following.from_iteration,
            from_epoch=following.from_epoch,
            workers=following.workers,
            memory_mb=following.memory_mb,
            aggregators=following.aggregators,
            batch_size=following.batch_size,
            nonaggregator_batch_size=following.nonaggregator_batch_size,
            iterations=spec.in_generation(following).planned_iterations,
            request=following.request,
        )
    )
    return stored


async def join_generation(invocation: InvocationContext, following: NextGeneration) -> Generation | None:
    """The next generation, if this invocation is a member of it; otherwise it says that it has left.

    Args:
        invocation: whose part of a generation is over.
        following: which generation it goes on in. A member says at its start in it that it has left the one before.
    """
    channel, keys, members = invocation.channel, invocation.keys, following.members
    if members is None:
        members = await members_of(channel, keys, following.number)
    if members is not None and invocation.rank < members.workers and members.memory_mb == invocation.call.memory_mb:
        return members
    await channel.put(keys.left(keys.generation, invocation.rank), [b""])
    return None


async def delete_left_generation(lifecycle: InvocationLifecycle) -> None:
    """Deletes the objects of the generation before, once all its ranks have left it or the timeout is over."""
    channel, keys = lifecycle.channel, lifecycle.keys
    number = keys.generation - 1
    before = await members_of(channel, keys, number)
    ranks = lifecycle.spec.first_workers if before is None else before.workers
    latest = lifecycle.now() + lifecycle.wait_timeout_s()
    while lifecycle.now() < latest:
        await asyncio.sleep(LEFT_EVERY_S)  # at first, too: this generation's first iteration comes first
        left = await channel.list(keys.all_left(number))
        if len(left) >= ranks:
            break
    await delete_generation(channel, keys, number, ranks=ranks)


__all__ = ["LEFT_EVERY_S", "begin_next_generation", "delete_left_generation", "join_generation"]


class EpochDecision:
    """Measures epochs on rank 0, and asks for the changes that the user's code decides.

    Args:
        lifecycle: of the invocation.
        decide: the user's code.
        ended: the epoch that has ended with the generation before; None: none has.
    """

    def __init__(self, lifecycle: InvocationLifecycle, decide: Decide, ended: EndedEpoch | None = None) -> None:
        self._lifecycle, self._decide, self._ended = lifecycle, decide, ended
        self._timeline = lifecycle.spec.timeline
        self._trace = lifecycle.invocation.trace
        self._begin()

    def _begin(self) -> None:
        self._began, self._before = self._lifecycle.now(), dict(self._trace.totals)
        self._loss, self._terms = 0.0, 0.0

    def record(self, loss: float, terms: float) -> None:
        """Takes in the loss of an iteration, a mean over so many terms."""
        self._loss, self._terms = self._loss + loss * terms, self._terms + terms

    def ended(self, metrics: Metrics) -> EndedEpoch:
        """The epoch until now, or the one that had ended where this invocation began.

        Args:
            metrics: of the last evaluation.
        """
        if self._ended is not None:  # it was evaluated after a hand-off
            return dataclasses.replace(self._ended, metrics=self._ended.metrics or dict(metrics))
        phases: dict[str, float] = {phase: total - self._before[phase] for phase, total in self._trace.totals.items()}
        return EndedEpoch(
            seconds=self._lifecycle.now() - self._began, loss=self._loss / (self._terms or 1.0), phases=phases, metrics=dict(metrics)
        )

    async def after(self, iteration: int, metrics: Metrics) -> None:
        """Asks for a change, if an epoch has ended and the user's code wants one.

        Args:
            iteration: which is computed next.
            metrics: of the last evaluation.
        """
        epoch, self._ended = self.ended(metrics), None
        if not self._timeline.starts_epoch(iteration):
            return
        lifecycle, c, phases = self._lifecycle, self._lifecycle.spec.configuration, epoch.phases
        measured = EpochMeasurements(
            epoch=self._timeline.epoch_of(iteration),
            epochs=lifecycle.spec.epochs,
            iteration=iteration,
            run_s=lifecycle.run_now(),
            epoch_s=epoch.seconds,
            iteration_s=lifecycle.timeouts.typical_s,
            spent_usd=lifecycle.run_usd(),
            loss=epoch.loss,
            metrics=epoch.metrics,
            fetch_s=phases.get("load", 0.0) + phases.get("download", 0.0),
            compute_s=phases.get("compute", 0.0),
            update_s=phases.get("upload", 0.0) + phases.get("aggregate", 0.0),
            workers=c.workers,
            memory_mb=c.memory_mb,
            aggregators=c.aggregators,
            batch_size=c.batch_size,
            nonaggregator_batch_size=c.nonaggregator_batch_size,
        )
        self._begin()
        wanted = await lifecycle.invocation.compute(lambda: self._decide(measured), samples=0)
        if wanted is not None and wanted.changes:
            lifecycle.resize_request = ResizeRequest(name=f"epoch {measured.epoch}", resize=wanted)
