"""Placement as a mixed-integer linear program: NetSplit's program, and additions that make it a tighter lower bound.

The published program (equations 5-11 to 5-18; Pesto, 6-2 to 6-7, is the same without backward passes) lets a device run any number of
operators at once and a link send any number of tensors. Its plans are wrong: on branching graphs they take 63 to 94 % longer in the
simulator than they claim. As a *relaxation* it is useful: every real schedule is feasible in it, so its optimum is a lower bound, and a
plan that takes the claimed time in the simulator is proved optimal.

The product of X_ip and X_jq in 5-16 is linearised by one variable per pair of devices with the right margins, which is tighter than the
usual three inequalities. For the bound these constraints are added, which hold for every plan without overlap:

- a device is busy for the sum of its passes, so the iteration takes at least that;
- and longer by its *ramps*: the first pass on a device needs something from another device, unless it is a source. Of the
  used devices, the k-th to begin does so no earlier than the k-th smallest time at which a node could begin with all its inputs
  received; likewise at the end, with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.milp import MilpProgram, Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProgram:
    """A program with its placement variables."""

    program: MilpProgram
    placed: tuple[tuple[int, ...], ...]
    """X of equation 5-15, units × devices."""
    units: tuple[tuple[int, ...], ...]
    scale_s: float
    """Seconds of one unit of time."""

    def where(self, solution: Solution) -> list[int] | None:
        """Device by node of a solution."""
        if solution.values is None:
            return None
        found = [0] * sum(len(u) for u in self.units)
        for unit, columns in zip(self.units, self.placed, strict=True):
            shares = [solution.values[c] for c in columns]
            for i in unit:
                found[i] = shares.index(max(shares))
        return found


def load_program(costs: Costs, units: Sequence[Sequence[int]], *, repeats: int = 1) -> PlacementProgram:
    """Program of loads, ramps and memory with divisible nodes: small and solved fast.

    Args:
        costs: the model.
        units: nodes that stay together.
        repeats: micro-batches of the iteration; ramps count once.
    """
    program, scale_s, total = _begun(costs)
    placed = _placed(program, costs, units, whole=False)
    _memory(program, costs, units, placed, exact=False)
    _loads(program, costs, units, placed, total, scale_s / repeats, scale_s)
    return PlacementProgram(program=program, placed=placed, units=tuple(map(tuple, units)), scale_s=scale_s)


def iteration_program(
    costs: Costs, units: Sequence[Sequence[int]], *, backward: bool = True, cuts: bool = True, memory: bool = True
) -> PlacementProgram:
    """Program of equations 5-11 to 5-18.

    Args:
        costs: the model.
        units: nodes that share X.
        backward: False: forward passes only, as Pesto.
        cuts: whether loads and ramps are added, for the bound; False: as published.
        memory: whether 5-18 is included.
    """
    program, scale_s, total = _begun(costs)
    n, size = len(costs.nodes), len(costs.devices)
    placed = _placed(program, costs, units, whole=True)
    unit_of = {i: g for g, unit in enumerate(units) for i in unit}
    starts = [program.variable() for _ in range(n)]
    ends = [program.variable() for _ in range(n)] if backward else []
    pairs: dict[tuple[int, int], list[list[int]]] = {}
    for i in range(n):
        columns = placed[unit_of[i]]
        passed = {columns[d]: -costs.forward[i][d] / scale_s for d in range(size)}
        if backward:
            program.row({ends[i]: 1.0, starts[i]: -1.0, **passed}, least=0.0)
        if not backward:
            program.row({total: 1.0, starts[i]: -1.0, **passed}, least=0.0)
        elif not costs.inputs[i]:
            back = {columns[d]: -costs.backward[i][d] / scale_s for d in range(size)}
            program.row({total: 1.0, ends[i]: -1.0, **back}, least=0.0)
    for t, u in enumerate(costs.producer):
        for v in costs.consumers[t]:
            a, b = unit_of[u], unit_of[v]
            apart: dict[int, float] = {}
            gradient: dict[int, float] = {}
            if a != b:
                both = _pair(program, pairs, placed, a, b)
                for p in range(size):
                    for q in range(size):
                        if p != q:
                            apart[both[p][q]] = -costs.send[t][p][q] / scale_s
                            gradient[both[p][q]] = -costs.back[t][q][p] / scale_s
            first = {placed[a][d]: -costs.forward[u][d] / scale_s for d in range(size)}
            program.row({starts[v]: 1.0, starts[u]: -1.0, **first, **apart}, least=0.0)
            if backward:
                then = {placed[b][d]: -costs.backward[v][d] / scale_s for d in range(size)}
                sent = gradient if costs.returns[t] else {}
                program.row({ends[u]: 1.0, ends[v]: -1.0, **then, **sent}, least=0.0)
    if memory:
        _memory(program, costs, units, placed, exact=True)
    if cuts:
        _loads(program, costs, units, placed, total, scale_s, scale_s)
    return PlacementProgram(program=program, placed=placed, units=tuple(map(tuple, units)), scale_s=scale_s)


def _begun(costs: Costs) -> tuple[MilpProgram, float, int]:
    """A program with times near 1,000, which suits HiGHS's tolerances; seconds per unit; and its objective."""
    longest = sum(max(f) + max(b) for f, b in zip(costs.forward, costs.backward, strict=True))
    longest += sum(max(map(max, m)) for m in costs.send) + sum(max(map(max, m)) for m in costs.back)
    program = MilpProgram()
    total = program.variable(cost=1.0)
    return program, max(longest, 1e-12) / 1000.0, total


