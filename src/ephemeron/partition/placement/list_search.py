"""List scheduling by the longest remaining path, repeated with other weights: starts for one iteration.

The node with the longest remaining path is next, on the device where both its passes would end first, with transfers one after the other
on each link (HEFT, Topcuoglu et al. 2002, for training: a node represents both passes, a tensor itself and its gradient). m-ETF takes the
pair that can *begin* first, and leaves long paths for the end: on a branching graph of 1,000 operators it takes 10 % longer.

Greedy choices depend on unknown weights: the worth of a byte of memory in seconds if memory is scarce, the weight of transfers, ties. So
a grid of weights is tried first, then random ones near the best. Other runs place only a segment of the order again, and all other nodes
keep their devices. A run takes about 5 µs per node and device.

Orders by list dispatching: a free device runs the ready pass that comes first in a list.

A list that is followed strictly (`sequencing`) waits for its next pass although another one is ready; dispatching never does. Neither is
always better. Forward-backward improvement (Li and Willis 1992) dispatches backwards in time by ends of passes, then forwards by begins,
and closes gaps that either leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.annealing import AnnealingResult
from ephemeron.partition.placement.plan import Timer
from ephemeron.partition.placement.sequencing import makespan_s, ranked_order, timed

PRICES = (0.0, 1.0, 3.0, 10.0, 30.0)
"""Price of memory: seconds of all work for the whole memory of all devices."""
LINKS = (0.5, 1.0, 2.0)
"""Factors on transfers."""
NOISE = (0.0, 0.5, 1.0, 2.0)
"""Noise of ranks, in mean times of a node."""
NEAR = 1.03
"""Factor to the best within which a schedule gets forward-backward improvement, less often the less that has helped."""
STRETCH = (0.02, 0.3)
"""Shortest and longest segment that is placed again, as a share of all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    price: float
    link: float
    noise: float


def list_search(costs: Costs, *, rng: Random, steps: int, timer: Timer, known: Sequence[Sequence[int]] = ()) -> AnnealingResult:
    """Best placement and order of repeated list scheduling.

    Args:
        costs: the model.
        rng: draws.
        steps: most runs.
        timer: ends earlier.
        known: further starts.

    Returns:
        The best schedule: least overfull, then shortest.
    """
    search = _Search(costs, rng)
    for where in known:
        search.take(list(where), None)
    grid = [_Weights(price=p, link=k, noise=0.0) for p in PRICES for k in LINKS]
    done = 0
    while done < steps and (timer.left_s() > 0 or search.best is None):
        fresh = done < len(grid)
        weights = grid[done] if fresh else search.near()
        keep = None if fresh or search.best is None or rng.random() < 0.1 else search.stretch()
        search.run(weights, keep)
        done += 1
    assert search.best is not None
    over, total_s = search.best
    return AnnealingResult(where=tuple(search.where), order=tuple(search.order), makespan_s=total_s, over_bytes=over, steps=done)


