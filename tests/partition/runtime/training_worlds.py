"""Models, batches and placements for the tests of this room, and the unsplit model trained over the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import torch
from cutting_worlds import example, optimizer, placed
from models import Example
from torch.utils._pytree import tree_map

from ephemeron.partition.runtime import cut as cut_batch
from ephemeron.partition.tracing import ModelSplit, Tracing, graph_of, mean_square, split, trace
from random_schedules import examples

STEPS = examples(20)
WHOLE = {"gnn"}
"""Models whose first size is not samples: never cut into micro-batches."""
SAMPLES = 7


@cache
def traced(name: str, dtype: torch.dtype = torch.float64) -> tuple[Example, Tracing]:
    e = example(name, dtype)
    return e, trace(e.model, e.args, e.kwargs, steps=1)


def batches(name: str, e: Example, steps: int = STEPS, samples: int = SAMPLES) -> list[tuple[Any, Any]]:
    """Seven samples each, every fourth batch one less; other values each time."""
    draw = torch.Generator().manual_seed(1)

    def fresh(t: Any, n: int) -> Any:
        if not isinstance(t, torch.Tensor) or t.dim() == 0 or name in WHOLE:
            return t
        t = torch.cat([t] * (-(-n // t.shape[0])))[:n]
        if t.is_floating_point() and t.min() < 0:
            t = t + 0.1 * torch.randn(t.shape, generator=draw, dtype=t.dtype)
        return t

    return [tree_map(lambda t, n=samples - (k % 4 == 3): fresh(t, n), (e.args, e.kwargs)) for k in range(steps)]


def loss(result: Any, targets: Any) -> torch.Tensor:
    return mean_square(result)


def parts_of(
    name: str, parts: int, *, seed: str = "0", pipeline: bool = True, ties: Any = "together", dtype: torch.dtype = torch.float64
) -> ModelSplit:
    _, tracing = traced(name, dtype)
    graph = graph_of(tracing.model, ties=ties)
    return split(tracing.model, placed(graph, parts, Random(name + seed), pipeline=pipeline), ties=ties)


def train_whole(
    name: str, todo: Sequence[tuple[Any, Any]], micro_batches: int, *, make: Any = optimizer, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The unsplit model: gradients of micro-batches are added up, then one step."""
    model = copy.deepcopy(traced(name, dtype)[1].model).train()
    opt, losses = make([p for p in model.parameters() if p.requires_grad]), []
    for k, (args, kwargs) in enumerate(todo):
        opt.zero_grad()
        total = 0.0
        for m, part in enumerate(cut_batch(args, kwargs, None, 1 if name in WHOLE else micro_batches)):
            model.draw_from(0, iteration=k, micro_batch=m)
            value = mean_square(model(*part.args, **part.kwargs)) * part.weight
            value.backward()
            total += value.item()
        opt.step()
        losses.append(total)
    return model.original_state(), losses


def furthest(a: Any, b: Any) -> float:
    assert set(a) == set(b)
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a if a[n].numel())
