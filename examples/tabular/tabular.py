"""Regression on the diabetes table of scikit-learn.

The loss is that of the target divided by its standard deviation, in training and in evaluation; `mae`, `mse` and `rmse` are errors in the
units of the target.
"""

import math

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn import functional

import ephemeron

SCALE = 77.0
"""Standard deviation of the target."""


class Diabetes(ephemeron.Task):
    settings = {  # noqa: RUF012
        "epochs": 30,
        "scheduler": {"target": "CosineAnnealingLR", "interval": "step", "warmup_steps": 10},
        "ema_decay": 0.9,
        "run": {"workers": 4, "batch_size": 16},
    }

    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, model, batch):
        inputs, targets = batch
        return functional.huber_loss(model(inputs)[:, 0], targets)

    def evaluation_step(self, model, batch):
        inputs, targets = batch
        outputs = model(inputs)[:, 0]
        error = (outputs - targets) * SCALE
        squares, count = error.square().sum(), len(error)
        return {"loss": functional.huber_loss(outputs, targets), "mae": (error.abs().sum(), count), "mse": (squares, count)}

    def evaluation_end(self, metrics):
        return {**metrics, "rmse": math.sqrt(metrics["mse"])}

    def optimizers(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_data(self):
        inputs, targets = load_diabetes(return_X_y=True)
        return (inputs * 21).astype(np.float32), ((targets - 152) / SCALE).astype(np.float32)
