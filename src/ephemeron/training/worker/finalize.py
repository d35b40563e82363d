"""How a run ends: every rank says it is done, rank 0 waits for all, writes the result and clears the channel.

Rank 1 stays until the result is there: if rank 0 dies at the very end, rank 1 is left to replace it. All others stay until rank 1 is
known to live: it is done, or, where ranks do not wait for each other, has come further since. That rank 0 lives is not enough, since
rank 1 may have died unnoticed before. A rank that finds the result on leaving clears the channel again, of what it has put meanwhile.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import ChannelTimeout, KeyExists
from ephemeron.training.collectives import Collective, StalledPeers, all_of, handle_timeout, wait_for_object
from ephemeron.training.collectives.group import MOMENT
from ephemeron.training.metrics import means
from ephemeron.training.tensors import digest, encode_state
from ephemeron.training.worker.invocation import InvocationContext
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.startup import StartedWorker
from ephemeron.training.worker.trainer import EvaluationSums

LOOK_EVERY_S = 1.0
"""How often a rank that is done looks whether the run is over: what it waits for is deleted then."""


async def finish(
    life: InvocationContext, loaded: StartedWorker, collective: Collective, evaluation: EvaluationSums
) -> dict[str, Any]:
    """Closes this rank's part of the run; rank 0 closes the run.

    Returns:
        For rank 0: iterations, metrics and, where a function holds the whole model, `weights_sha256`.
    """
    stages = loaded.spec.stages
    if stages is not None:
        stage, replica = stages.place(life.rank)
        if replica == 0:
            await life.channel.put(life.keys.part(stage), [encode_state(*loaded.trainer.weights())])
    if life.rank != 0:
        repeated = life.channel.retrying.repeated
        await life.channel.put(life.keys.done(life.rank), [json.dumps(list(evaluation)).encode()])
        if life.channel.retrying.repeated > repeated and await life.channel.fetch(life.keys.result) is not None:
            await life.channel.delete([life.keys.done(life.rank)])  # the first put was served, and all is cleared since
        if life.rank == 1:
            await _wait_for(life, life.keys.result, lambda: _blame_result(life, loaded.spec))
        else:
            await clear_if_over(life)
            await _until_rank_1_lives(life, collective, loaded.spec.iterations)
        # Not before: the successor may have to wait on in our place.
        if await life.dismiss_successor() or life.rank == 1:
            await clear_if_over(life)
        return {}
    iterations, world = loaded.spec.iterations, loaded.spec.configuration.workers
    slices = await all_of(_done(life, collective, rank, iterations) for rank in range(1, world))
    final = await collective.final_parameters()
    if final is not None:
        loaded.trainer.apply(final)
        evaluation = loaded.trainer.evaluate()
    summary: dict[str, Any] = {"iterations": iterations, "metrics": means([evaluation, *slices])}
    if stages is None:
        arrays, notes = loaded.trainer.weights()
        summary["weights_sha256"] = digest(arrays)
    else:  # no function may be large enough for all of them: whoever collects the result puts them together
        arrays, notes = {}, {"parts": stages.count}
    with contextlib.suppress(KeyExists):  # another attempt of this rank was first: its result stands
        await life.channel.put(life.keys.result, [encode_state(arrays, {**summary, **notes})], create=True)
    await life.dismiss_successor()  # not before: whoever has to wait for the others may need it
    await clear(life.channel, life.keys, parts=parts_of(loaded.spec))
    return summary


async def _until_rank_1_lives(life: InvocationContext, collective: Collective, iterations: int) -> None:
    """Waits until rank 1 is known to live, or the run is over; replaces rank 1 if that takes too long."""

    async def position() -> int:
        if not collective.self_paced:  # no rank is further than one that is done
            return 0
        return await collective.latest_iteration(1) or 0

    before, began = await position(), life.now()
    while True:
        patience_s = life.patience()
        try:
            await life.channel.get(life.keys.done(1), deadline=life.now() + min(LOOK_EVERY_S, patience_s))
            return
        except ChannelTimeout as e:
            if await position() > before or await life.channel.fetch(life.keys.result) is not None:
                return
            if life.now() - began >= patience_s:
                await handle_timeout(life.overdue, StalledPeers(iterations, [1], [life.keys.done(1)]), e)
                began = life.now()


def parts_of(spec: RunSpec | None) -> int:
    """In how many parts the weights of a run lie beside its result; 0: they are in it."""
    return 0 if spec is None or spec.stages is None else spec.stages.count


async def _blame_result(life: InvocationContext, spec: RunSpec) -> StalledPeers:
    """Rank 0 may be waiting itself, for others that are not done."""
    done = await life.channel.list(life.keys.dones)
    missing = [r for r in range(2, spec.configuration.workers) if life.keys.done(r) not in done]
    if missing:
        return StalledPeers(spec.iterations, missing, [life.keys.done(r) for r in missing])
    # The last one may be done just now.
    return StalledPeers(spec.iterations, [0], [life.keys.result], MOMENT * life.patience())


async def _done(life: InvocationContext, collective: Collective, rank: int, iterations: int) -> EvaluationSums:
    key = life.keys.done(rank)

    async def blame() -> StalledPeers:
        lost = await collective.first_lost(rank, iterations)
        return StalledPeers(iterations, [rank], [key]) if lost is None else StalledPeers(lost, [life.rank])

    return EvaluationSums(*json.loads(bytes(await _wait_for(life, key, blame))))


async def _wait_for(life: InvocationContext, key: str, blame: Callable[[], Awaitable[StalledPeers]]) -> memoryview:
    arrived = await wait_for_object(
        life.channel, key, timeout_s=life.patience, stalled=blame, on_timeout=life.overdue, accept=lambda data: data
    )
    return arrived.value


async def clear_if_over(life: InvocationContext) -> None:
    """For whoever leaves late, superseded or not needed: what it has put since the run ended is deleted again."""
    if await life.channel.fetch(life.keys.result) is not None:
        await clear(life.channel, life.keys, parts=parts_of(life.spec))


async def clear(channel: Channel, keys: Keys, *, parts: int = 0) -> None:
    """Deletes everything of the run but its result, with so many parts, and its specification. Listing is allowed here:
    once per run, and once by whoever is late."""
    keep = {keys.result, keys.spec, *(keys.part(s) for s in range(parts))}
    gone = [key for key in await channel.list(f"{keys.run}/") if key not in keep]
    if gone:
        await channel.delete(gone)
