"""Start of an invocation: fence it, load what it needs, and restore the state in which its predecessor ended."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ephemeron.communication.channels.base import Channel
from ephemeron.config.code_bundle import unbundle
from ephemeron.data import Samples
from ephemeron.data.batch_source import ArrayBatchSource
from ephemeron.errors import ChannelTimeout
from ephemeron.events import Loaded as LoadedEvent
from ephemeron.events import Started
from ephemeron.training.collectives import ReductionStatus, all_of
from ephemeron.training.job.generation import Generation
from ephemeron.training.tensors import decode_state
from ephemeron.training.worker.control import StopRequest, decode_control
from ephemeron.training.worker.decisions import DecisionState
from ephemeron.training.worker.direct_exchange import become_member, join_members, keeps_in_memory, token_of, transports_of
from ephemeron.training.worker.group_exchange import GroupEntry, enter, entered_at
from ephemeron.training.worker.invocation import InvocationContext, InvocationExit, NextGeneration
from ephemeron.training.worker.lifecycle import CHECK_EVERY_S, InvocationLifecycle
from ephemeron.training.worker.recovery import fencing
from ephemeron.training.worker.recovery.checkpoint import Checkpoint, Checkpoints, EndedEpoch, Saved
from ephemeron.training.worker.recovery.direct_handoff import HandedOver, from_predecessor
from ephemeron.training.worker.recovery.generations import Begin, decode_begin, decode_members, members_of
from ephemeron.training.worker.recovery.lost_files import lost_files, lost_text
from ephemeron.training.worker.recovery.peer_recovery import PeerRecovery
from ephemeron.training.worker.recovery.recovered_state import RestoredState, peer_recovery, recovered_state
from ephemeron.training.worker.request import OVER, RECOVER, Recovery
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.factory import Piece, Stored, build_script_trainer, build_trainer, open_feed
from ephemeron.training.worker.trainers.private_copies import PrivateCopies
from ephemeron.training.worker.trainers.trainer import SkipsIterations, Trainer, WritesFiles
from ephemeron.training.worker.trainers.warm_up import pays, warm_up

_log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
POLLED_SHARE, LEAST_POLL_S, MOST_POLL_S = 0.25, 0.01, 0.25
"""Interval between polls for the state in which a generation begins: a share of an iteration, in seconds at least and at most."""
"""Interval at which a rank that waits for its predecessor, or for an object of the driver, checks whether the run is over."""


@dataclass(slots=True, kw_only=True)
class StartedWorker:
    """A worker's position in the run."""

    lifecycle: InvocationLifecycle
    spec: RunSpec
    trainer: Trainer
    checkpoints: Checkpoints
    iteration: int
    """Next iteration to compute."""
    status: ReductionStatus
    replaying: bool
    """Peers may be ahead: versions from here on may exist already."""
    test_samples: int
    state: Checkpoint | None
    """State from which it goes on; None: the run, or the generation, begins here."""
    beginning: int
    """First iteration of the generation."""
    decisions: DecisionState
    """What evaluations have decided so far."""
    agreed: Generation | None = None
    """The next generation, if it is agreed on already."""
    recovery: PeerRecovery | None = None
    """Recovery from live peers, on a direct channel."""
    evaluates: bool = False
    """Whether the evaluation before the next iteration is still to be done by this rank."""
    evaluated: bool = True
    """Whether what follows from that evaluation is in the state already."""
    exchanged: bool = True
    """Whether the exchange with other groups before the next iteration is in the state already, or none is due."""
    entry: GroupEntry | None = None
    """How this group has joined a run of several; None: it did not do so in this invocation."""
    ended: EndedEpoch | None = None
    """See `BeginMeta` and `CheckpointMeta`; None: nothing is decided where it begins."""


