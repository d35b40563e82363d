"""Pipeline with the least bottleneck, and a proved lower bound.

First comes a dynamic program over the graph's downsets and the classes of devices (`chains`), which covers all orders of all subsets of
devices, if the graph has few enough downsets. Then, for every order of classes: cuts by dynamic programming, a linear program with
rounding (shares of all nodes up to a stage are rounded at one threshold, so that tensors still only go forward), annealing, and the
mixed-integer program, whose optimum is the proof. Orders that a bound excludes are skipped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.chains import AdjacentSearch, ChainSearch, ChainSearchResult
from ephemeron.partition.placement.downsets import (
    DeviceClasses,
    classes_of,
    coarse_classes_of,
    downsets_of,
    permutations,
    sequences,
    units_of,
    without_idle_ends,
)
from ephemeron.partition.placement.plan import SearchBudget, Timer
from ephemeron.partition.placement.stages import DeviceOrder, StagedPlacement, annealed_stages, cuts, in_flight, repaired, staged
from ephemeron.partition.placement.stages_program import StagesProgram
from ephemeron.partition.schedule_simulator.schedule import Schedule

_log = logging.getLogger(__name__)

TIGHT = 1e-3
"""Relative gap at which the search of an order of devices ends."""
PROVED = 1e-6
"""Relative gap at which the search ends after the dynamic program."""
WITHIN = (1.003, 1.01, 1.03, 1.06, 1.1, 1.15, 1.25, 1.5)
"""Multiples of the load bound below which plans are searched first."""
MOST_STARTS = 20
"""Orders along the fastest links, and as many random ones, if there are too many orders."""
MOST_TRANSFERS = 20_000
"""Stages × tensors of a mixed-integer program; building a larger one takes longer than the time limit."""
MOST_LINES = 400
"""Limit up to which all orders of classes are tried; of more only some are, and the bound is that of downsets or of loads."""
MOST_VECTORS = 4000
"""Limit of states (number of used devices of each class) of the dynamic program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSearchResult:
    """Result of the search."""

    found: tuple[StagedPlacement, ...]
    """Best pipelines that fit, best first; empty: none."""
    bound_s: float
    """Proved lower bound of the bottleneck."""


