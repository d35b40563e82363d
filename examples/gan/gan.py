"""Two networks whose optimisers take turns: a generator of points on a ring, and a discriminator."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import ephemeron


def layers(inputs, outputs, width=32):
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs))


class Ring(ephemeron.Task):
    settings = {"epochs": 60, "run": {"workers": 4, "batch_size": 32}}  # noqa: RUF012

    def model(self):
        return nn.ModuleDict({"generator": layers(4, 2), "discriminator": layers(2, 1)})

    def training_step(self, model, batch, optimizer_index):
        real, noise = batch
        made = model["generator"](noise)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        if optimizer_index == 1:
            return binary_cross_entropy_with_logits(model["discriminator"](made), ones)
        scores = model["discriminator"](real), model["discriminator"](made.detach())
        return binary_cross_entropy_with_logits(scores[0], ones) + binary_cross_entropy_with_logits(scores[1], zeros)

    def evaluation_step(self, model, batch):
        radius = model["generator"](batch[1]).norm(dim=1)
        return {"loss": (radius - 1).abs().mean(), "radius": (radius.sum(), len(radius))}

    def optimizers(self, model):
        options = {"lr": 2e-3, "betas": (0.5, 0.9)}
        return [torch.optim.Adam(model[name].parameters(), **options) for name in ("discriminator", "generator")]

    def train_data(self):
        rng = np.random.default_rng(0)
        angles = rng.uniform(0, 2 * np.pi, 1024)
        points = np.stack([np.cos(angles), np.sin(angles)], axis=1) + 0.02 * rng.normal(size=(1024, 2))
        return points.astype(np.float32), rng.normal(size=(1024, 4)).astype(np.float32)
