"""Stages of a traced model: trainable modules with named inputs and outputs.

    split(traced, plan.placement, stages=plan.stages) -> ModelSplit

Stages exchange named values. Sizes of the batch are plain numbers, which every stage has before anything runs. A parameter that stages of
several devices read has a copy on each: `sum_shared_gradients` makes their gradients equal, and equal optimisers keep the copies equal (as
Megatron does with tied embeddings). Buffers that change are on one device; constant ones are copied. Parameters that no operator reads are
on the first stage, so that no state is lost.

Stages of a placement, as names of operators. Pure.

If tensors never return to a device, directly or through others, each device has one stage: a pipeline. Otherwise a device has several, each
as large as possible: operators whose inputs come through another device are in a later stage.

Forward and backward pass through all stages in one process; stages exchange named values only.

Tensors are detached from autograd's graph at every stage boundary, as if they were sent, and their gradients are returned by name. So a split
that works here works between processes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ephemeron.errors import JobError
from ephemeron.partition.tracing.operators import Operator, Ties, front_numbers, operators, states_read
from ephemeron.partition.tracing.program import Ref, TracedStep, leaves
from ephemeron.partition.tracing.side_effects import references
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


# -- stages of a placement, as names of operators. Pure -----------------------------------------------------------


def stages_of(
    operators: Sequence[Operator], placement: Mapping[str, str], devices: Sequence[str] = ()
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Device and operators of each stage, in topological order.

    Args:
        operators: each after its inputs.
        placement: device by operator.
        devices: of a pipeline, in its order; empty: the first order that is found.

    Raises:
        JobError: an operator without a device, an unknown one, a group on several devices, a group that other devices
            would have to interrupt, or devices in an order that sends a tensor backwards; named.
    """
    _check(operators, placement)
    maker = {n: o.name for o in operators for n in o.outputs}
    before = {o.name: {maker[n] for n in o.inputs} for o in operators}
    order = _device_order(operators, before, placement, devices)
    if order is not None:
        return tuple((d, tuple(o.name for o in operators if placement[o.name] == d)) for d in order)
    level = _levels(operators, before, placement)
    keys = sorted({(level[o.name], placement[o.name]) for o in operators})
    return tuple((d, tuple(o.name for o in operators if (level[o.name], placement[o.name]) == (k, d))) for k, d in keys)


def _check(operators: Sequence[Operator], placement: Mapping[str, str]) -> None:
    known = {o.name for o in operators}
    for name in placement:
        if name not in known:
            raise JobError(f"placement has {name}, which is no operator of the model", remedy="place the graph of this model")
    at: dict[str, tuple[str, str]] = {}
    for o in operators:
        if o.name not in placement:
            raise JobError(f"placement has no device for operator {o.name}", remedy="place every operator")
        if o.group is not None:
            first, device = at.setdefault(o.group, (o.name, placement[o.name]))
            if device != placement[o.name]:
                raise JobError(
                    f"placement puts {first} on {device} and {o.name} on {placement[o.name]}, and they share state that changes",
                    remedy="put nodes of one group on one device",
                )


def _device_order(
    operators: Sequence[Operator], before: Mapping[str, set[str]], placement: Mapping[str, str], given: Sequence[str]
) -> list[str] | None:
    """Devices, each after those that send to it; None if there is a cycle."""
    waits: dict[str, set[str]] = {placement[o.name]: set() for o in operators}
    for o in operators:
        waits[placement[o.name]] |= {placement[b] for b in before[o.name]} - {placement[o.name]}
    if given:
        wrong = sorted(set(given) ^ set(waits)) + [d for k, d in enumerate(given) if d in waits and not waits[d] <= set(given[:k])]
        if wrong or len(given) != len(waits):
            raise JobError(
                f"stages = {', '.join(given)} is no order of the placement's devices in which tensors only go forward",
                remedy="take stages and placement of one plan",
            )
        return list(given)
    order: list[str] = []
    while len(order) < len(waits):
        free = next((d for d in waits if d not in order and waits[d] <= set(order)), None)
        if free is None:
            return None
        order.append(free)
    return order


