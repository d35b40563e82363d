"""One device's stages of a split model as a document, and back as a `ModelSplit` in which only these stages have content.

The document has everything but the weights: calls, the model's inputs and results, the values that cross between stages, and the
shape of each parameter and buffer. So a function that loads it holds its own stages' parameters and nothing else of the model,
which may be larger than any function.

Opaque modules come from the user's code: the model is built again without memory (on PyTorch's meta device), and the module is
taken from it.

Steps of a traced model as JSON, and back: calls by name, never by pickle, so that documents can be read and checked.

PyTorch's operators are named by schema and overload, other functions by module and name. A function without an importable name
(a function in a function, a graph within the graph) cannot be serialised; it is refused where the stages are made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, treespec_dumps, treespec_loads

from ephemeron.errors import JobError
from ephemeron.partition.tracing.fx_trace import _Method
from ephemeron.partition.tracing.nesting import register_names, registered_names
from ephemeron.partition.tracing.operators import front_numbers
from ephemeron.partition.tracing.program import Constant, Input, OpaqueShape, Ref, State, TracedProgram, TracedStep
from ephemeron.partition.tracing.side_effects import Observation, SideEffects, Value
from ephemeron.partition.tracing.split import ModelSplit, Stage, StageSpec
from ephemeron.partition.tracing.traced import Traced
from ephemeron.partition.tracing.traced_module import TracedModule
from ephemeron.user_code import line_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDocument:
    """A parameter or buffer without its values."""

    name: str
    same_as: str
    """First name of the same tensor; `name` itself unless it is tied."""
    shape: tuple[int, ...]
    dtype: object
    """See `stage_steps.to_json`."""
    parameter: bool
    trained: bool
    persistent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDocument:
    """Content of one stage."""

    steps: tuple[StepDocument, ...]
    states: tuple[StateDocument, ...]
    modules: tuple[str, ...]
    """Paths of opaque modules."""
    side_effects: Mapping[str, SideEffects]
    """By step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDocument:
    """A flat argument of the model; both fields as in `stage_steps.to_json`."""

    name: str
    shape: object
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramDocument:
    """Inputs and results of the whole model."""

    tracer: str
    inputs: tuple[InputDocument, ...]
    numbers: tuple[StepDocument, ...]
    """Steps that compute sizes from the inputs."""
    outputs: tuple[object, ...]
    in_spec: str
    out_spec: str
    dataclasses: tuple[str, ...]
    """`module:class` of dataclasses in which tensors are nested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleDocument:
    """Stages of one device; JSON by `typed.plain`, and back by `typed.build`."""

    device: str
    specs: tuple[StageSpec, ...]
    """Specifications of all stages of the model."""
    shared: Mapping[str, tuple[str, ...]]
    """Devices by shared parameter."""
    stages: Mapping[int, StageDocument]
    """Stages of this device, by index."""
    owned: tuple[str, ...]
    """Parameters and buffers that this device writes into results."""
    evaluates: bool
    program: ProgramDocument
    values: Mapping[str, Value]
    saved: Mapping[str, str]
    """Name of an owned tensor by key of the original model's `state_dict()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBundle:
    """Stages of a device without parameters and buffers."""

    document: BundleDocument
    constants: Mapping[str, torch.Tensor]
    """Constants that its steps read, by name."""


def owners(split: ModelSplit) -> dict[str, str]:
    """Device that writes each parameter and buffer into results: the one that changes it, else the first that has it."""
    changing = {n for e in split.traced.observation.side_effects.values() for n in e.changed_states}
    made: dict[str, str] = {}
    for stage in split.stages:
        own = {n for step, _ in stage._box.steps[True] for n in _changed(split, step.name)}
        for name, _ in _named(stage):
            if name not in made or (name in changing and name in own):
                made[name] = stage.spec.device
    return made


