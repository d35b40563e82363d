"""Training options of a pipeline; the same value on every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ephemeron.errors import JobError
from ephemeron.partition.costs.optimizer import MakeOptimizer
from ephemeron.partition.schedule_simulator.schedule import Schedule

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
