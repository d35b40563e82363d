"""Steps of a traced model as JSON, and back: calls by name, never by pickle, so that documents can be read and checked.

PyTorch's operators are named by schema and overload, other functions by module and name. A function without an importable name
(a function in a function, a graph within the graph) cannot be serialised; it is refused where the stages are made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._pytree import TreeSpec, treespec_dumps, treespec_loads

from ephemeron.errors import JobError
from ephemeron.partition.tracing.fx_trace import _Method
from ephemeron.partition.tracing.program import Constant, OpaqueShape, Ref, State, TracedStep

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
        target=None if read.target is None else _named(read.target, resolve),
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


def _named(text: str, resolve: Resolve) -> Callable[..., Any]:
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
