"""Scaling to 1,000 functions, SIMULATED: `python -m benchmarks.scaling [--parts storage,compute,store] [--quick] [--json]`

Figure 8 of the survey (Cirrus, 2.2): store throughput with 30 MB/s for each function, gradients per second without exchange, and
samples per second through a sharded parameter server. All rates are of virtual time.

Measured in the same run, on this machine: CPU time of real minibatches (reading, cutting, gradient), of the client, and of a real shard for
each request, by least squares. Real code in virtual time: `SparseStore`, `ShardServer` and their frames, optimisers, retries and
throttled channels. Modelled: the object store (latency of a request, requests per second in all, answers that ask to slow down), bandwidth of a
function and of a shard's machine, network latency, a spread of compute times, and that a function has one core like ours.

storage   GB/s against functions, by size of the objects. A function reads an object while it uses the one before at 30 MB/s.
compute   gradients per second against functions, each with minibatches of 1,000 samples from partitions of 10 MB.
store     samples per second against functions, by size of the minibatch and number of shards; each shard has a core.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import scaling_network
from benchmarks.common import SEED, environment, write
from benchmarks.scaling_measured import ROWS, Measured, Minibatches, measure
from benchmarks.sparse_store_sides import TOKEN
from ephemeron.communication.channels.base import Channel, Wrapper
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.retrying import Retrying, RetryPolicy
from ephemeron.communication.channels.wrappers import Metered, Throttled
from ephemeron.errors import ChannelThrottled
from ephemeron.functions.simulation import run
from ephemeron.functions.world import Simulation
from ephemeron.sparse.store import AdaGrad, SparseStore
from ephemeron.sparse.store.server import ShardServer
from ephemeron.sparse.store.state import ShardState
from ephemeron.units import MB

WORLD = Simulation(straggler_sigma=0.1)
STORE_GETS_PER_S = 5500.0
"""What S3 documents for one prefix; more are answered by 503."""
CONSUMED_MB_S = 30.0
SHARD_MB_S = 300.0
"""MB/s of a shard's machine in each direction, for each shard."""
FUNCTIONS = (1, 100, 300, 1000)
STORE_FUNCTIONS = (1, 20, 100, 600)
OBJECT_MB = (1.0, 10.0)
BATCHES = (100, 1_000, 10_000)
SHARDS = (1, 4)
START_S = 10.0
"""All functions are connected by then."""
STEPS = (1, 3)
"""Steps of each function on average, between whose ends rates are taken."""
ALONE_STEPS = 10
"""Times as many for one function."""
PARTS = ("storage", "compute", "store")


class RequestLimit(Wrapper):
    """The request rate of an object store: what comes above it is refused with the request to slow down.

    Args:
        inner: the store that functions share.
        per_s: requests per second, of which a tenth of a second's may come at once.
    """

    def __init__(self, inner: Channel, per_s: float) -> None:
        super().__init__(inner)
        self.refused = 0
        self._per_s, self._free_at = per_s, 0.0

    async def fetch(self, key: str) -> memoryview | None:
        now = asyncio.get_running_loop().time()
        if self._free_at > now + 0.1:
            self.refused += 1
            raise ChannelThrottled("please reduce your request rate", key=key)
        self._free_at = max(now, self._free_at) + 1 / self._per_s
        return await self.inner.fetch(key)


def reader(store: Channel, rank: int) -> tuple[Metered, Channel]:
    """A function's own way to the store, and its meter."""
    network = Throttled(store, latency_s=WORLD.latency_s, bandwidth_mb_s=WORLD.bandwidth_mb_s)
    meter = Metered(network)
    return meter, Retrying(meter, policy=RetryPolicy(), rng=random.Random(f"{SEED} {rank}"))


