"""Models of the size of the paper's (Cloudless-Training, table 2), as jobs import them: LeNet-like, ResNet-like and DeepFM-like.

It is copied beside a job file, so it imports nothing of the benchmarks. Normalisation is by groups of channels: it has no state that regions would have to exchange.
"""

from __future__ import annotations

import torch
from torch import nn

FEATURES = (960, 4082, 7, 7, 3, 2, 9, 80, 233, 4)
"""Values of each of the ten fields of Frappe: user, item and context; 5,387 in all."""
FACTORS = 64


def lenet() -> nn.Module:
    """LeNet for images of 16 × 16: 105,000 parameters, 0.4 MB."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 298),
        nn.ReLU(),
        nn.Linear(298, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


class Block(nn.Module):
    """A basic block (He et al. 2015, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(4, outputs),
        )
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """A ResNet with few filters for images of 8 × 8 in colour: 151,000 parameters, 0.6 MB."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        Block(64, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class DeepFM(nn.Module):
    """Factorisation machine and perceptron over the same factors: 0.6 million parameters, 2.4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.tensor([sum(FEATURES[:i]) for i in range(len(FEATURES))]))
        self.linear, self.factors = nn.Embedding(sum(FEATURES), 1), nn.Embedding(sum(FEATURES), FACTORS)
        nn.init.zeros_(self.linear.weight)
        nn.init.normal_(self.factors.weight, std=0.05)
        self.deep = nn.Sequential(nn.Linear(FACTORS * len(FEATURES), 320), nn.ReLU(), nn.Linear(320, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.long() + self.first
        v = self.factors(x)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True)
        score = self.linear(x).sum(1) + pairs + self.deep(v.flatten(1))
        return torch.cat([-score / 2, score / 2], dim=1)


def deepfm() -> nn.Module:
    """DeepFM with two classes."""
    return DeepFM()


class Weights(nn.Module):
    """A classifier of as many parameters as a model has, for runs in which only bytes and time count."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.zeros(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ self.all[:640].reshape(64, 10)


def weights(parameters: int) -> nn.Module:
    """See `Weights`.

    Args:
        parameters: at least 640.
    """
    return Weights(parameters)
