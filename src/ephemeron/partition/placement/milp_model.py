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

Suppression of solver output: HiGHS prints when it transforms a solution, independent of its log options.

It prints to C's `stdout`. While a solver runs, that variable points to the null device. File descriptor 1 and Python's `sys.stdout` do
not change, so Python output of other threads is kept; output of C code in other threads is dropped, too.

Mixed-integer linear programs, written row by row and solved by SciPy's HiGHS.

Deterministic: the same program with the same limit of branches has the same result; a time limit ends the search at any point.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ephemeron.errors import MissingExtra
from ephemeron.partition.costs.table import Costs


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


# -- suppression of solver output ---------------------------------------------------------------------------------


_LOCK = threading.Lock()
_OPEN = 0
"""Number of open contexts."""
_KEPT: int | None = None
_SINK: int | None = None
"""Opened once and never closed: C code may still hold it."""


@contextmanager
def silent() -> Iterator[None]:
    """Context in which output of C code by `printf` and similar functions is dropped; contexts may overlap.

    Without glibc, whose `stdout` is a variable, nothing happens.
    """
    global _OPEN, _KEPT, _SINK
    out = _c_stdout()
    if out is None:
        yield
        return
    with _LOCK:
        if _OPEN == 0:
            if _SINK is None:
                opening: Any = ctypes.CDLL(None).fopen
                opening.restype = ctypes.c_void_p
                _SINK = opening(os.devnull.encode(), b"w")
            _KEPT, out.value = out.value, _SINK if _SINK is not None else out.value
        _OPEN += 1
    try:
        yield
    finally:
        with _LOCK:
            _OPEN -= 1
            if _OPEN == 0:
                out.value = _KEPT


@cache
def _c_stdout() -> ctypes.c_void_p | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        return ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stdout")
    except (ValueError, OSError, TypeError):
        return None


# -- mixed-integer linear programs --------------------------------------------------------------------------------


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Result of a solver."""

    values: tuple[float, ...] | None
    """By variable; None: no solution was found."""
    value: float
    """Objective; infinite without a solution."""
    bound: float
    """Proved lower bound; minus infinity: none, infinity: there is no solution."""
    nodes: int
    """Number of explored branches."""


@dataclass(slots=True)
class MilpProgram:
    """Minimise cost·x, rows within limits, some variables whole numbers."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def variable(self, lower: float = 0.0, upper: float = math.inf, *, whole: bool = False, cost: float = 0.0) -> int:
        """Add a variable; its number."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms: Mapping[int, float], *, least: float = -math.inf, most: float = math.inf) -> None:
        """Add a row least ≤ Σ terms ≤ most."""
        self.rows.append((dict(terms), least, most))

    def solve(self, *, time_limit_s: float = math.inf, node_limit: int = 10_000_000, gap: float = 1e-6, relaxed: bool = False) -> Solution:
        """Solution of the program.

        Args:
            time_limit_s: of HiGHS.
            node_limit: branches.
            gap: relative gap at which the solver stops.
            relaxed: whole numbers need not be whole.

        Raises:
            MissingExtra: SciPy is not installed.
        """
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise MissingExtra("SciPy, which solves the linear programs of placement,", "partition") from None
        if time_limit_s <= 0:
            return Solution(values=None, value=math.inf, bound=-math.inf, nodes=0)
        starts: list[int] = [0]
        columns: list[int] = []
        numbers: list[float] = []
        for terms, _, _ in self.rows:
            columns.extend(terms.keys())
            numbers.extend(terms.values())
            starts.append(len(columns))
        matrix = csr_array((numbers, columns, starts), shape=(len(self.rows), len(self.cost)))
        options: dict[str, float | int] = {"node_limit": node_limit, "mip_rel_gap": gap}
        if time_limit_s < math.inf:
            options["time_limit"] = time_limit_s
        integrality = np.zeros(len(self.cost)) if relaxed else np.array(self.whole, dtype=int)
        _log.debug("HiGHS starts: %d variables, %d rows", len(self.cost), len(self.rows))
        with silent():
            result = milp(
                np.array(self.cost),
                integrality=integrality,
                bounds=Bounds(np.array(self.lower), np.array(self.upper)),
                constraints=LinearConstraint(matrix, [r[1] for r in self.rows], [r[2] for r in self.rows]),
                options=options,
            )
        _log.debug("HiGHS ends: %s", result.message)
        if result.status == 2:
            return Solution(values=None, value=math.inf, bound=math.inf, nodes=0)
        values = None if result.x is None else tuple(float(v) for v in result.x)
        value = math.inf if values is None else float(result.fun)
        proved = getattr(result, "mip_dual_bound", None)
        if integrality.any():
            bound = -math.inf if proved is None or math.isnan(proved) else float(proved)
        else:
            bound = value if result.status == 0 else -math.inf
        return Solution(values=values, value=value, bound=min(bound, value), nodes=int(getattr(result, "mip_node_count", 0) or 0))