def read_ahead(nbytes: int, functions: int, use: Callable[[int], Awaitable[None]], window: tuple[float, float]) -> dict[str, Any]:
    """Functions that read one object while they use the one before; what they read between two moments."""

    async def main() -> dict[str, Any]:
        objects = MemoryChannel()
        objects.publish("part", bytes(nbytes))
        store = RequestLimit(objects, STORE_GETS_PER_S)
        meters = []

        async def function(rank: int) -> None:
            meter, channel = reader(store, rank)
            meters.append(meter)
            await asyncio.sleep(random.Random(rank).random())
            ahead = asyncio.ensure_future(channel.fetch("part"))
            while True:
                await ahead
                ahead = asyncio.ensure_future(channel.fetch("part"))
                await use(rank)

        tasks = [asyncio.ensure_future(function(rank)) for rank in range(functions)]
        counts = []
        for moment in window:
            await asyncio.sleep(moment - asyncio.get_running_loop().time())
            counts.append((sum(m.bytes_down for m in meters), store.refused))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        seconds = window[1] - window[0]
        return {
            "gb_per_s": round((counts[1][0] - counts[0][0]) / seconds / 1e9, 4),
            "requests_refused_per_s": round((counts[1][1] - counts[0][1]) / seconds, 1),
        }

    return run(main())


