"""Micro-batches of a batch, and their weights.

A mean over a batch is the mean of its micro-batches' means weighted by their samples, so gradients of unequal micro-batches are
those of the whole batch. Sizes differ by one sample at most: a batch of 9 in 4 is 3, 2, 2, 2, so no micro-batch takes much longer
than the schedule assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ephemeron.errors import JobError
from ephemeron.partition.costs.optimizer import MakeOptimizer
from ephemeron.partition.schedule_simulator.schedule import Schedule

Weigh = Callable[[Any], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Inputs and targets of some samples."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: Any
    weight: float
    """Share of the batch's loss; the sum is 1."""


def sizes(samples: int, parts: int) -> tuple[int, ...]:
    """Samples of each micro-batch: they differ by one at most, larger first. None is empty, so there may be fewer than `parts`."""
    parts = min(parts, samples)
    return tuple(samples // parts + (i < samples % parts) for i in range(parts))


def cut(args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any, parts: int, *, weigh: Weigh | None = None) -> tuple[MicroBatch, ...]:
    """Micro-batches: every tensor whose first size is that of the first tensor is divided, others are passed whole.

    Args:
        args, kwargs: of the model.
        targets: of the loss, nested or not.
        parts: most micro-batches. 1: the batch as it is.
        weigh: weight of a micro-batch by its targets, e.g. its number of words if the loss is a mean over words. None: its
            samples.

    Raises:
        JobError: no tensor, no samples, or weights that are not numbers from 0, or all 0.
    """
    args, kwargs = tuple(args), dict(kwargs)
    first = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0), None)
    if parts == 1:
        return (MicroBatch(args=args, kwargs=kwargs, targets=targets, weight=1.0),)
    if first is None or first.shape[0] == 0:
        raise JobError("step: the batch has no samples to cut into micro-batches", remedy="pass tensors, samples first")
    samples = first.shape[0]
    counts, begin, made, weights = sizes(samples, parts), 0, [], []
    for count in counts:

        def part(t: Any, begin: int = begin, count: int = count) -> Any:
            own = isinstance(t, torch.Tensor) and t.dim() > 0 and t.shape[0] == samples
            return t.narrow(0, begin, count) if own else t

        made.append(tree_map(part, (args, kwargs, targets)))
        weights.append(float(count) if weigh is None else float(weigh(made[-1][2])))
        begin += count
    total = sum(weights)
    if not (all(w >= 0 for w in weights) and 0 < total < float("inf")):
        raise JobError(f"step: micro-batches weigh {weights}", remedy="let weigh give numbers from 0, not all of them 0")
    return tuple(MicroBatch(args=a, kwargs=k, targets=t, weight=w / total) for (a, k, t), w in zip(made, weights, strict=True))


# -- training options of a pipeline; the same value on every device -----------------------------------------------


Loss = Callable[[Any, Any], torch.Tensor]
"""(result of the model, targets) -> mean over samples as a tensor of one number."""
Metrics = Callable[[Any, Any], Mapping[str, float]]
"""(result of the model, targets) -> means over samples, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Loss, optimiser and schedule of stages."""

    schedule: Schedule
    optimizer: MakeOptimizer
    """Makes the optimiser over the parameters of one device; called once on each."""
    loss: Loss
    metrics: Metrics | None = None
    seed: int = 0
    """Seed of random steps, which draw by seed, iteration, micro-batch and name."""


def number_of(value: Any, what: str) -> torch.Tensor:
    """Value of the loss as a scalar.

    Raises:
        JobError: it is no tensor of one number.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        seen = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise JobError(f"{what} gave {seen} instead of one number", remedy="return the mean over samples as a tensor")
    return value.reshape(())
