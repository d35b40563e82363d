"""Iterations with and without sending during the backward pass, beside DistributedDataParallel: `python -m benchmarks.direct_overlap`.

W processes train ResNet-18 on the digits: with gradients that are sent after the backward pass (`after`), in pieces meanwhile
(`early`), and by DistributedDataParallel over gloo (`ddp`), in turns, so that all meet the same load of the machine. With `--rate` all bytes
pass a token bucket on the loopback interface of a network namespace of their own (`tc`; needs root): one link that all share.

Processes have the ordinary scheduling, unlike those of `benchmarks.direct`: with real-time scheduling a thread that sends waits until the one
that computes has used up its time. PyTorch has one thread in each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import subprocess
import sys
import tempfile
import time
import traceback
from statistics import median
from typing import Any

import numpy as np

from benchmarks import direct_models
from benchmarks.common import SEED, environment, write
from benchmarks.direct_rounds import _SPAWN, CaseFailed, DirectCase, DirectMember
from ephemeron.data import Samples
from ephemeron.data.batch_source import ArrayBatchSource
from ephemeron.data.sources import readers
from ephemeron.data.spec import DataSpec
from ephemeron.training.job import Target, TrainingOptions
from ephemeron.training.task.losses import make_loss
from ephemeron.training.task.program import JobTask, with_optimizers
from ephemeron.training.worker.non_finite import all_finite, gaps
from ephemeron.training.worker.trainers.early_pieces import EarlyContribution
from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer

SIDES = ("after", "early", "ddp")
BATCH, LEARNING_RATE, MOMENTUM = 16, 0.02, 0.9
ITERATIONS = 4
"""Of a burst."""
LIMIT_S = 600.0


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, metavar="W")
    parser.add_argument("--transport", choices=("shared", "unix", "tcp"), default="shared")
    parser.add_argument("--turns", type=int, default=7, help="bursts of each side")
    parser.add_argument("--rate", help="of the one link that all share, such as 4gbit; needs root and --transport tcp")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    if options.rate:
        sys.exit(in_namespace(options.rate, sys.argv[1:]))
    found = measure(options.workers, options.transport, options.turns)
    if options.json:
        write({**environment(), "benchmark": "direct_overlap", **found})
        return
    for side, row in found["sides"].items():
        print(
            f"{side}: {row['iteration_s'] * 1e3:.1f} ms per iteration, {row['cpu_s'] * 1e3:.1f} ms of CPU time per iteration"
            f" of all, {row['ratio_to_ddp']:.2f} x ddp"
        )


def in_namespace(rate: str, arguments: list[str]) -> int:
    """Runs this command in a network namespace whose loopback interface passes so many bits per second; returns its exit status."""
    name = f"overlap-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        inside = ["ip", "netns", "exec", name]
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        shape = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "2mb", "latency", "400ms"]
        subprocess.run([*inside, *shape], check=True)
        at = next(i for i, word in enumerate(arguments) if word.startswith("--rate"))
        rest = arguments[:at] + arguments[at + (1 if "=" in arguments[at] else 2) :]
        return subprocess.run([*inside, sys.executable, "-m", "benchmarks.direct_overlap", *rest], check=False).returncode
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def measure(workers: int, transport: str, turns: int) -> dict[str, Any]:
    """Seconds and CPU seconds of an iteration by side: medians over turns, and of the ratios within turns.

    Raises:
        CaseFailed: with the first failure.
    """
    barrier, answers = _SPAWN.Barrier(workers), _SPAWN.Queue()
    with tempfile.TemporaryDirectory() as folder:
        todo = [_SPAWN.Process(target=_work, args=(workers, transport, rank, folder, turns, barrier, answers)) for rank in range(workers)]
        for process in todo:
            process.start()
        try:
            parts = [answers.get(timeout=LIMIT_S) for _ in todo]
        except queue.Empty:
            raise CaseFailed(f"no answer within {LIMIT_S:.0f} s") from None
        finally:
            for process in todo:
                process.join(2)
                process.kill()
    if failures := [part for part in parts if isinstance(part, str)]:
        raise CaseFailed(failures[0])
    seconds = {
        side: [
            (max(e for _, e, _ in turn) - min(b for b, _, _ in turn)) / ITERATIONS
            for turn in zip(*(part[side] for part in parts), strict=True)
        ]
        for side in SIDES
    }
    cpu = {side: sum(median(c for _, _, c in part[side]) for part in parts) / ITERATIONS for side in SIDES}
    rows = {
        side: {
            "iteration_s": round(median(seconds[side]), 5),
            "cpu_s": round(cpu[side], 5),
            "ratio_to_ddp": round(median(a / b for a, b in zip(seconds[side], seconds["ddp"], strict=True)), 3),
        }
        for side in SIDES
    }
    return {"workers": workers, "transport": transport, "turns": turns, "sides": rows}


# -- inside a process -----------------------------------------------------------------------------------------


def _work(workers: int, transport: str, rank: int, folder: str, turns: int, barrier: Any, answers: Any) -> None:
    try:
        answers.put(asyncio.run(_measure(workers, transport, rank, folder, turns, barrier)))
    except Exception:  # noqa: BLE001 (every failure is reported to the measuring process)
        barrier.abort()
        answers.put(traceback.format_exc(limit=-3))


async def _measure(
    workers: int, transport: str, rank: int, folder: str, turns: int, barrier: Any
) -> dict[str, list[tuple[float, float, float]]]:
    """By side, begin, end and CPU seconds of each burst."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=workers)
    whole, _ = readers.read_digits(DataSpec(source="digits"))
    samples = whole.take(np.arange(rank, len(whole), workers))
    trainer, peer = _trainer(samples), DdpTrainer(samples)
    case = DirectCase(workers=workers, size_mb=4 * trainer.size / 1e6, transport=transport)
    member = await DirectMember.join(case, rank, folder)
    found: dict[str, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
    for turn in range(-1, turns):  # the first burst warms up
        for side in SIDES:
            await asyncio.to_thread(barrier.wait)
            began, cpu = time.monotonic(), time.process_time()
            if side == "ddp":
                await asyncio.to_thread(peer.iterate, ITERATIONS)
            else:
                await _iterate(member, trainer, ITERATIONS, early=side == "early")
            if turn >= 0:
                found[side].append((began, time.monotonic(), time.process_time() - cpu))
            await asyncio.to_thread(barrier.wait)
    await member.mesh.close()
    dist.destroy_process_group()
    return found


class _Batches:
    """Consecutive batches, from the beginning again when there are no more."""

    def __init__(self, samples: int) -> None:
        self._batches = samples // BATCH

    def batch(self, iteration: int) -> np.ndarray:
        """See `Positions`."""
        return np.arange(BATCH) + iteration % self._batches * BATCH


def _trainer(samples: Samples) -> TorchTrainer:
    import torch

    torch.manual_seed(SEED)
    model = direct_models.resnet18()
    optimizer = Target(target="SGD", options={"lr": LEARNING_RATE, "momentum": MOMENTUM})
    task = JobTask(lambda: model, make_loss(Target(target="cross_entropy"), _found), optimizer)
    program = with_optimizers(task, model, TrainingOptions(), find=_found, epoch_length=100, epochs=100)
    feed = ArrayBatchSource(samples, samples.take(np.arange(0)))
    return TorchTrainer(program, feed=feed, sampler=_Batches(len(samples)), exchange="gradients", seed=SEED)


def _found(name: str) -> Any:
    raise LookupError(name)


class DdpTrainer:
    """The same model with DistributedDataParallel."""

    def __init__(self, samples: Samples) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(SEED)
        self._inputs, self._targets = torch.from_numpy(samples.inputs), torch.from_numpy(samples.targets)
        self._model = DistributedDataParallel(direct_models.resnet18())
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._batches, self._t = _Batches(len(samples)), 0

    def iterate(self, n: int) -> None:
        """So many iterations."""
        import torch

        for _ in range(n):
            which = self._batches.batch(self._t)
            self._t += 1
            self._optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self._model(self._inputs[which]), self._targets[which])
            loss.backward()
            self._optimizer.step()
            float(loss.detach())


