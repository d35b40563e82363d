"""How a function begins: fence itself, fetch what it needs, stand where its predecessor stood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.config.code_bundle import unbundle
from ephemeron.data import Samples
from ephemeron.data.batch_source import ArrayFeed
from ephemeron.errors import ChannelTimeout
from ephemeron.events import Loaded as LoadedEvent
from ephemeron.events import Started
from ephemeron.training.collectives import all_of
from ephemeron.training.tensors import Arrays, decode_state
from ephemeron.training.worker import fencing
from ephemeron.training.worker.checkpoint import Checkpoints
from ephemeron.training.worker.factory import build_trainer, open_feed
from ephemeron.training.worker.invocation import InvocationContext, InvocationExit
from ephemeron.training.worker.request import OVER, RECOVER, Recovery
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainer import Trainer

LOAD_TIMEOUT_S = 60.0
LOOK_EVERY_S = 5.0
"""How often whoever waits for its predecessor, or for what the trigger has put, looks whether the run is over."""


@dataclass(slots=True, kw_only=True)
class StartedWorker:
    """A worker's position in the run."""

    spec: RunSpec
    trainer: Trainer
    checkpoints: Checkpoints
    iteration: int
    """The next one to compute."""
    applied: int
    """Versions that the parameters have seen."""
    replaying: bool
    """Peers may be ahead: versions from here on may exist already."""
    test_samples: int
    collective: tuple[Arrays, dict[str, Any]] | None


async def load(life: InvocationContext) -> StartedWorker:
    """Everything up to the first iteration.

    Raises:
        Leave: this call is a duplicate, or there is nothing left to do.
        ChannelTimeout: what the trigger should have prepared is not there.
    """
    mine = life.keys.start(life.rank, life.attempt)
    if not await fencing.take(life.channel, mine, life.ctx.invocation):
        raise InvocationExit("duplicate")
    asked = life.now()
    over = await life.channel.fetch(life.keys.result) is not None
    life.request_s = min(asked - life.began, life.now() - asked)  # of two: a single one may have been late
    if over:
        # Nothing is left to do, or a second delivery comes when all marks of the first have been cleared.
        raise InvocationExit("duplicate" if life.call.reason == "start" else "finished")
    life.emit(
        Started(
            t=life.run_now(), rank=life.rank, attempt=life.attempt, invocation=life.ctx.invocation, cold=life.ctx.cold
        )
    )
    spec = RunSpec.from_bytes(await _get(life, life.keys.spec))
    life.adopt(spec)
    if life.attempt > 0 and life.call.reason != "relay" and await _is_over(life):
        raise InvocationExit("finished")
    trainer, test_samples = await _trainer(life, spec)
    life.at_end.callback(trainer.close)
    checkpoints = Checkpoints(life.channel, life.keys, life.rank)
    life.load_s = life.now() - life.began - life.channel.outages_s
    arrays, meta, replaying = await _state(life, checkpoints)
    life.trace.record("load", life.began, life.now())
    if meta is None:
        if spec.trainer == "torch":
            initial = life.keys.init if spec.stages is None else life.keys.initial(spec.stages.place(life.rank)[0])
            asked, outages_s = life.now(), life.channel.outages_s
            trainer.load(*decode_state(await _get(life, initial), key=initial))
            life.write_s = max(0.0, life.now() - asked - (life.channel.outages_s - outages_s))  # of the state: no less
    else:
        trainer.load({n: a for n, a in arrays.items() if not n.startswith("c/")}, meta)
        life.spent_before_usd = meta["spent_usd"]
        life.timeouts.load(**meta["timeouts"])
    position = meta or {"iteration": 0, "applied": 0}
    life.emit(
        LoadedEvent(
            t=life.run_now(),
            rank=life.rank,
            attempt=life.attempt,
            iteration=position["iteration"],
            spans=life.trace.flush(),
            nbytes=life.channel.bytes_down,
        )
    )
    return StartedWorker(
        spec=spec, trainer=trainer, checkpoints=checkpoints, iteration=position["iteration"], applied=position["applied"],
        replaying=replaying, test_samples=test_samples,
        collective=None if meta is None else ({n[2:]: a for n, a in arrays.items() if n.startswith("c/")}, meta["collective"]),
    )  # fmt: skip


