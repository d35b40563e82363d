"""One iteration as a CP-SAT model: NetSplit's program (5-11 to 5-18) with the constraint that it lacks, no overlap on devices and links.

Every pass is an optional interval on each device, every transfer one on each link, with NoOverlap constraints. CP-SAT starts from a
complete plan (device and start of all tasks): with less it finds no solution at 200 nodes. Times are rounded down to ticks, so its
bound stays a lower bound. Of its solution only placement and orders are used, and simulated with true times.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ephemeron.errors import MissingExtra
from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.plan import SearchBudget, Timer
from ephemeron.partition.placement.sequencing import timed
from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Pass, Task

_log = logging.getLogger(__name__)

TICKS = 2_000_000
"""Ticks of the iteration of the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSatResult:
    """Result of CP-SAT."""

    where: tuple[int, ...] | None
    """Device by node; None: no solution within the limits."""
    orders: DeviceOrders | None
    passes: tuple[int, ...] = ()
    """All passes by start, see `sequencing`."""
    bound_s: float


def improve(
    costs: Costs,
    units: Sequence[Sequence[int]],
    where: Sequence[int],
    order: Sequence[int],
    *,
    bound_s: float,
    budget: SearchBudget,
    timer: Timer,
) -> CpSatResult:
    """Improved plan, and a lower bound.

    Args:
        costs: the model.
        units: nodes that stay together.
        where: device by node; it fits.
        order: all passes.
        bound_s: known lower bound.
        budget: threads, seed, deterministic time.
        timer: ends earlier.

    Raises:
        MissingExtra: OR-tools is not installed.
    """
    module = cp_model()
    limit_s = timer.left_s()
    if limit_s <= 0:
        return CpSatResult(where=None, orders=None, bound_s=bound_s)
    total_s = timed(costs, where, order).makespan_s
    tick_s = max(total_s, 1e-12) / TICKS
    model = _Model(module=module, costs=costs, units=units, tick_s=tick_s, horizon=TICKS + 1)
    model.build(int(bound_s / tick_s * (1 - 1e-9)))
    model.hint(where, order)
    solver = module.CpSolver()
    if limit_s < float("inf"):
        solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.max_deterministic_time = budget.constraint_work
    solver.parameters.num_workers = budget.workers
    solver.parameters.random_seed = budget.seed
    _log.debug("CP-SAT starts: %d passes, limit %.1f s", 2 * len(costs.nodes), limit_s)
    status = solver.solve(model.model)
    _log.debug("CP-SAT ends: %s after %.1f s", solver.status_name(status), solver.wall_time)
    proved = max(bound_s, solver.best_objective_bound * tick_s * (1 - 1e-9))
    if status == module.INFEASIBLE:  # no better solution than the start
        return CpSatResult(where=None, orders=None, bound_s=total_s)
    if status not in (module.OPTIMAL, module.FEASIBLE):
        return CpSatResult(where=None, orders=None, bound_s=bound_s)
    found, orders, passes = model.read(solver)
    return CpSatResult(where=tuple(found), orders=orders, passes=tuple(passes), bound_s=proved)


