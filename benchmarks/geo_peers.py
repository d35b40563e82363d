"""Two regions beside torchft's DiLoCo and LocalSGD on the same emulated link: seconds and bytes to accuracy. A part of `benchmarks.geo`.

    pip install torchft-nightly
    python -m benchmarks.geo --parts peers

Needs root: each region is a process in a network namespace of its own, limited by `tc tbf` in both directions; bytes are those of the kernel's counters. All
sides train the same model from the same weights on the same skewed halves of the digits, with the same inner optimiser and the same number of iterations between two exchanges,
and measure accuracy on the same test set after each exchange. Sides alternate. torchft's own quantisation needs a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ephemeron.testing import wan_namespaces
from ephemeron.testing.wan_namespaces import RegionNamespaces

NAMES = ("east", "west")
SIDES = {
    "ours diloco": ("diloco:lr=0.7,momentum=0.9", "none"),
    "ours diloco int4": ("diloco:lr=0.7,momentum=0.9", "int4"),
    "ours sma": ("sma", "none"),
    "torchft DiLoCo": ("torchft", "diloco"),
    "torchft LocalSGD": ("torchft", "local-sgd"),
}
EVERY = 20
ROUNDS = 16
TARGET = 0.95
PORT = 29_510
_CLONE_NEWUTS = 0x04000000


def data(region: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training samples of a region, of which 60 % are sorted by class between the two, and test samples."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    targets = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(targets)))
    test, rest = order[:360], order[360:]
    sorted_part, mixed = rest[: int(0.6 * len(rest))], rest[int(0.6 * len(rest)) :]
    by_class = sorted_part[torch.argsort(targets[sorted_part], stable=True)]
    own = torch.cat([by_class.chunk(2)[region], mixed.chunk(2)[region]])
    return inputs[own], targets[own], inputs[test], targets[test]


class Trainer:
    """Model, data and the record of one region."""

    def __init__(self, region: int, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.inputs, self.targets, self.test_inputs, self.test_targets = data(region, seed)
        self._rng = np.random.default_rng([seed, region])
        self.rows: list[dict[str, float]] = []
        self.began = 0.0
        self._bytes = 0

    def begin(self) -> None:
        """Clock and counter begin."""
        self.began, self._bytes = time.monotonic(), _kernel_bytes()

    def step(self) -> None:
        """One optimiser step on a batch of 32."""
        batch = torch.from_numpy(self._rng.integers(0, len(self.targets), 32))
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.inputs[batch]), self.targets[batch]).backward()
        self.optimizer.step()

    def record(self) -> None:
        """Accuracy after an exchange; its own time does not count."""
        now, nbytes = time.monotonic(), _kernel_bytes()
        with torch.no_grad():
            right = (self.model(self.test_inputs).argmax(1) == self.test_targets).float().mean().item()
        self.rows.append({"s": now - self.began, "bytes": nbytes - self._bytes, "accuracy": right})
        self.began += time.monotonic() - now


def _kernel_bytes() -> int:
    folder = Path("/sys/class/net/wan0/statistics")
    return sum(int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes"))


async def ours(arguments: argparse.Namespace, policy: str, compression: str) -> Trainer:
    """Communicator, policies and compression of ephemeron."""
    from ephemeron.communication.channels.address import open_channel
    from ephemeron.regions.communicator.base import Update
    from ephemeron.regions.communicator.network import RegionNetwork
    from ephemeron.regions.communicator.tcp import TcpCommunicator
    from ephemeron.regions.policies import parse_sync
    from ephemeron.regions.region_state import RegionState
    from ephemeron.training.worker.spec import GroupNetwork

    trainer, own = Trainer(arguments.region, arguments.seed), NAMES[arguments.region]
    parameters = list(trainer.model.parameters())
    vector = torch.nn.utils.parameters_to_vector(parameters).detach().numpy().copy()
    whole, state = slice(0, vector.size), RegionState(parse_sync(policy), NAMES, compression, vector)
    network = RegionNetwork(GroupNetwork(listen=f"{arguments.addresses[arguments.region]}:{PORT}"), token="token")

    def iterations() -> None:
        for _ in range(EVERY):
            trainer.step()

    async with open_channel(Path(arguments.store).as_uri()) as channel:
        made = TcpCommunicator(channel, network, run="run", token="token", region=own, identity=own, fence=1, names=NAMES)
        async with made as communicator:
            await communicator.join()
            await _both(communicator, 1)
            trainer.begin()
            for number in range(2, ROUNDS + 2):
                await asyncio.to_thread(iterations)
                vector = torch.nn.utils.parameters_to_vector(parameters).detach().numpy().copy()
                payload = state.payload(whole, vector)
                mine = Update(
                    region=own, fence=1, fragment=0, round=number, samples=32 * EVERY, norm=state.norm(payload, whole), payload=payload
                )
                await communicator.publish(mine)
                deadline = asyncio.get_running_loop().time() + 300
                other = await communicator.get(NAMES[1 - arguments.region], 0, number, deadline=deadline)
                pair = sorted([mine, other], key=lambda update: NAMES.index(update.region))
                contributions = [c for _, c in state.accepted(pair, whole)]
                merged = state.policy.merge(whole, vector, contributions, last=False)
                torch.nn.utils.vector_to_parameters(torch.from_numpy(merged.astype(np.float32)), parameters)
                await communicator.acknowledge(other.region, 0, number)
                trainer.record()
            await communicator.leave(after=ROUNDS + 1)
    return trainer


async def _both(communicator: Any, number: int) -> None:
    """A round without content: both regions are there."""
    from ephemeron.regions.communicator.base import Update

    await communicator.publish(Update(region=communicator.region, fence=1, fragment=0, round=number, samples=1, norm=0.0, payload=b"0"))
    (other,) = [name for name in NAMES if name != communicator.region]
    await communicator.get(other, 0, number, deadline=asyncio.get_running_loop().time() + 120)
    await communicator.acknowledge(other, 0, number)


def torchft(arguments: argparse.Namespace, kind: str) -> Trainer:
    """torchft's local SGD, as its documentation uses it; the lighthouse is in the first region."""
    own = arguments.addresses[arguments.region]
    if ctypes.CDLL(None).unshare(_CLONE_NEWUTS) == 0:  # torchft announces the name of the machine, which both regions share
        socket.sethostname(own)
    from datetime import timedelta

    from torch.distributed import TCPStore
    from torchft._torchft import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    os.environ["GLOO_SOCKET_IFNAME"] = "wan0"
    lighthouse = LighthouseServer(bind=f"{own}:{PORT}", min_replicas=2) if arguments.region == 0 else None
    trainer = Trainer(arguments.region, arguments.seed)
    store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=300)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=trainer.model.load_state_dict,
        state_dict=trainer.model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        hostname=own,
        lighthouse_addr=f"http://{arguments.addresses[0]}:{PORT}",
        replica_id=NAMES[arguments.region],
        timeout=limit,
        quorum_timeout=limit,
        connect_timeout=limit,
        init_sync=False,
    )
    model = trainer.model
    if kind == "diloco":
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        context: Any = DiLoCo(manager, [model], trainer.optimizer, outer, sync_every=EVERY, pin_memory=False)
    else:
        context = LocalSGD(manager, model, trainer.optimizer, sync_every=EVERY)
    with context:
        first = True
        while len(trainer.rows) < ROUNDS + 1:
            if first:
                trainer.begin()
            for _ in range(EVERY):
                trainer.step()
            if first:  # the quorum, the process group and the first weights, which ours has before its clock begins
                first = False
                trainer.begin()
                trainer.rows.append({})
            else:
                trainer.record()
    trainer.rows = trainer.rows[1:]
    del lighthouse
    time.sleep(0.5)  # the other replica's last commit goes through this one's manager
    manager.shutdown(wait=False)
    return trainer


