"""A job whose model is divided among functions: the model is traced, cut into stages, and stored as objects of the channel.

The client holds several copies of the whole model; no function holds one. The least memory of each stage is known before
anything is started, and a smaller quota is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.keys import Keys
from ephemeron.config.user_code import resolve
from ephemeron.data import assign
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.placement.linear_partition import PipelineSegment, PipelineSegments, best_cuts, leanest_cuts
from ephemeron.partition.schedule_simulator.schedule import Schedule
from ephemeron.partition.serialization.documents import load, parse_plan
from ephemeron.training.driver.launching.initial_weights import load_initial
from ephemeron.training.driver.launching.training_data import TrainingData
from ephemeron.training.job import Configuration, Job
from ephemeron.training.planner.model.bounds import MOST_STAGES, RUNTIME_MB
from ephemeron.training.tensors import encode_state
from ephemeron.training.worker.spec import RunSpec, Stages
from ephemeron.units import MIB

if TYPE_CHECKING:
    from torch import nn

    from ephemeron.partition.tracing import ModelSplit, Traced

EXAMPLE = 4
"""Samples of the batch that is traced: with 3 or more, the batch size remains variable."""
LATENCY_S, BANDWIDTH_MB_S = 0.03, 70.0
"""Network between a function and its storage where nothing is known: FuncPipe's figures for AWS Lambda and S3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedModel:
    """A model in stages."""

    stages: Stages
    split: ModelSplit
    needs_mb: tuple[float, ...]
    """Least memory of the functions of each stage, MB."""
    dtype: Any
    """Number type of floating-point inputs."""
    names: dict[str, str]
    """Name of each tensor in the stages, by its key in the model's `state_dict()`."""


def placed_stages(path: str) -> tuple[int, Schedule]:
    """Number of devices of a placement file, and its schedule.

    Raises:
        JobError: it cannot be read.
    """
    plan = load(parse_plan, path)
    return len(set(plan.placement.values())), plan.schedule


