"""Training on a flow is training on a DataLoader: the same order gives the same losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ephemeron.data.flow import BatchStream, Flow, LocalReader


class Stripes(Dataset[Any]):
    """Images of stripes, across or down."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, i: int) -> tuple[Any, int]:
        down = i % 2
        image = np.random.default_rng(i).normal(0, 0.5, (1, 8, 8)).astype(np.float32)
        wave = np.sin(np.arange(8, dtype=np.float32))
        image += wave[None, :, None] if down else wave[None, None, :]
        return image, down


def losses(epochs: list[Any]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for batches in epochs:
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(float(loss))
    return out


def test_the_loss_curve_is_that_of_a_dataloader_on_the_same_order():
    data = Stripes()
    view = Flow("test/stripes").dataset(data).prepare_read(LocalReader(2))
    with view.to_shuffled(16, seed=7) as batches:
        mine = losses([batches, batches])
    orders = [BatchStream(samples=90, batch_size=16, seed=7, epoch=e).order() for e in (0, 1)]
    theirs = losses([DataLoader(data, 16, sampler=[int(i) for i in order]) for order in orders])
    assert mine == theirs
    assert np.mean(mine[-3:]) < np.mean(mine[:3])
