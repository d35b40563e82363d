"""Programs that fail where a dry run looks."""

from __future__ import annotations

import os

import numpy as np
import torch
from programs import Tabular
from torch import nn


class Random(Tabular):
    """Draws numbers that no seed determines."""

    def training_step(self, model, batch):
        noise = torch.tensor(int.from_bytes(os.urandom(4), "little") / 2**32)
        return super().training_step(model, batch) * (1 + noise)


class Remembers(Tabular):
    """Changes while it trains, and does not save it."""

    def __init__(self):
        self.seen = 0

    def training_step(self, model, batch):
        self.seen += 1
        return super().training_step(model, batch) * self.seen


class Saves(Remembers):
    """The same, with its state."""

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class LaterError(Tabular):
    """Fails at one sample."""

    def training_step(self, model, batch):
        if (batch[1] > 2.2).any():
            raise ValueError("too large")
        return super().training_step(model, batch)


class Large(Tabular):
    """Needs 400 MB in a step."""

    def training_step(self, model, batch):
        held = np.ones(400_000_000, dtype=np.uint8)
        return super().training_step(model, batch) * float(held[0])


class Vector(Tabular):
    """Returns a loss for each sample."""

    def training_step(self, model, batch):
        return nn.functional.mse_loss(model(batch[0])[:, 0], batch[1], reduction="none")