def divide(
    job: Job,
    c: Configuration,
    data: TrainingData,
    *,
    spec: RunSpec,
    optimizer_copies: int,
    network: tuple[float, float | None],
    mb_per_vcpu: float,
) -> PartitionedModel:
    """Traces the model and divides it into stages.

    Args:
        spec: of the run, without its stages.
        optimizer_copies: parameters' bytes that the optimiser remembers, in multiples.
        network: latency in seconds and MB/s of one function, where known.
        mb_per_vcpu: memory quota that brings one whole vCPU.

    Raises:
        JobError: the model cannot be traced, divided or serialised, or the placement is of another model.
        TraceMismatch: the stages do not train as the whole model does.
        PlanInfeasible: a stage does not fit its function.
    """
    import torch

    from ephemeron.partition.costs.times import estimated_s
    from ephemeron.partition.runtime import check_stages
    from ephemeron.partition.runtime.micro_batches import sizes
    from ephemeron.partition.tracing import graph_of, operators, split, trace
    from ephemeron.training.task.program import make_model
    from ephemeron.training.task.tensors import as_tensors

    if job.data.flow is not None:
        raise JobError("data.flow is not for a model on several functions", remedy="use data.source, or train it with stages = 1")
    find = partial(resolve, folders=job.code)
    model = make_model(job.model, find, seed=job.seed, dtype=job.dtype)
    if job.init is not None:
        load_initial(model, job.init)
    dtype = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
    batch = data.trial(EXAMPLE).batch(_All(), 0)
    args = (as_tensors(batch.data[0], dtype),)
    tracing = trace(model, args)
    traced = tracing.model
    if not tracing.splittable:
        raise JobError(
            f"model {job.model.target} cannot be traced into operators, so it cannot be divided: {'; '.join(tracing.failures)}",
            remedy=f"{tracing.remedy}, or train it with stages = 1" if tracing.remedy else "train it with stages = 1",
        )
    replicas = c.group
    micro = [n for r in range(replicas) for n in sizes(c.batch_of(r), c.stages.micro_batches)]
    open_batch = all(i.shape is None or not i.shape or i.shape[0] is None for i in traced.program.inputs)
    if not open_batch and set(micro) != {batch.samples}:
        raise JobError(
            f"model {job.model.target} could only be traced for batches of {batch.samples} samples: " + "; ".join(tracing.failures),
            remedy=f"choose batch_size and micro_batches so that each part has {batch.samples}, or use stages = 1",
        )
    forward_s = estimated_s(traced, args)
    both = {n: {"cpu": s} for n, s in forward_s.items()}
    back = {n: {"cpu": 2 * s} for n, s in forward_s.items()}
    graph = graph_of(traced, name=job.model.target, forward_s=both, backward_s=back, ties="apart", source="estimated")
    costs = _Costs(
        c=c,
        scale=max(micro) / batch.samples,
        copies=optimizer_copies,
        network=network,
        held_bytes=data.held_bytes(max(spec.split.counts), c.batch_size),
        vcpus=c.memory_mb / mb_per_vcpu,
    )
    plan = load(parse_plan, c.stages.placement) if c.stages.placement else None
    placement = _found(graph, c, costs) if plan is None else plan.placement
    parts = split(traced, placement, stages=() if plan is None else plan.stages, ties="apart")
    if len(parts.devices) != c.stages.count:
        raise JobError(
            f"{c.stages.placement} has {len(parts.devices)} devices, and stages.count = {c.stages.count}", remedy="leave stages.count out"
        )
    if parts.shared and c.exchange.compression == "int8":
        raise JobError(
            f"{next(iter(parts.shared))} is on several stages, and compression 'int8' would round its copies apart",
            remedy="use bf16 or none",
        )
    whole = sum(forward_s.values())
    by_device = {d: [o for o in operators(traced, ties="apart") if placement[o.name] == d] for d in parts.devices}
    needs = tuple(costs.need_mb(k, _piece_of(graph, {o.name for o in own})) for k, own in enumerate(by_device.values()))
    for k, needed in enumerate(needs):
        if needed > c.memory_mb:
            raise PlanInfeasible(
                f"stage {k} of {c.stages.count} needs at least {needed:.0f} MB, the quota of a function is {c.memory_mb} MB; "
                "use more --stages, more --micro-batches or a larger --memory-mb",
                binding="memory",
            )
    schedule = Schedule(kind=c.stages.schedule or "plain", micro_batches=c.stages.micro_batches, recompute=c.stages.recompute)
    check_stages(parts, schedule=schedule, original=model)
    stages = Stages(
        replicas=replicas,
        micro_batches=c.stages.micro_batches,
        schedule=schedule.kind,
        recompute=c.stages.recompute,
        fed=_fed(parts, traced),
        shares=tuple(sum(forward_s[o.name] for o in own) / whole for own in by_device.values()),
        test_samples=tuple(len(part) for part in np.array_split(np.arange(data.test_samples), replicas)),
        evaluates=traced.evaluates and open_batch,
    )
    return PartitionedModel(stages=stages, split=parts, needs_mb=needs, dtype=dtype, names=_names(model))