@dataclass(slots=True)
class _Model:
    module: Any
    costs: Costs
    units: Sequence[Sequence[int]]
    tick_s: float
    horizon: int
    model: Any = None
    total: Any = None
    on: list[list[Any]] = field(default_factory=list)
    """X of its unit, by node."""
    start: list[Any] = field(default_factory=list)
    """Start by pass."""
    sends: dict[tuple[int, int, bool], Any] = field(default_factory=dict)
    """Start of (tensor, device that reads it, whether it is the gradient)."""
    crosses: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    """Whether (tensor, from, to) is sent."""
    there: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Whether a tensor is held on a device."""

    def _ticks(self, seconds: float) -> int:
        return int(seconds / self.tick_s)

    def build(self, bound: int) -> None:
        costs, module = self.costs, self.module
        n, size = len(costs.nodes), len(costs.devices)
        model = self.model = module.CpModel()
        self.total = model.new_int_var(max(0, bound), self.horizon, "")
        self.on = [[] for _ in range(n)]
        for unit in self.units:
            x = [model.new_bool_var("") for _ in range(size)]
            model.add_exactly_one(x)
            for i in unit:
                self.on[i] = x
        self.start = [model.new_int_var(0, self.horizon, "") for _ in range(2 * n)]
        devices: list[list[Any]] = [[] for _ in range(size)]
        links: list[list[list[Any]]] = [[[] for _ in range(size)] for _ in range(size)]
        end = []
        for op in range(2 * n):
            i = op % n
            times = [self._ticks(s) for s in (costs.forward, costs.backward)[op >= n][i]]
            for d in range(size):
                if times[d]:
                    devices[d].append(model.new_optional_fixed_size_interval_var(self.start[op], times[d], self.on[i][d], ""))
            end.append(self.start[op] + sum(times[d] * self.on[i][d] for d in range(size)))
        for i in range(n):
            model.add(self.start[n + i] >= end[i])
            if not costs.inputs[i]:
                model.add(self.total >= end[n + i])
        for t in range(len(costs.tensors)):
            self._tensor(t, end, links)
        for d in range(size):
            model.add_no_overlap(devices[d])
            for q in range(size):
                if links[d][q]:
                    model.add_no_overlap(links[d][q])
            model.add(
                self.total >= sum((self._ticks(costs.forward[i][d]) + self._ticks(costs.backward[i][d])) * self.on[i][d] for i in range(n))
            )
        self._memory()
        model.minimize(self.total)

    def _tensor(self, t: int, end: list[Any], links: list[list[list[Any]]]) -> None:
        costs, model = self.costs, self.model
        n, size = len(costs.nodes), len(costs.devices)
        u = costs.producer[t]
        outside = [v for v in costs.consumers[t] if self.on[v] is not self.on[u]]
        for v in costs.consumers[t]:
            model.add(self.start[v] >= end[u])
            model.add(self.start[n + u] >= end[n + v])
        if not outside:
            return
        for q in range(size):
            sent = self.sends[t, q, False] = model.new_int_var(0, self.horizon, "")
            gone = self.sends[t, q, True] = model.new_int_var(0, self.horizon, "") if costs.returns[t] else None
            for p in range(size):
                if p == q:
                    continue
                z = self.crosses[t, p, q] = model.new_bool_var("")
                model.add_implication(z, self.on[u][p])
                there, away = self._ticks(costs.send[t][p][q]), self._ticks(costs.back[t][q][p])
                for v in outside:
                    model.add_bool_or([z, self.on[u][p].negated(), self.on[v][q].negated()])
                    model.add(self.start[v] >= sent + there).only_enforce_if([z, self.on[v][q]])
                    if gone is not None:
                        model.add(gone >= end[n + v]).only_enforce_if([z, self.on[v][q]])
                model.add(sent >= end[u]).only_enforce_if(z)
                if there:
                    links[p][q].append(model.new_optional_fixed_size_interval_var(sent, there, z, ""))
                if gone is not None:
                    model.add(self.start[n + u] >= gone + away).only_enforce_if(z)
                    if away:
                        links[q][p].append(model.new_optional_fixed_size_interval_var(gone, away, z, ""))

    def _memory(self) -> None:
        """Equation 5-18, left out if everything fits on every device."""
        costs, model = self.costs, self.model
        if sum(costs.state) + sum(costs.held) <= min(costs.capacity):
            return
        for d in range(len(costs.devices)):
            terms = [costs.state[i] * self.on[i][d] for i in range(len(costs.nodes)) if costs.state[i]]
            for t, u in enumerate(costs.producer):
                if not costs.held[t]:
                    continue
                held = self.there[t, d] = model.new_bool_var("")
                for i in {u, *costs.consumers[t]}:
                    model.add_implication(self.on[i][d], held)
                terms.append(costs.held[t] * held)
            model.add(sum(terms) <= costs.capacity[d])

    def hint(self, where: Sequence[int], order: Sequence[int]) -> None:
        """Hint with the whole plan in ticks, which is a feasible solution."""
        costs, model = self.costs, self.model
        n = len(costs.nodes)
        ticked = _ticked(costs, self._ticks)
        at = timed(ticked, where, order)
        for unit in self.units:
            for d, x in enumerate(self.on[unit[0]]):
                model.add_hint(x, int(where[unit[0]] == d))
        for op in range(2 * n):
            model.add_hint(self.start[op], int(at.start_s[op]))
        sent = {(t, p if gradient else q, gradient): int(s) for s, t, p, q, gradient in at.sends}
        for (t, q, gradient), variable in self.sends.items():
            if variable is not None:
                model.add_hint(variable, sent.get((t, q, gradient), 0))
        for (t, p, q), z in self.crosses.items():
            model.add_hint(z, int(where[costs.producer[t]] == p and (t, q, False) in sent))
        for (t, d), held in self.there.items():
            model.add_hint(held, int(any(where[i] == d for i in (costs.producer[t], *costs.consumers[t]))))
        model.add_hint(self.total, int(at.makespan_s))

    def read(self, solver: Any) -> tuple[list[int], DeviceOrders, list[int]]:
        costs = self.costs
        n = len(costs.nodes)
        where = [next(d for d, x in enumerate(self.on[i]) if solver.value(x)) for i in range(n)]
        depth = [*range(n), *range(2 * n - 1, n - 1, -1)]
        starts = [solver.value(s) for s in self.start]
        passes = sorted(range(2 * n), key=lambda op: (starts[op], depth[op]))
        ways: tuple[Pass, Pass] = ("forward", "backward")
        compute: dict[str, list[Task]] = {}
        for op in passes:
            compute.setdefault(costs.devices[where[op % n]], []).append((costs.nodes[op % n], ways[op >= n]))
        moved: list[tuple[int, int, int, int, int, bool]] = []
        for (t, q, gradient), variable in self.sends.items():
            p = where[costs.producer[t]]
            if variable is None or p == q or all(where[v] != q for v in costs.consumers[t]):
                continue
            deep = 2 * n - costs.producer[t] if gradient else costs.producer[t]
            moved.append((solver.value(variable), deep, t, *((q, p) if gradient else (p, q)), gradient))
        transfers: dict[tuple[str, str], list[Task]] = {}
        for _, _, t, p, q, gradient in sorted(moved):
            transfers.setdefault((costs.devices[p], costs.devices[q]), []).append((costs.tensors[t], ways[gradient]))
        orders = DeviceOrders(
            compute={d: tuple(tasks) for d, tasks in compute.items()}, transfers={k: tuple(tasks) for k, tasks in transfers.items()}
        )
        return where, orders, passes


def _ticked(costs: Costs, ticks: Any) -> Costs:
    """The same costs in whole ticks."""
    return replace(
        costs,
        forward=tuple(tuple(float(ticks(s)) for s in row) for row in costs.forward),
        backward=tuple(tuple(float(ticks(s)) for s in row) for row in costs.backward),
        send=tuple(tuple(tuple(float(ticks(s)) for s in row) for row in m) for m in costs.send),
        back=tuple(tuple(tuple(float(ticks(s)) for s in row) for row in m) for m in costs.back),
    )


# -- optional solvers, imported on first use ----------------------------------------------------------------------


def cp_model() -> Any:
    """CP-SAT of OR-tools.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model as module
    except ImportError:
        raise MissingExtra("OR-tools, whose CP-SAT orders placed operators,", "partition") from None
    return module
