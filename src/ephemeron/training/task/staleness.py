"""Provisional optimiser steps against stale gradients, for HAP, SSP and ASP.

A rank that computes an iteration before the last s versions are applied would compute its gradient at parameters that are s steps
old. With momentum 0.9 the largest stable learning rate is then a few per cent of BSP's. But it knows a part of each missing version:
its own contribution. So it first steps with its own gradients of these iterations, by the job's own optimiser, computes the
gradient there, and takes the steps back (one-step delay SGD, Xu et al. 2020; here for any staleness and any optimiser). What is
left of the error is the difference between its own batch and the global one. `docs/convergence.md` has the measurements, and
docs/decisions/0028 the remedies that were compared.

The result depends on parameters, optimiser states and own gradients only, all of which are in checkpoints. It costs one more copy
of parameters and optimiser states, one gradient per missing version, and one optimiser step each. Accumulated state outside of
`optimizer.state` and `param_groups` would not be taken back: optimisers of `torch.optim` have none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ephemeron.training.job.convergence import MOST_PROVISIONAL


class OwnGradient(NamedTuple):
    """This rank's gradient of one iteration."""

    iteration: int
    turn: int | None
    """Number of the optimiser whose turn it was; None: all step together."""
    parts: tuple[torch.Tensor | None, ...]
    """By parameter, the mean over this rank's batch; None: it took no part."""


class ProvisionalSteps:
    """Own gradients of iterations that are not applied yet, and optimiser steps with them that are taken back.

    Args:
        parameters: those that are trained.
        optimizers: over them.
        step: clips `.grad` of the parameters and steps the optimiser of a turn (None: all), without its schedulers.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], step: Callable[[int | None], None]
    ) -> None:
        self._parameters, self._optimizers, self._step = parameters, optimizers, step
        self._kept: deque[OwnGradient] = deque(maxlen=MOST_PROVISIONAL)

    def computed(self, gradient: OwnGradient) -> None:
        """Records the gradient of an iteration. The caller leaves its tensors alone."""
        self._kept.append(gradient)

    def applied(self, version: int) -> None:
        """Forgets the gradients of iterations up to this one: their versions have been applied."""
        while self._kept and self._kept[0].iteration <= version:
            self._kept.popleft()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Context in which parameters are where the missing versions are expected to bring them. Changes `.grad`.

        Afterwards parameters, optimiser states and options are bit for bit what they were.
        """
        if not self._kept:
            yield
            return
        before = [p.detach().clone() for p in self._parameters]
        try:
            with self._copied_states():
                for gradient in self._kept:
                    for p, part in zip(self._parameters, gradient.parts, strict=True):
                        p.grad = None if part is None else part.to(p.dtype, copy=True)
                    self._step(gradient.turn)
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self._parameters, before, strict=True):
                    p.copy_(value)

    @contextmanager
    def _copied_states(self) -> Iterator[None]:
        """Optimisers work on copies of their states and options."""
        states = [o.state for o in self._optimizers]
        options = [[{k: _copy(v) for k, v in g.items() if k != "params"} for g in o.param_groups] for o in self._optimizers]
        for o, state in zip(self._optimizers, states, strict=True):
            copied: defaultdict[Any, Any] = defaultdict(dict)
            copied.update({p: {k: _copy(v) for k, v in own.items()} for p, own in state.items()})
            o.state = copied
        try:
            yield
        finally:
            for o, state, groups in zip(self._optimizers, states, options, strict=True):
                o.state = state
                for group, values in zip(o.param_groups, groups, strict=True):
                    group.update(values)

    def state(self) -> list[object]:
        """The gradients, for a checkpoint."""
        return [[g.iteration, g.turn, list(g.parts)] for g in self._kept]

    def load(self, state: Iterable[Any]) -> None:
        """The inverse of `state`."""
        self._kept.clear()
        self._kept.extend(OwnGradient(iteration, turn, tuple(parts)) for iteration, turn, parts in state)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value