async def load(invocation: InvocationContext, stack: AsyncExitStack) -> StartedWorker:
    """Does everything up to the first iteration.

    Args:
        invocation: that begins.
        stack: closes what is opened for the whole of it.

    Raises:
        InvocationExit: this call is a duplicate, or there is nothing left to do.
        NextGeneration: the generation of this attempt is over.
        ChannelTimeout: an object that the driver should have prepared is missing.
    """
    channel, keys, began = invocation.channel, invocation.keys, invocation.now()
    found = None
    if invocation.left is not None:
        found = await _go_on(invocation, invocation.left)
    else:
        await _fence(invocation)
        invocation.emit(
            Started(
                t=invocation.run_now(),
                rank=invocation.rank,
                attempt=invocation.attempt,
                invocation=invocation.ctx.invocation,
                cold=invocation.ctx.cold,
            )
        )
    _log.info("started as %s, a %s", invocation.ctx.invocation, invocation.reason)
    number = fencing.number_of(invocation.attempt)
    recovers = number > 0 and invocation.reason != "relay"
    if recovers and (latest := await fencing.latest_begun(channel, keys)) > keys.generation:
        raise NextGeneration(latest)
    spec = await _spec(invocation)
    lifecycle = InvocationLifecycle(invocation, spec)
    lifecycle.handoff.request_s = invocation.request_s
    if recovers and await _is_over(invocation):
        raise InvocationExit("finished")
    recovery: PeerRecovery | None = None
    if invocation.reason != "relay":
        await join_members(invocation, spec)
        recovery = peer_recovery(invocation, spec)
    trainer, test_samples = await _trainer(invocation, spec, found)
    invocation.at_end.callback(trainer.close)
    if invocation.ctx.scratch is not None and isinstance(trainer, WritesFiles) and invocation.rank == 0:
        invocation.at_end.callback(_warn_of_lost, invocation, spec, lost_files(invocation.ctx.scratch))
    first = await entered_at(lifecycle) or spec.current_generation.from_iteration
    beginning = Saved(iteration=first, applied=first)
    checkpoints = Checkpoints(channel, keys, invocation.rank, beginning=beginning)
    if not invocation.stays:
        invocation.load_s = invocation.now() - invocation.began - channel.outages_s
    lifecycle.handoff.load_s = invocation.load_s
    restored: RestoredState | None = None
    if invocation.reason == "relay":
        await join_members(invocation, spec, waits=True)
        restored = await _handed_over(lifecycle, checkpoints, trainer)
        become_member(invocation)
        recovery = peer_recovery(invocation, spec, None if restored is None else restored.copies)
    if restored is None:
        restored = await recovered_state(lifecycle, checkpoints, trainer, recovery) if number > 0 else RestoredState()
    elif recovery is not None:
        recovery.common.stored([s.iteration for s in checkpoints.saved])
    state = restored.checkpoint
    begin = await _begin(lifecycle) if state is None and keys.generation else None
    invocation.trace.record("load", began if invocation.stays else invocation.began, invocation.now())
    if spec.trainer in ("torch", "script") and ((state is None and begin is None) or trainer.initial_first):
        initial = keys.init if spec.stages is None else keys.initial(spec.stages.place(invocation.rank)[0])
        asked, outages_s = invocation.now(), channel.outages_s
        trainer.load(*decode_state(await _get(invocation, initial), key=initial))
        if state is None and begin is None:
            lifecycle.handoff.write_s = max(0.0, invocation.now() - asked - (channel.outages_s - outages_s))
    if state is not None:
        restored.load(trainer)
        lifecycle.budget.spent_before_usd = state.meta.spent_usd
        lifecycle.timeouts.load(state.meta.times)
    decisions = DecisionState() if state is None else state.meta.decisions
    if begin is not None:
        trainer.load(begin.trainer, begin.meta.trainer, shared=True)
        lifecycle.budget.spent_before_usd = begin.meta.spent_usd / spec.configuration.workers
        lifecycle.budget.began_s = invocation.now() - (invocation.run_now() - begin.meta.run_s)
        lifecycle.timeouts.load(begin.meta.times)
        decisions = begin.meta.decisions
    entry: GroupEntry | None = None
    if state is None and begin is None and spec.group is not None and spec.group.joins:
        entry = await _entered(lifecycle, trainer, stack)
        first = entry.iteration
        beginning = Saved(iteration=first, applied=first)
        checkpoints = Checkpoints(channel, keys, invocation.rank, beginning=beginning)
    agreed = None if state is None else state.meta.agreed
    if recovers and agreed is None:
        agreed = await members_of(channel, keys, keys.generation + 1)
    position = beginning if state is None else state.meta
    invocation.emit(
        LoadedEvent(
            t=invocation.run_now(),
            rank=invocation.rank,
            attempt=invocation.attempt,
            iteration=position.iteration,
            spans=invocation.trace.flush(),
            nbytes=channel.bytes_down,
        )
    )
    _log.info("loaded; next iteration %d, %d versions applied", position.iteration, position.applied)
    return StartedWorker(
        lifecycle=lifecycle,
        spec=spec,
        trainer=trainer,
        checkpoints=checkpoints,
        iteration=position.iteration,
        status=ReductionStatus(applied=position.applied, durable=checkpoints.durable, intact=checkpoints.intact),
        replaying=restored.replaying,
        test_samples=test_samples,
        recovery=recovery,
        evaluates=restored.evaluates,
        evaluated=restored.evaluated,
        exchanged=restored.exchanged,
        ended=begin.meta.ended if begin is not None else None if state is None else state.meta.ended,
        entry=entry,
        state=state,
        beginning=first,
        decisions=decisions,
        agreed=agreed if agreed and agreed.from_iteration >= position.iteration else None,
    )


