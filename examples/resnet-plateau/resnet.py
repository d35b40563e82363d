"""A residual network on handwritten digits, whose learning rate falls when the evaluation loss stops falling."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import ephemeron


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Digits(ephemeron.Task):
    settings = {  # noqa: RUF012
        "epochs": 10,
        "keep_best": {"monitor": "accuracy", "mode": "max"},
        "run": {"workers": 4, "batch_size": 16},
    }

    def model(self):
        stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        return nn.Sequential(*stem, Residual(16), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def evaluation_step(self, model, batch):
        images, labels = batch
        scores = model(images)
        right = (scores.argmax(1) == labels).sum()
        return {"loss": nn.functional.cross_entropy(scores, labels), "accuracy": (right, len(labels))}

    def optimizers(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}

    def train_data(self):
        digits = load_digits()
        return (digits.images[:, None] / 16).astype(np.float32), digits.target
