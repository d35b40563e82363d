"""Stands for an executor while a computation is only planned: takes its programs, and runs none of them.

Time of a program on a number of functions, and the largest size of its temporary tiles.

Small graphs are scheduled task by task, as functions would take them: the longest chain first. For a large one, of which they take earlier
steps of the outermost loop first, the length of the longest chain and the temporary tiles are taken from the same program with fewer tiles
(its sizes divided by f and by 2 f), and the time is the sum of work per function and chain (Brent 1974), an upper bound for any schedule
that leaves no function idle while a task is ready.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ephemeron.events import Traffic
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.unrolled import UnrolledGraph, chain_orders
from ephemeron.linalg.language.program import Node, Program, Role
from ephemeron.linalg.matrices.stored import CLOUD, LOCAL, FunctionSpeed, Shape, StoredMatrix, TileFamily, Tiles
from ephemeron.linalg.matrices.tile_store import PLANNED
from ephemeron.linalg.prediction.program_work import ProgramWork, TaskWork, product_flops, share
from ephemeron.units import human_bytes, human_count, human_seconds, human_usd

if TYPE_CHECKING:
    from ephemeron.executor import FunctionExecutor

_SOLVER_FLOPS = {
    "eigh": 9.0,
    "eigvalsh": 1.4,
    "svd": 22.0,
    "svdvals": 2.7,
    "pseudo_inverse": 24.0,
    "triangle_condition": 0.0,
    "cholesky_condition": 0.0,
    "lu_condition": 0.0,
}
"""By m n min(m, n) of the matrix that one function solves."""
_LOCAL_START_S, _CLOUD_START_S = 0.6, 2.0
_LOCAL_TASK_S, _LOCAL_EDGE_S = 0.010, 0.004
"""CPU seconds of a function of this machine for the queue's requests: for a task, and for each task that waits for it."""
_CACHE_TASK_S, _CACHE_EDGE_S = 0.003, 0.001
"""The same with a queue in a cache: 5 ms for a task with two such edges, measured with tiles of 80 rows."""
_SHARED = 0.75
"""Rate of products that functions of this machine have while they fill its cores, as a share of that of one process that is alone: measured for
Cholesky factorisations and products of 4,000 rows, whose tiles pass through the same memory."""
_COPY_S_PER_BYTE = 2e-10
_PER_TASK = Traffic(puts=4, gets=5, polls=2, lists=3)
"""Requests of a queue of objects for a task: lease, batch, log, their reading back, counts."""
_PER_EDGE = Traffic(puts=2, gets=1, polls=1, lists=2)
"""The same for each task that waits for another one."""
_AT_ONCE = 4
"""Tasks whose requests to a remote store a function has in flight."""
_LISTS_PER_S = 10
"""Of the client: it looks for results, and how many tasks are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a computation will take, from the shapes of its tiles."""

    algorithm: str
    tasks: int = 0
    flops: float = 0.0
    """Floating-point operations on real numbers."""
    bytes_read: float = 0.0
    """By tasks, those of cached tiles included."""
    bytes_written: float = 0.0
    output_bytes: float = 0.0
    """Of results, and of what later programs of the same computation read."""
    temporary_bytes: float = 0.0
    """Largest size of temporary tiles at once, beside them."""
    executors: int = 0
    seconds: float = 0.0
    chain_s: float = 0.0
    """Longest chain of tasks that wait for each other: no number of functions is faster."""
    core_seconds: float = 0.0
    """Seconds that tasks compute, times vCPUs."""
    requests: int = 0
    """To the store."""
    cost_usd: float = 0.0
    """At list prices; for local functions what a cloud's would cost."""
    prices: str = ""
    """Name and date of the price list."""
    task_bytes: float = 0.0
    """Largest size of the tiles that one task reads and writes."""

    def __add__(self, other: Prediction) -> Prediction:
        """Figures of two programs, one after the other, under the name of the first."""
        sums = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name not in ("algorithm", "executors", "temporary_bytes", "prices", "task_bytes")
        }
        return dataclasses.replace(
            self,
            executors=max(self.executors, other.executors),
            temporary_bytes=max(self.temporary_bytes, other.temporary_bytes),
            prices=other.prices,
            task_bytes=max(self.task_bytes, other.task_bytes),
            **sums,
        )

    def __str__(self) -> str:
        return (
            f"{self.algorithm}: {human_count(self.tasks, 'task')}, {self.flops / 1e9:.1f} Gflop; about {human_seconds(self.seconds)} on "
            f"{human_count(self.executors, 'function')} (at least {human_seconds(self.chain_s)} on any number), "
            f"{self.core_seconds:.1f} core-seconds; {human_bytes(self.bytes_read)} read, {human_bytes(self.bytes_written)} written, "
            f"{human_bytes(self.output_bytes + self.temporary_bytes)} stored at most beside the inputs; about {human_usd(self.cost_usd)} "
            f"({self.prices})"
        )