async def _entered(lifecycle: InvocationLifecycle, trainer: Trainer, stack: AsyncExitStack) -> GroupEntry:
    """Joins a run of several groups that has begun, with the parameters that they have; optimisers begin anew."""
    invocation = lifecycle.invocation
    own = await invocation.compute(trainer.parameters, samples=0)
    entry = await enter(lifecycle, stack, own)

    def begin() -> None:
        trainer.set_parameters(entry.vector)
        if isinstance(trainer, SkipsIterations):
            trainer.skip(entry.iteration)

    await invocation.compute(begin, samples=0)
    return entry


async def _fence(invocation: InvocationContext) -> None:
    """Takes the attempt, and makes sure that there is something to do.

    Raises:
        InvocationExit: this call is a duplicate, or the run is over.
    """
    channel, keys = invocation.channel, invocation.keys
    if not await fencing.take(channel, keys.start(invocation.rank, invocation.attempt), invocation.ctx.invocation):
        raise InvocationExit("duplicate")
    asked = invocation.now()
    over = await channel.fetch(keys.result) is not None
    # Of two: a single one may have been late.
    invocation.request_s = min(asked - invocation.began, invocation.now() - asked)
    if over:
        # Nothing is left to do, or a second delivery comes when all marks of the first have been cleared.
        raise InvocationExit("duplicate" if invocation.reason == "start" else "finished")


async def _go_on(invocation: InvocationContext, left: int) -> list[memoryview]:
    """Takes the attempt in the next generation, and reads meanwhile what this rank lacks: the others wait for it.

    Args:
        invocation: that has been a member of the generation before.
        left: number of that generation.

    Returns:
        See `_objects`.

    Raises:
        InvocationExit: another attempt of this rank was first.
    """
    channel, keys = invocation.channel, invocation.keys
    spec = await _spec(invocation)
    async with asyncio.TaskGroup() as tasks:
        mine = keys.start(invocation.rank, invocation.attempt)
        taken = tasks.create_task(fencing.take(channel, mine, invocation.ctx.invocation))
        tasks.create_task(channel.put(keys.left(left, invocation.rank), [b""]))
        found = tasks.create_task(_objects(invocation, spec))
    if not taken.result():
        raise InvocationExit("duplicate")
    return found.result()


async def _spec(invocation: InvocationContext) -> RunSpec:
    """The run as the generation of this attempt sees it."""
    if invocation.spec is None:
        invocation.spec = bytes(await _get(invocation, invocation.keys.spec))
    spec, number = RunSpec.from_bytes(invocation.spec), invocation.keys.generation
    if not number:
        return spec
    key = invocation.keys.members(number)
    if invocation.members is None:
        invocation.members = decode_members(await _get(invocation, key), key=key)
    return spec.in_generation(invocation.members)


async def _begin(lifecycle: InvocationLifecycle) -> Begin:
    """The state in which this generation begins. A function that was started ahead waits for it.

    Raises:
        InvocationExit: the run has ended or was stopped meanwhile, or the time of this invocation is over.
    """
    invocation = lifecycle.invocation
    key, control = invocation.keys.begin(invocation.keys.generation), invocation.keys.control
    latest = invocation.ctx.deadline - 0.1 * invocation.call.lifetime_s
    if invocation.begin is not None:
        told, invocation.begin = invocation.begin, None
        return decode_begin(told, key=key)
    # Others wait for it meanwhile: the usual pauses between polls are long by the time it is there.
    every_s = min(max(LEAST_POLL_S, POLLED_SHARE * lifecycle.timeouts.typical_s), MOST_POLL_S)
    while True:
        try:
            until = min(latest, invocation.now() + CHECK_EVERY_S)
            return decode_begin(await _unless_over(invocation, key, until, every_s=every_s), key=key)
        except ChannelTimeout:
            asked = await invocation.channel.fetch(control)
            if asked is not None and isinstance(decode_control(asked, key=control), StopRequest):
                raise InvocationExit("stopped") from None
            if invocation.now() >= latest:
                await lifecycle.wait_in_successor()
                raise InvocationExit("relayed") from None


