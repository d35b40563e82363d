"""NumPyWren's size on simulated functions: `python -m benchmarks.linalg_scale --json`.

simulated   N = 262,144 in tiles of 4,096 on up to 512 functions of one vCPU, with the latency and bandwidth of S3 and a function
            (`benchmarks.linalg_scale_model` says what is real and what is modelled): time, core-seconds, cost, and utilisation over time.
            `ideal_s` is flops / (vCPUs × rate): no system beats it. A cluster of as many vCPUs is billed for all of them all the time.
autoscaling functions for each task in the queue against time and cost (the scaling factor of NumPyWren's provisioner).
analysis    real: time of a query of the dependency analysis, and its memory, for 10² to 10⁶ tiles.
scheduler   real: tasks released per second, without computing anything, by queue adapter; each task's edges are connected and counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import SEED, condensed, environment, write
from benchmarks.linalg_scale_model import Outcome, Simulated, World, curve
from benchmarks.servers import started_valkey
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.events import Traffic
from ephemeron.functions.tasks.model import TaskEdge, TaskResult, TaskSpec
from ephemeron.functions.tasks.open_queue import Adapter, open_queue
from ephemeron.functions.tasks.queue import TaskQueue
from ephemeron.functions.tasks.scaling import ScalingLimits
from ephemeron.linalg.algorithms import cholesky as cholesky_programs
from ephemeron.linalg.algorithms import products
from ephemeron.linalg.algorithms import qr as qr_programs
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.language.program import Node, Program
from ephemeron.training.planner.prices import load_prices

PROGRAMS: Mapping[str, tuple[Program, Sequence[str]]] = {
    "cholesky": (cholesky_programs.cholesky, ("N",)),
    "gemm": (products.matmul, ("M", "N", "K")),
    "qr": (qr_programs.qr, ("M", "N")),
}
PENALTY_S = 20.0
"""Start penalty of table 4 for each function."""
FACTORS = (0.125, 0.25, 0.5, 1.0)
PARTS = ("simulated", "autoscaling", "analysis", "scheduler")


def simulate(
    operation: str, tiles: int, tile: int, *, functions: int = 512, factor: float = 1.0, static: bool = False, parts: int = 40
) -> dict[str, Any]:  # fmt: skip
    """A row of figures."""
    program, names = PROGRAMS[operation]
    world = World(functions=functions)
    limits = ScalingLimits(most=functions, tasks_per_executor=1 / factor, hold_s=20.0, burst=1000, starts_per_s=100.0)
    began = time.perf_counter()
    out = Simulated(program, dict.fromkeys(names, tiles), tile=tile, world=world, limits=limits, static=static).run()
    return {
        "operation": operation, "n": tiles * tile, "tile": tile, "functions": functions, "scaling_factor": factor,
        "provisioner": "none: all functions all the time" if static else "scaling.decide",
        **figures(out, world), "simulated_in_s": round(time.perf_counter() - began, 1), "utilisation": curve(out, world, parts=parts),
    }  # fmt: skip


def figures(out: Outcome, world: World) -> dict[str, Any]:
    """Time, core-seconds and cost of a run."""
    prices = load_prices("objects")
    ideal_s = out.flops / (world.functions * world.flops)
    reads = round(out.bytes_read and out.requests * out.bytes_read / (out.bytes_read + out.bytes_written))
    storage = prices.storage_usd(Traffic(puts=out.requests - reads, gets=reads))
    return {
        "tasks": out.tasks,
        "seconds": round(out.seconds, 1),
        "ideal_s": round(ideal_s, 1),
        "to_ideal": round(out.seconds / ideal_s, 3),
        "core_seconds": {
            "computing": round(out.computing_s),
            "functions": round(out.active_s),
            "functions_with_start_of_table_4": round(out.active_s + PENALTY_S * out.starts),
            "cluster": round(out.seconds * world.functions),
            "cluster_at_ideal_time": round(ideal_s * world.functions),
        },
        "starts": out.starts,
        "most_functions": out.most_functions,
        "utilisation_of_functions": round(out.computing_s / out.active_s, 4),
        "tb_read": round(out.bytes_read / 1e12, 3),
        "tb_written": round(out.bytes_written / 1e12, 3),
        "usd": {
            "functions": round(prices.functions_usd(out.active_s * world.memory_gb, out.starts), 2),
            "requests": round(storage, 2),
        },
    }


def analysis(repeats: int) -> list[dict[str, Any]]:
    """Queries at random nodes of the tiled Cholesky factorisation."""
    rows = []
    for tiles in (10, 100, 1000):
        dice = random.Random(SEED)
        graph = Analysis(cholesky_programs.cholesky, {"N": tiles})
        nodes = []
        lines = sorted(cholesky_programs.cholesky.calls)
        while len(nodes) < repeats:
            i = dice.randrange(tiles - 2)
            j = dice.randrange(i + 1, tiles)
            k = dice.randrange(i + 1, j + 1)
            nodes.append(Node(lines[-1] if i else lines[-2], (i, j, k)))
        times: dict[str, list[float]] = {"downstream": [], "upstream_count": [], "reader_count": []}
        for node in nodes:
            for name, values in times.items():
                began = time.perf_counter()
                if name == "reader_count":
                    for tile in graph.reads(node):
                        graph.reader_count(*tile)
                else:
                    getattr(graph, name)(node)
                values.append(1e6 * (time.perf_counter() - began))
        began = time.perf_counter()
        tasks = graph.count()
        counted_s = time.perf_counter() - began
        tracemalloc.start()
        graph = Analysis(cholesky_programs.cholesky, {"N": tiles})
        for node in nodes[:20]:
            (
                graph.downstream(node),
                graph.upstream_count(node),
                [graph.reader_count(*tile) for tile in graph.reads(node)],
            )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append(
            {
                "tiles": tiles * tiles, "tasks": tasks, "counted_in_s": round(counted_s, 4), "peak_memory_kb": round(peak / 1e3, 1),
                "microseconds": {name: condensed(values) for name, values in times.items()},
            }
        )  # fmt: skip
    return rows


class _Graph:
    """Tasks of a program for a queue."""

    def __init__(self, tiles: int) -> None:
        self.graph = Analysis(cholesky_programs.cholesky, {"N": tiles})
        self._nodes: dict[str, Node] = {}

    def spec(self, node: Node) -> TaskSpec:
        name = self._name(node)
        self._nodes[name] = node
        return TaskSpec(id=name, function="none", then=tuple(map(self._name, self.graph.downstream(node))))

    def edges(self, task: TaskSpec) -> list[TaskEdge]:
        node = self._nodes[task.id]
        return [
            TaskEdge(name=self._name(child), inputs=self.graph.upstream_count(child), tasks=(self.spec(child),), order=child.indices[0])
            for child in self.graph.downstream(node)
        ]  # fmt: skip

    def _name(self, node: Node) -> str:
        return "-".join(map(str, (node.line, *node.indices)))


async def _released(queues: Sequence[TaskQueue], tiles: int) -> int:
    """Runs all tasks, which do nothing, on one executor per queue object; returns their number."""
    graph = _Graph(tiles)
    left = total = graph.graph.count()
    for node in graph.graph.start_nodes():
        await queues[0].publish([graph.spec(node)], order=0)

    async def executor(queue: TaskQueue) -> None:
        nonlocal left
        while left:
            leases = await queue.take(4)
            if not leases:
                await asyncio.sleep(0.001)
            for lease in leases:
                for task in lease.tasks:
                    await asyncio.gather(*(queue.connect(edge) for edge in graph.edges(task)))
                recorded = await queue.complete(lease, [TaskResult(id=task.id) for task in lease.tasks])
                left -= len(recorded)

    await asyncio.gather(*map(executor, queues))
    return total


async def _adapter(name: str, channel: Channel, tiles: int, executors: int) -> dict[str, Any]:
    adapter: Adapter = "redis" if name == "valkey" else "objects"
    queues = [open_queue(channel, "bench", owner=f"e{n}", adapter=adapter) for n in range(executors)]
    cpu, began = time.process_time(), time.perf_counter()
    tasks = await _released(queues, tiles)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    requests = sum((queue.traffic for queue in queues), Traffic())
    await queues[0].clear()
    return {
        "adapter": name, "executors": executors, "tasks": tasks, "tasks_per_s": round(tasks / seconds, 1),
        "tasks_per_cpu_s_of_clients": round(tasks / cpu_s, 1),
        "requests_per_task": round((requests.puts + requests.gets + requests.polls + requests.lists) / tasks, 2) or None,
    }  # fmt: skip


def scheduler(tiles: int) -> list[dict[str, Any]]:
    """Adapters in turns; all executors share one event loop of one process."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = started_valkey(Path(folder), durable=False)
        try:
            for executors in (1, 8):
                for name in ("valkey", "folder", "memory"):

                    async def one(name: str = name, executors: int = executors) -> dict[str, Any]:
                        if name == "memory":
                            return await _adapter(name, MemoryChannel(), tiles, executors)
                        address = (
                            f"redis://127.0.0.1:{server.port}/0"
                            if name == "valkey"
                            else Path(folder, f"q{executors}").as_uri()
                        )
                        async with open_channel(address) as channel:
                            return await _adapter(name, channel, tiles, executors)

                    rows.append(asyncio.run(one()))
                    print(rows[-1], file=sys.stderr)
        finally:
            server.process.kill()
    return rows


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A picture of utilisation over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(rows), 1, figsize=(8, 3 * len(rows)), squeeze=False)
    for row, axis in zip(rows, axes[:, 0], strict=True):
        x = [point["until_s"] for point in row["utilisation"]]
        axis.step(x, [point["functions"] for point in row["utilisation"]], where="pre", label="functions")
        axis.step(
            x,
            [point["computing"] * row["functions"] for point in row["utilisation"]],
            where="pre",
            label="of which compute",
        )
        axis.set_title(f"{row['operation']}, n = {row['n']:,}, {row['functions']} vCPUs (simulated)")
        axis.set_xlabel("seconds")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--operations",
        nargs="*",
        choices=tuple(PROGRAMS),
        default=tuple(PROGRAMS),
        help="GEMM and QR have more tasks, and half as many tiles",
    )
    parser.add_argument("--tiles", type=int, default=64, help="rows of tiles; N = 64 × 4096 = 262,144")
    parser.add_argument("--tile", type=int, default=4096)
    parser.add_argument("--scheduler-tiles", type=int, default=12, help="of the graph that adapters release")
    parser.add_argument("--queries", type=int, default=200, help="of the analysis at each size")
    parser.add_argument("--picture", type=Path, help="file for a picture of utilisation over time")
    parser.add_argument("--json", action="store_true", help="as all benchmarks; there is no other output")
    arguments = parser.parse_args()
    result = environment()
    if "simulated" in arguments.parts:
        rows, half = [], max(2, arguments.tiles // 2)
        runs = {
            "cholesky": ((arguments.tiles, False), (arguments.tiles, True)),
            "gemm": ((half, False),),
            "qr": ((half, False),),
        }
        for operation in arguments.operations:
            for tiles, static in runs[operation]:
                rows.append(simulate(operation, tiles, arguments.tile, static=static))
                print({k: v for k, v in rows[-1].items() if k != "utilisation"}, file=sys.stderr)
        result["simulated"] = rows
        if arguments.picture:
            draw(rows, arguments.picture)
    if "autoscaling" in arguments.parts:
        half = max(2, arguments.tiles // 2)
        result["autoscaling_simulated"] = [
            simulate("cholesky", half, arguments.tile, factor=factor, parts=10) for factor in FACTORS
        ]
    if "analysis" in arguments.parts:
        result["analysis"] = analysis(arguments.queries)
    if "scheduler" in arguments.parts:
        result["scheduler"] = scheduler(arguments.scheduler_tiles)
    write(result)


if __name__ == "__main__":
    main()
