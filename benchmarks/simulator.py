"""Speed and size of the simulator, and the cost of hand-offs in it: `python -m benchmarks.simulator`.

Four parts: channel operations per second of wall time; a run of 200 workers; the cost of short function timeouts
(virtual time, so exact); and the number of objects that a long run keeps in its store.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import condensed, environment, write
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.channels.wrappers import Metered, Throttled
from ephemeron.communication.keys import Keys
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.functions.simulation import run
from ephemeron.prices import load_prices
from ephemeron.training.collectives import Group, KReduce, ReductionStatus
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.run_driver import RunDriver
from ephemeron.training.job import Configuration, Simulation, Target
from ephemeron.training.worker.spec import RunSpec

BATCH = 16
WORLD = Simulation(compute={"a": 50.0, "b": 4.0, "m": 0.0}, warm_start_s=0.05, cold_start_s=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes")
    arguments = parser.parse_args()
    result = {**environment(), "benchmark": "simulator", **measure(quick=arguments.quick)}
    if arguments.json:
        write(result)
    else:
        Console(width=110).print_json(data=result)


def measure(*, quick: bool) -> dict[str, Any]:
    """Runs all four parts. Each whole run has a process of its own, so that its peak memory is measured separately."""
    part = 10 if quick else 1
    return {
        "operations": [operations(w, k, 12_000 // part) for w, k in ((4, 2), (16, 4), (50, 4), (50, 16), (200, 4))],
        "large_runs": [alone(large_run, 200 // part, k, 100 // part) for k in (4, 16)],
        "relays": [alone(handoffs, 4, 2, 1000 // part), alone(handoffs, 16, 4, 1000 // part)],
        "long_run": alone(long_run, 4, 2, 2000 // part),
    }


# -- channel operations ---------------------------------------------------------------------------------------


def operations(workers: int, aggregators: int, about: int) -> dict[str, Any]:
    """Puts and gets of K-REDUCE with 64 elements, through RunChannel(Throttled(memory)), per second of wall time."""
    per_round = aggregators * workers + 2 * aggregators * (workers - 1)
    wall, cpu = [], []
    for _ in range(5):
        meters: list[Metered] = []
        began, cpu_began = time.perf_counter(), time.process_time()
        run(_rounds(workers, aggregators, max(1, about // per_round), meters))
        done = sum(m.puts + m.gets for m in meters)
        wall.append(done / (time.perf_counter() - began))
        cpu.append(done / (time.process_time() - cpu_began))
    return {"workers": workers, "aggregators": aggregators, "operations_per_s": condensed(wall), "operations_per_cpu_s": condensed(cpu)}


async def _rounds(workers: int, aggregators: int, rounds: int, meters: list[Metered]) -> None:
    store = MemoryChannel()

    async def worker(rank: int) -> None:
        network = Throttled(store, latency_s=0.01, bandwidth_mb_s=70)
        channel = RunChannel(network, owner=f"rank {rank}")
        meters.append(channel.meter)
        group = Group(
            keys=Keys("benchmark"),
            rank=rank,
            world=workers,
            aggregators=aggregators,
            channel=channel,
            policy=policy_for("bsp"),
            size=64,
            dtype=np.dtype(np.float32),
            status=ReductionStatus(),
        )
        collective, vector = KReduce(group), np.full(64, rank, dtype=np.float32)
        for iteration in range(rounds):
            group.status.applied = group.status.durable = iteration
            collective.submit(iteration, vector, 1.0)
            await collective.upload(iteration)
            await asyncio.gather(collective.reduce(iteration), collective.wait(iteration))
            await collective.collect_garbage()

    await asyncio.gather(*(worker(rank) for rank in range(workers)))


# -- whole runs -----------------------------------------------------------------------------------------------


class CountingStore:
    """Largest number of objects that a store had at once, seen from a task beside the run."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self._objects = objects
        self.most = 0

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, len(self._objects))
            await asyncio.sleep(0.005)


async def simulate(
    workers: int, aggregators: int, iterations: int, *, lifetime_s: float = 900.0, count: bool = False, **options: Any
) -> dict[str, Any]:
    """A run with the synthetic trainer, from the launch to the result."""
    configuration = Configuration(
        platform="simulated",
        channel="memory",
        workers=workers,
        aggregators=aggregators,
        batch_size=BATCH,
        memory_mb=1769,
        function_timeout_s=lifetime_s,
        **options,
    ).resolved()
    spec = RunSpec(
        run_id="b",
        model=Target(target="x"),
        loss=Target(target="x"),
        optimizer=Target(target="x"),
        configuration=configuration,
        epochs=1,
        seed=1,
        dtype="float32",
        samples=BATCH * workers * iterations,
        prices=load_prices("objects"),
        trainer="synthetic",
    )
    platform = SimulatedPlatform(WORLD)
    store: MemoryChannel = platform.store  # type: ignore[assignment]
    trigger = RunDriver(platform, store, spec, channel_address="memory", clock=asyncio.get_running_loop().time, on_event=lambda e: None)
    counting = CountingStore(store.objects)
    watcher = asyncio.ensure_future(counting.watch()) if count else None
    await trigger.launch(Prepared(job=None, spec=spec, objects={Keys("b").spec: [spec.to_bytes()]}, model_bytes=0))  # type: ignore[arg-type]
    ending = await trigger.watch()
    if watcher is not None:
        watcher.cancel()
    traffic = trigger.ledger.traffic
    return {
        "status": ending.status,
        "causes": ending.causes,
        "weights": ("" if ending.final is None else str(ending.final.weights_sha256))[:12],
        "virtual_s": round(trigger.ledger.ended_at, 3),
        "invocations": trigger.ledger.invocations,
        "operations": traffic.puts + traffic.gets + traffic.polls,
        "objects_left": len(store.objects),
        "most_objects": counting.most if count else None,
    }


def large_run(workers: int, aggregators: int, iterations: int) -> dict[str, Any]:
    """Wall time and memory of one large run."""
    began = time.perf_counter()
    outcome = run(simulate(workers, aggregators, iterations))
    wall_s = time.perf_counter() - began
    return {
        "workers": workers,
        "aggregators": aggregators,
        "iterations": iterations,
        **outcome,
        "wall_minutes": round(wall_s / 60, 3),
        "operations_per_s": round(outcome["operations"] / wall_s),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
    }


def handoffs(workers: int, aggregators: int, iterations: int) -> dict[str, Any]:
    """Run with a function timeout of a tenth of its duration, compared with a run without a limit."""
    whole = run(simulate(workers, aggregators, iterations))
    lifetime_s = whole["virtual_s"] / 10
    parts = run(simulate(workers, aggregators, iterations, lifetime_s=lifetime_s))
    return {
        "workers": workers,
        "aggregators": aggregators,
        "iterations": iterations,
        "lifetime_s": round(lifetime_s, 3),
        "whole": whole,
        "relayed": parts,
        "ratio": round(parts["virtual_s"] / whole["virtual_s"], 4),
        "same_weights": whole["weights"] == parts["weights"],
    }


def long_run(workers: int, aggregators: int, iterations: int) -> dict[str, Any]:
    """Largest number of objects that a long run keeps at once."""
    began = time.perf_counter()
    outcome = run(simulate(workers, aggregators, iterations, count=True))
    return {
        "workers": workers,
        "aggregators": aggregators,
        "iterations": iterations,
        **outcome,
        "wall_minutes": round((time.perf_counter() - began) / 60, 3),
    }


def alone(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Runs a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


if __name__ == "__main__":
    main()