class Planner:
    """Takes the programs of one computation.

    Args:
        executor: that would run them.
        algorithm: name.
    """

    def __init__(self, executor: FunctionExecutor, algorithm: str) -> None:
        self.prediction = Prediction(algorithm=algorithm)
        self._executor = executor
        self._families: dict[str, Shape] = {}
        self._programs = 0
        self._is_local = executor.platform == "local"
        base = LOCAL if self._is_local else CLOUD
        rate = product_flops() if self._is_local else base.flops
        if self._is_local and executor.max_workers * executor.vcpus >= (os.cpu_count() or 1):
            rate *= _SHARED
        self._speed: FunctionSpeed = dataclasses.replace(base, flops=rate)
        self._vcpus = executor.vcpus
        self._has_cache = executor.channel.startswith("redis")

    @property
    def memory_mb(self) -> int:
        """Of a function."""
        return self._executor.memory_mb

    def plan(
        self, program: Program, sizes: Mapping[str, int], inputs: Mapping[str, Tiles], outputs: Mapping[str, Tiles]
    ) -> dict[str, Tiles]:
        """Adds a program. Returns its outputs, which have no tiles."""
        matrices = {**inputs, **outputs}
        itemsize = next(np.dtype(m.dtype).itemsize for m in matrices.values() if isinstance(m, StoredMatrix))
        given = {n: self._families[m.name] for n, m in inputs.items() if isinstance(m, TileFamily) and m.name in self._families}
        work = ProgramWork(program, sizes, matrices, given, itemsize)
        self._add(program, sizes, work.statements)
        self._programs += 1
        made: dict[str, Tiles] = {
            name: dataclasses.replace(each, name=f"planned-{self._programs}-{name}", store=PLANNED) for name, each in outputs.items()
        }
        for name, each in made.items():
            self._families[each.name] = work.tile_shape(name)
        self.prediction = dataclasses.replace(
            self.prediction, output_bytes=self.prediction.output_bytes + sum(_bytes(each) for each in made.values())
        )
        return made

    def plan_gathered(self, solver: str, matrix: StoredMatrix, outputs: Sequence[StoredMatrix]) -> list[StoredMatrix]:
        """Adds a task that reads a whole matrix. Returns its outputs, which have no tiles."""
        self._programs += 1
        made = [dataclasses.replace(each, name=f"planned-{self._programs}-{n}", store=PLANNED) for n, each in enumerate(outputs)]
        written, itemsize = sum(map(_bytes, made)), np.dtype(matrix.dtype).itemsize
        flops = _SOLVER_FLOPS.get(solver, 10.0) * matrix.rows * matrix.columns * min(matrix.shape)
        stored = [index for index in matrix.indices() if matrix.is_stored(*index)]
        read = sum(math.prod(matrix.tile_shape(*index)) for index in stored) * itemsize
        work = TaskWork(
            line=0,
            kernel="small_svd",
            tasks=1,
            flops=flops,
            bytes_read=float(read),
            bytes_written=written,
            tiles_read=len(stored),
            tiles_written=sum(math.prod(each.tiles) for each in made),
            edges=0,
        )
        seconds = self._seconds(work).latency
        self._count(solver, [work], Schedule(seconds=seconds, chain_s=seconds, temporary_tiles=0))
        self.prediction = dataclasses.replace(self.prediction, output_bytes=self.prediction.output_bytes + written)
        return made

    def _add(self, program: Program, sizes: Mapping[str, int], statements: Sequence[TaskWork]) -> None:
        by_line = {s.line: self._seconds(s) for s in statements}
        work_s = sum(s.tasks * self._seconds(s).busy for s in statements)
        executors = self._executors(statements)
        found = scheduled(program, sizes, by_line.__getitem__, work_s=work_s, executors=executors)
        self._count(program.name, statements, found)

    def _executors(self, statements: Sequence[TaskWork]) -> int:
        return max(1, min(self._executor.max_workers, sum(s.tasks for s in statements)))

    def _count(self, name: str, statements: Sequence[TaskWork], found: Schedule) -> None:
        tasks, executors = sum(s.tasks for s in statements), self._executors(statements)
        compute_s = sum(s.tasks * self._compute_s(s) for s in statements)
        first = not self.prediction.tasks
        start_s = (_LOCAL_START_S if self._is_local else _CLOUD_START_S) if first else 0.0
        seconds = start_s + found.seconds
        traffic = self._traffic(statements, seconds)
        written = sum(s.tasks * s.bytes_written for s in statements)
        prices, gb = self._executor.prices, self._executor.memory_mb / 1024
        lifetimes = max(1, math.ceil(seconds / self._executor.function_timeout_s))
        cost = prices.functions_usd(executors * seconds * gb, executors * lifetimes if first else 0) + prices.storage_usd(traffic)
        mean = written / max(1, sum(s.tasks * s.tiles_written for s in statements))
        self.prediction += Prediction(
            algorithm=name,
            tasks=tasks,
            flops=sum(s.tasks * s.flops for s in statements),
            bytes_read=sum(s.tasks * s.bytes_read for s in statements),
            bytes_written=written,
            temporary_bytes=found.temporary_tiles * mean,
            executors=executors,
            seconds=seconds,
            chain_s=found.chain_s,
            core_seconds=compute_s * self._vcpus,
            cost_usd=cost,
            prices=f"{prices.name}, {prices.as_of}",
            requests=traffic.puts + traffic.gets + traffic.polls + traffic.lists,
            task_bytes=max(s.bytes_read + s.bytes_written for s in statements),
        )

    def _traffic(self, statements: Sequence[TaskWork], seconds: float) -> Traffic:
        """Requests to the store: of tiles, which are read back, and of the queue, if it is one of objects."""
        read, written = (
            sum(s.tasks * n for s, n in each)
            for each in ([(s, s.tiles_read) for s in statements], [(s, s.tiles_written) for s in statements])
        )
        tiles = Traffic(
            puts=round(written),
            gets=round(read + written),
            bytes_up=round(sum(s.tasks * s.bytes_written for s in statements)),
            bytes_down=round(sum(s.tasks * s.bytes_read for s in statements)),
        )
        if self._has_cache:
            return tiles
        edges = sum(s.tasks * s.edges for s in statements)
        queue = _times(_PER_TASK, sum(s.tasks for s in statements)) + _times(_PER_EDGE, edges)
        return tiles + queue + Traffic(lists=round(_LISTS_PER_S * seconds))

    def _compute_s(self, s: TaskWork) -> float:
        return s.flops / (self._speed.flops * self._vcpus * share(s.kernel)) + _COPY_S_PER_BYTE * s.bytes_written

    def _seconds(self, s: TaskWork) -> TaskSeconds:
        compute_s = self._compute_s(s)
        read_s, write_s = s.bytes_read / self._speed.bytes_per_s, s.bytes_written / self._speed.bytes_per_s
        if self._is_local:  # transfers and requests take the function's own CPU time
            task_s, edge_s = (_CACHE_TASK_S, _CACHE_EDGE_S) if self._has_cache else (_LOCAL_TASK_S, _LOCAL_EDGE_S)
            all_s = compute_s + read_s + write_s + task_s + s.edges * edge_s
            return TaskSeconds(busy=all_s, latency=all_s)
        task_s = self._speed.task_s
        return TaskSeconds(busy=max(compute_s, read_s, write_s, task_s / _AT_ONCE), latency=compute_s + read_s + write_s + task_s)