class _Search:
    def __init__(self, costs: Costs, rng: Random) -> None:
        self.costs, self.rng, self.mirror = costs, rng, mirrored(costs)
        self.best: tuple[int, float] | None = None
        """Bytes over, and seconds."""
        self.forward_backward_improved = self.helped = 0
        self.where: list[int] = []
        self.order: list[int] = []
        self.weights = _Weights(price=0.0, link=1.0, noise=0.0)
        n, size = len(costs.nodes), len(costs.devices)
        self.work = [sum(f) / size + sum(b) / size for f, b in zip(costs.forward, costs.backward, strict=True)]
        self.price_s = sum(self.work) / size / max(1, sum(costs.capacity))
        self.cluster = [0] * n
        for g, cluster in enumerate(costs.clusters):
            for i in cluster:
                self.cluster[i] = g
        self.tensors = [{t for i in c for t in (*costs.inputs[i], *costs.outputs[i])} for c in costs.clusters]
        self.state = [sum(costs.state[i] for i in c) for c in costs.clusters]
        self.waits = [len({costs.producer[t] for t in costs.inputs[i]}) for i in range(n)]
        self.after = [list(dict.fromkeys(v for t in costs.outputs[i] for v in costs.consumers[t])) for i in range(n)]
        self.rank = self._ranks()

    def _ranks(self) -> list[float]:
        costs, pairs = self.costs, max(1, len(self.costs.devices) ** 2)
        rank = [0.0] * len(costs.nodes)
        for i in reversed(range(len(rank))):
            after = 0.0
            for t in costs.outputs[i]:
                sent = (sum(map(sum, costs.send[t])) + sum(map(sum, costs.back[t])) * costs.returns[t]) / pairs
                after = max([after, *(rank[v] + sent for v in costs.consumers[t])])
            rank[i] = self.work[i] + after
        return rank

    def near(self) -> _Weights:
        """Random weights near those of the best schedule."""
        draw, w = self.rng, self.weights
        price = draw.choice(PRICES) if draw.random() < 0.3 else w.price * draw.uniform(0.5, 2.0)
        link = draw.choice(LINKS) if draw.random() < 0.3 else w.link * draw.uniform(0.7, 1.4)
        return _Weights(price=price, link=link, noise=draw.choice(NOISE))

    def stretch(self) -> list[int]:
        """Devices of the best schedule, with -1 for clusters that begin in a segment of its order."""
        n = len(self.costs.nodes)
        forward = [op for op in self.order if op < n]
        length = max(1, int(n * self.rng.uniform(*STRETCH)))
        first = self.rng.randrange(n)
        keep = self.where[:]
        for i in forward[first : first + length]:
            for j in self.costs.clusters[self.cluster[i]]:
                keep[j] = -1
        return keep

    def run(self, weights: _Weights, keep: Sequence[int] | None) -> None:
        """Run one list schedule and keep it if it is better."""
        mean = sum(self.work) / len(self.work)
        rank = [r + weights.noise * mean * self.rng.uniform(-1, 1) for r in self.rank] if weights.noise else self.rank
        where, order = self._placed(rank, weights, keep)
        if self.take(where, order):
            self.weights = weights

    def take(self, where: list[int], forward: list[int] | None) -> bool:
        """Keep a placement if it is better than the best, in the mirrored or the dispatched order; whether it is."""
        costs, n = self.costs, len(where)
        over = costs.over(where)
        if self.best is not None and over > self.best[0]:
            return False
        order = ranked_order(costs, where) if forward is None else [*forward, *(n + i for i in reversed(forward))]
        total_s = makespan_s(costs, where, order)
        near = self.best is None or (over, total_s) < (self.best[0], self.best[1] * NEAR)
        if near and self.rng.random() < (self.helped + 2) / (self.forward_backward_improved + 2) + 0.05:
            shorter_s, shorter = forward_backward_improved(costs, self.mirror, where, order)
            self.forward_backward_improved += 1
            self.helped += shorter_s < total_s
            total_s, order = shorter_s, shorter
        if self.best is not None and (over, total_s) >= self.best:
            return False
        self.best, self.where, self.order = (over, total_s), where, order
        return True

    def _placed(self, rank: Sequence[float], weights: _Weights, keep: Sequence[int] | None) -> tuple[list[int], list[int]]:
        costs = self.costs
        n, size = len(costs.nodes), len(costs.devices)
        left, there = list(costs.capacity), [set[int]() for _ in range(size)]
        free, end = [0.0] * size, [0.0] * n
        link = [[0.0] * size for _ in range(size)]
        arrived: dict[tuple[int, int], float] = {}
        where, order = [-1] * n, list[int]()
        waits = self.waits[:]
        ready = [(-rank[i], i) for i in range(n) if waits[i] == 0]
        heapq.heapify(ready)
        price, factor = weights.price * self.price_s, weights.link

        def start_s(i: int, d: int, commit: bool) -> float:
            """Earliest arrival of all inputs; books their transfers if `commit`."""
            at = free[d]
            taken: dict[int, float] = {}
            for t in costs.inputs[i]:
                u = costs.producer[t]
                p = where[u]
                if p == d:
                    there_s = end[u]
                elif (t, d) in arrived:
                    there_s = arrived[t, d]
                else:
                    sent_s = costs.send[t][p][d] + (costs.back[t][d][p] if costs.returns[t] else 0.0)
                    there_s = max(taken.get(p, link[p][d]), end[u]) + factor * sent_s
                    taken[p] = there_s
                    if commit:
                        arrived[t, d] = link[p][d] = there_s
                if there_s > at:
                    at = there_s
            return at

        while ready:
            _, i = heapq.heappop(ready)
            g = self.cluster[i]
            tensors = self.tensors[g]
            home = where[i]
            if home < 0:
                best: tuple[bool, float] | None = None
                for d in range(size) if keep is None or keep[i] < 0 else (keep[i],):
                    need = self.state[g] + sum(costs.held[t] for t in tensors if t not in there[d])
                    ends = start_s(i, d, False) + costs.forward[i][d] + costs.backward[i][d]
                    key = (need > left[d], ends + price * need)
                    if best is None or key < best:
                        best, home = key, d
                left[home] -= self.state[g] + sum(costs.held[t] for t in tensors if t not in there[home])
                there[home] |= tensors
                for j in costs.clusters[g]:
                    where[j] = home
            end[i] = free[home] = start_s(i, home, True) + costs.forward[i][home] + costs.backward[i][home]
            order.append(i)
            for v in self.after[i]:
                waits[v] -= 1
                if waits[v] == 0:
                    heapq.heappush(ready, (-rank[v], v))
        return where, order


# -- orders by list dispatching -----------------------------------------------------------------------------------


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
