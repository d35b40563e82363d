"""End of a run: each rank reports that it is done, rank 0 waits for all, writes the result and clears the channel.

Rank 1 stays until the result exists: if rank 0 dies at the very end, rank 1 is left to replace it. All others stay until rank 1
is known to live: it is done, or, where ranks do not wait for each other, has made progress since. That rank 0 lives is not
enough, since rank 1 may have died unnoticed before. A rank that finds the result when it ends clears the channel again, of the
objects that it has stored meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import ChannelTimeout, KeyExists
from ephemeron.runs.metrics import EvaluationSums
from ephemeron.training.collectives import Collective, StalledPeers, all_of, handle_timeout, wait_for_object
from ephemeron.training.collectives.group import GRACE_SHARE
from ephemeron.training.tensors import digest, encode_state
from ephemeron.training.worker.decisions import DecisionState
from ephemeron.training.worker.evaluation_exchange import decode_evaluation, encode_evaluation
from ephemeron.training.worker.invocation import InvocationContext
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.result import RunResult
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.startup import StartedWorker
from ephemeron.training.worker.trainers.trainer import WritesFiles

_log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
"""Interval at which a rank that is done checks whether the run is over: the object that it waits for is deleted then."""


async def finish(
    started: StartedWorker, collective: Collective, evaluation: EvaluationSums, *, iterations: int, decisions: DecisionState
) -> RunResult | None:
    """Closes this rank's part of the run; rank 0 closes the run.

    Args:
        evaluation: of this rank's slice, at the end.
        iterations: number of iterations of the run.
        decisions: what evaluations have decided.

    Returns:
        For rank 0: the result of the run.
    """
    lifecycle, spec, trainer = started.lifecycle, started.spec, started.trainer
    channel, keys, rank = lifecycle.channel, lifecycle.keys, lifecycle.rank
    if spec.stages is not None:
        stage, replica = spec.stages.place(rank)
        if replica == 0:
            await channel.put(keys.part(stage), [encode_state(*trainer.weights())])
    if rank != 0:
        await _report_done(lifecycle, collective, evaluation, iterations)
        return None
    slices = await all_of(_done(lifecycle, collective, other, iterations) for other in range(1, spec.configuration.workers))
    final = await collective.final_parameters()
    if final is not None:
        trainer.apply(final)
        evaluation = trainer.evaluate()
    if spec.stages is None:
        arrays, notes = trainer.weights()
        weights_sha256 = digest(arrays)
        arrays = arrays | (trainer.files() if isinstance(trainer, WritesFiles) else {})
    else:  # no function may be large enough for all of them: the client puts the parts together
        arrays, notes, weights_sha256 = {}, {"parts": spec.stages.count}, None
    summary = RunResult(iterations=iterations, metrics=trainer.metrics([evaluation, *slices]), weights_sha256=weights_sha256)
    with contextlib.suppress(KeyExists):  # another attempt of this rank was first: its result counts
        await channel.put(
            keys.result,
            [encode_state(arrays, {**summary.to_json(), "kept": decisions.kept, "best": decisions.best_iteration, **notes})],
            create=True,
        )
    _log.info("the run is finished after %d iterations", iterations)
    await lifecycle.dismiss_successor()  # not before: a successor may be needed to wait for the others
    await clear(channel, keys, parts=parts_of(spec))
    return summary


async def _report_done(lifecycle: InvocationLifecycle, collective: Collective, evaluation: EvaluationSums, iterations: int) -> None:
    channel, keys, rank, spec = lifecycle.channel, lifecycle.keys, lifecycle.rank, lifecycle.spec
    repeated = channel.retrying.repeated
    await channel.put(keys.done(rank), [encode_evaluation(evaluation)])
    _log.info("done; waits for the end of the run")
    if channel.retrying.repeated > repeated and await channel.fetch(keys.result) is not None:
        await channel.delete([keys.done(rank)])  # the first put was served, and all is cleared since
    if rank == 1:
        await _wait_for(lifecycle, keys.result, lambda: _stalled_before_result(lifecycle, iterations))
    else:
        await clear_if_over(lifecycle.invocation, spec)
        await _until_rank_1_lives(lifecycle, collective, iterations)
    # Not before: the successor may have to wait on in this attempt's place.
    if await lifecycle.dismiss_successor() or rank == 1:
        await clear_if_over(lifecycle.invocation, spec)


async def _until_rank_1_lives(lifecycle: InvocationLifecycle, collective: Collective, iterations: int) -> None:
    """Waits until rank 1 is known to live, or the run is over; replaces rank 1 if that takes too long."""
    channel, keys = lifecycle.channel, lifecycle.keys

    async def position() -> int:
        if not collective.self_paced:  # no rank is further than one that is done
            return 0
        return await collective.latest_iteration(1) or 0

    before, began = await position(), lifecycle.now()
    while True:
        timeout_s = lifecycle.wait_timeout_s()
        try:
            await channel.get(keys.done(1), deadline=lifecycle.now() + min(CHECK_EVERY_S, timeout_s))
            return
        except ChannelTimeout as e:
            if await position() > before or await channel.fetch(keys.result) is not None:
                return
            if lifecycle.now() - began >= timeout_s:
                await handle_timeout(lifecycle.on_timeout, StalledPeers(iterations, [1], [keys.done(1)]), e)
                began = lifecycle.now()


def parts_of(spec: RunSpec) -> int:
    """Number of objects beside the result that hold the run's weights; 0: the result holds them."""
    return 0 if spec.stages is None else spec.stages.count


