"""Dataclasses as nests of tensors: PyTorch looks into them once they are registered, which is done here for those that a model uses."""

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
    """Registers the types of all dataclasses in a nest, from the outside in.

    Raises:
        JobError: one cannot be made again from its fields; names it.
    """
    while found := {
        type(v): None for v in tree_leaves(tree) if dataclasses.is_dataclass(v) and not isinstance(v, type)
    }:
        for kind in found:
            register(kind)


def register(kind: type[Any]) -> None:
    """Makes a dataclass a nest of its fields, under the name by which other processes find it; once is enough."""
    if kind in pytree.SUPPORTED_NODES:
        return
    hidden = [f.name for f in dataclasses.fields(kind) if not f.init]
    if hidden:
        raise JobError(
            f"{kind.__qualname__}.{hidden[0]} is a field that its constructor does not take, so it cannot be made again",
            remedy="return a dataclass whose fields are all arguments, or a dict",
        )
    torch.export.register_dataclass(kind, serialized_type_name=_name(kind))


def registered_names(*specs: TreeSpec) -> list[str]:
    """`module:class` of the dataclasses in nestings that another process has to register to read them.

    Raises:
        JobError: one lies in a function, where no other process finds it; names it.
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
                f"{kind.__qualname__}, which the model takes or returns, has no name by which it could be found elsewhere",
                remedy="define it at the top of a module",
            )
    return [_name(kind) for kind in kinds]


def register_names(names: Iterable[str], resolve: Callable[[str], Any]) -> None:
    """The other end of `registered_names`."""
    for name in names:
        register(resolve(name))


def strangers(tree: Any) -> Iterator[str]:
    """Types in a nest that hide tensors: neither tensors nor plain values."""
    for value in tree_leaves(tree):
        if not isinstance(value, (torch.Tensor, *_PLAIN)):
            yield type(value).__name__


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _all(spec: TreeSpec) -> Iterator[TreeSpec]:
    yield spec
    for child in spec.children():
        yield from _all(child)
