"""Models for end-to-end tests."""

import numpy as np
import torch
from torch import nn


def mlp(hidden: int = 16, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 10))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def heavy(megabytes: int) -> nn.Module:
    """A model that takes memory only when it trains."""

    class Heavy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 2:
                self.ballast = [np.ones(2**17) for _ in range(megabytes)]
            return self.inner(x)

    return Heavy()


def failing() -> nn.Module:
    """A model whose third forward pass raises."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 3:
                raise ValueError("no luck today")
            return self.inner(x)

    return Failing()


def wide_input() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def tied() -> nn.Module:
    """A layer that is used at both ends."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.inner(torch.tanh(self.first(x.flatten(1)))))
            return self.last(torch.tanh(self.inner(x)))

    return Tied()


def bulky(width: int, layers: int) -> nn.Module:
    """Many parameters and little to compute: a batch of one row of them."""
    middle = [m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *middle, nn.Linear(width, 10))
