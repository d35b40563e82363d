"""How a run ends: every rank says it is done, rank 0 waits for all, writes the result and clears the channel.

Rank 1 stays until the result is there: if rank 0 dies at the very end, somebody is left to replace it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ephemeron.collectives import Blame, Collective
from ephemeron.errors import ChannelTimeout
from ephemeron.tensors import digest, encode_state
from ephemeron.worker.life import Life
from ephemeron.worker.load import Loaded
from ephemeron.worker.trainer import Evaluation


async def finish(life: Life, loaded: Loaded, collective: Collective, evaluation: Evaluation) -> dict[str, Any]:
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
        await life.dismiss_successor()
        await life.channel.put(life.keys.done(life.rank), [json.dumps(list(evaluation)).encode()])
        if life.rank == 1:
            await _wait_for(life, life.keys.result, Blame(loaded.spec.iterations, [0]))
        return {}
    iterations, world = loaded.spec.iterations, loaded.spec.configuration.workers
    slices = await asyncio.gather(*(_done(life, rank, iterations) for rank in range(1, world)))
    final = await collective.final()
    if final is not None:
        loaded.trainer.apply(final)
        evaluation = loaded.trainer.evaluate()
    summary: dict[str, Any] = {"iterations": iterations, "metrics": metrics([evaluation, *slices])}
    if stages is None:
        arrays, notes = loaded.trainer.weights()
        summary["weights_sha256"] = digest(arrays)
    else:  # no function may be large enough for all of them: whoever collects the result puts them together
        arrays, notes = {}, {"parts": stages.count}
    await life.channel.put(life.keys.result, [encode_state(arrays, {**summary, **notes})])
    await life.dismiss_successor()  # not before: whoever has to wait for the others may need it
    await clear(life, parts=0 if stages is None else stages.count)
    return summary


async def _done(life: Life, rank: int, iterations: int) -> Evaluation:
    return Evaluation(*json.loads(bytes(await _wait_for(life, life.keys.done(rank), Blame(iterations, [rank])))))


async def _wait_for(life: Life, key: str, blame: Blame) -> memoryview:
    while True:
        try:
            return (await life.channel.get(key, deadline=life.now() + life.patience())).data
        except ChannelTimeout:
            await life.overdue(blame)


def metrics(slices: list[Evaluation]) -> dict[str, float | None]:
    """Mean loss and accuracy over all slices of the test set; None without one."""
    samples = sum(e.samples for e in slices)
    if samples == 0:
        return {"loss": None, "accuracy": None}
    return {
        "loss": sum(e.loss_sum for e in slices) / samples,
        "accuracy": sum(e.correct for e in slices) / samples,
    }


async def clear(life: Life, *, parts: int = 0) -> None:
    """Deletes everything of the run but its result, with so many parts, and its specification. Listing is allowed here:
    once per run."""
    keep = {life.keys.result, life.keys.spec, *(life.keys.part(s) for s in range(parts))}
    everything = await life.channel.list(f"{life.keys.run}/")
    await life.channel.delete([key for key in everything if key not in keep])
