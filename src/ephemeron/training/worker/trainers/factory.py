"""Builds trainers from specifications."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import xxhash

from ephemeron.communication.channels.base import Buffer
from ephemeron.data import Samples, decode
from ephemeron.data.batch_source import ArrayBatchSource, BatchSource
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.trainer import Trainer

if TYPE_CHECKING:
    from ephemeron.training.worker.trainers.script_trainer import ScriptTrainer
    from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer


def exchanged(spec: RunSpec) -> str:
    """Kind of the exchanged vector: `gradients`, `parameters`, `deltas`, or `changes` for an asynchronous parameter server."""
    c = spec.configuration
    return "changes" if c.pattern == "parameter-server" and c.sync == "asp" else c.exchanged


def steps_provisionally(spec: RunSpec, rank: int) -> bool:
    """Whether a rank computes after provisional steps: its parameters may be stale, and it exchanges what is merged into a step."""
    c = spec.configuration
    staleness = policy_for(c.sync).staleness(aggregator=rank < c.aggregators) if c.workers > 1 else 0
    return staleness > 0 and exchanged(spec) in ("gradients", "deltas") and spec.options.staleness == "auto"


class Piece(NamedTuple):
    """Part of an object with samples or, with a flow, with their numbers."""

    data: Buffer
    start: int
    stop: int


Stored: TypeAlias = Buffer | Sequence[Piece]
"""A function's samples in the channel: a whole object, or pieces of several."""


def rank_seed(seed: int, rank: int, generation: int = 0) -> int:
    """Seed of a rank's own random numbers (dropout and the like); the data order does not depend on it."""
    told = f"{seed}/{rank}/{generation}" if generation else f"{seed}/{rank}"
    return int(xxhash.xxh3_64_intdigest(told.encode())) % 2**63


def _samples(stored: Stored) -> Samples:
    if isinstance(stored, (bytes, bytearray, memoryview)):
        return decode(bytearray(stored))
    parts = [(decode(bytearray(piece.data)), piece) for piece in stored]
    inputs, targets = (np.concatenate([getattr(samples, name)[p.start : p.stop] for samples, p in parts]) for name in ("inputs", "targets"))
    return Samples(inputs, targets)


def open_feed(spec: RunSpec, data: Stored, test: Stored, *, folders: Sequence[Path], own_process: bool = False) -> BatchSource:
    """A function's samples: stored for it by the driver, or read from a flow.

    Args:
        data, test: its objects in the channel: samples or, with a flow, their numbers.
        folders: of the user's code.
        own_process: whether this process may fork and start threads, to load ahead.

    Raises:
        JobError, DatasetError: the flow has changed since the run was started.
    """
    if spec.flow is None:
        return ArrayBatchSource(_samples(data), _samples(test))
    from ephemeron.data.flow.batch_source import FlowBatchSource, decode_indices

    def indices(stored: Stored) -> np.ndarray:
        if isinstance(stored, (bytes, bytearray, memoryview)):
            return decode_indices(bytes(stored))
        return np.concatenate([decode_indices(bytes(p.data))[p.start : p.stop] for p in stored])

    return FlowBatchSource(
        spec.flow,
        train_indices=indices(data),
        test_indices=indices(test),
        seed=spec.seed,
        iterations=spec.iterations,
        timeline=spec.timeline,
        code=folders,
        own_process=own_process,
    )


def build_trainer(spec: RunSpec, rank: int, *, folders: Sequence[Path], feed: BatchSource) -> Trainer:
    """The trainer of a specification.

    Raises:
        JobError: the model, loss or optimiser cannot be made.
        MissingExtra: PyTorch is not installed.
    """
    if spec.trainer == "synthetic":
        from ephemeron.training.worker.trainers.synthetic_trainer import SyntheticTrainer

        number = spec.current_generation.number
        seed = rank_seed(spec.seed, rank, number)
        return SyntheticTrainer(seed=seed, split=spec.timeline, rank=rank, **spec.trainer_options)
    if spec.trainer == "counting":
        from ephemeron.training.worker.trainers.synthetic_trainer import CountingTrainer

        c = spec.configuration
        adds, asynchronous = c.pattern == "parameter-server", c.sync == "asp"
        return CountingTrainer(
            rank=rank,
            world=c.workers,
            iterations=spec.iterations,
            tables=c.aggregators,
            weighted=not asynchronous if adds else not policy_for(c.sync).waits_for_all,
            replaces=adds and asynchronous,
        )
    return build_torch_trainer(spec, rank, folders=folders, feed=feed)


def build_script_trainer(spec: RunSpec, rank: int, *, folders: Sequence[Path]) -> ScriptTrainer:
    """Starts a script, up to its first batch.

    Raises:
        JobError: it has no loop over `run.steps`.
        Exception: what the script raises.
    """
    from ephemeron.training.task.script_batches import Share
    from ephemeron.training.worker.trainers.script_trainer import ScriptTrainer

    assert spec.script is not None
    script = spec.script.script
    return ScriptTrainer(
        script.find(folders),
        script.arguments,
        folders,
        share=Share(rank=rank, weights=spec.proportions),
        epoch_length=spec.script.epoch_length,
        iterations=spec.iterations,
        seed=spec.seed,
        rank_seed=rank_seed(spec.seed, rank),
        provisional=steps_provisionally(spec, rank),
    )


def build_torch_trainer(spec: RunSpec, rank: int, *, folders: Sequence[Path], feed: BatchSource) -> TorchTrainer:
    """Like `build_trainer`, for a job that trains with PyTorch."""
    from ephemeron.training.task.program import program_of
    from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer

    c = spec.configuration
    timeline = spec.timeline
    program = program_of(
        spec,
        folders=folders,
        epoch_length=spec.split.iterations * c.exchange.local_steps,
        epochs=spec.epochs,
        learning_rate_factor=spec.learning_rate_factor,
        is_main=rank == 0,
    )
    program.epoch_start = (timeline.epoch + 1, timeline.start_of(timeline.epoch + 1) * c.exchange.local_steps)
    return TorchTrainer(
        program,
        feed=feed,
        sampler=spec.sampler(rank),
        exchange=exchanged(spec),
        seed=rank_seed(spec.seed, rank, spec.current_generation.number),
        alone=c.workers == 1,
        provisional=steps_provisionally(spec, rank),
        local_steps=c.exchange.local_steps,
        outer=c.exchange.outer_optimizer,
    )