async def _get(invocation: InvocationContext, key: str) -> memoryview:
    # Before the platform ends the invocation: an error that names the key says more than a time limit that was too short.
    latest = invocation.ctx.deadline - 0.1 * invocation.call.lifetime_s
    return await _unless_over(invocation, key, min(invocation.now() + LOAD_TIMEOUT_S, latest))


async def _unless_over(invocation: InvocationContext, key: str, deadline: float, *, every_s: float | None = None) -> memoryview:
    """An object that is about to be stored.

    Args:
        invocation: that needs it.
        key: of the object.
        deadline: loop time.
        every_s: interval between polls, where the store is polled; None: they grow.

    Raises:
        InvocationExit: the run has ended meanwhile.
        ChannelTimeout: it is missing at the deadline.
    """
    while True:
        try:
            wait_until = min(deadline, invocation.now() + CHECK_EVERY_S)
            return await _arrived(invocation.channel, key, wait_until, every_s)
        except ChannelTimeout:
            if invocation.attempt > 0 and await invocation.channel.fetch(invocation.keys.result) is not None:
                raise InvocationExit("finished") from None
            if invocation.now() >= deadline:
                raise


async def _arrived(channel: Channel, key: str, deadline: float, every_s: float | None) -> memoryview:
    """`Channel.get`; with `every_s`, polls at this interval instead of at growing ones."""
    if every_s is None or channel.traits.waits:
        return (await channel.get(key, deadline=deadline)).data
    loop = asyncio.get_running_loop()
    at = loop.time()
    while True:
        try:
            return (await channel.get(key, deadline=at, expected_at=at)).data
        except ChannelTimeout:
            if at >= deadline:
                raise
            at = min(max(at + every_s, loop.time()), deadline)


async def _is_over(invocation: InvocationContext) -> bool:
    """Whether a replacement is not needed, because its rank is done."""
    # The last message of a rank that is done may have been lost: a peer that misses it says so, and it is sent again.
    missed = invocation.request.not_after is not None
    if missed or invocation.rank <= 1:  # rank 1 has to stay until there is a result
        return False
    done = [await invocation.channel.fetch(invocation.keys.done(rank)) for rank in (invocation.rank, 1)]
    return None not in done  # else it has to stay until rank 1 is known to live


async def _objects(invocation: InvocationContext, spec: RunSpec) -> list[memoryview]:
    """What the trainer of a rank is built from, if it is one model: training samples, test samples, code that is not unpacked."""
    if spec.trainer != "torch" or spec.stages is not None:
        return []
    keys, rank = invocation.keys, invocation.rank
    wanted = [keys.data(p.number) for p in spec.train_parts(rank)] + [keys.test(p.number) for p in spec.test_parts(rank)]
    if invocation.code is None:
        wanted.append(keys.code)
    return await all_of(_get(invocation, key) for key in wanted)


def _warn_of_lost(invocation: InvocationContext, spec: RunSpec, lost: Callable[[], list[str]]) -> None:
    """Names files of the program that are deleted with this function."""
    if found := lost():
        whose = "self" if spec.script is None else "ephemeron.current()"
        invocation.warn(lost_text(found, program=spec.program, rank=invocation.rank, remedy=f"{whose}.output_dir"))


