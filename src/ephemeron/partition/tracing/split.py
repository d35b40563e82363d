"""Stages of a traced model: trainable modules with named inputs and outputs.

    split(traced, plan.placement, stages=plan.stages) -> ModelSplit

Stages exchange named values. Sizes of the batch are plain numbers, which every stage has before anything runs. A parameter that stages of
several devices read has a copy on each: `sum_shared_gradients` makes their gradients equal, and equal optimisers keep the copies equal (as
Megatron does with tied embeddings). Buffers that change are on one device; constant ones are copied. Parameters that no operator reads are
on the first stage, so that no state is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ephemeron.errors import JobError
from ephemeron.partition.tracing.operators import Ties, front_numbers, operators, states_read
from ephemeron.partition.tracing.program import Ref, TracedStep, leaves
from ephemeron.partition.tracing.side_effects import references
from ephemeron.partition.tracing.staging import stages_of
from ephemeron.partition.tracing.traced import Traced, full_state
from ephemeron.partition.tracing.traced_module import TracedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """Input or output of a stage."""

    name: str
    kind: str
    """`tensor`, or `number`."""
    nbytes: int
    """Bytes of a tensor for the example batch."""
    needs_gradient: bool
    """Whether a gradient is sent back for it."""
    source: int | None
    """Producing stage; None: an input of the model, or a size computed from inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """Device, operators, inputs and outputs of a stage."""

    index: int
    device: str
    operators: tuple[str, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    """Values that later stages read, and outputs of the model."""


class Stage(TracedModule):
    """Operators of one device between two transfers.

    Attributes:
        spec: device, inputs and outputs.
    """

    spec: StageSpec

    def forward(self, values: Mapping[str, Any]) -> dict[str, object]:
        """Outputs by name from inputs by name; superfluous inputs are ignored.

        Raises:
            JobError: an input is missing; names it.
        """
        missing = [p.name for p in self.spec.inputs if p.name not in values]
        if missing:
            raise JobError(f"stage {self.spec.index} on {self.spec.device} was not given {', '.join(missing)}")
        own = {p.name: values[p.name] for p in self.spec.inputs}
        self.run_steps(own)
        return {p.name: own[p.name] for p in self.spec.outputs}


class ModelSplit:
    """All stages of a model, made by `split`."""

    def __init__(self, traced: Traced, stages: Sequence[Stage], shared: Mapping[str, tuple[str, ...]]) -> None:
        self.traced = traced
        self.stages = tuple(stages)
        self.shared = dict(shared)
        """Devices by parameter, for parameters on several devices."""

    def numbers(self, values: Mapping[str, Any]) -> dict[str, object]:
        """Sizes computed from the model's inputs."""
        steps = front_numbers(self.traced)
        front = TracedModule(
            steps=steps, outputs=[s.name for s in steps] + list(values), random=(), constants=self.traced.program.constants
        )
        made = dict(values)
        front.run_steps(made)
        return {s.name: made[s.name] for s in steps}

    def parameters(self, device: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of one device, each once."""
        seen: set[int] = set()
        for stage in self.stages:
            if stage.spec.device == device:
                for name, p in stage.named_parameters():
                    if id(p) not in seen:
                        seen.add(id(p))
                        yield name, p

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices in the order of their first stages."""
        return tuple(dict.fromkeys(s.spec.device for s in self.stages))

    def sum_shared_gradients(self) -> None:
        """Set the gradient of every copy of a shared parameter to the sum over all copies; for stages in one process."""
        copies = {d: dict(self.parameters(d)) for d in self.devices}
        for name, devices in self.shared.items():
            found = [copies[d][name] for d in reversed(devices)]  # backward passes end with the first stage
            grads = [p.grad for p in found if p.grad is not None]
            if grads:
                total = grads[0].clone()
                for g in grads[1:]:
                    total += g
                for p in found:
                    p.grad = total.clone()

    def state(self) -> dict[str, torch.Tensor]:
        """State dict that the original model loads strictly."""
        made: dict[str, torch.Tensor] = {}
        changing = {n for d in self.traced.observation.side_effects.values() for n in d.changed_states}
        for stage in self.stages:
            for name, t in stage.state_dict().items():
                if name not in made or name in changing:
                    made[name] = t
        return full_state(made, self.traced.__dict__["names"])


def split(traced: Traced, placement: Mapping[str, str], *, stages: Sequence[str] = (), ties: Ties = "together") -> ModelSplit:
    """Stages of a model; their parameters are copies of the traced model's.

    Args:
        traced: the model.
        placement: device by operator, as `PlacementPlan.placement` of the model's graph.
        stages: devices in the order of the pipeline, as `PlacementPlan.stages`; empty: the first order that is found.
        ties: as for the graph; with `apart`, operators that share a parameter may be on several devices.

    Raises:
        JobError: the placement is not of this model, or separates operators of one group; names them.
    """
    nodes = operators(traced, ties=ties)
    layout = stages_of(nodes, placement, stages)
    by_name = {o.name: o for o in nodes}
    stage_of = {n: i for i, (_, names) in enumerate(layout) for n in names}
    maker = {n: stage_of[o.name] for o in nodes for n in (o.name, *(s.name for s in o.steps), *o.outputs)}
    numbers = {s.name for s in front_numbers(traced)}
    given = {i.name for i in traced.program.inputs}
    wanted = {r.name for r in leaves(list(traced.program.outputs)) if isinstance(r, Ref)}
    index = {s.name: i for i, s in enumerate(traced.program.steps)}
    bodies = [
        sorted((s for n in names for s in by_name[n].steps if s.name not in numbers), key=lambda s: index[s.name]) for _, names in layout
    ]
    reads = [{n for s in body for n in references(s)} - {s.name for s in body} for body in bodies]
    copies: dict[str, Traced] = {}
    made = []
    for i, (device, names) in enumerate(layout):
        later = {n for j, r in enumerate(reads) if j != i for n in r}
        outputs = [s.name for s in bodies[i] if s.name in later or s.name in wanted]
        spec = StageSpec(
            index=i,
            device=device,
            operators=names,
            inputs=tuple(_port(traced, n, None if n in given or n in numbers else maker[n]) for n in sorted(reads[i])),
            outputs=tuple(_port(traced, n, i) for n in outputs),
        )
        home = copies.setdefault(device, copy.deepcopy(traced))
        made.append(_stage(spec, bodies[i], home, extra=_unread(traced) if i == 0 else ()))
    return ModelSplit(traced, made, _shared(traced, made))


def _stage(spec: StageSpec, steps: Sequence[TracedStep], home: Traced, extra: Sequence[str]) -> Stage:
    """Stage with the parameters of its device's copy of the model."""
    stage = Stage(steps=steps, outputs=[p.name for p in spec.outputs], random=home._box.random, constants=home.program.constants)
    stage.__dict__["spec"] = spec
    if any(s.module == "" for s in steps):
        stage.hold_module("", home.module_at(""))
        return stage
    needed = {n for s in steps for n in states_read(home, s)} | set(extra)
    persistent = set(home.state_dict())
    for name in (*dict(home.named_parameters()), *dict(home.named_buffers())):
        if name in needed:
            stage.hold(name, home.state(name), persistent=name in persistent)
    for path in dict.fromkeys(s.module for s in steps if s.module is not None):
        stage.hold_module(path, home.module_at(path))
    return stage


def _unread(traced: Traced) -> tuple[str, ...]:
    read = {n for s in traced.program.steps for n in states_read(traced, s)}
    return tuple(n for n in (*dict(traced.named_parameters()), *dict(traced.named_buffers())) if n not in read)


def _shared(traced: Traced, stages: Sequence[Stage]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for stage in stages:
        for name, p in stage.named_parameters():
            if p.requires_grad:
                found.setdefault(name, {})[stage.spec.device] = None
    return {n: tuple(d) for n, d in found.items() if len(d) > 1}


def _port(traced: Traced, name: str, source: int | None) -> Port:
    v = traced.observation.values[name]
    return Port(name=name, kind=v.kind, nbytes=v.nbytes, needs_gradient=v.needs_gradient, source=source)