async def _stalled_before_result(lifecycle: InvocationLifecycle, iterations: int) -> StalledPeers:
    """Rank 0, or the ranks that it waits for itself, because they are not done."""
    keys = lifecycle.keys
    done = await lifecycle.channel.list(keys.dones)
    missing = [r for r in range(2, lifecycle.spec.configuration.workers) if keys.done(r) not in done]
    if missing:
        return StalledPeers(iterations, missing, [keys.done(r) for r in missing])
    # The last one may be done just now.
    return StalledPeers(iterations, [0], [keys.result], GRACE_SHARE * lifecycle.wait_timeout_s())


async def _done(lifecycle: InvocationLifecycle, collective: Collective, rank: int, iterations: int) -> EvaluationSums:
    key = lifecycle.keys.done(rank)

    async def stalled() -> StalledPeers:
        lost = await collective.first_lost(rank, iterations)
        return StalledPeers(iterations, [rank], [key]) if lost is None else StalledPeers(lost, [lifecycle.rank])

    return decode_evaluation(await _wait_for(lifecycle, key, stalled), key=key)


async def _wait_for(lifecycle: InvocationLifecycle, key: str, stalled: Callable[[], Awaitable[StalledPeers]]) -> memoryview:
    arrived = await wait_for_object(
        lifecycle.channel,
        key,
        timeout_s=lifecycle.wait_timeout_s,
        stalled=stalled,
        on_timeout=lifecycle.on_timeout,
        accept=lambda data: data,
    )
    return arrived.value


async def clear_if_over(invocation: InvocationContext, spec: RunSpec | None = None) -> None:
    """Deletes the objects that a late rank, superseded or not needed, has stored since the run ended.

    Args:
        invocation: the ending one.
        spec: of the run; None: it is read from the channel.
    """
    channel, keys = invocation.channel, invocation.keys
    if await channel.fetch(keys.result) is None:
        return
    if spec is None:
        data = await channel.fetch(keys.spec)
        if data is None:  # the client has deleted the run
            return
        spec = RunSpec.from_bytes(data)
    await clear(channel, keys, parts=parts_of(spec))


async def clear(channel: Channel, keys: Keys, *, parts: int = 0) -> None:
    """Deletes all objects of the run but its result, with so many parts, kept weights, and its specification.

    Lists: once per run, and once for each invocation that ends late.
    """
    keep = {keys.result, keys.spec, *(keys.part(s) for s in range(parts))}
    gone = [key for key in await channel.list(f"{keys.run}/") if key not in keep and not key.startswith(keys.all_kept)]
    if gone:
        await channel.delete(gone)
