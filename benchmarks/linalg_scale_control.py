"""Control of LAmbdaPACK programs, really run, for `benchmarks.linalg_scale`: queries of the dependency analysis, and queues that release tasks."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import SEED, condensed
from benchmarks.servers import started_valkey
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.events import Traffic
from ephemeron.functions.tasks.model import TaskEdge, TaskResult, TaskSpec
from ephemeron.functions.tasks.open_queue import Adapter, open_queue
from ephemeron.functions.tasks.queue import TaskQueue
from ephemeron.linalg.algorithms.equations import cholesky
from ephemeron.linalg.algorithms.qr import qr
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.language.program import Node, Program

ROWS = (10, 100, 1000, 10**6)
"""Rows of tiles of square matrices: 10², 10⁴, 10⁶ and 10¹² tiles."""


def analysis(repeats: int) -> list[dict[str, Any]]:
    """Queries at random updates of Cholesky and of tiled QR."""
    return [queries_of(program, rows, repeats) for program in (cholesky, qr) for rows in ROWS]


def _updates(program: Program, rows: int, number: int) -> list[Node]:
    """Random tasks that update a tile to the right of a panel, of steps after the first."""
    dice, lines = random.Random(SEED), sorted(program.calls)
    nodes = []
    for _ in range(number):
        step = dice.randrange(1, rows - 2)
        j = dice.randrange(step + 1, rows)
        if program is cholesky:
            nodes.append(Node(lines[-1], (step, j, dice.randrange(step + 1, j + 1))))
        else:  # apply_leaf
            nodes.append(Node(lines[3], (step, dice.randrange(step, rows), j)))
    return nodes


def queries_of(program: Program, rows: int, repeats: int) -> dict[str, Any]:
    sizes, nodes = dict.fromkeys(program.sizes, rows), _updates(program, rows, repeats)
    graph = Analysis(program, sizes)
    inputs = {"A"}

    def readers(node: Node) -> list[int]:
        return [graph.reader_count(*tile) for tile in graph.reads(node) if tile[0] not in inputs]

    queries = {"downstream": graph.downstream, "upstream_count": graph.upstream_count, "reader_counts_of_what_it_reads": readers}
    times: dict[str, list[float]] = {name: [] for name in queries}
    for node in nodes:
        for name, query in queries.items():
            began = time.process_time()
            query(node)
            times[name].append(1e6 * (time.process_time() - began))
    began = time.process_time()
    tasks = graph.count()
    counted_s = time.process_time() - began
    peaks = []
    for number in (len(nodes) // 10, len(nodes)):  # memory does not grow with the number of queries either
        tracemalloc.start()
        graph = Analysis(program, sizes)
        for node in nodes[:number]:
            graph.downstream(node), graph.upstream_count(node), readers(node)
        peaks.append(round(tracemalloc.get_traced_memory()[1] / 1e3, 1))
        tracemalloc.stop()
    row = {
        "program": program.name,
        "tiles": rows * rows,
        "tasks": tasks,
        "counted_in_cpu_s": round(counted_s, 4),
        "peak_memory_kb": {"queries": [len(nodes) // 10, len(nodes)], "peak": peaks},
        "cpu_microseconds": {name: condensed(values) for name, values in times.items()},
    }
    print(row, file=sys.stderr)
    return row


_MEASURED = ("tasks_per_s", "tasks_per_cpu_s_of_clients", "requests_per_task")


class _Graph:
    """Tasks of a program for a queue."""

    def __init__(self, tiles: int) -> None:
        self.graph = Analysis(cholesky, {"N": tiles})
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
        ]

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
        "adapter": name,
        "executors": executors,
        "tasks": tasks,
        "tasks_per_s": round(tasks / seconds, 1),
        "tasks_per_cpu_s_of_clients": round(tasks / cpu_s, 1),
        "requests_per_task": round((requests.puts + requests.gets + requests.polls + requests.lists) / tasks, 2) or None,
    }


def scheduler(tiles: int, repeats: int) -> list[dict[str, Any]]:
    """Adapters in turns; all executors share one event loop of one process."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        server = started_valkey(Path(folder), durable=False)
        try:
            for turn in range(repeats):
                for executors in (1, 8):
                    for name in ("valkey", "folder", "memory"):
                        place = f"redis://127.0.0.1:{server.port}/0" if name == "valkey" else Path(folder, f"q{turn}-{executors}").as_uri()

                        async def one(name: str = name, executors: int = executors, place: str = place) -> dict[str, Any]:
                            if name == "memory":
                                return await _adapter(name, MemoryChannel(), tiles, executors)
                            async with open_channel(place) as channel:
                                return await _adapter(name, channel, tiles, executors)

                        found.setdefault((name, executors), []).append(asyncio.run(one()))
                        print(found[name, executors][-1], file=sys.stderr)
        finally:
            server.process.kill()
    return [_middle(rows) for rows in found.values()]


def _middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first row, with medians of what was measured, and the range of the rate."""
    medians = {name: statistics.median(row[name] for row in rows) for name in _MEASURED if rows[0][name] is not None}
    rates = [row["tasks_per_s"] for row in rows]
    return {**rows[0], **medians, "tasks_per_s_least_and_most": [min(rates), max(rates)], "n": len(rows)}
