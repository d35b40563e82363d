"""Outer optimiser: a step with the mean of all ranks' deltas, after local steps of the job's own optimiser on each rank.

A delta is a rank's parameters before its local steps less those after them: the direction in which gradients point, so that an
optimiser of `torch.optim` takes the merged delta for a gradient. `average` is SGD with learning rate 1: it adds the mean change, as
in local SGD (Stich 2018; post-local SGD, Lin et al. 2020). SGD with Nesterov momentum 0.9 and learning rate 0.7 is DiLoCo's choice
(Douillard et al. 2023). All ranks step alike, with the same merged deltas; the optimiser's state is in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ephemeron.errors import JobError
from ephemeron.training.job import AVERAGE, Target
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.program import optimizer_over


class OuterOptimizer:
    """Optimiser of merged deltas.

    Args:
        target: `average`, or a name in `torch.optim` and its options; None: `average`.
        parameters: those that are trained.

    Raises:
        JobError: no such optimiser, or it refuses its options.
    """

    def __init__(self, target: Target | None, parameters: Sequence[nn.Parameter]) -> None:
        if target is None or target.target == AVERAGE:
            if target is not None and target.options:
                raise JobError(
                    "exchange.outer_optimizer 'average' has no options", remedy='use target = "SGD" for a learning rate or momentum'
                )
            target = Target(target="SGD", options={"lr": 1.0})
        self._optimizer = optimizer_over(target, list(parameters))

    def step(self, _: int | None = None) -> None:
        """Steps with the merged deltas in `.grad`; None there: no rank has changed the parameter."""
        with eager_optimizers():
            self._optimizer.step()

    @property
    def stepped(self) -> tuple[Sequence[torch.optim.Optimizer], Callable[[int | None], None]]:
        """Optimiser and step, for `ProvisionalSteps`."""
        return (self._optimizer,), self.step

    def state(self) -> Mapping[str, Any]:
        """State for a checkpoint."""
        with eager_optimizers():
            state: Mapping[str, Any] = self._optimizer.state_dict()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        with eager_optimizers():
            self._optimizer.load_state_dict(dict(state))
