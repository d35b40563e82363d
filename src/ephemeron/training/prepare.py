"""Everything that can be done, and everything that can be refused, before a function is started.

Loads the data, builds the model once, tries one batch through it, splits the samples unequally by role, and
returns the objects to put into the channel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ephemeron.channels.base import Buffer
from ephemeron.channels.keys import Keys
from ephemeron.data import assign, bundle, resolve
from ephemeron.errors import JobError, MissingExtra
from ephemeron.job import Configuration, Fault, Job, check_limits, sync_name
from ephemeron.platforms.base import Call, Limits
from ephemeron.prices import Prices
from ephemeron.tensors import encode_state
from ephemeron.training import stages
from ephemeron.training.feasible import check_call, check_memory, check_time
from ephemeron.training.material import TRIAL, Material, material
from ephemeron.worker.build import rank_seed
from ephemeron.worker.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run, ready to be launched."""

    job: Job
    spec: RunSpec
    objects: dict[str, list[Buffer]]
    """Key to buffers; the specification itself comes last."""
    model_bytes: int
    """S_m: bytes of the exchanged vector."""
    test_samples: int = 0


def refuse_contradictions(c: Configuration) -> None:
    """Combinations that no protocol here can honour.

    Raises:
        JobError: names both sides.
    """
    sync, _ = sync_name(c.sync)
    server = c.pattern == "parameter-server"
    if server and sync == "hap":
        raise JobError(
            "sync 'hap' needs aggregating workers, pattern 'parameter-server' has none", remedy="use bsp, ssp:N or asp"
        )
    if server and c.compression != "none":
        raise JobError(
            f"compression '{c.compression}' is not for pattern 'parameter-server'", remedy="use compression 'none'"
        )
    if server and sync == "asp" and c.exchange == "parameters":
        raise JobError(
            "an asynchronous parameter server adds changes; exchange 'parameters' does not apply",
            remedy="use gradients",
        )
    if c.stages > 1:
        _refuse_with_stages(c, sync)
    if c.pattern == "pipelined" and sync == "asp":
        raise JobError(
            "pattern 'pipelined' needs every contribution of an iteration, sync 'asp' does not wait",
            remedy="use k-reduce",
        )
    if sync == "asp" and c.exchange == "parameters":
        raise JobError(
            "exchange 'parameters' under 'asp' would undo what others did", remedy="use exchange 'gradients'"
        )
    if c.compression == "int8" and c.exchange == "parameters":
        raise JobError(
            "compression 'int8' is for gradients; parameters would lose their small values", remedy="use bf16"
        )
    if server != c.channel.startswith(("ps://", "parameter_server")) and server:
        raise JobError(f"pattern 'parameter-server' needs a parameter server, channel is '{c.channel}'",
                       remedy="use --channel parameter_server or ps://host:port")  # fmt: skip


def _refuse_with_stages(c: Configuration, sync: str) -> None:
    if sync != "bsp":
        raise JobError(f"sync '{c.sync}' is not for a model on several functions", remedy="use sync 'bsp'")
    if c.pattern in ("parameter-server", "standalone"):
        raise JobError(
            f"pattern '{c.pattern}' is not for a model on several functions", remedy="use k-reduce or pipelined"
        )
    if c.exchange != "gradients":
        raise JobError(
            f"exchange '{c.exchange}' is not for a model on several functions", remedy="use exchange 'gradients'"
        )