def _levels(operators: Sequence[Operator], before: Mapping[str, set[str]], placement: Mapping[str, str]) -> dict[str, int]:
    """Most changes of device on a path to each operator; equal within a group."""
    level = {o.name: 0 for o in operators}
    groups: dict[str, list[str]] = {}
    for o in operators:
        if o.group is not None:
            groups.setdefault(o.group, []).append(o.name)
    for _ in range(len(operators) + 1):
        changed = False
        for o in operators:
            least = max((level[b] + (placement[b] != placement[o.name]) for b in before[o.name]), default=0)
            if level[o.name] < least:
                level[o.name], changed = least, True
        for names in groups.values():
            top = max(level[n] for n in names)
            changed |= any(level[n] < top for n in names)
            level.update(dict.fromkeys(names, top))
        if not changed:
            return level
    worst = max(groups, key=lambda g: level[groups[g][0]])
    raise JobError(
        f"placement sends outputs of {', '.join(groups[worst][:4])} to another device and back to the same group, which cannot be divided",
        remedy="place the operators between them on the same device",
    )


# -- forward and backward pass through all stages in one process; stages exchange named values only ---------------


class SequentialPass:
    """Forward pass: the model's result, and the values that `backward` needs.

    Attributes:
        result: as the original's; its tensors are leaves of autograd's graph, so a loss of it can be differentiated.
    """

    def __init__(self, split: ModelSplit, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.split = split
        traced = split.traced
        given = traced.named_inputs(tuple(args), kwargs)
        store: dict[str, object] = {**given, **split.numbers(given)}
        self._entered: list[dict[str, torch.Tensor]] = []
        self._left: list[dict[str, object]] = []
        for stage in split.stages:
            own = {p.name: leaf(store[p.name], p.needs_gradient and p.name not in given) for p in stage.spec.inputs}
            made = stage(own)
            self._entered.append({n: t for n, t in own.items() if isinstance(t, torch.Tensor)})
            self._left.append(made)
            store |= made
        ends = {n: t for made in self._left for n, t in made.items()}
        self._ends = {n: leaf(t, t.requires_grad) for n, t in ends.items() if isinstance(t, torch.Tensor)}
        self.result = _result(split, {**store, **self._ends})

    def backward(self) -> None:
        """Backward pass through all stages, last first, after `backward` of a loss of the result; then sums gradients of shared parameters."""
        gradients: dict[str, torch.Tensor] = {n: t.grad for n, t in self._ends.items() if t.grad is not None}
        for entered, left in zip(reversed(self._entered), reversed(self._left), strict=True):
            ready = [(t, gradients[n]) for n, t in left.items() if n in gradients and isinstance(t, torch.Tensor) and t.requires_grad]
            if ready:
                torch.autograd.backward([t for t, _ in ready], [g for _, g in ready])
            for name, t in entered.items():
                if t.requires_grad and t.grad is not None:
                    gradients[name] = gradients[name] + t.grad if name in gradients else t.grad
        self.split.sum_shared_gradients()


def train_step(split: ModelSplit, args: Sequence[Any], kwargs: Mapping[str, Any] | None, loss: Any) -> tuple[Any, torch.Tensor]:
    """One forward and backward pass; gradients are added to those of the stages' parameters.

    Args:
        split: the stages, in training mode.
        args, kwargs: a batch.
        loss: of the result.

    Returns:
        The result and the loss.
    """
    done = SequentialPass(split, args, kwargs or {})
    value = loss(done.result)
    if any(t.requires_grad for t in tree_leaves(done.result) if isinstance(t, torch.Tensor)):
        value.backward()
    done.backward()
    return done.result, value


def leaf(value: Any, needs_gradient: bool) -> Any:
    """Received value: detached from autograd's graph, and with a gradient if `needs_gradient`.

    All dtypes that autograd differentiates can have one, including complex ones; integers and booleans cannot.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(needs_gradient and (value.is_floating_point() or value.is_complex()))


def _result(split: ModelSplit, values: Mapping[str, Any]) -> Any:
    return split.traced.result(values)