def make_bundle(split: ModelSplit, device: str, *, saved: Mapping[str, str] | None = None) -> StageBundle:
    """Stages of one device, ready to be sent to another process.

    Args:
        split: a whole model's.
        device: one of `split.devices`.
        saved: name by key of the original model's `state_dict()`; those that the device owns are kept.

    Raises:
        JobError: a call, a constant or the nesting of the results cannot be named elsewhere.
    """
    traced, program, seen = split.traced, split.traced.program, split.traced.observation
    mine = [s for s in split.stages if s.spec.device == device]
    owned = {n for n, d in owners(split).items() if d == device}
    values = {*(i.name for i in program.inputs), *(s.name for s in front_numbers(traced)), *(p.name for s in mine for p in s.spec.inputs)}
    document = BundleDocument(
        device=device,
        specs=tuple(s.spec for s in split.stages),
        shared=split.shared,
        stages={s.spec.index: _stage_document(split, s) for s in mine},
        owned=tuple(sorted(owned)),
        evaluates=traced.evaluates,
        program=ProgramDocument(
            tracer=program.tracer,
            inputs=tuple(InputDocument(name=i.name, shape=to_json(i.shape), value=to_json(i.value)) for i in program.inputs),
            numbers=tuple(step_to_json(s) for s in front_numbers(traced)),
            outputs=tuple(to_json(o) for o in program.outputs),
            in_spec=spec_to_json(program.in_spec),
            out_spec=spec_to_json(program.out_spec),
            dataclasses=tuple(
                registered_names(
                    program.in_spec,
                    program.out_spec,
                    *(step.shape.spec for s in mine for step, _ in s._box.steps[True] if step.shape is not None),
                )
            ),
        ),
        values={n: seen.values[n] for n in sorted(values)},
        saved={key: name for key, name in (saved or {}).items() if name in owned},
    )
    return StageBundle(document=document, constants=_constants(mine))


def load_bundle(bundle: StageBundle, *, resolve: Resolve, build_model: Callable[[], nn.Module]) -> ModelSplit:
    """The inverse of `make_bundle`; parameters have memory and no values yet. Stages of other devices are empty.

    Args:
        bundle: of one device.
        resolve: finds functions of the user's code.
        build_model: makes the model; called on the meta device, and only for opaque modules.

    Raises:
        JobError: an opaque module cannot be built without memory.
    """
    document, ends = bundle.document, bundle.document.program
    register_names(ends.dataclasses, resolve)
    steps = {n: [step_from_json(s, resolve) for s in own.steps] for n, own in document.stages.items()}
    modules = {s.module for own in steps.values() for s in own if s.module is not None}
    model = _without_memory(build_model) if modules else None
    stages = []
    for spec in document.specs:
        own = document.stages.get(spec.index)
        stage = Stage(
            steps=steps.get(spec.index, ()),
            outputs=[p.name for p in spec.outputs],
            random=[] if own is None else [n for n, e in own.side_effects.items() if e.random],
            constants=bundle.constants,
        )
        stage.__dict__["spec"] = spec
        if own is not None:
            _fill(stage, own, {p: model.get_submodule(p) for p in own.modules} if model is not None else {})
        stages.append(stage)
    program = TracedProgram(
        tracer=ends.tracer,
        inputs=tuple(Input(name=i.name, shape=from_json(i.shape), value=from_json(i.value)) for i in ends.inputs),
        steps=tuple(step_from_json(s, resolve) for s in ends.numbers),
        outputs=tuple(from_json(o) for o in ends.outputs),
        in_spec=treespec_loads(ends.in_spec),
        out_spec=treespec_loads(ends.out_spec),
    )
    side_effects = {n: e for own in document.stages.values() for n, e in own.side_effects.items()}
    observation = Observation(values=document.values, side_effects=side_effects)
    return ModelSplit(_outline(program, observation, evaluates=document.evaluates), stages, document.shared)


def _constants(stages: Sequence[Stage]) -> dict[str, torch.Tensor]:
    constants: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, value in stage._box.constants.items():
            if not isinstance(value, torch.Tensor):
                raise JobError(
                    f"{name} of the model is {type(value).__name__}, which cannot be sent to another function",
                    remedy="train this model on one function: stages = 1",
                )
            constants[name] = value
    return constants


