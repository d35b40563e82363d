"""Training programs of the tests, as users would write them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ephemeron


class Sentences(Dataset):
    """Token sequences with a rule: each token is the one before plus the first, modulo the vocabulary."""

    def __init__(self, count=96, length=8, vocabulary=11, seed=3):
        rng = np.random.default_rng(seed)
        first = rng.integers(1, vocabulary, (count, 1))
        self.tokens = torch.tensor((first * np.arange(1, length + 2)) % vocabulary)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i, :-1], "labels": self.tokens[i, 1:]}


class TinyGpt(nn.Module):
    """One block of a decoder with tied embeddings."""

    def __init__(self, vocabulary=11, width=16, length=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.place[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        h = self.norm(x)
        x = x + self.attend(h, h, h, attn_mask=mask, need_weights=False)[0]
        return self.head(x + self.mix(self.norm(x)))


class Gpt(ephemeron.Task):
    """AdamW with parameter groups, warm-up and cosine decay, clipping, accumulation; perplexity beside the loss."""

    settings = {"epochs": 3, "clip_norm": 1.0, "accumulate": 2}  # noqa: RUF012

    def model(self):
        return TinyGpt()

    def training_step(self, model, batch):
        logits = model(batch["input_ids"])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        right = (logits.argmax(-1) == batch["labels"]).float().mean()
        return {"loss": loss, "token_accuracy": right}

    def evaluation_end(self, metrics):
        return {**metrics, "perplexity": math.exp(metrics["loss"])}

    def optimizers(self, model):
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)

        def rate(step):
            warm = min(1.0, (step + 1) / 3)
            return warm * 0.5 * (1 + math.cos(math.pi * step / max(1, self.total_steps)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_data(self):
        return Sentences()

    def evaluation_data(self):
        return Sentences(count=32, seed=4)


class PlateauResidual(ephemeron.Task):
    """Batch statistics, and a learning rate that falls when the evaluation loss stops falling."""

    settings = {"epochs": 4}  # noqa: RUF012

    def model(self):
        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
                self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 10)

            def forward(self, x):
                x = self.first(x)
                return self.head((x + torch.relu(self.norm(self.second(x)))).mean((2, 3)))

        return Residual()

    def optimizers(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}

    def train_data(self):
        rng = np.random.default_rng(0)
        return rng.normal(size=(96, 1, 6, 6)).astype(np.float32), rng.integers(0, 10, 96)


class Gan(ephemeron.Task):
    """Two networks, whose optimisers take turns."""

    settings = {"epochs": 4}  # noqa: RUF012

    def model(self):
        return nn.ModuleDict(
            {
                "generator": nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)),
                "discriminator": nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)),
            }
        )

    def training_step(self, model, batch, optimizer_index):
        real, noise = batch
        made = model["generator"](noise)
        score = functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        if optimizer_index == 0:
            loss = score(model["discriminator"](real), ones) + score(model["discriminator"](made.detach()), zeros)
            return {"loss": loss, "discriminator": loss}
        return {"loss": score(model["discriminator"](made), ones)}

    def evaluation_step(self, model, batch):
        real, noise = batch
        return {"distance": (model["generator"](noise).mean(0) - real.mean(0)).norm()}

    def optimizers(self, model):
        return [torch.optim.Adam(model["discriminator"].parameters(), lr=1e-2), torch.optim.Adam(model["generator"].parameters(), lr=1e-2)]

    def train_data(self):
        rng = np.random.default_rng(0)
        return rng.normal(3, 1, (64, 2)).astype(np.float32), rng.normal(size=(64, 2)).astype(np.float32)


class Adapter(ephemeron.Task):
    """A large frozen body with a low-rank adapter and a head: only these are trained."""

    settings = {"epochs": 2}  # noqa: RUF012

    def model(self):
        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(36, 512).requires_grad_(False)
                self.down, self.up = nn.Linear(36, 2, bias=False), nn.Linear(2, 512, bias=False)
                self.head = nn.Linear(512, 10)
                nn.init.zeros_(self.up.weight)

            def forward(self, x):
                x = x.flatten(1)
                return self.head(torch.relu(self.body(x) + self.up(self.down(x))))

        return Adapted()

    def train_data(self):
        rng = np.random.default_rng(0)
        return rng.normal(size=(64, 36)).astype(np.float32), rng.integers(0, 10, 64)


class Tabular(ephemeron.Task):
    """Regression, with errors that are no means of batches."""

    settings = {"epochs": 5, "scheduler": {"target": "StepLR", "options": {"step_size": 2}}}  # noqa: RUF012

    def model(self):
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, model, batch):
        inputs, targets = batch
        return functional.mse_loss(model(inputs)[:, 0], targets)

    def evaluation_step(self, model, batch):
        inputs, targets = batch
        error = model(inputs)[:, 0] - targets
        return {"loss": error.square().mean(), "absolute_error": (error.abs().sum(), len(error))}

    def evaluation_end(self, metrics):
        return {**metrics, "rmse": math.sqrt(metrics["loss"])}

    def train_data(self):
        rng = np.random.default_rng(0)
        inputs = rng.normal(size=(120, 5)).astype(np.float32)
        return inputs, (inputs @ np.arange(1, 6) / 5).astype(np.float32)
