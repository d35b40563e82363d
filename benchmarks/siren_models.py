"""Models of `benchmarks.siren`: LeNet, a convolutional network and a linear one, on digits of 8 × 8 pixels enlarged to 28 × 28."""

from __future__ import annotations

import torch
from torch import nn


class Enlarged(nn.Module):
    """Images of 28 × 28 pixels from flat or square ones of 8 × 8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x.reshape(-1, 1, 8, 8), size=(28, 28), mode="bilinear", align_corners=False)


def lenet() -> nn.Module:
    """LeNet-5 with rectified units: 62,000 parameters."""
    return nn.Sequential(
        Enlarged(), nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def cnn() -> nn.Module:
    """Two wide convolutional layers and a dense one: 825,000 parameters."""
    return nn.Sequential(
        Enlarged(), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def linear() -> nn.Module:
    """Softmax regression: 7,850 parameters."""
    return nn.Sequential(Enlarged(), nn.Flatten(), nn.Linear(784, 10))
