"""Times of a placement with a given order, in fast plain Python; annealing calls it many thousand times.

An order lists all 2N passes, i for node i's forward and N + i for its backward pass, each after its dependencies. Passes begin in this
order as soon as their device is free and their inputs have arrived. A tensor is sent when it is produced, a gradient when its last reader
on the device has ended, and a link sends in the order of these events in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Pass, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTiming:
    """Begin of all passes and transfers."""

    makespan_s: float
    start_s: tuple[float, ...]
    """Begin by pass, 2N."""
    sends: tuple[tuple[float, int, int, int, bool], ...]
    """(start, tensor, source, target, whether it is the gradient), in the order of the list."""


def makespan_s(costs: Costs, where: Sequence[int], order: Sequence[int]) -> float:
    """Seconds of one iteration."""
    return _run(costs, where, order, None, None)


def timed(costs: Costs, where: Sequence[int], order: Sequence[int]) -> OrderTiming:
    """Seconds of one iteration, and begin of all passes and transfers."""
    starts = [0.0] * (2 * len(costs.nodes))
    sends: list[tuple[float, int, int, int, bool]] = []
    total_s = _run(costs, where, order, starts, sends)
    return OrderTiming(makespan_s=total_s, start_s=tuple(starts), sends=tuple(sends))


def _run(
    costs: Costs,
    where: Sequence[int],
    order: Sequence[int],
    starts: list[float] | None,
    sends: list[tuple[float, int, int, int, bool]] | None,
) -> float:
    n, size = len(costs.nodes), len(costs.devices)
    forward, backward, send, back = costs.forward, costs.backward, costs.send, costs.back
    outputs, inputs, consumers, producer, returns = (costs.outputs, costs.inputs, costs.consumers, costs.producer, costs.returns)
    free = [0.0] * size
    link = [[0.0] * size for _ in range(size)]
    ready = [0.0] * (2 * n)
    left: dict[int, int] = {}
    for op in order:
        if op < n:
            p = where[op]
            start = ready[op] if ready[op] > free[p] else free[p]
            end = free[p] = start + forward[op][p]
            if end > ready[n + op]:
                ready[n + op] = end
            for t in outputs[op]:
                arrived: dict[int, float] = {}
                for v in consumers[t]:
                    q = where[v]
                    at = end
                    if q != p:
                        if q in arrived:
                            at = arrived[q]
                            left[t * size + q] += 1
                        else:
                            begin = link[p][q]
                            if begin < end:
                                begin = end
                            at = arrived[q] = link[p][q] = begin + send[t][p][q]
                            left[t * size + q] = 1
                            if sends is not None:
                                sends.append((begin, t, p, q, False))
                    if at > ready[v]:
                        ready[v] = at
        else:
            v = op - n
            q = where[v]
            start = ready[op] if ready[op] > free[q] else free[q]
            end = free[q] = start + backward[v][q]
            for t in inputs[v]:
                u = producer[t]
                p = where[u]
                at = end
                if p != q and returns[t]:
                    key = t * size + q
                    left[key] -= 1
                    if left[key]:
                        continue
                    begin = link[q][p]
                    if begin < end:
                        begin = end
                    at = link[q][p] = begin + back[t][q][p]
                    if sends is not None:
                        sends.append((begin, t, q, p, True))
                if at > ready[n + u]:
                    ready[n + u] = at
        if starts is not None:
            starts[op] = start
    return max(free)


def ranked_order(costs: Costs, where: Sequence[int]) -> list[int]:
    """Order by longest remaining path: a good and always feasible start."""
    n = len(costs.nodes)
    rank = [0.0] * (2 * n)
    for i in range(n):  # producers' backward passes come last, so theirs is the shortest path
        p = where[i]
        after = [rank[n + costs.producer[t]] + costs.back[t][p][where[costs.producer[t]]] for t in costs.inputs[i]]
        rank[n + i] = costs.backward[i][p] + max(after, default=0.0)
    for i in reversed(range(n)):
        p = where[i]
        after = [rank[v] + costs.send[t][p][where[v]] for t in costs.outputs[i] for v in costs.consumers[t]]
        rank[i] = costs.forward[i][p] + max([rank[n + i], *after])
    depth = [*range(n), *range(2 * n - 1, n - 1, -1)]  # for times of 0: forward in order, then backward in reverse
    return sorted(range(2 * n), key=lambda op: (-rank[op], depth[op]))


def orders_of(costs: Costs, where: Sequence[int], order: Sequence[int]) -> DeviceOrders:
    """The order by device and link with names, for the simulator."""
    n = len(costs.nodes)
    at = timed(costs, where, order)
    ways: tuple[Pass, Pass] = ("forward", "backward")
    compute: dict[str, list[Task]] = {}
    for op in order:  # each device follows the list
        compute.setdefault(costs.devices[where[op % n]], []).append((costs.nodes[op % n], ways[op >= n]))
    transfers: dict[tuple[str, str], list[Task]] = {}
    for _, t, p, q, gradient in at.sends:
        transfers.setdefault((costs.devices[p], costs.devices[q]), []).append((costs.tensors[t], ways[gradient]))
    return DeviceOrders(
        compute={d: tuple(tasks) for d, tasks in compute.items()}, transfers={k: tuple(tasks) for k, tasks in transfers.items()}
    )
