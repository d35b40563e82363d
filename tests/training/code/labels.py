"""Models and tasks whose losses are means over labels, in several forms."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import ephemeron


class Net(nn.Module):
    """Three scores. Samples with a large first input take part in a layer of their own."""

    def __init__(self, end=None):
        super().__init__()
        self.first, self.last, self.rare = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(6, 3)
        self.end = end

    def forward(self, x):
        out, rare = self.last(torch.tanh(self.first(x))), x[:, 0] > 1.2
        if rare.any():
            out = out + torch.where(rare[:, None], self.rare(x), 0.0)
        return torch.sigmoid(out) if self.end else out


def build(end=None):
    return Net(end)


def stack():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def straight(output, targets):
    return functional.cross_entropy(output, targets)


def weighed(output, targets):
    known = targets != -100
    terms = functional.cross_entropy(output[known], targets[known], reduction="none")
    return {"loss": terms.sum() / known.sum(), "weight": known.sum()}


class Labels(ephemeron.Task):
    """Cross-entropy of some labels, and how its training step reports it."""

    def __init__(self, how, weight=1.0):
        self.how, self.weight = how, weight

    def model(self):
        return build()

    def optimizers(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def training_step(self, model, batch):
        x, y = batch
        scores, labelled = model(x), y != -100
        match self.how:
            case "plain":
                return functional.cross_entropy(scores, y)
            case "given":
                return {"loss": functional.cross_entropy(scores, y), "weight": int(labelled.sum())}
            case "masked":
                terms = functional.cross_entropy(scores, y, reduction="none")
                return {"loss": (terms * labelled).sum() / labelled.sum(), "weight": labelled.sum()}
            case "summed":
                return functional.cross_entropy(scores, y, reduction="sum")
            case "said":
                return {"loss": -scores.log_softmax(1)[labelled, y[labelled]].sum(), "reduction": "sum"}
            case "scaled":
                return functional.cross_entropy(scores, y, reduction="sum") * 0.5
            case "noisy":
                return functional.cross_entropy(scores, y, reduction="sum") * torch.rand(())
            case _:
                return {"loss": functional.cross_entropy(scores, y), "weight": self.weight}
