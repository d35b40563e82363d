"""What a pipeline is to do, as the user says it: a value that every device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ephemeron.errors import JobError
from ephemeron.partition.costs.optimizer import MakeOptimizer
from ephemeron.partition.schedule_simulator.schedule import Schedule

Loss = Callable[[Any, Any], torch.Tensor]
"""(result of the model, targets) -> one number, a mean over samples."""
Metrics = Callable[[Any, Any], Mapping[str, float]]
"""(result of the model, targets) -> means over samples, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How stages are trained."""

    schedule: Schedule
    optimizer: MakeOptimizer
    """Over the parameters of one device; made once on each."""
    loss: Loss
    metrics: Metrics | None = None
    seed: int = 0
    """Of random steps, which draw by seed, iteration, micro-batch and name."""


def number_of(value: Any, what: str) -> torch.Tensor:
    """The loss, checked.

    Raises:
        JobError: it is no single number.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        seen = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise JobError(f"{what} gave {seen} instead of one number", remedy="return the mean over samples as a tensor")
    return value.reshape(())
