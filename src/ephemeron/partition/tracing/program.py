"""Traced models as values: steps in order, with their arguments.

NetSplit (section 4.1.1) keeps nodes, variables, entry nodes, inputs, outputs and initialisers of an ONNX file. Here a step is one call
that PyTorch can repeat, so dropout, batch statistics, tied weights and the names of parameters are preserved, unlike in ONNX. Nothing here
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import TreeSpec


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to an input of the model or the result of a step."""

    name: str


@dataclass(frozen=True, slots=True)
class State:
    """Reference to a parameter or buffer by its canonical name in the original model."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """Reference to a constant in the model's code: a tensor, or a graph within the graph."""

    name: str


Leaf: TypeAlias = Ref | State | Constant
Target: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One call."""

    name: str
    target: Target | None
    """Called function; None: the module at `module`."""
    args: tuple[Any, ...] = ()
    """Nested tuples, lists and dicts with leaves `Ref`, `State` and `Constant`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    module: str | None = None
    """Path of an opaque module; "" is the whole model."""
    origin: str = ""
    """Path of the module whose code has this call."""
    shape: OpaqueShape | None = None
    """Arguments and result of an opaque call."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedStep:
        return self

    @property
    def operator(self) -> str:
        """Name in messages."""
        if self.module is not None:
            return f"module {self.module or 'itself'}"
        return str(getattr(self.target, "__qualname__", None) or self.target)

    @property
    def opaque(self) -> bool:
        """Whether it is opaque."""
        return self.module is not None or self.shape is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueShape:
    """Conversion between the list of tensors that an opaque call takes and its arguments."""

    arguments: tuple[Any, ...]
    """Flat arguments; None for tensors."""
    holes: tuple[bool, ...]
    """Whether a flat argument is a tensor."""
    spec: TreeSpec
    """Nesting of (args, kwargs)."""

    def filled(self, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, object]]:
        """Arguments and keyword arguments with tensors filled in."""
        given = iter(tensors)
        flat = [next(given) if hole else a for a, hole in zip(self.arguments, self.holes, strict=True)]
        args, kwargs = torch.utils._pytree.tree_unflatten(flat, self.spec)
        return args, kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One flat argument of the model."""

    name: str
    shape: tuple[int | None, ...] | None
    """Sizes, None for any size; None: no tensor."""
    value: Any = None
    """Value of an argument that is no tensor; the trace holds for this value only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram:
    """Traced model."""

    tracer: str
    """Name of the tracer."""
    inputs: tuple[Input, ...]
    steps: tuple[TracedStep, ...]
    outputs: tuple[Any, ...]
    """Flat: `Ref`, `State`, `Constant`, or a plain value."""
    in_spec: TreeSpec
    """Nesting of (args, kwargs)."""
    out_spec: TreeSpec
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedProgram:
        return self

    @property
    def opaque(self) -> tuple[str, ...]:
        """Names of opaque steps."""
        return tuple(s.name for s in self.steps if s.opaque)


def leaves(tree: Any) -> Iterator[Leaf]:
    """References in nested arguments, in order, with duplicates."""
    if isinstance(tree, (Ref, State, Constant)):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from leaves(item)
    elif isinstance(tree, slice):
        yield from leaves((tree.start, tree.stop, tree.step))


def reads(step: TracedStep) -> tuple[Leaf, ...]:
    """References of a step without duplicates."""
    return tuple(dict.fromkeys((*leaves(step.args), *leaves(step.kwargs))))


def filled(tree: Any, value: Callable[[Leaf], Any]) -> Any:
    """Nested arguments with references replaced by values; named tuples and slices keep their type."""
    if isinstance(tree, (Ref, State, Constant)):
        return value(tree)
    if isinstance(tree, tuple):
        items = [filled(t, value) for t in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [filled(t, value) for t in tree]
    if isinstance(tree, Mapping):
        return {k: filled(t, value) for k, t in tree.items()}
    if isinstance(tree, slice):
        return slice(filled(tree.start, value), filled(tree.stop, value), filled(tree.step, value))
    return tree
