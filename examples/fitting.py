"""Training loop and command line that the three examples share.

Each example is a module of functions with the same names (`make`, `train`, `collate`, `build`, `loss`), which a job can name, too:

    model = "classification:build"
    loss = "classification:loss"
    [data]
    flow = "classification:train"
    path = "/tmp/shapes/store"
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ephemeron.data.flow import LocalReader


def fit(
    model: nn.Module, loss: Callable[[Any, Any], torch.Tensor], batches: Iterable[Any], optimizer: torch.optim.Optimizer
) -> list[float]:
    """Makes one pass over the batches. Returns the loss of each."""
    losses = []
    model.train()
    for inputs, targets in batches:
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def main(module: str) -> None:
    """Runs the command line of an example."""
    example = importlib.import_module(module)
    parser = argparse.ArgumentParser(prog=f"{module}.py", description=example.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder of the generated data, new or from an earlier run; temporary by default")
    parser.add_argument("--samples", type=int, default=400, help="number of generated samples (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--loaders", type=int, default=2, help="loader processes; 0: none (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of Adam (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix=f"{module}-"))
    store = folder / "store"
    if not store.exists():
        print(f"making {asked.samples} samples in {folder}")
        example.make(folder, samples=asked.samples, seed=asked.seed)
    torch.manual_seed(asked.seed)
    model = example.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=asked.lr)
    read = example.train(store).prepare_read(LocalReader(asked.loaders))
    with read.to_shuffled(asked.batch_size, getattr(example, "collate", None), seed=asked.seed) as batches:
        for epoch in range(asked.epochs):
            losses = fit(model, example.loss, batches, optimizer)
            print(f"epoch {epoch + 1}/{asked.epochs}  loss {sum(losses) / len(losses):.4f}")
        print(batches.counters.advice())