def _times(traffic: Traffic, n: float) -> Traffic:
    return Traffic(
        puts=round(n * traffic.puts), gets=round(n * traffic.gets), polls=round(n * traffic.polls), lists=round(n * traffic.lists)
    )


def _bytes(made: Tiles) -> float:
    if not isinstance(made, StoredMatrix):
        return 0.0
    down, across = made.tiles
    tiles = down * across if made.structure == "full" else down * (across + 1) / 2
    return float(tiles * made.tile_rows * made.tile_columns * np.dtype(made.dtype).itemsize)


# -- time of a program on a number of functions -------------------------------------------------------------------


MOST_TASKS = 1500
"""Of a graph that is scheduled task by task."""
_KEPT = 4
"""Sizes up to this are never made smaller: they are often a number of rounds, not of tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSeconds:
    """Time of a task."""

    busy: float
    """In which its function computes or transfers: tiles of the next task are read, and those of the previous one written, meanwhile."""
    latency: float
    """From when it may start to when tasks that follow it may: read, compute, write, record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Figures of a program on some functions."""

    seconds: float
    chain_s: float
    """Longest chain of tasks that wait for each other."""
    temporary_tiles: float
    """Largest number of temporary tiles at once."""


def scheduled(
    program: Program, sizes: Mapping[str, int], seconds: Callable[[int], TaskSeconds], *, work_s: float, executors: int
) -> Schedule:
    """Time and temporary tiles of a program.

    Args:
        program, sizes: the program.
        seconds: of a task of a statement, by its line.
        work_s: sum of `busy` over all tasks.
        executors: functions.
    """
    fraction = 1
    while Analysis(program, _smaller(sizes, fraction)).count() > MOST_TASKS:
        fraction *= 2
    if fraction == 1:
        return _simulated(program, sizes, seconds, executors, critical_path=True)
    some = _simulated(program, _smaller(sizes, fraction), seconds, executors)
    fewer = _simulated(program, _smaller(sizes, 2 * fraction), seconds, executors)
    chain_s = fewer.chain_s + (2 * fraction - 1) * max(0.0, some.chain_s - fewer.chain_s)
    growth = math.log2(max(1.0, some.temporary_tiles / max(1.0, fewer.temporary_tiles)))
    return Schedule(seconds=work_s / executors + chain_s, chain_s=chain_s, temporary_tiles=some.temporary_tiles * fraction**growth)


def _smaller(sizes: Mapping[str, int], fraction: int) -> dict[str, int]:
    return {name: max(min(n, _KEPT), -(-n // fraction)) for name, n in sizes.items()}


def _simulated(
    program: Program, sizes: Mapping[str, int], seconds: Callable[[int], TaskSeconds], executors: int, *, critical_path: bool = False
) -> Schedule:
    """List scheduling of the whole graph."""
    graph = UnrolledGraph(program, sizes)
    order: Callable[[Node], Any] = chain_orders(graph).__getitem__ if critical_path else _order
    roles = {matrix.name: matrix.role for matrix in program.matrices}
    waiting = {node: graph.upstream_count(node) for node in graph.nodes}
    chain: dict[Node, float] = {}
    ready = [(order(node), node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    free = [0.0] * executors
    running: list[tuple[float, Node]] = []
    readers: dict[tuple[str, tuple[int, ...]], int] = {}
    now = end = longest = 0.0
    stored = most = 0
    while ready or running:
        while ready and free and free[0] <= now:
            _, node = heapq.heappop(ready)
            took = seconds(node.line)
            heapq.heapreplace(free, now + took.busy)
            heapq.heappush(running, (now + took.latency, node))
            chain[node] = took.latency + max((chain[each] for each in graph.upstream(node)), default=0.0)
            longest = max(longest, chain[node])
        if not running or (ready and free[0] < running[0][0]):
            now = free[0]
            continue
        now, node = heapq.heappop(running)
        end = max(end, now)
        for tile in graph.writes(node):
            if roles[tile[0]] is Role.TEMPORARY:
                readers[tile] = graph.reader_count(*tile)
                stored += 1
        most = max(most, stored)
        for tile in dict.fromkeys(graph.reads(node)):
            if tile in readers:
                readers[tile] -= 1
                stored -= readers[tile] == 0
        for child in graph.downstream(node):
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, (order(child), child))
    return Schedule(seconds=max(end, max(free)), chain_s=longest, temporary_tiles=most)


def _order(node: Node) -> tuple[int, int]:
    return node.indices[0] if node.indices else 0, node.line