def to_accuracy(rows: list[dict[str, float]]) -> dict[str, float] | None:
    """The first exchange after which the target is reached, and kept for one more."""
    for row, after in zip(rows, [*rows[1:], rows[-1]], strict=True):
        if row["accuracy"] >= TARGET and after["accuracy"] >= TARGET:
            return row
    return None


def run_side(side: str, mbit_s: float, seed: int) -> dict[str, Any]:
    """Both regions of a side, from new namespaces on."""
    with RegionNamespaces(dict.fromkeys(NAMES, mbit_s), routed=True) as regions, tempfile.TemporaryDirectory() as store:
        addresses = [regions[name].address for name in NAMES]
        commands = [
            [
                *regions[name].command,
                sys.executable,
                "-m",
                "benchmarks.geo_peers",
                "--side",
                side,
                "--region",
                str(i),
                "--seed",
                str(seed),
                "--addresses",
                *addresses,
                "--store",
                store,
            ]
            for i, name in enumerate(NAMES)
        ]
        running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
        try:
            outputs = [process.communicate(timeout=400) for process in running]
        finally:
            for process in running:
                process.kill()
        for process, (_, errors) in zip(running, outputs, strict=True):
            if process.returncode:
                raise RuntimeError(f"{side} failed: {errors.strip().splitlines()[-5:]}")
        rows = json.loads(outputs[0][0].strip().splitlines()[-1])
    reached = to_accuracy(rows)
    return {
        "last_accuracy": rows[-1]["accuracy"],
        "seconds_all": rows[-1]["s"],
        "bytes_all": rows[-1]["bytes"],
        "seconds": None if reached is None else reached["s"],
        "bytes": None if reached is None else reached["bytes"],
    }


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Plain values of this part."""
    if why := wan_namespaces.unavailable():
        return {"skipped": why}
    has_peer = importlib.util.find_spec("torchft") is not None
    sides = [side for side, (kind, _) in SIDES.items() if has_peer or kind != "torchft"]
    found: dict[str, Any] = {
        "target_accuracy": TARGET,
        "exchange_every": EVERY,
        "rounds": ROUNDS,
        "regions": len(NAMES),
        "peer_installed": has_peer,
        "links": {},
    }
    for mbit_s in (10.0,) if quick else (10.0, 100.0):
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for seed in range(1 if quick else 3):
            for side in sides if seed % 2 == 0 else reversed(sides):
                results[side].append(run_side(side, mbit_s, seed))
                say(f"{mbit_s:g} Mbit/s, seed {seed}, {side}: {results[side][-1]}")
        found["links"][f"{mbit_s:g} Mbit/s"] = {side: _summary(runs) for side, runs in results.items()}
    return found


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    reached = [run for run in runs if run["seconds"] is not None]
    found: dict[str, Any] = {"runs": len(runs), "reached": len(reached)}
    for key in ("seconds", "bytes", "seconds_all", "bytes_all", "last_accuracy"):
        values = [run[key] for run in (reached if key in ("seconds", "bytes") else runs)]
        found[key] = round(statistics.median(values), 4) if values else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="One region of one side; started by benchmarks.geo.")
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--region", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--addresses", nargs=2, required=True)
    parser.add_argument("--store", required=True)
    arguments = parser.parse_args()
    kind, option = SIDES[arguments.side]
    trainer = torchft(arguments, option) if kind == "torchft" else asyncio.run(ours(arguments, kind, option))
    print(json.dumps(trainer.rows), flush=True)
    os._exit(0)  # torchft's threads would wait for each other


if __name__ == "__main__":
    main()
