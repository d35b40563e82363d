"""One device's stages of a split model as a document, and back as a `ModelSplit` in which only these stages have content.

The document says everything but the weights: calls, the model's inputs and results, what crosses between stages, and of
each parameter and buffer its shape. So a function that joins it holds its own stages' parameters and nothing else of
the model, which may be larger than any function.

Modules that tracing kept as they are come from the user's code: the model is built again without memory (on PyTorch's
meta device), and the module taken out of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import treespec_loads

from ephemeron.errors import JobError
from ephemeron.partition.serialization.stage_steps import (
    Resolve,
    from_json,
    spec_to_json,
    step_from_json,
    step_to_json,
    to_json,
)
from ephemeron.partition.tracing.nesting import register_names, registered_names
from ephemeron.partition.tracing.operators import front_numbers
from ephemeron.partition.tracing.program import Input, TracedProgram
from ephemeron.partition.tracing.side_effects import Observation, SideEffects, Value
from ephemeron.partition.tracing.split import ModelSplit, Port, Stage, StageSpec
from ephemeron.partition.tracing.traced import Traced
from ephemeron.partition.tracing.traced_module import TracedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBundle:
    """What a device has to know."""

    document: dict[str, Any]
    """Plain JSON."""
    constants: dict[str, torch.Tensor]
    """That its steps read, by name."""


def owners(split: ModelSplit) -> dict[str, str]:
    """Device that speaks for each parameter and buffer: the one that changes it, else the first that has it."""
    changing = {n for d in split.traced.observation.deeds.values() for n in d.changed_states}
    made: dict[str, str] = {}
    for stage in split.stages:
        own = {n for step, _ in stage._box.steps[True] for n in _changed(split, step.name)}
        for name, _ in _named(stage):
            if name not in made or (name in changing and name in own):
                made[name] = stage.spec.device
    return made


def part_of(split: ModelSplit, device: str) -> StageBundle:
    """What a device has to know.

    Args:
        split: a whole model's.
        device: one of `split.devices`.

    Raises:
        JobError: a call, a constant or the nesting of the results cannot be named elsewhere.
    """
    traced, program, seen = split.traced, split.traced.program, split.traced.observation
    mine = [s for s in split.stages if s.spec.device == device]
    constants = {n: c for s in mine for n, c in s._box.constants.items()}
    for name, value in constants.items():
        if not isinstance(value, torch.Tensor):
            raise JobError(
                f"{name} of the model is {type(value).__name__}, which cannot be sent to another function",
                remedy="train this model on one function: stages = 1",
            )
    speaks = owners(split)
    values = {
        *(i.name for i in program.inputs), *(s.name for s in front_numbers(traced)),
        *(p.name for s in mine for p in s.spec.inputs),
    }  # fmt: skip
    document = {
        "device": device,
        "specs": [dataclasses.asdict(s.spec) for s in split.stages],
        "shared": {n: list(d) for n, d in split.shared.items()},
        "stages": {str(s.spec.index): _stage_to_json(split, s) for s in mine},
        "owned": sorted(n for n, d in speaks.items() if d == device),
        "evaluates": traced.evaluates,
        "program": {
            "tracer": program.tracer,
            "inputs": [{"name": i.name, "shape": to_json(i.shape), "value": to_json(i.value)} for i in program.inputs],
            "numbers": [step_to_json(s) for s in front_numbers(traced)],
            "outputs": [to_json(o) for o in program.outputs],
            "in_spec": spec_to_json(program.in_spec),
            "out_spec": spec_to_json(program.out_spec),
            "dataclasses": registered_names(
                program.in_spec,
                program.out_spec,
                *(step.shape.spec for s in mine for step, _ in s._box.steps[True] if step.shape is not None),
            ),
        },
        "values": {n: dataclasses.asdict(seen.values[n]) for n in sorted(values)},
    }
    return StageBundle(document=document, constants=constants)


def joined(
    document: Mapping[str, Any],
    constants: Mapping[str, torch.Tensor],
    *,
    resolve: Resolve,
    build: Callable[[], nn.Module],
) -> ModelSplit:
    """The inverse of `part_of`; parameters have memory and no values yet. Stages of other devices are empty.

    Args:
        resolve: finds functions of the user's code.
        build: makes the model; called on the meta device, and only if a module was kept as it is.

    Raises:
        JobError: a module that was kept as it is cannot be made without memory.
    """
    told = document["program"]
    register_names(told["dataclasses"], resolve)
    steps = {n: [step_from_json(s, resolve) for s in raw["steps"]] for n, raw in document["stages"].items()}
    modules = {s.module for own in steps.values() for s in own if s.module is not None}
    model = _without_memory(build) if modules else None
    stages = []
    for raw in document["specs"]:
        spec = StageSpec(
            index=raw["index"], device=raw["device"], operators=tuple(raw["operators"]),
            inputs=tuple(Port(**p) for p in raw["inputs"]), outputs=tuple(Port(**p) for p in raw["outputs"]),
        )  # fmt: skip
        own = document["stages"].get(str(spec.index))
        stage = Stage(
            steps=steps.get(str(spec.index), ()),
            outputs=[p.name for p in spec.outputs],
            random=[] if own is None else [n for n, d in own["deeds"].items() if d["random"]],
            constants=dict(constants),
        )
        stage.__dict__["spec"] = spec
        if own is not None:
            _fill(stage, own, {p: model.get_submodule(p) for p in own["modules"]} if model is not None else {})
        stages.append(stage)
    deeds = {
        name: SideEffects(
            changed=frozenset(d["changed"]), changed_states=frozenset(d["changed_states"]), random=d["random"]
        )
        for own in document["stages"].values()
        for name, d in own["deeds"].items()
    }
    values = {n: Value(**{**v, "shape": tuple(v["shape"])}) for n, v in document["values"].items()}
    numbers = tuple(step_from_json(s, resolve) for s in told["numbers"])
    program = TracedProgram(
        tracer=told["tracer"],
        inputs=tuple(
            Input(name=i["name"], shape=from_json(i["shape"]), value=from_json(i["value"])) for i in told["inputs"]
        ),
        steps=numbers,
        outputs=tuple(from_json(o) for o in told["outputs"]),
        in_spec=treespec_loads(told["in_spec"]),
        out_spec=treespec_loads(told["out_spec"]),
    )
    traced = _outline(program, Observation(values=values, deeds=deeds), evaluates=bool(document["evaluates"]))
    return ModelSplit(traced, stages, {n: tuple(d) for n, d in document["shared"].items()})


def _outline(program: TracedProgram, observation: Observation, *, evaluates: bool) -> Traced:
    """A traced model of which only the ends are known: how inputs are named, and of what the result is made."""
    traced = Traced.__new__(Traced)
    TracedModule.__init__(traced, steps=program.steps, outputs=[s.name for s in program.steps], random=(), constants={})
    traced.__dict__.update(program=program, observation=observation, evaluates=evaluates, names={})
    return traced


def _stage_to_json(split: ModelSplit, stage: Stage) -> dict[str, Any]:
    steps = [step for step, _ in stage._box.steps[True]]
    if any(s.module == "" for s in steps):
        raise JobError(
            "the model cannot be looked into, so it cannot be divided", remedy="train it on one function: stages = 1"
        )
    seen = split.traced.observation.deeds
    persistent = set(stage.state_dict())
    first: dict[int, str] = {}
    states = []
    for name, t in _named(stage, duplicates=True):
        states.append({
            "name": name, "same_as": first.setdefault(id(t), name), "shape": list(t.shape), "dtype": to_json(t.dtype),
            "parameter": isinstance(t, nn.Parameter), "trained": t.requires_grad, "persistent": name in persistent,
        })  # fmt: skip
    return {
        "steps": [step_to_json(s) for s in steps],
        "states": states,
        "modules": list(dict.fromkeys(s.module for s in steps if s.module is not None)),
        "deeds": {
            s.name: {"changed": sorted(seen[s.name].changed), "changed_states": sorted(seen[s.name].changed_states),
                     "random": seen[s.name].random}
            for s in steps if s.name in seen
        },
    }  # fmt: skip


def _fill(stage: Stage, raw: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
    for path, module in modules.items():
        stage.hold_module(path, module.train())
    made: dict[str, torch.Tensor] = {}
    for s in raw["states"]:
        name = s["name"]
        if s["same_as"] == name:
            empty = torch.empty(s["shape"], dtype=from_json(s["dtype"]))
            made[name] = nn.Parameter(empty, requires_grad=s["trained"]) if s["parameter"] else empty
        stage.hold(name, made[s["same_as"]], persistent=s["persistent"])


def _without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            return build()
    except Exception as e:
        raise JobError(
            f"the model cannot be built without memory: {type(e).__name__}: {str(e)[:200]}",
            remedy="let its constructor not look at values of parameters, or train it on one function",
        ) from e


def _named(stage: Stage, *, duplicates: bool = False) -> list[tuple[str, torch.Tensor]]:
    once = not duplicates
    return [*stage.named_parameters(remove_duplicate=once), *stage.named_buffers(remove_duplicate=once)]


def _changed(split: ModelSplit, step: str) -> frozenset[str]:
    deed = split.traced.observation.deeds.get(step)
    return frozenset() if deed is None else deed.changed_states