async def _get(life: InvocationContext, key: str) -> memoryview:
    # Sooner than the platform would kill us: an error that names the key says more than a lifetime that was too short.
    deadline = min(life.now() + LOAD_TIMEOUT_S, life.ctx.deadline - 0.1 * life.call.lifetime_s)
    return await _unless_over(life, key, deadline)


async def _unless_over(life: InvocationContext, key: str, deadline: float) -> memoryview:
    """An object that is about to be there.

    Raises:
        Leave: the run has ended meanwhile.
        ChannelTimeout: it is not there at the deadline.
    """
    while True:
        try:
            return (await life.channel.get(key, deadline=min(deadline, life.now() + LOOK_EVERY_S))).data
        except ChannelTimeout:
            if life.attempt > 0 and await life.channel.fetch(life.keys.result) is not None:
                raise InvocationExit("finished") from None
            if life.now() >= deadline:
                raise


async def _is_over(life: InvocationContext) -> bool:
    # The last message of a rank that is done may have been lost: whoever misses it says so, and it is sent again.
    missed = life.request.not_after is not None
    if missed or life.rank <= 1:  # rank 1 has to stay until there is a result
        return False
    done = [await life.channel.fetch(life.keys.done(rank)) for rank in (life.rank, 1)]
    return None not in done  # else it has to stay until rank 1 is known to live


async def _trainer(life: InvocationContext, spec: RunSpec) -> tuple[Trainer, int]:
    if spec.trainer != "torch":
        return build_trainer(spec, life.rank, folders=[], feed=ArrayFeed(_NOTHING, _NOTHING)), 0
    if spec.stages is not None:
        from ephemeron.training.worker.pipeline.factory import stage_trainer  # needs torch

        return await stage_trainer(life, spec, lambda key: _get(life, key))
    keys = life.keys
    code, data, test = await all_of(_get(life, k) for k in (keys.code, keys.data(life.rank), keys.test(life.rank)))
    folders = [] if life.ctx.scratch is None else unbundle(bytes(code), life.ctx.scratch / "code")
    feed = open_feed(spec, data, test, folders=folders, own_process=life.ctx.own_process)
    return build_trainer(spec, life.rank, folders=folders, feed=feed), feed.test_samples


async def _state(life: InvocationContext, checkpoints: Checkpoints) -> tuple[Arrays, dict[str, Any] | None, bool]:
    """The state to go on from (None: the beginning), and whether peers may be ahead of it."""
    if life.attempt == 0:
        return {}, None, False
    if life.call.reason == "relay":
        try:
            key = life.keys.hand(life.rank, life.attempt)
            told = bytes(await _unless_over(life, key, life.now() + (life.request.hand_within_s or 0.0)))
            if told == OVER:
                raise InvocationExit("finished")
            if told.startswith(RECOVER):
                recovery = Recovery.of(told, key=key)
                life.timeouts.load(waited=recovery.waited)
                life.replacing.seen.update(recovery.seen)
            else:
                asked, outages_s = life.now(), life.channel.outages_s
                arrays, meta = await checkpoints.read(int(told), life.now() + LOAD_TIMEOUT_S)
                life.write_s = max(0.0, life.now() - asked - (life.channel.outages_s - outages_s))
                return arrays, meta, False
        except ChannelTimeout:  # the predecessor died before it could hand over
            pass
    return *(await checkpoints.newest(life.request.not_after) or ({}, None)), True


_NOTHING = Samples(np.zeros((0, 1), dtype=np.float32), np.zeros(0, dtype=np.int64))
