"""Orders by list dispatching: a free device runs the ready pass that comes first in a list.

A list that is followed strictly (`sequencing`) waits for its next pass although another one is ready; dispatching never does. Neither is
always better. Forward-backward improvement (Li and Willis 1992) dispatches backwards in time by ends of passes, then forwards by begins,
and closes gaps that either leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.sequencing import makespan_s, timed


def dispatched(costs: Costs, where: Sequence[int], order: Sequence[int]) -> list[int]:
    """All passes by begin.

    Args:
        costs: the model.
        where: device by node.
        order: all passes by priority, see `sequencing`.
    """
    n, size = len(where), len(costs.devices)
    first = [0] * (2 * n)
    for k, op in enumerate(order):
        first[op] = k
    waits = [len(costs.inputs[i]) for i in range(n)]
    waits += [1 + sum(len(costs.consumers[t]) for t in costs.outputs[i]) for i in range(n)]
    readers: dict[tuple[int, int], int] = {}
    for t, u in enumerate(costs.producer):
        for v in costs.consumers[t]:
            if where[v] != where[u]:
                readers[t, where[v]] = readers.get((t, where[v]), 0) + 1
    left = dict(readers)
    queues: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    link = [[0.0] * size for _ in range(size)]
    idle = [True] * size
    events: list[tuple[float, int, int, int]] = []
    """Time, pass that waits for a transfer (-1: none), number of inputs, and pass that ends (-1: a transfer)."""
    begun: list[int] = []

    def met(op: int, count: int, touched: set[int]) -> None:
        waits[op] -= count
        if waits[op] == 0:
            heapq.heappush(queues[where[op % n]], (first[op], op))
            touched.add(where[op % n])

    def ended(op: int, now_s: float, touched: set[int]) -> None:
        i = op % n
        d = where[i]
        idle[d] = True
        touched.add(d)
        if op < n:
            met(n + i, 1, touched)
            for t in costs.outputs[i]:
                away: dict[int, list[int]] = {}
                for v in costs.consumers[t]:
                    if where[v] == d:
                        met(v, 1, touched)
                    else:
                        away.setdefault(where[v], []).append(v)
                for q, there in away.items():
                    link[d][q] = max(link[d][q], now_s) + costs.send[t][d][q]
                    for v in there:
                        heapq.heappush(events, (link[d][q], v, 1, -1))
            return
        for t in costs.inputs[i]:
            u = costs.producer[t]
            p = where[u]
            if p == d or not costs.returns[t]:
                met(n + u, 1, touched)
                continue
            left[t, d] -= 1
            if left[t, d] == 0:
                link[d][p] = max(link[d][p], now_s) + costs.back[t][d][p]
                heapq.heappush(events, (link[d][p], n + u, readers[t, d], -1))

    touched = set(range(size))
    for i in range(n):
        if waits[i] == 0:
            heapq.heappush(queues[where[i]], (first[i], i))
    now_s = 0.0
    while True:
        for d in sorted(touched):
            if idle[d] and queues[d]:
                op = heapq.heappop(queues[d])[1]
                idle[d] = False
                begun.append(op)
                times = costs.forward if op < n else costs.backward
                heapq.heappush(events, (now_s + times[op % n][d], -1, 0, op))
        if not events:
            return begun
        now_s = events[0][0]
        touched = set()
        while events and events[0][0] <= now_s:
            _, then, count, op = heapq.heappop(events)
            if op >= 0:
                ended(op, now_s, touched)
            else:
                met(then, count, touched)


def mirrored(costs: Costs) -> Costs:
    """Costs with reversed time: a node's mirrored backward pass comes first, and gradients go forward."""

    def turned(tables: Sequence[tuple[tuple[float, ...], ...]]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        return tuple(tuple(zip(*table, strict=True)) for table in tables)

    nothing = tuple((0.0,) * len(costs.devices) for _ in costs.devices)
    gradients = [m if sent else nothing for m, sent in zip(costs.back, costs.returns, strict=True)]
    return replace(
        costs,
        forward=costs.backward,
        backward=costs.forward,
        send=turned(gradients),
        back=turned(costs.send),
        returns=(True,) * len(costs.returns),
    )


def forward_backward_improved(
    costs: Costs, mirror: Costs, where: Sequence[int], order: Sequence[int], *, rounds: int = 3
) -> tuple[float, list[int]]:
    """Shortest of an order, its dispatch, and some rounds of forward-backward improvement.

    Args:
        costs: the model.
        mirror: `mirrored(costs)`.
        where: device by node.
        order: all passes.
        rounds: of improvement.

    Returns:
        Seconds and order.
    """
    at = list(order)
    best = (makespan_s(costs, where, at), at)
    for k in range(rounds + 1):
        at = dispatched(costs, where, at)
        total_s = makespan_s(costs, where, at)
        if total_s < best[0]:
            best = (total_s, at)
        elif k:
            break
        at = _backwards(mirror, where, dispatched(mirror, where, _backwards(costs, where, at)))
    return best


def _backwards(costs: Costs, where: Sequence[int], order: Sequence[int]) -> list[int]:
    """All passes by descending end, as passes of the mirrored model."""
    n = len(where)
    start_s = timed(costs, where, order).start_s
    times = [*costs.forward, *costs.backward]
    place = {op: k for k, op in enumerate(order)}
    last = sorted(order, key=lambda op: (-start_s[op] - times[op][where[op % n]], -place[op]))
    return [op + n if op < n else op - n for op in last]
