"""The models as tests take them: with given weights, cut anywhere, and trained."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from models import MODELS, Example
from torch.utils._pytree import tree_map

from ephemeron.partition import Graph


def example(name: str, dtype: torch.dtype) -> Example:
    """Always the same weights and values."""
    torch.manual_seed(0)
    made = MODELS[name]()
    args, kwargs = tree_map(lambda t: to(t, dtype), (made.args, made.kwargs))
    return Example(model=made.model.to(dtype), args=args, kwargs=kwargs)


def to(t: Any, dtype: torch.dtype) -> Any:
    return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t


def placed(graph: Graph, parts: int, rng: Random, *, pipeline: bool = True) -> dict[str, str]:
    """Every group whole; in a pipeline tensors only go forward."""
    order = graph.topological_order()
    bounds = sorted(rng.sample(range(1, len(order)), parts - 1))
    at = {n: sum(i >= b for b in bounds) if pipeline else rng.randrange(parts) for i, n in enumerate(order)}
    readers = [(t.producer, c) for t in graph.tensors for c in t.consumers]
    group: dict[str, list[str]] = {}
    for n in graph.nodes:
        group.setdefault(n.group or n.name, []).append(n.name)
    changed = True
    while changed:
        changed = False
        for names in group.values():
            top = max(at[n] for n in names)
            changed |= any(at[n] < top for n in names)
            at.update(dict.fromkeys(names, top))
        for u, v in readers if pipeline else ():
            if at[v] < at[u]:
                at[v], changed = at[u], True
    return {n: f"d{k}" for n, k in at.items()}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)
