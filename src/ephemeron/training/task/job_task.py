"""A job file's model, loss and optimiser as a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ephemeron.errors import JobError
from ephemeron.training.job import Target
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.losses import Loss
from ephemeron.training.task.optimizers import check_kind
from ephemeron.training.task.task import Task


class JobTask(Task):
    """`loss(model(inputs), targets)`, with accuracy where the loss is one of classification.

    Args:
        make: builds the model.
        loss: a mean or a sum over the batch.
        optimizer: a name in `torch.optim` and its options.
    """

    def __init__(self, make: Callable[[], nn.Module], loss: Loss, optimizer: Target) -> None:
        self._make, self.loss, self._optimizer = make, loss, optimizer

    def model(self) -> nn.Module:
        return self._make()

    def training_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return self.loss.report(model(inputs), targets)

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        output = model(inputs)
        return {**self.loss.report(output, targets), "accuracy": self.loss.answers(output, targets)}

    def optimizers(self, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_over(self._optimizer, [p for p in model.parameters() if p.requires_grad])


def optimizer_over(target: Target, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimiser of `torch.optim` with its options.

    Raises:
        JobError: no such optimiser, options it refuses, or one that needs a closure.
    """
    cls = getattr(torch.optim, target.target, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        names = sorted(n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer))
        raise JobError(f"optimizer {target.target!r} is not in torch.optim", remedy=f"use one of {', '.join(names)}")
    check_kind(cls)
    make: Callable[..., torch.optim.Optimizer] = cls
    try:
        with eager_optimizers():
            return make(parameters, **target.options)
    except (TypeError, ValueError) as e:
        raise JobError(f"optimizer {target.target} refuses its options: {e}") from None
