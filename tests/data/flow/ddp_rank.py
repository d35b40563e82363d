"""A rank of two that train with DistributedDataParallel over gloo: `python ddp_rank.py RANK PORT_FILE`. Prints JSON."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loader_kinds import Table, ids, loss, model, weights
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ephemeron.data.flow import Flow
from ephemeron.errors import JobError

WORLD = 2


def loader(kind: str, rank: int, samples: int, batch: int, shuffle: bool) -> tuple[Any, Any]:
    """A loader, and what is told the epoch."""
    table = Table(samples)
    if kind == "flow":
        view = Flow("test/table").dataset(table).prepare_read()
        ranks = {"rank": rank, "world_size": WORLD} if shuffle else {}  # else: as in the process group
        made: Any = view.to_shuffled(batch, seed=3, shuffle=shuffle, **ranks)
        return made, made
    sampler: Any = DistributedSampler(table, WORLD, rank, shuffle=shuffle, seed=3)
    made = {"torch": DataLoader, "stateful": StatefulDataLoader}[kind]
    return made(table, batch, sampler=sampler), sampler


def train(kind: str, rank: int, samples: int, batch: int, shuffle: bool) -> dict[str, Any]:
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    batches, sampler = loader(kind, rank, samples, batch, shuffle)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen.append([])
        for inputs, targets in batches:
            seen[-1].append(ids((inputs, targets)))
            optimizer.zero_grad()
            loss(net(inputs), targets).backward()
            optimizer.step()
    return {"seen": seen, "length": len(batches), "weights": weights(net)}


def main(rank: int, store: str, cases: list[list[Any]]) -> None:
    torch.set_num_threads(1)
    view = Flow("test/table").dataset(Table(8)).prepare_read()
    too_early, for_each = view.to_shuffled(4), view.to_shuffled(4, rank=0, world_size=1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    assert [len(ids(batch)) for batch in for_each] == [4, 4], "all samples for each rank, if that is meant"
    for begin in (lambda: next(iter(too_early)), lambda: next(iter(too_early.batch_sampler))):
        with pytest.raises(JobError, match="before the process group of 2 ranks"):
            begin()
    print(json.dumps([train(case[0], rank, *case[1:]) for case in cases]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
