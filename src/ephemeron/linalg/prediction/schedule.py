"""Time of a program on a number of functions, and the largest size of its temporary tiles.

Small graphs are scheduled task by task, as functions would take them: the longest chain first. For a large one, of which they take earlier
steps of the outermost loop first, the length of the longest chain and the temporary tiles are taken from the same program with fewer tiles
(its sizes divided by f and by 2 f), and the time is the sum of work per function and chain (Brent 1974), an upper bound for any schedule
that leaves no function idle while a task is ready.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.unrolled import UnrolledGraph, chain_orders
from ephemeron.linalg.language.program import Node, Program, Role

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