async def _trainer(invocation: InvocationContext, spec: RunSpec, found: list[memoryview] | None) -> tuple[Trainer, int]:
    """The trainer of a rank, and the number of its test samples.

    Args:
        invocation, spec: of the rank.
        found: see `_objects`; None: they are not read yet.
    """
    if spec.trainer == "script":
        code, scratch = await _get(invocation, invocation.keys.code), invocation.ctx.scratch
        if scratch is None:
            scratch = Path(invocation.at_end.enter_context(tempfile.TemporaryDirectory(prefix="ephemeron-script-")))
        return build_script_trainer(spec, invocation.rank, folders=unbundle(bytes(code), scratch / "code")), 0
    if spec.trainer != "torch":
        trainer = build_trainer(spec, invocation.rank, folders=[], feed=ArrayBatchSource(_NOTHING, _NOTHING))
        return trainer, sum(part.stop - part.start for part in spec.test_parts(invocation.rank))
    if spec.stages is not None:
        from ephemeron.training.worker.pipeline.factory import stage_trainer  # needs torch

        return await stage_trainer(invocation, spec, lambda key: _get(invocation, key))
    ctx, rank = invocation.ctx, invocation.rank
    parts, tests = spec.train_parts(rank), spec.test_parts(rank)
    found = await _objects(invocation, spec) if found is None else found
    if invocation.code is None:
        bundle = bytes(found.pop())
        invocation.code = [] if ctx.scratch is None else unbundle(bundle, ctx.scratch / "code")
    folders = invocation.code
    data: Stored = [Piece(d, p.start, p.stop) for d, p in zip(found, parts, strict=False)]
    test: Stored = [Piece(d, p.start, p.stop) for d, p in zip(found[len(parts) :], tests, strict=True)]
    if len(found) == 2 and not invocation.keys.generation:  # whole objects, which are not copied
        data, test = found
    feed = open_feed(spec, data, test, folders=folders, own_process=ctx.own_process)
    return build_trainer(spec, rank, folders=folders, feed=feed), feed.test_samples


async def _handed_over(lifecycle: InvocationLifecycle, checkpoints: Checkpoints, trainer: Trainer) -> RestoredState | None:
    """State that the predecessor hands over; None: it has not, and this attempt recovers."""
    invocation = lifecycle.invocation
    channel, request = invocation.channel, invocation.request
    key = invocation.keys.hand(invocation.rank, invocation.attempt)
    try:
        message = await _state_or_message(lifecycle, key, invocation.now() + (request.hand_within_s or 0.0), trainer)
        if isinstance(message, HandedOver):
            state, copies = checkpoints.taken(message.state), PrivateCopies()
            for of in message.copies:
                copies.record(*of)
            lifecycle.taken_over(state.meta.iteration)
            return RestoredState(checkpoint=state, copies=copies)
        if message == OVER:
            raise InvocationExit("finished")
        if not message.startswith(RECOVER):
            asked, outages_s = invocation.now(), channel.outages_s
            state = await checkpoints.read(int(message), invocation.now() + LOAD_TIMEOUT_S)
            lifecycle.taken_over(state.meta.iteration)
            lifecycle.handoff.write_s = max(0.0, invocation.now() - asked - (channel.outages_s - outages_s))
            return RestoredState(checkpoint=state)
        told = Recovery.of(message, key=key)
        lifecycle.timeouts.load(waited=told.waited)
        lifecycle.detector.progress_seen.update(told.seen)
        lifecycle.back = told.back
        if told.sent:
            lifecycle.not_after = None
    except ChannelTimeout:
        _log.warning("no hand-off from the predecessor; recovers")
        # The predecessor was lost, and this is its replacement: a run in which no hand-off succeeds has to end.
        await lifecycle.replacement.spend(invocation.rank, max(request.reached, 0))
    return None


async def _state_or_message(lifecycle: InvocationLifecycle, key: str, deadline: float, trainer: Trainer) -> HandedOver | bytes:
    """The predecessor's state, over a connection to it, or its message in the store, whichever is first.

    Args:
        lifecycle: of the successor.
        key: of the message.
        deadline: loop time.
        trainer: is warmed up meanwhile.

    Raises:
        InvocationExit: the run has ended meanwhile.
        ChannelTimeout: there is neither at the deadline.
    """
    invocation = lifecycle.invocation
    if not keeps_in_memory(lifecycle.spec):
        return bytes(await _unless_over(invocation, key, deadline))
    token = token_of(invocation.call.key, invocation.call.run)
    async with from_predecessor(invocation, token=token, transports=transports_of(invocation)) as state:
        message = asyncio.get_running_loop().create_task(_unless_over(invocation, key, deadline))
        try:
            if pays(lifecycle):
                await warm_up(lifecycle, trainer)
            await asyncio.wait((state, message), return_when=asyncio.FIRST_COMPLETED)
            return bytes(message.result()) if message.done() else state.result()
        finally:
            message.cancel()
            await asyncio.gather(message, return_exceptions=True)


_NOTHING = Samples(np.zeros((0, 1), dtype=np.float32), np.zeros(0, dtype=np.int64))
