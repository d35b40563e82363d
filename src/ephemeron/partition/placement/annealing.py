"""Simulated annealing over placements and orders, evaluated by `sequencing`.

A step moves one group of nodes to another device, most often to the device of a neighbour, or shifts one pass within the order as far
as its dependencies allow. Steps that lengthen the iteration are accepted with falling probability. Overfull devices have a penalty
that grows during the search: with little memory, the path from one good placement to another leads through placements that do not
fit. The result fits if any placement of the search did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.plan import Timer
from ephemeron.partition.placement.sequencing import makespan_s, timed

OVERFULL = 3.0
"""Penalty at the beginning, as a share of the iteration, for one device overfull by all its memory; eleven times that at the end."""
HOT, COOLING = 1.0, 0.03
"""First temperature as a share of the iteration's time, times the number of nodes, because a step in a larger graph changes less; and last
temperature as a share of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnealingResult:
    """A placement and an order for it."""

    where: tuple[int, ...]
    """Device by node."""
    order: tuple[int, ...]
    """All passes, see `sequencing`."""
    makespan_s: float
    over_bytes: int
    """0: it fits."""
    steps: int


def anneal(
    costs: Costs,
    units: Sequence[Sequence[int]],
    where: Sequence[int],
    order: Sequence[int],
    *,
    rng: Random,
    steps: int,
    timer: Timer,
    heat: float = 1.0,
) -> AnnealingResult:
    """Improvement of a placement and its order.

    Args:
        costs: the model.
        units: nodes that are moved together.
        where: device by node, to begin with.
        order: all passes, to begin with.
        rng: draws.
        steps: most steps.
        timer: ends earlier.
        heat: factor on the first temperature.

    Returns:
        The best state of the search: least overfull, then shortest.
    """
    n, size = len(costs.nodes), len(costs.devices)
    state = _State(costs, list(where), list(order))
    value = makespan_s(costs, state.where, state.order)
    best = (state.over, value)
    best_where, best_order = state.where[:], state.order[:]
    unit_of = {i: g for g, unit in enumerate(units) for i in unit}
    near = [_neighbours(costs, unit) for unit in units]
    begun_s, end_s = timer.clock(), timer.end_s
    start = heat * HOT / (n + 20)
    done, temperature, moves_share = 0.0, start * value, 0.5 if size > 1 else 0.0
    penalty = 0.0
    step = 0
    while step < steps:
        if step % 16 == 0:
            done = step / steps
            if end_s < math.inf:
                done = max(done, (timer.clock() - begun_s) / max(end_s - begun_s, 1e-9))
            if done >= 1:
                break
            temperature = max(best[1], 1e-12) * start * COOLING**done
            penalty = (OVERFULL + 10 * OVERFULL * done) / max(1, *costs.capacity)
        step += 1
        if rng.random() < moves_share:
            unit = units[unit_of[rng.randrange(n)]]
            home = state.where[unit[0]]
            around = near[unit_of[unit[0]]]
            away = state.where[around[rng.randrange(len(around))]] if around and rng.random() < 0.7 else rng.randrange(size)
            if away == home:
                continue
            over = state.over
            state.move(unit, away)
            new = makespan_s(costs, state.where, state.order)
            worse = new * (1 + penalty * state.over) - value * (1 + penalty * over)
            if _accepted(worse, temperature, rng):
                value = new
            else:
                state.move(unit, home)
        else:
            shift = state.shift(rng)
            if shift is None:
                continue
            new = makespan_s(costs, state.where, state.order)
            if _accepted(new - value, temperature, rng):
                value = new
            else:
                state.put(shift[1], shift[0])
        if (state.over, value) < best:
            best = (state.over, value)
            best_where, best_order = state.where[:], state.order[:]
    at = timed(costs, best_where, best_order)
    place = {op: k for k, op in enumerate(best_order)}
    times = [*costs.forward, *costs.backward]
    ended = {op: at.start_s[op] + times[op][best_where[op % n]] for op in best_order}
    tidy = sorted(best_order, key=lambda op: (ended[op], place[op]))
    if makespan_s(costs, best_where, tidy) <= at.makespan_s:
        best_order = tidy
    return AnnealingResult(
        where=tuple(best_where),
        order=tuple(best_order),
        makespan_s=makespan_s(costs, best_where, best_order),
        over_bytes=best[0],
        steps=step,
    )


def _accepted(worse: float, temperature: float, rng: Random) -> bool:
    return worse <= 0 or rng.random() < math.exp(-worse / temperature)


def _neighbours(costs: Costs, unit: Sequence[int]) -> list[int]:
    """Nodes that exchange tensors with the unit."""
    inside, near = set(unit), dict[int, None]()
    for i in unit:
        for t in (*costs.inputs[i], *costs.outputs[i]):
            for j in (costs.producer[t], *costs.consumers[t]):
                if j not in inside:
                    near[j] = None
    return list(near)


class _State:
    """A placement with its memory, and an order with its positions."""

    def __init__(self, costs: Costs, where: list[int], order: list[int]) -> None:
        self.costs = costs
        self.where = where
        self.order = order
        self.position = [0] * len(order)
        for k, op in enumerate(order):
            self.position[op] = k
        n = len(costs.nodes)
        self.before: list[list[int]] = [[] for _ in range(2 * n)]
        self.after: list[list[int]] = [[] for _ in range(2 * n)]
        for i in range(n):
            self._arc(i, n + i)
            for t in costs.outputs[i]:
                for v in costs.consumers[t]:
                    self._arc(i, v)
                    self._arc(n + v, n + i)
        self.touch = [[0] * len(costs.devices) for _ in costs.tensors]
        self.held = [0] * len(costs.devices)
        for i, d in enumerate(where):
            self._hold(i, d)
        self.over = self._over()

    def _arc(self, first: int, then: int) -> None:
        self.after[first].append(then)
        self.before[then].append(first)

    def _hold(self, i: int, d: int) -> None:
        costs = self.costs
        self.held[d] += costs.state[i]
        for t in (*costs.inputs[i], *costs.outputs[i]):
            if self.touch[t][d] == 0:
                self.held[d] += costs.held[t]
            self.touch[t][d] += 1

    def _drop(self, i: int, d: int) -> None:
        costs = self.costs
        self.held[d] -= costs.state[i]
        for t in (*costs.inputs[i], *costs.outputs[i]):
            self.touch[t][d] -= 1
            if self.touch[t][d] == 0:
                self.held[d] -= costs.held[t]

    def _over(self) -> int:
        return sum(h - c for h, c in zip(self.held, self.costs.capacity, strict=True) if h > c)

    def move(self, unit: Sequence[int], away: int) -> None:
        for i in unit:
            self._drop(i, self.where[i])
            self._hold(i, away)
            self.where[i] = away
        self.over = self._over()

    def shift(self, rng: Random) -> tuple[int, int] | None:
        """Shift one pass; its old and new position, or None if it cannot move."""
        k = rng.randrange(len(self.order))
        op = self.order[k]
        low = max((self.position[b] for b in self.before[op]), default=-1) + 1
        high = min((self.position[a] for a in self.after[op]), default=len(self.order)) - 1
        reach = 24
        low, high = max(low, k - reach), min(high, k + reach)
        if low == high:
            return None
        to = rng.randrange(low, high)
        if to >= k:
            to += 1
        self.put(k, to)
        return k, to

    def put(self, k: int, to: int) -> None:
        op = self.order.pop(k)
        self.order.insert(to, op)
        for x in range(min(k, to), max(k, to) + 1):
            self.position[self.order[x]] = x
