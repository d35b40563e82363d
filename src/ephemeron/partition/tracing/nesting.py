"""Registration of a model's dataclasses as pytree nodes, so that PyTorch finds the tensors in them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec, tree_leaves

from ephemeron.errors import JobError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def register_dataclasses(tree: Any) -> None:
    """Register the types of all dataclasses in a tree, from the outside in.

    Raises:
        JobError: a dataclass cannot be constructed from its fields; names it.
    """
    while found := {type(v): None for v in tree_leaves(tree) if dataclasses.is_dataclass(v) and not isinstance(v, type)}:
        for kind in found:
            register(kind)


def register(kind: type[Any]) -> None:
    """Register a dataclass under its importable name; repeated calls do nothing."""
    if kind in pytree.SUPPORTED_NODES:
        return
    hidden = [f.name for f in dataclasses.fields(kind) if not f.init]
    if hidden:
        raise JobError(
            f"{kind.__qualname__}.{hidden[0]} is a field that its constructor does not take, so it cannot be constructed again",
            remedy="return a dataclass whose fields are all arguments, or a dict",
        )
    torch.export.register_dataclass(kind, serialized_type_name=_name(kind))


def registered_names(*specs: TreeSpec) -> list[str]:
    """`module:class` of the dataclasses in tree specifications, for registration in another process.

    Raises:
        JobError: a class is defined in a function and cannot be imported; names it.
    """
    kinds: dict[type[Any], None] = {}
    for spec in specs:
        kinds |= {s.type: None for s in _all(spec) if isinstance(s.type, type) and dataclasses.is_dataclass(s.type)}
    for kind in kinds:
        try:
            known: Any = importlib.import_module(kind.__module__)
            for part in kind.__qualname__.split("."):
                known = getattr(known, part)
        except (ImportError, AttributeError):
            known = None
        if known is not kind:
            raise JobError(
                f"{kind.__qualname__}, which the model takes or returns, has no name by which another process can import it",
                remedy="define it at the top of a module",
            )
    return [_name(kind) for kind in kinds]


def register_names(names: Iterable[str], resolve: Callable[[str], Any]) -> None:
    """Register the dataclasses of `registered_names`."""
    for name in names:
        register(resolve(name))


def opaque_types(tree: Any) -> Iterator[str]:
    """Names of types in a tree that are neither tensors nor plain values, and may contain tensors."""
    for value in tree_leaves(tree):
        if not isinstance(value, (torch.Tensor, *_PLAIN)):
            yield type(value).__name__


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _all(spec: TreeSpec) -> Iterator[TreeSpec]:
    yield spec
    for child in spec.children():
        yield from _all(child)
