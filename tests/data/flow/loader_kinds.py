"""The same data behind three loaders: PyTorch's `DataLoader`, torchdata's `StatefulDataLoader`, and a flow's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ephemeron.data.flow import Flow, LocalReader

KINDS = ("torch", "stateful", "flow")
SAMPLES = 22
BATCH = 4
"""Six batches, the last one of two."""
FEATURES = 3


class Table:
    """Sample i is (three numbers that follow from i, i)."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.rows = np.random.default_rng(7).normal(size=(samples, FEATURES)).astype(np.float32)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.rows[i], int(i)


def loader(kind: str, *, shuffle: bool = False, workers: int = 0, samples: int = SAMPLES, batch: int = BATCH, drop: bool = False) -> Any:
    """One of `KINDS`."""
    table = Table(samples)
    if kind == "flow":
        read = Flow("test/table").dataset(table).prepare_read(LocalReader(workers))
        return read.to_shuffled(batch, seed=3, shuffle=shuffle, remainder="drop" if drop else "even")
    made = {"torch": DataLoader, "stateful": StatefulDataLoader}[kind]
    return made(table, batch, shuffle=shuffle, num_workers=workers, drop_last=drop, generator=torch.Generator().manual_seed(3))


def ids(batch: Any) -> list[int]:
    """Numbers of the samples in a batch."""
    return [int(i) for i in batch[1]]


def read(batches: Iterable[Any]) -> list[list[int]]:
    """All batches, as numbers of samples."""
    return [ids(batch) for batch in batches]


def model() -> torch.nn.Linear:
    """Always with the same weights."""
    made = torch.nn.Linear(FEATURES, 1)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[0.5, -0.25, 0.125]]))
        made.bias.zero_()
    return made


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Whose gradient depends on which samples come together, and in which order."""
    return ((output[:, 0] - targets.float() / 10) ** 2).mean()


def weights(module: torch.nn.Module) -> list[float]:
    """All parameters."""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
