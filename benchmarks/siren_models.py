"""Models of `benchmarks.siren`: LeNet, a convolutional network and a linear one, on digits of 8 × 8 pixels enlarged to 28 × 28."""

from __future__ import annotations

import torch
from torch import nn


class Enlarged(nn.Module):
    """Images of 28 × 28 pixels, with mean near 0 and spread near 1, from flat or square ones of 8 × 8 between 0 and 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = nn.functional.interpolate(x.reshape(-1, 1, 8, 8), size=(28, 28), mode="bilinear", align_corners=False)
        return (images - 0.3) / 0.35


def lenet() -> nn.Module:
    """LeNet-5 with rectified units: 62,000 parameters."""
    return initialised(
        nn.Sequential(
            Enlarged(),
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )
    )


def cnn() -> nn.Module:
    """Two convolutional layers of 8 and 16 channels, and two dense ones: 53,000 parameters."""
    return initialised(
        nn.Sequential(
            Enlarged(),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(784, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    )


def linear() -> nn.Module:
    """Softmax regression: 7,850 parameters."""
    return nn.Sequential(Enlarged(), nn.Flatten(), nn.Linear(784, 10))


def initialised(net: nn.Sequential) -> nn.Sequential:
    """He's initialisation of all layers but the last: PyTorch's own leaves LeNet on a plateau for the first epochs."""
    for layer in list(net)[:-1]:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return net