def _placed(program: MilpProgram, costs: Costs, units: Sequence[Sequence[int]], *, whole: bool) -> tuple[tuple[int, ...], ...]:
    placed = tuple(tuple(program.variable(0.0, 1.0, whole=whole) for _ in costs.devices) for _ in units)
    for columns in placed:
        program.row(dict.fromkeys(columns, 1.0), least=1.0, most=1.0)
    return placed


def _pair(
    program: MilpProgram, pairs: dict[tuple[int, int], list[list[int]]], placed: Sequence[Sequence[int]], a: int, b: int
) -> list[list[int]]:
    """Variables that are 1 where a is on p and b on q."""
    if (a, b) not in pairs:
        size = len(placed[a])
        both = [[program.variable(0.0, 1.0) for _ in range(size)] for _ in range(size)]
        for p in range(size):
            program.row({**dict.fromkeys(both[p], 1.0), placed[a][p]: -1.0}, least=0.0, most=0.0)
            program.row({**{both[q][p]: 1.0 for q in range(size)}, placed[b][p]: -1.0}, least=0.0, most=0.0)
        pairs[a, b] = both
    return pairs[a, b]


def _memory(program: MilpProgram, costs: Costs, units: Sequence[Sequence[int]], placed: Sequence[Sequence[int]], *, exact: bool) -> None:
    """Equation 5-18. Left out if everything fits on every device; with divisible nodes, only states and each tensor once."""
    everything = sum(costs.state) + sum(costs.held)
    if everything <= min(costs.capacity):
        return
    unit_of = {i: g for g, unit in enumerate(units) for i in unit}
    scale = 100.0 / max(everything, 1)
    used: list[dict[int, float]] = [{} for _ in costs.devices]
    for g, unit in enumerate(units):
        for d in range(len(costs.devices)):
            used[d][placed[g][d]] = scale * sum(costs.state[i] for i in unit)
    for t, u in enumerate(costs.producer):
        if not costs.held[t]:
            continue
        around = sorted({unit_of[u], *(unit_of[v] for v in costs.consumers[t])})
        for d in range(len(costs.devices)):
            if len(around) == 1 or not exact:
                column = placed[unit_of[u]][d]
                used[d][column] = used[d].get(column, 0.0) + scale * costs.held[t]
                continue
            there = program.variable(0.0, 1.0)
            for g in around:
                program.row({there: 1.0, placed[g][d]: -1.0}, least=0.0)
            used[d][there] = scale * costs.held[t]
    for d, terms in enumerate(used):
        program.row(terms, most=scale * costs.capacity[d])


