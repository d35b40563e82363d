"""A traced model as a value: steps in the order in which the model does them, and what each reads.

NetSplit (section 4.1.1) keeps nodes, variables, entry nodes, inputs, outputs and initialisers of an ONNX file. Here a step is one call
that PyTorch itself can repeat, so dropout, batch statistics, tied weights and the names of parameters survive, which they do
not in ONNX. Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import TreeSpec


@dataclass(frozen=True, slots=True)
class Ref:
    """A value: an input of the model, or what a step made."""

    name: str


@dataclass(frozen=True, slots=True)
class State:
    """A parameter or buffer, by its canonical name in the original model."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor, or a graph within the graph, that tracing found in the model's code."""

    name: str


Leaf: TypeAlias = Ref | State | Constant
Target: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One call."""

    name: str
    target: Target | None
    """What is called; None: the module named by `module`."""
    args: tuple[Any, ...] = ()
    """Nested tuples, lists and dicts with leaves `Ref`, `State` and `Constant`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    module: str | None = None
    """Path of a module that is kept as it is, Python and all: an opaque node. "" is the whole model."""
    origin: str = ""
    """Path of the module whose code made this call."""
    shape: OpaqueShape | None = None
    """How an opaque call is made from tensors, and what it gives back."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedStep:
        return self

    @property
    def operator(self) -> str:
        """What messages call it."""
        if self.module is not None:
            return f"module {self.module or 'itself'}"
        return str(getattr(self.target, "__qualname__", None) or self.target)

    @property
    def opaque(self) -> bool:
        """Whether its inside is not known."""
        return self.module is not None or self.shape is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueShape:
    """An opaque call takes a list of tensors and returns one; this makes arguments of the former and tensors of the result."""

    arguments: tuple[Any, ...]
    """Flat arguments; None where the next tensor stands."""
    holes: tuple[bool, ...]
    """Which of the flat arguments are tensors."""
    spec: TreeSpec
    """Of (args, kwargs)."""

    def filled(self, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, object]]:
        """Arguments and keyword arguments with these tensors in them."""
        given = iter(tensors)
        flat = [next(given) if hole else a for a, hole in zip(self.arguments, self.holes, strict=True)]
        args, kwargs = torch.utils._pytree.tree_unflatten(flat, self.spec)
        return args, kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One flat argument of the model."""

    name: str
    shape: tuple[int | None, ...] | None
    """Sizes; None where any is right. None altogether: no tensor."""
    value: Any = None
    """Of what is no tensor: the trace holds for this value only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram:
    """All steps of a model."""

    tracer: str
    """Which tracer made it."""
    inputs: tuple[Input, ...]
    steps: tuple[TracedStep, ...]
    outputs: tuple[Any, ...]
    """Flat: `Ref`, `State`, `Constant`, or a plain value."""
    in_spec: TreeSpec
    """Of (args, kwargs)."""
    out_spec: TreeSpec
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedProgram:
        return self

    @property
    def opaque(self) -> tuple[str, ...]:
        """Steps whose inside is not known."""
        return tuple(s.name for s in self.steps if s.opaque)


def leaves(tree: Any) -> Iterator[Leaf]:
    """What nested arguments refer to, in order, as often as they do."""
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
    """What a step refers to, each once."""
    return tuple(dict.fromkeys((*leaves(step.args), *leaves(step.kwargs))))


def filled(tree: Any, value: Callable[[Leaf], Any]) -> Any:
    """Nested arguments with leaves replaced; named tuples and slices keep their type."""
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
