"""A small GPT on the characters of a text: AdamW with groups, cosine schedule with warm-up, clipping, bf16, early stopping."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ephemeron

TEXT = (Path(__file__).parent / "text.txt").read_text()
LETTERS = sorted(set(TEXT))
LENGTH = 32


class Pieces(Dataset):
    """Pieces of the text, each with the letters that follow."""

    def __init__(self, start, end):
        self.ids = torch.tensor([LETTERS.index(letter) for letter in TEXT[start:end]])

    def __len__(self):
        return (len(self.ids) - 1) // LENGTH * 4 - 4

    def __getitem__(self, i):
        first = i * LENGTH // 4
        return self.ids[first : first + LENGTH], self.ids[first + 1 : first + LENGTH + 1]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        split = self.attend(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mix(self.between(x))


class Gpt(nn.Module):
    def __init__(self, width=64, heads=4, blocks=2):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)
        self.head.weight = self.letters.weight

    def forward(self, ids):
        x = self.letters(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Characters(ephemeron.Task):
    settings = {  # noqa: RUF012
        "epochs": 20,
        "clip_norm": 1.0,
        "accumulate": 2,
        "precision": "bf16-mixed",
        "early_stopping": {"monitor": "loss", "patience": 3},
        "run": {"workers": 4, "batch_size": 8},
    }

    def model(self):
        return Gpt()

    def training_step(self, model, batch):
        ids, following = batch
        return functional.cross_entropy(model(ids).flatten(0, 1), following.flatten())

    def evaluation_end(self, metrics):
        return {**metrics, "perplexity": math.exp(metrics["loss"])}

    def optimizers(self, model):
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        warmup = max(1, self.total_steps // 20)

        def rate(step):
            return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / self.total_steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_data(self):
        return Pieces(0, int(len(TEXT) * 0.85))

    def evaluation_data(self):
        return Pieces(int(len(TEXT) * 0.85), len(TEXT))