def _outline(program: TracedProgram, observation: Observation, *, evaluates: bool) -> Traced:
    """Traced model that knows names of inputs and parts of the result only."""
    traced = Traced.__new__(Traced)
    TracedModule.__init__(traced, steps=program.steps, outputs=[s.name for s in program.steps], random=(), constants={})
    traced.__dict__.update(program=program, observation=observation, evaluates=evaluates, names={})
    return traced


def _stage_document(split: ModelSplit, stage: Stage) -> StageDocument:
    steps = [step for step, _ in stage._box.steps[True]]
    if any(s.module == "" for s in steps):
        raise JobError("the model is opaque, so it cannot be split", remedy="train it on one function: stages = 1")
    seen = split.traced.observation.side_effects
    persistent = set(stage.state_dict())
    first: dict[int, str] = {}
    states = tuple(
        StateDocument(
            name=name,
            same_as=first.setdefault(id(t), name),
            shape=tuple(t.shape),
            dtype=to_json(t.dtype),
            parameter=isinstance(t, nn.Parameter),
            trained=t.requires_grad,
            persistent=name in persistent,
        )
        for name, t in _named(stage, duplicates=True)
    )
    return StageDocument(
        steps=tuple(step_to_json(s) for s in steps),
        states=states,
        modules=tuple(dict.fromkeys(s.module for s in steps if s.module is not None)),
        side_effects={s.name: seen[s.name] for s in steps if s.name in seen},
    )


def _fill(stage: Stage, document: StageDocument, modules: Mapping[str, nn.Module]) -> None:
    for path, module in modules.items():
        stage.hold_module(path, module.train())
    made: dict[str, torch.Tensor] = {}
    for s in document.states:
        if s.same_as == s.name:
            empty = torch.empty(s.shape, dtype=from_json(s.dtype))
            made[s.name] = nn.Parameter(empty, requires_grad=s.trained) if s.parameter else empty
        stage.hold(s.name, made[s.same_as], persistent=s.persistent)


def _without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            return build()
    except Exception as e:
        raise JobError(
            f"the model cannot be built without memory: {line_of(e)[:200]}",
            remedy="let its constructor not look at values of parameters, or train it on one function",
        ) from e


def _named(stage: Stage, *, duplicates: bool = False) -> list[tuple[str, torch.Tensor]]:
    once = not duplicates
    return [*stage.named_parameters(remove_duplicate=once), *stage.named_buffers(remove_duplicate=once)]


def _changed(split: ModelSplit, step: str) -> frozenset[str]:
    effects = split.traced.observation.side_effects.get(step)
    return frozenset() if effects is None else effects.changed_states


# -- steps of a traced model as JSON ------------------------------------------------------------------------------