def best_pipeline(
    costs: Costs, schedule: Schedule, *, budget: SearchBudget, timer: Timer, least: Sequence[StagedPlacement] = ()
) -> PipelineSearchResult:
    """Best pipelines over all orders of devices.

    Args:
        costs: of one micro-batch.
        schedule: determines micro-batches in flight.
        budget: limits and seed.
        timer: ends earlier.
        least: known pipelines.

    Raises:
        MissingExtra: SciPy is not installed.
    """
    rng = Random(budget.seed)
    classes = classes_of(costs)
    every = sequences(classes.counts) <= MOST_LINES
    found = [s for s in least if s.over_bytes == 0]

    def best_s() -> float:
        return min((s.bottleneck_s for s in found), default=float("inf"))

    anyhow_s = _load_bound_s(costs, _all_devices(costs, schedule), everywhere=True)
    orders = _orders(costs, rng)
    chained = _chained(costs, schedule, classes, orders, found, anyhow_s, rng=rng, timer=timer.part(0.85))
    anyhow_s = max(anyhow_s, chained)
    _log.debug("dynamic program ends: best %.6g, bound %.6g", best_s(), anyhow_s)
    if anyhow_s >= best_s() * (1 - PROVED):
        return PipelineSearchResult(found=_first(found), bound_s=min(anyhow_s, best_s()))
    lines = _lines(costs, schedule, classes, rng) if every else _some_lines(costs, schedule, classes, found, rng)
    lines.sort(key=lambda line: _load_bound_s(costs, line))
    bounds = {line: max(chained, _load_bound_s(costs, line)) for line in lines}
    steps = max(1, budget.annealing_steps // (2 * len(lines)))
    promising: list[tuple[float, DeviceOrder, StagedPlacement]] = []
    for k, line in enumerate(lines):
        if bounds[line] >= best_s() * (1 - TIGHT):
            continue
        if timer.left_s() <= 0 and promising:
            break
        tries = [staged(costs, line, cuts(costs, line, order)) for order in orders]
        start = min(tries, key=lambda s: (s.over_bytes, s.bottleneck_s))
        share = timer.part(0.25 / max(1, len(lines) - k)) if k < len(lines) - 1 else timer.part(0.1)
        better = annealed_stages(costs, line, start.stage, rng=rng, steps=min(steps, 200 * len(costs.nodes)), timer=share)
        promising.append((better.bottleneck_s, line, better))
        if better.over_bytes == 0:
            found.append(better)
    for relaxed in (True, False):
        promising.sort(key=lambda p: (p[2].over_bytes > 0, p[0]))
        for k, (_, line, start) in enumerate(promising):
            if bounds[line] >= best_s() * (1 - TIGHT) or timer.left_s() <= 0:
                continue
            if len(line.devices) * len(costs.tensors) > MOST_TRANSFERS:
                continue
            program = StagesProgram.of(costs, line, most_s=best_s())
            solution = program.program.solve(
                time_limit_s=timer.part(1.0 / (len(promising) - k)).left_s() if not relaxed else timer.part(0.5).left_s(),
                node_limit=budget.program_nodes,
                gap=TIGHT / 4,
                relaxed=relaxed,
            )
            bounds[line] = max(bounds[line], min(best_s(), solution.bound * program.scale_s * (1 - 1e-7)))
            if solution.values is None:
                continue
            for stage in program.rounded(solution):
                better = staged(costs, line, repaired(costs, stage))
                if (better.over_bytes, better.bottleneck_s) < (start.over_bytes, start.bottleneck_s):
                    start = better
            better = annealed_stages(costs, line, start.stage, rng=rng, steps=min(steps, 100 * len(costs.nodes)), timer=timer.part(0.2))
            if better.over_bytes == 0:
                found.append(better)
    proved = max(anyhow_s, min(bounds.values())) if every else anyhow_s
    return PipelineSearchResult(found=_first(found), bound_s=min(proved, best_s()))


def _first(found: Sequence[StagedPlacement]) -> tuple[StagedPlacement, ...]:
    return tuple(sorted(found, key=lambda s: s.bottleneck_s)[:3])


def _chained(
    costs: Costs,
    schedule: Schedule,
    classes: DeviceClasses,
    orders: Sequence[Sequence[int]],
    found: list[StagedPlacement],
    loads_s: float,
    *,
    rng: Random,
    timer: Timer,
) -> float:
    """Add the plans of the dynamic program to `found`; its bound, or the load bound if it proves none."""
    if math.prod(c + 1 for c in classes.counts) > MOST_VECTORS:
        classes = coarse_classes_of(costs)
        if math.prod(c + 1 for c in classes.counts) > MOST_VECTORS:
            return loads_s
    downsets = downsets_of(without_idle_ends(costs, units_of(costs)))
    if downsets is None:
        return loads_s

    def best_s() -> float:
        return min((s.bottleneck_s for s in found), default=float("inf"))

    def add(line: DeviceOrder, *stages: Sequence[int]) -> None:
        tries = [staged(costs, line, repaired(costs, stage)) for stage in stages]
        plain = min(tries, key=lambda s: (s.over_bytes, s.bottleneck_s))
        better = annealed_stages(costs, line, plain.stage, rng=rng, steps=20 * len(costs.nodes), timer=timer.part(0.1))
        found.extend(s for s in (plain, better) if s.over_bytes == 0)

    line = _all_devices(costs, schedule)
    add(line, *(cuts(costs, line, order) for order in orders))

    def try_out(searched: ChainSearchResult) -> None:
        if searched.chain is not None:
            add(_line(schedule, _linked(costs, classes, searched.chain.classes)), searched.chain.stage)

    search = ChainSearch(costs, schedule, downsets, classes)
    for factor in (*WITHIN, math.inf):  # a tight limit leaves few states
        limit_s = min(best_s(), factor * loads_s)
        searched = search.below(limit_s, "most", timer.part(0.5))
        try_out(searched)
        if searched.chain is not None or limit_s == best_s() or not searched.complete:
            break
    bound_s = loads_s
    for exact in (False, True):
        value_s = best_s()
        if exact and value_s == math.inf:  # this search needs a known plan as its limit
            break
        searched = AdjacentSearch(search).below(value_s, timer) if exact else search.below(value_s, "least", timer)
        try_out(searched)
        if not searched.complete:
            return bound_s
        if searched.chain is not None:
            bound_s = max(bound_s, searched.chain.value_s * (1 - 1e-9))
        elif value_s < math.inf:
            bound_s = max(bound_s, value_s)
        if bound_s >= best_s() * (1 - PROVED):
            break
    return bound_s


def _linked(costs: Costs, classes: DeviceClasses, order: Sequence[int]) -> tuple[int, ...]:
    """Devices for a sequence of classes; if members differ by their links, always the nearest."""
    if classes.exact:
        return tuple(classes.of(order))
    free = [list(own) for own in classes.members]
    made: list[int] = []
    for x in order:
        made.append(min(free[x], key=lambda d: (sum(m[made[-1]][d] for m in costs.send) if made else 0.0, d)))
        free[x].remove(made[-1])
    return tuple(made)


def _line(schedule: Schedule, devices: Sequence[int]) -> DeviceOrder:
    return DeviceOrder(devices=tuple(devices), flight=tuple(in_flight(schedule, len(devices))), recompute=schedule.recompute)


def _all_devices(costs: Costs, schedule: Schedule) -> DeviceOrder:
    return _line(schedule, range(len(costs.devices)))


def staging(costs: Costs, schedule: Schedule, where: Sequence[int], order: Sequence[str] = ()) -> StagedPlacement | None:
    """A placement as stages; None: tensors go in both directions between devices.

    Args:
        costs: of one micro-batch.
        schedule: determines micro-batches in flight.
        where: device by node.
        order: names of the used devices in the order of the pipeline, if known; else the first order that is found.
    """
    if order:
        return _on_line(costs, schedule, where, [costs.devices.index(name) for name in order])
    used = list(dict.fromkeys(where))
    feeds = {(where[u], where[v]) for t, u in enumerate(costs.producer) for v in costs.consumers[t] if where[u] != where[v]}
    found: list[int] = []
    while len(found) < len(used):
        ready = [d for d in used if d not in found and all(a in found for a, b in feeds if b == d)]
        if not ready:
            return None
        found.append(ready[0])
    return _on_line(costs, schedule, where, found)


def _on_line(costs: Costs, schedule: Schedule, where: Sequence[int], order: Sequence[int]) -> StagedPlacement:
    return staged(costs, _line(schedule, order), [order.index(d) for d in where])


def _lines(costs: Costs, schedule: Schedule, classes: DeviceClasses, rng: Random) -> list[DeviceOrder]:
    """Every order of every subset of devices; of equivalent orders only the first."""
    return [
        _line(schedule, classes.of(order)) for count in range(len(costs.devices), 0, -1) for order in permutations(classes.counts, count)
    ]


def _some_lines(
    costs: Costs, schedule: Schedule, classes: DeviceClasses, found: Sequence[StagedPlacement], rng: Random
) -> list[DeviceOrder]:
    """Orders of the best known plans, orders along the fastest links from each class, and some random ones."""
    size = len(costs.devices)
    known = [s.line for s in sorted(found, key=lambda s: s.bottleneck_s)[:5]]
    fast = [_line(schedule, _along_fast_links(costs, own[0])) for own in classes.members[:MOST_STARTS]]
    drawn = [_line(schedule, rng.sample(range(size), size)) for _ in range(MOST_STARTS)]
    return list(dict.fromkeys((*known, *fast, *drawn)))


def _along_fast_links(costs: Costs, first: int) -> tuple[int, ...]:
    order, left = [first], set(range(len(costs.devices))) - {first}
    while left:
        at = order[-1]
        order.append(min(left, key=lambda d: (sum(m[at][d] for m in costs.send), d)))
        left.remove(order[-1])
    return tuple(order)


def _load_bound_s(costs: Costs, line: DeviceOrder, *, everywhere: bool = False) -> float:
    """Load bound with divisible work.

    Any weights w of devices with Σ w = 1 give the bound Σ_i min_d w_d t_id (duality); weights proportional to total speed are exact if
    devices differ by a factor only.
    """
    devices = range(len(costs.devices)) if everywhere else line.devices
    totals = [sum(f[d] + b[d] for f, b in zip(costs.forward, costs.backward, strict=True)) for d in devices]
    if not all(totals):
        return 0.0
    weights = [1.0 / t for t in totals]
    share = [w / sum(weights) for w in weights]
    even = sum(
        min(s * (f[d] + b[d]) for s, d in zip(share, devices, strict=True)) for f, b in zip(costs.forward, costs.backward, strict=True)
    )
    single = max(min(f[d] + b[d] for d in devices) for f, b in zip(costs.forward, costs.backward, strict=True))
    return max(even, single) * (1 - 1e-12)


def _orders(costs: Costs, rng: Random) -> list[list[int]]:
    """Orders of nodes to cut: by number, depth first, and some random ones."""
    n = len(costs.nodes)
    found = [list(range(n))]
    for kind in ("deep", "random", "random"):
        waits = [len({costs.producer[t] for t in costs.inputs[i]}) for i in range(n)]
        free = [i for i in range(n) if waits[i] == 0]
        order: list[int] = []
        while free:
            i = free.pop() if kind == "deep" else free.pop(rng.randrange(len(free)))
            order.append(i)
            for v in dict.fromkeys(v for t in costs.outputs[i] for v in costs.consumers[t]):
                waits[v] -= 1
                if waits[v] == 0:
                    free.append(v)
        found.append(order)
    return found


def feasible_pipeline(costs: Costs, schedule: Schedule, *, rng: Random, timer: Timer) -> StagedPlacement | None:
    """A pipeline that fits, by a quick search; None: none was found, which proves nothing."""
    classes = classes_of(costs)
    every = sequences(classes.counts) <= MOST_LINES
    for line in _lines(costs, schedule, classes, rng) if every else _some_lines(costs, schedule, classes, (), rng):
        for order in _orders(costs, rng)[:2]:
            for start in (cuts(costs, line, order), _filled(costs, line, order)):
                found = annealed_stages(costs, line, start, rng=rng, steps=20 * len(costs.nodes), timer=timer)
                if found.over_bytes == 0:
                    return found
        if timer.left_s() <= 0:
            break
    return None


def _filled(costs: Costs, line: DeviceOrder, order: Sequence[int]) -> list[int]:
    """Stages filled up to their memory one after the other."""
    stage = [0] * len(costs.nodes)
    s, used = 0, 0
    there: set[int] = set()
    for i in order:
        fresh = {*costs.inputs[i], *costs.outputs[i]} - there
        need = costs.state[i] + _needed(costs, line, s, fresh)
        if s < len(line.devices) - 1 and used + need > costs.capacity[line.devices[s]]:
            s, used, there = s + 1, 0, set()
            need = costs.state[i] + _needed(costs, line, s - 1, {*costs.inputs[i], *costs.outputs[i]})
        used += need
        there |= {*costs.inputs[i], *costs.outputs[i]}
        stage[i] = s
    return repaired(costs, stage)


def _needed(costs: Costs, line: DeviceOrder, s: int, tensors: set[int]) -> int:
    """Bytes of tensors on a stage; with recomputation as if all stayed inside, which later repair corrects."""
    if not line.recompute:
        return line.flight[s] * sum(costs.held[t] for t in tensors)
    return sum(costs.held[t] * (1 if costs.inputs[costs.producer[t]] else line.flight[s]) for t in tensors)