def storage(functions: tuple[int, ...], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Figure 8a."""
    rows = []
    for size, count in itertools.product(OBJECT_MB, functions):
        nbytes = int(size * MB)

        async def use(rank: int, nbytes: int = nbytes) -> None:
            await asyncio.sleep(nbytes / (CONSUMED_MB_S * MB))

        rows.append({"object_mb": size, "functions": count, **read_ahead(nbytes, count, use, (3.0, 5.0))})
        say(f"storage {rows[-1]}")
    return with_efficiency(rows, "gb_per_s", ("object_mb",))


def compute(measured: Measured, functions: tuple[int, ...], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Figure 8b."""
    rows, size = [], 1_000
    batch, steps, window = measured.minibatches[size], measured.partition_rows // size, (2.0, 3.0)
    for count in functions:
        done = 0

        async def use(rank: int) -> None:
            nonlocal done
            loop = asyncio.get_running_loop()
            dice = random.Random(f"{SEED} {rank} {loop.time()}")
            for _ in range(steps):
                await asyncio.sleep((batch.load_s + batch.compute_s) * dice.lognormvariate(0, WORLD.straggler_sigma))
                done += window[0] <= loop.time() < window[1]

        read = read_ahead(measured.partition_bytes, count, use, window)
        rate = done / (window[1] - window[0])
        rows.append({"functions": count, "gradients_per_s": round(rate, 1), "samples_per_s": round(rate * size), **read})
        say(f"compute {rows[-1]}")
    return with_efficiency(rows, "gradients_per_s", ())


def store(measured: Measured, functions: tuple[int, ...], shards: tuple[int, ...], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Figure 8c."""
    rows = []
    for batch, count in itertools.product(measured.minibatches.values(), shards):
        for workers in functions:
            found = scaling_network.run(_store(measured, batch, workers, count), latency_s=WORLD.direct_latency_s)
            rows.append({"minibatch": batch.size, "shards": count, "functions": workers, **found})
            say(f"store {rows[-1]}")
    return with_efficiency(rows, "samples_per_s", ("minibatch", "shards"))


async def _store(measured: Measured, batch: Minibatches, workers: int, shards: int) -> dict[str, Any]:
    """Real clients and shards. Counts steps and time from the end of step 1 of each function on average to that of step 3."""
    loop = asyncio.get_running_loop()
    hosts, servers = [], []
    for shard in range(shards):
        hosts.append(scaling_network.Host(SHARD_MB_S, measured.service_s))
        servers.append(ShardServer(ShardState(shard, shards), token=TOKEN))
        await servers[-1].serve(scaling_network.Endpoint(f"shard {shard}", hosts[-1]))  # type: ignore[arg-type]

    async def locate(shard: int) -> tuple[str, int]:
        return f"shard {shard}", 0

    per_function = [part * (ALONE_STEPS if workers == 1 else 1) for part in STEPS]
    first, last = (part * workers for part in per_function)
    times: list[float] = []
    busy: list[list[float]] = []
    over = asyncio.Event()
    gradients = [np.ones((rows.size, 1), np.float32) for rows in batch.rows]

    async def function(rank: int) -> None:
        scaling_network.HOST.set(scaling_network.Host(WORLD.bandwidth_mb_s))
        dice = random.Random(f"{SEED} {rank}")
        async with await SparseStore.connect(locate, TOKEN, shards=shards) as client:
            await client.create("weights", ROWS, optimizer=AdaGrad(learning_rate=0.1))
            cpu_s = batch.load_s + batch.compute_s + measured.client.seconds(batch.rows[0].size, shards)
            await asyncio.sleep(START_S - loop.time() + cpu_s * dice.random())
            for step in itertools.count():
                which = (rank + step) % len(batch.rows)
                rows = batch.rows[which]
                await client.multi_get("weights", rows)
                cpu_s = batch.load_s + batch.compute_s + measured.client.seconds(rows.size, shards)
                await asyncio.sleep(cpu_s * dice.lognormvariate(0, WORLD.straggler_sigma))
                await client.push("weights", rows, gradients[which])
                times.append(loop.time())
                if len(times) in (first, last):
                    busy.append([host.busy_s for host in hosts])
                if len(times) >= last:
                    over.set()

    tasks = [asyncio.create_task(function(rank)) for rank in range(workers)]
    await over.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in servers:
        await server.close()
    seconds = times[last - 1] - times[first - 1]
    rate = (last - first) / seconds
    used = max(end - begin for begin, end in zip(*busy, strict=True)) / seconds
    return {
        "samples_per_s": round(rate * batch.size),
        "steps_per_s": round(rate, 1),
        "step_s": round(workers / rate, 6),
        "busiest_shard": round(used, 3),
    }


def with_efficiency(rows: list[dict[str, Any]], rate: str, by: tuple[str, ...]) -> list[dict[str, Any]]:
    """Adds the rate of each function, as a part of that of the fewest functions of its curve."""
    first: dict[tuple[Any, ...], float] = {}
    for row in rows:
        alone = first.setdefault(tuple(row[name] for name in by), row[rate] / row["functions"])
        row["efficiency"] = round(row[rate] / row["functions"] / alone, 3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="few functions and shards")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parts = args.parts.split(",")
    few, small, shards = (FUNCTIONS, STORE_FUNCTIONS, SHARDS) if not args.quick else ((1, 10), (1, 10, 50), (1, 4))

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    logging.getLogger("ephemeron").setLevel(logging.ERROR)  # refused requests are counted
    result: dict[str, Any] = {**environment(), "benchmark": "scaling", "simulated": True}
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder) / "data", BATCHES)
    result["measured"] = measured.to_json()
    result["modelled"] = {
        "store_latency_s": WORLD.latency_s,
        "store_gets_per_s": STORE_GETS_PER_S,
        "function_mb_s": WORLD.bandwidth_mb_s,
        "consumed_mb_s": CONSUMED_MB_S,
        "network_latency_s": WORLD.direct_latency_s,
        "shard_mb_s": SHARD_MB_S,
        "compute_sigma": WORLD.straggler_sigma,
    }
    result["published"] = {
        "storage": "linear to 1,000 functions at 30 MB/s each, objects of 10 MB",
        "compute": "linear to 1,000 functions",
        "store": "linear to 600 functions",
    }
    say(f"measured {result['measured']}")
    if "storage" in parts:
        result["storage"] = storage(few, say)
    if "compute" in parts:
        result["compute"] = compute(measured, few, say)
    if "store" in parts:
        result["store"] = store(measured, small, shards, say)
    if args.json:
        write(result)


if __name__ == "__main__":
    main()