def prepare(
    job: Job, configuration: Configuration, *, run_id: str, limits: Limits, prices: Prices, faults: Sequence[Fault] = (),
    patience_s: float = 20.0, cold_start_s: float = 3.0, network: tuple[float, float | None] = (0.0, None),
    only_first: int | None = None,
) -> Prepared:  # fmt: skip
    """Checks and builds everything.

    Args:
        job, configuration: what and how; the configuration is resolved.
        network: latency in seconds and MB/s of one function, where known.
        only_first: train on so many samples and test on none: a rehearsal.

    Raises:
        JobError, PlanInfeasible, MissingExtra: one line each; nothing has been started.
    """
    refuse_contradictions(configuration)
    check_limits(job, configuration)
    for fault in faults:
        if fault.rank >= configuration.workers:
            raise JobError(
                f"fault {fault}: there is no rank {fault.rank}", remedy=f"ranks are 0 to {configuration.workers - 1}"
            )
    data = material(job, only_first=only_first)
    spec = RunSpec(
        run_id=run_id, name=job.name, model=job.model, loss=job.loss, optimizer=job.optimizer, configuration=configuration,
        epochs=job.epochs, seed=job.seed, dtype=job.dtype, samples=data.samples, prices=prices,
        budget_usd=job.limits.budget_usd, faults=tuple(map(str, faults)), patience_s=patience_s, cold_start_s=cold_start_s,
        flow=data.flow,
    )  # fmt: skip
    call = Call(
        run=run_id,
        rank=0,
        attempt=0,
        memory_mb=configuration.memory_mb,
        lifetime_s=configuration.lifetime_s,
        channel=configuration.channel,
    )
    check_call(call, workers=configuration.workers, limits=limits)
    initial, model_bytes, copies = _try_model(job, spec, data)
    divided, bounded = None, configuration
    if configuration.stages > 1:
        divided = stages.divide(
            job,
            configuration,
            data,
            spec=spec,
            optimizer_copies=copies,
            network=network,
            mb_per_vcpu=limits.mb_per_vcpu,
        )
        spec = dataclasses.replace(spec, stages=divided.stages)
        # What bounds a stage: its share of the vector among its replicas. Computing is divided, who knows how well.
        bounded = dataclasses.replace(configuration, workers=configuration.group, stages=1)
        model_bytes = -(-model_bytes // configuration.stages)
    else:
        check_memory(
            configuration.memory_mb,
            model_bytes=model_bytes,
            optimizer_copies=copies,
            data_bytes=data.held_bytes(max(spec.split.counts), configuration.batch_size),
            most_mb=limits.memory_max_mb,
        )
    check_time(
        job, bounded, iterations=spec.iterations - spec.epochs, model_bytes=model_bytes, latency_s=network[0],
        bandwidth_mb_s=network[1], compute=job.simulation.compute if divided is None else None,
    )  # fmt: skip
    objects = _objects(job, spec, data, initial) if divided is None else _stage_objects(job, spec, data, divided)
    return Prepared(job=job, spec=spec, objects=objects, model_bytes=model_bytes, test_samples=data.test_samples)


def _stage_objects(job: Job, spec: RunSpec, data: Material, divided: stages.Divided) -> dict[str, list[Buffer]]:
    keys = Keys(spec.run_id)
    made: dict[str, list[Buffer]] = {keys.code: [bundle(job.code)], **stages.objects(job, spec, data, divided)}
    made[keys.spec] = [spec.to_bytes()]
    return made


def _objects(job: Job, spec: RunSpec, data: Material, initial: bytes) -> dict[str, list[Buffer]]:
    keys = Keys(spec.run_id)
    world = spec.configuration.workers
    objects: dict[str, list[Buffer]] = {keys.code: [bundle(job.code)], keys.init: [initial]}
    for rank, indices in enumerate(assign(data.samples, spec.split, job.seed)):
        objects[keys.data(rank)] = data.share(indices)
    for rank, indices in enumerate(np.array_split(np.arange(data.test_samples), world)):
        objects[keys.test(rank)] = data.test_share(indices)
    objects[keys.spec] = [spec.to_bytes()]
    return objects


def _try_model(job: Job, spec: RunSpec, data: Material) -> tuple[bytes, int, int]:
    """Builds the model and puts one small batch through it. Returns its state, S_m and the optimiser's copies."""
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtra("PyTorch", "torch") from None
    from ephemeron.worker.torch_trainer import TorchTrainer, make_loss, make_model, make_optimizer

    find = partial(resolve, folders=job.code)
    model = make_model(job.model, find, seed=job.seed, dtype=job.dtype)
    fresh, notes = _weights(model)
    trainer = TorchTrainer(
        model=model, loss=make_loss(job.loss, find), optimizer=make_optimizer(job.optimizer, model),
        feed=data.trial(), exchange="gradients", sampler=_First(), seed=rank_seed(job.seed, 0),
    )  # fmt: skip
    try:
        step = trainer.compute(0)
        trainer.apply(step.vector.copy())
    except Exception as e:
        raise JobError(
            f"model {job.model.target} does not accept the data: {data.described()} "
            f"raised {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}",
            remedy="check the model's input size, the loss and the labels",
        ) from e
    held = sum(t.numel() for s in trainer.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    copies = round(held / max(1, trainer.size))
    return encode_state(fresh, notes), trainer.size * trainer.dtype.itemsize, copies


def _weights(model: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    from ephemeron.worker.torch_trainer import to_arrays

    arrays, bf16 = to_arrays({n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]})
    return arrays, {"bf16": bf16} if bf16 else {}


class _First:
    """Positions of the trial batch."""

    def batch(self, iteration: int) -> np.ndarray:
        return np.arange(TRIAL)