def objects(job: Job, spec: RunSpec, data: TrainingData, divided: PartitionedModel) -> dict[str, list[Buffer]]:
    """Objects of the channel for each stage, without code and specification.

    Raises:
        JobError: a part of the model cannot be serialised.
    """
    from ephemeron.partition.serialization.stage_bundle import make_bundle
    from ephemeron.training.task.tensors import to_arrays
    from ephemeron.training.worker.pipeline.factory import stage_object

    keys, stages = Keys(spec.run_id), divided.stages
    made: dict[str, list[Buffer]] = {}
    for k, device in enumerate(divided.split.devices):
        bundle = make_bundle(divided.split, device, saved=divided.names)
        made[keys.stage(k)] = [stage_object(bundle, dtype=divided.dtype)]
        own = [s for s in divided.split.stages if s.spec.device == device]
        states = {n: t.detach() for s in own for n, t in (*s.named_parameters(), *s.named_buffers())}
        arrays, bf16 = to_arrays(states)
        made[keys.initial(k)] = [encode_state(arrays, {"bf16": bf16})]
    tested = np.array_split(np.arange(data.test_samples), stages.replicas)
    for replica, indices in enumerate(assign(data.samples, spec.split, job.seed)):
        share, test = data.share(indices), data.test_share(tested[replica])
        for k in range(stages.count):
            if stages.fed[k]:
                made[keys.data(stages.rank(k, replica))] = share
                made[keys.test(stages.rank(k, replica))] = test
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Time and memory of segments as stages."""

    c: Configuration
    scale: float
    """Samples of a micro-batch divided by those of the example."""
    copies: int
    network: tuple[float, float | None]
    held_bytes: int
    vcpus: float

    def seconds(self, p: PipelineSegment) -> float:
        """Seconds of an iteration on a stage. Computing, sending and receiving overlap."""
        m = self.c.stages.micro_batches
        latency_s, bandwidth = self.network[0] or LATENCY_S, (self.network[1] or BANDWIDTH_MB_S) * 1e6
        times = self.scale * m
        compute_s = p.compute_s * times / min(1.0, self.vcpus)
        moved = [nbytes * times / bandwidth + m * latency_s for nbytes in (p.in_bytes, p.out_bytes) if nbytes]
        return max([compute_s, *moved])

    def need_mb(self, stage: int, p: PipelineSegment) -> float:
        """Least memory, MB: runtime, states, gradients, one merged vector, samples, and activations of micro-batches in flight."""
        from ephemeron.partition.runtime.dispatcher import in_flight

        schedule = Schedule(kind=self.c.stages.schedule or "plain", micro_batches=self.c.stages.micro_batches)
        names = [str(s) for s in range(self.c.stages.count)]
        kept = list(in_flight(schedule, names).values())[min(stage, self.c.stages.count - 1)]
        states = p.parameter_bytes * (3 + self.copies)
        samples = self.held_bytes if stage in (0, self.c.stages.count - 1) else 0
        made = p.made_bytes + p.enter_bytes * (kept - 1) if self.c.stages.recompute else p.made_bytes * kept
        return RUNTIME_MB + (states + samples + made * self.scale) / MIB


def _found(graph: Graph, c: Configuration, costs: _Costs) -> Mapping[str, str]:
    pieces = PipelineSegments(graph)
    quota = float(c.memory_mb)
    cut = best_cuts(pieces, c.stages.count, seconds=costs.seconds, need=costs.need_mb, memory=quota)
    if cut is None:
        lean = leanest_cuts(pieces, c.stages.count, need=costs.need_mb)
        if lean is None:
            raise JobError(
                f"{graph.name} has {len(pieces.cuts) - 1} pieces, and stages.count = {c.stages.count}", remedy="use fewer stages"
            )
        needed = max(costs.need_mb(s, p) for s, p in enumerate(lean))
        raise PlanInfeasible(
            f"a stage needs at least {needed:.0f} MB when {graph.name} is cut into {c.stages.count}, the quota of a function is "
            f"{c.memory_mb} MB; {_what_fits(pieces, c, costs, quota)}",
            binding="memory",
        )
    return {graph.nodes[i].name: f"stage{s}" for s, p in enumerate(cut) for i in range(p.start, p.stop)}


def _what_fits(pieces: PipelineSegments, c: Configuration, costs: _Costs, quota: float) -> str:
    for stages in range(c.stages.count + 1, min(MOST_STAGES, len(pieces.cuts) - 1) + 1):
        trial = replace(costs, c=replace(c, stages=replace(c.stages, count=stages), workers=stages * c.group))
        if best_cuts(pieces, stages, seconds=trial.seconds, need=trial.need_mb, memory=quota) is not None:
            return f"split it further: --stages {stages}"
    return "no number of stages fits: use a larger --memory-mb, or more --micro-batches"


def _piece_of(graph: Graph, names: set[str]) -> PipelineSegment:
    own = [n for n in graph.nodes if n.name in names]
    return PipelineSegment(
        start=0,
        stop=len(own),
        compute_s=0.0,
        parameter_bytes=sum(n.parameter_bytes for n in own),
        made_bytes=sum(t.nbytes for t in graph.tensors if t.producer in names),
        enter_bytes=sum(t.nbytes for t in graph.tensors if t.producer not in names and names & set(t.consumers)),
        in_bytes=0,
        out_bytes=0,
    )


def _names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        first.setdefault(id(t), name)
    return {key: first[id(t)] for key, t in model.state_dict(keep_vars=True).items() if id(t) in first}


def _fed(parts: ModelSplit, traced: Traced) -> tuple[bool, ...]:
    """Whether each stage reads samples: those that use a tensor of the inputs, and the one that computes the loss."""
    from ephemeron.partition.runtime.boundaries import stage_boundaries

    inputs = {i.name for i in traced.program.inputs if i.shape is not None}
    every = stage_boundaries(parts)
    return tuple(any(b.last or inputs & set(b.given) for b in every if b.device == d) for d in parts.devices)


class _All:
    """Positions of the example."""

    def batch(self, iteration: int) -> np.ndarray:
        return np.arange(EXAMPLE)
