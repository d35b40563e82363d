"""A loop over a flow whose samples take 3 ms each to decode, loaded where it runs or through the data service of the study."""

import argparse
import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import ephemeron
from ephemeron.data.flow import Flow, LocalReader
from ephemeron.data.service import RemoteReader


class Encoded(torch.utils.data.Dataset):
    """Sample numbers: what is stored."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return np.array([index], dtype=np.int64), index % 10


def decode(stored):
    """64 numbers of a sample, after 3 ms of CPU time."""
    end = time.thread_time() + 0.003
    while time.thread_time() < end:
        np.sort(np.arange(500)[::-1])
    rng = np.random.default_rng(int(stored[0]))
    image = rng.normal(size=64).astype(np.float32)
    image[int(stored[0]) % 10] += 2
    return image


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()

    flow = Flow("benchmark/encoded", version=1).dataset(Encoded(options.samples)).map_data("decode", decode, cache_control="can-cache")
    reader = RemoteReader() if os.environ.get("EPHEMERON_DATA_SERVICE") else LocalReader(workers=0)
    loader = flow.prepare_read(reader).to_shuffled(batch_size=50, seed=0, rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    run = ephemeron.current()
    run.register(model=model, optimizer=optimizer, loader=loader)
    for _ in run.epochs(options.epochs):
        total = 0.0
        for inputs, targets in run.steps(loader):
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            run.step(optimizer, loss)
            total += loss.item() * len(targets)
        run.log(loss=total / options.samples)


if __name__ == "__main__":
    main()
