"""Exponential moving average of parameters, with which a model is evaluated and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class MovingAverage:
    """Moving averages of parameters.

    Args:
        named: the parameters by name.
        decay: weight of the previous average; 0: there are none, and all methods do nothing.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], decay: float) -> None:
        self._named, self._decay = named, decay
        self.values = {n: p.detach().clone() for n, p in named} if decay else {}
        """By name of the parameter."""

    def update(self) -> None:
        """Takes in the parameters as they are."""
        with torch.no_grad():
            for name, p in self._named if self.values else ():
                self.values[name].mul_(self._decay).add_(p, alpha=1 - self._decay)

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Restores averages; those that are missing begin with the parameters as they are."""
        with torch.no_grad():
            for name, p in self._named if self.values else ():
                self.values[name].copy_(values.get(name, p))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the parameters are their averages."""
        if not self.values:
            yield
            return
        own = {name: p.detach().clone() for name, p in self._named}
        self._put(self.values)
        try:
            yield
        finally:
            self._put(own)

    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, p in self._named:
                p.copy_(values[name])