def _loads(
    program: MilpProgram,
    costs: Costs,
    units: Sequence[Sequence[int]],
    placed: Sequence[Sequence[int]],
    total: int,
    load_scale_s: float,
    scale_s: float,
) -> None:
    size = len(costs.devices)
    heads, tails = ramps_s(costs)
    k_most = min(size, len(heads))
    used = [program.variable(0.0, 1.0, whole=True) for _ in range(size)]
    first = [[program.variable(0.0, 1.0, whole=True) for _ in range(k_most)] for _ in range(size)]
    last = [[program.variable(0.0, 1.0, whole=True) for _ in range(k_most)] for _ in range(size)]
    for d in range(size):
        for g in range(len(units)):
            program.row({used[d]: 1.0, placed[g][d]: -1.0}, least=0.0)
        for ramp in (first, last):
            program.row({**dict.fromkeys(ramp[d], 1.0), used[d]: -1.0}, least=0.0, most=0.0)
        load = {placed[g][d]: -sum(costs.forward[i][d] + costs.backward[i][d] for i in unit) / load_scale_s for g, unit in enumerate(units)}
        before = {first[d][k]: -heads[k] / scale_s for k in range(k_most)}
        behind = {last[d][k]: -tails[k] / scale_s for k in range(k_most)}
        program.row({total: 1.0, **load, **before, **behind}, least=0.0)
    for ramp in (first, last):
        for k in range(k_most):
            program.row({ramp[d][k]: 1.0 for d in range(size)}, most=1.0)


def ramps_s(costs: Costs) -> tuple[list[float], list[float]]:
    """Least seconds before the k-th device begins, and after the k-th device ends.

    Returns:
        Heads and tails, both ascending, one per node. A device begins with a forward pass whose inputs all come from other devices, and
        ends with a backward pass whose gradients all go to other devices.
    """
    size = len(costs.devices)

    def least(matrix: Sequence[Sequence[float]]) -> float:
        return min((matrix[p][q] for p in range(size) for q in range(size) if p != q), default=0.0)

    send = [least(m) for m in costs.send]
    back = [least(m) if returns else 0.0 for m, returns in zip(costs.back, costs.returns, strict=True)]
    begun, ended = [0.0] * len(costs.nodes), [0.0] * len(costs.nodes)
    heads, tails = [], []
    for i in range(len(costs.nodes)):
        makers = [(t, costs.producer[t]) for t in costs.inputs[i]]
        begun[i] = max((begun[u] + min(costs.forward[u]) for _, u in makers), default=0.0)
        ended[i] = max((ended[u] + min(costs.backward[u]) for _, u in makers), default=0.0)
        heads.append(max((begun[u] + min(costs.forward[u]) + send[t] for t, u in makers), default=0.0))
        tails.append(max((ended[u] + min(costs.backward[u]) + back[t] for t, u in makers), default=0.0))
    return sorted(heads), sorted(tails)


def path_bound_s(costs: Costs) -> float:
    """Longest path through forward and backward passes, each on its fastest device, without transfers."""
    n = len(costs.nodes)
    down, up = [0.0] * n, [0.0] * n
    for i in range(n):
        down[i] = max((down[costs.producer[t]] for t in costs.inputs[i]), default=0.0) + min(costs.forward[i])
        up[i] = max((up[costs.producer[t]] for t in costs.inputs[i]), default=0.0) + min(costs.backward[i])
    return max(a + b for a, b in zip(down, up, strict=True))