Resolve = Callable[[str], Any]
"""`module:name` -> the object."""
_PLAIN = (bool, int, float, str, type(None))
_NAMED: tuple[tuple[str, type], ...] = (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format))
_HOMES = ("torch", "torch.nn.functional", "torch._C._nn", "torch.linalg", "torch.fft", "torch.special")
"""Modules of functions whose `__module__` is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeDocument:
    """`OpaqueShape`."""

    arguments: object
    holes: tuple[bool, ...]
    spec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDocument:
    """`TracedStep`; arguments as in `to_json`."""

    name: str
    target: str | None
    args: object
    kwargs: object
    module: str | None
    origin: str
    shape: ShapeDocument | None


def step_to_json(step: TracedStep) -> StepDocument:
    """Document of a step.

    Raises:
        JobError: the step cannot be serialised; names it.
    """
    try:
        shape = None
        if step.shape is not None:
            arguments = to_json(step.shape.arguments)
            shape = ShapeDocument(arguments=arguments, holes=step.shape.holes, spec=spec_to_json(step.shape.spec))
        return StepDocument(
            name=step.name,
            target=None if step.target is None else _name_of(step.target),
            args=to_json(step.args),
            kwargs=to_json(dict(step.kwargs)),
            module=step.module,
            origin=step.origin,
            shape=shape,
        )
    except _NotSerializable as e:
        raise JobError(
            f"{step.name} ({step.operator}) cannot be sent to another function: {e}", remedy="train this model on one function: stages = 1"
        ) from None


def step_from_json(read: StepDocument, resolve: Resolve) -> TracedStep:
    """The inverse of `step_to_json`."""
    shape = read.shape
    return TracedStep(
        name=read.name,
        target=None if read.target is None else _named_step(read.target, resolve),
        args=from_json(read.args),
        kwargs=from_json(read.kwargs),
        module=read.module,
        origin=read.origin,
        shape=None
        if shape is None
        else OpaqueShape(arguments=from_json(shape.arguments), holes=shape.holes, spec=treespec_loads(shape.spec)),
    )


class _NotSerializable(Exception):
    pass


def to_json(tree: Any) -> Any:
    """Nested arguments as JSON; everything but plain values and lists is a table of one entry."""
    if isinstance(tree, _PLAIN):
        return tree
    if isinstance(tree, list):
        return [to_json(t) for t in tree]
    for key, leaf in (("ref", Ref), ("state", State), ("constant", Constant)):
        if isinstance(tree, leaf):
            return {key: tree.name}
    for key, kind in _NAMED:
        if isinstance(tree, kind):
            return {key: str(tree).removeprefix("torch.")}
    if isinstance(tree, torch.device):
        return {"device": str(tree)}
    if type(tree) is tuple:
        return {"tuple": [to_json(t) for t in tree]}
    if isinstance(tree, slice):
        return {"slice": [to_json(t) for t in (tree.start, tree.stop, tree.step)]}
    if isinstance(tree, Mapping):
        return {"table": [[to_json(k), to_json(v)] for k, v in tree.items()]}
    if isinstance(tree, complex):
        return {"complex": [tree.real, tree.imag]}
    if tree is Ellipsis:
        return {"ellipsis": True}
    raise _NotSerializable(f"an argument is {type(tree).__name__}")


def from_json(raw: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(raw, list):
        return [from_json(r) for r in raw]
    if not isinstance(raw, Mapping):
        return raw
    ((key, value),) = raw.items()
    return _READERS[key](value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "ref": Ref,
    "state": State,
    "constant": Constant,
    "dtype": lambda v: getattr(torch, v),
    "layout": lambda v: getattr(torch, v),
    "memory_format": lambda v: getattr(torch, v),
    "device": torch.device,
    "tuple": lambda v: tuple(from_json(t) for t in v),
    "slice": lambda v: slice(*(from_json(t) for t in v)),
    "table": lambda v: {from_json(k): from_json(t) for k, t in v},
    "complex": lambda v: complex(*v),
    "ellipsis": lambda v: Ellipsis,
}


def spec_to_json(spec: TreeSpec) -> str:
    """Nesting of values.

    Raises:
        JobError: values are nested in classes that cannot be named.
    """
    try:
        return treespec_dumps(spec)
    except (NotImplementedError, ValueError, TypeError) as e:
        raise JobError(
            f"arguments or results of the model cannot be sent to another function: {e}", remedy="nest tensors in lists, tuples and dicts"
        ) from None


def _name_of(target: Callable[..., Any]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = target._schema.name.partition("::")
        return f"op {space}.{name}.{target._overloadname}"
    if isinstance(target, _Method):
        return f"method {target.__qualname__}"
    owner = getattr(target, "__self__", None)
    leaf = getattr(target, "__name__", "")
    if isinstance(owner, type):  # `apply` of a custom autograd function
        candidates = [f"{owner.__module__}:{owner.__qualname__}.{leaf}"]
    else:
        home = getattr(target, "__module__", None)
        candidates = [f"{m}:{getattr(target, '__qualname__', leaf)}" for m in ([home] if home else []) + list(_HOMES)]
    for name in candidates:
        try:
            if _found(name) == target:
                return f"function {name}"
        except (ImportError, AttributeError):
            continue
    raise _NotSerializable(f"{target} has no name by which it could be found again")


def _named_step(text: str, resolve: Resolve) -> Callable[..., Any]:
    kind, _, name = text.partition(" ")
    if kind == "method":
        return _Method(name)
    if kind == "op":
        found: Any = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        return cast("Callable[..., Any]", found)
    home = name.partition(":")[0].partition(".")[0]
    known = home in ("torch", "_operator", "operator", "math", "builtins")
    return cast("Callable[..., Any]", (_found if known else resolve)(name))


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value
