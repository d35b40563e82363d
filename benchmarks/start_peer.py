"""The fastest start of DistributedDataParallel that we know: one process makes all imports and is forked for each worker.

    python -m benchmarks.start_peer --workers 4 --data FILE.npz --epochs 1 --out FILE

Users start it with torchrun (`direct_peers ddp`), where each worker makes the imports.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from pathlib import Path

import torch.distributed  # before the fork, as all that the workers need
import torch.nn.parallel
import torch.utils.data.distributed

from benchmarks import direct_models, direct_peers


def _worker(rank: int, port: int, options: argparse.Namespace) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options.workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    direct_peers.ddp(options)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.model, options.learning_rate = direct_models.digits.__name__, direct_peers.LEARNING_RATE
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # imports what optimisers import on first use
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked = multiprocessing.get_context("fork")
    workers = [forked.Process(target=_worker, args=(rank, port, options)) for rank in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker has failed")


if __name__ == "__main__":
    main()
