"""From a specification and a stage's document to its trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ephemeron.communication.channels.base import Buffer
from ephemeron.config.code_bundle import unbundle
from ephemeron.config.typed import build, plain
from ephemeron.config.user_code import resolve
from ephemeron.data import Sampler
from ephemeron.data.batch_source import BatchSource
from ephemeron.partition.schedule_simulator.schedule import Schedule
from ephemeron.partition.serialization.stage_bundle import BundleDocument, StageBundle, load_bundle
from ephemeron.training.task.losses import make_loss
from ephemeron.training.task.program import make_model
from ephemeron.training.task.tensors import to_arrays, to_tensor
from ephemeron.training.tensors import decode_state, encode_state
from ephemeron.training.worker.invocation import InvocationContext
from ephemeron.training.worker.pipeline.trainer import StageTrainer
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.factory import open_feed, rank_seed

Get = Callable[[str], Awaitable[memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageMeta:
    """Plain values of a stage's object."""

    document: BundleDocument
    bf16: tuple[str, ...]
    """Names of arrays that hold the bits of bfloat16."""
    dtype: str
    """Dtype of floating inputs."""


def stage_object(bundle: StageBundle, *, dtype: torch.dtype) -> bytes:
    """Object in the channel for the stages of a device; `stage_trainer` reads it."""
    arrays, bf16 = to_arrays(bundle.constants)
    meta = _StageMeta(document=bundle.document, bf16=tuple(bf16), dtype=str(dtype).removeprefix("torch."))
    return encode_state(arrays, plain(meta))


async def stage_trainer(invocation: InvocationContext, spec: RunSpec, get: Get) -> tuple[StageTrainer, int]:
    """The trainer of this rank's stages, and how many samples it tests with.

    Raises:
        JobError: the user's code is not what it was where the run was started.
    """
    assert spec.stages is not None
    keys, stages = invocation.keys, spec.stages
    stage, replica = stages.place(invocation.rank)
    wanted = [keys.code, keys.stage(stage)]
    if stages.fed[stage]:
        wanted += [keys.data(invocation.rank), keys.test(invocation.rank)]
    code, raw, *samples = await asyncio.gather(*(get(key) for key in wanted))
    folders = [] if invocation.ctx.scratch is None else unbundle(bytes(code), invocation.ctx.scratch / "code")
    find = partial(resolve, folders=folders)
    arrays, notes = decode_state(raw, key=keys.stage(stage))
    meta = build(_StageMeta, notes, where=keys.stage(stage))
    split = load_bundle(
        StageBundle(document=meta.document, constants={n: to_tensor(a, n in meta.bf16) for n, a in arrays.items()}),
        resolve=find,
        build_model=lambda: make_model(spec.model, find, seed=spec.seed, dtype=spec.dtype),
    )
    feed = None if not samples else _feed(spec, samples, folders, own_process=invocation.ctx.own_process)
    schedule = build(
        Schedule, {"kind": stages.schedule, "micro_batches": stages.micro_batches, "recompute": stages.recompute}, where="stages"
    )
    return StageTrainer(
        split,
        meta.document.device,
        saved=meta.document.saved,
        optimizer=spec.optimizer,
        loss=make_loss(spec.loss, find),
        schedule=schedule,
        feed=feed,
        sampler=Sampler(spec.split, replica, spec.seed),
        dtype=getattr(torch, meta.dtype),
        seed=rank_seed(spec.seed, replica),
        alone=stages.replicas == 1,
    ), 0 if feed is None else feed.test_samples


def _feed(spec: RunSpec, objects: Sequence[Buffer], folders: Sequence[Path], *, own_process: bool) -> BatchSource:
    data, test = objects
    return open_feed(spec, data, test, folders=folders, own_process=own_process)
