"""The runs of `direct_runs` as users of PyTorch write them: DistributedDataParallel over gloo, and Ray Train.

    torchrun --nproc-per-node 4 -m benchmarks.direct_peers ddp  --model digits --data FILE.npz --epochs 15 --out FILE
    python -m benchmarks.direct_peers ray --model digits --data FILE.npz --epochs 15 --workers 4 --out FILE

Both evaluate after each epoch, each worker its part of the test set, as our runs do.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

BATCH, SEED = 16, 0
LEARNING_RATE, MOMENTUM = 0.1, 0.9


def train(model_name: str, data: str, epochs: int, rank: int, world: int, wrapped: Any, learning_rate: float) -> dict[str, Any]:
    """The loop of one worker.

    Args:
        model_name: function in `direct_models`.
        data: NPZ file with `train_inputs`, `train_targets`, `test_inputs` and `test_targets`.
        epochs: passes over the training set.
        rank, world: of the worker.
        wrapped: makes a model data-parallel.
        learning_rate: of SGD with momentum.

    Returns:
        Iterations, seconds per iteration without the first one, Unix time of the end of the first iteration, accuracy.
    """
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    from benchmarks import direct_models

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    with np.load(data) as arrays:
        train_set, test = (
            TensorDataset(torch.from_numpy(arrays[f"{part}_inputs"]), torch.from_numpy(arrays[f"{part}_targets"]))
            for part in ("train", "test")
        )
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, world, rank, shuffle=True, seed=SEED)
    loader = DataLoader(train_set, BATCH, sampler=sampler)
    mine = range(rank * len(test) // world, (rank + 1) * len(test) // world)
    model = wrapped(getattr(direct_models, model_name)())
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM)
    first = began = 0.0
    iterations, accuracy = 0, 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            iterations += 1
            if iterations == 1:
                first, began = time.time(), time.perf_counter()
        model.eval()
        with torch.no_grad():
            inputs, targets = test[mine.start : mine.stop]
            right = (model(inputs).argmax(1) == targets).sum().reshape(1)
        dist.all_reduce(right)
        accuracy = float(right) / len(test)
    each_s = (time.perf_counter() - began) / (iterations - 1)
    return {"iterations": iterations, "iteration_s": each_s, "first_iteration_at": first, "accuracy": accuracy}


def ddp(options: argparse.Namespace) -> None:
    """One process of torchrun."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = train(options.model, options.data, options.epochs, rank, world, DistributedDataParallel, options.learning_rate)
    if rank == 0:
        options.out.write_text(json.dumps(found))
    dist.destroy_process_group()


def ray_train(options: argparse.Namespace) -> None:
    """A TorchTrainer on a Ray cluster of this machine, started for it as `ray.init()` does."""
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    out, model, data = str(options.out), options.model, options.data
    epochs, learning_rate = options.epochs, options.learning_rate

    def loop() -> None:
        import ray.train
        import ray.train.torch

        context = ray.train.get_context()
        rank, world = context.get_world_rank(), context.get_world_size()
        found = train(model, data, epochs, rank, world, ray.train.torch.prepare_model, learning_rate)
        if rank == 0:
            Path(out).write_text(json.dumps(found))

    ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False)
    scaling = ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": 1})
    TorchTrainer(loop, scaling_config=scaling, torch_config=TorchConfig(backend="gloo")).fit()
    ray.shutdown()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("ddp", "ray"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    {"ddp": ddp, "ray": ray_train}[options.side](options)


if __name__ == "__main__":
    main()