async def _iterate(member: DirectMember, trainer: TorchTrainer, n: int, *, early: bool) -> None:
    """What the training loop does, so many times."""
    collective, status = member.collective, member.group.status
    for _ in range(n):
        t, member.t = member.t, member.t + 1
        pieces = EarlyContribution(collective, t, lambda: 0, checked=True) if early else None
        trainer.give_early(pieces)
        step = await asyncio.to_thread(_computed, trainer, t, pieces)
        collective.submit(t, step.vector, float(step.weight or step.samples))
        upload = asyncio.ensure_future(collective.upload(t))
        reduce = asyncio.ensure_future(collective.reduce(t))
        merged = await collective.wait(t)
        await upload
        await asyncio.to_thread(_apply, trainer, merged.vector)
        status.applied = status.durable = t + 1
        await reduce


def _computed(trainer: TorchTrainer, iteration: int, pieces: EarlyContribution | None) -> Any:
    step = trainer.compute(iteration)
    taken = pieces.taken if pieces is not None else []
    assert all(all_finite(step.vector[start:stop]) for start, stop in gaps(taken, step.vector.size))
    return step


def _apply(trainer: TorchTrainer, mean: np.ndarray) -> None:
    assert all_finite(mean)
    trainer.apply(mean)


if __name__ == "__main__":
    main()
