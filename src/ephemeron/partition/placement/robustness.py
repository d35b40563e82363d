"""Robustness of a plan to the variation of measured times, by bootstrap.

A plan is proved for the given times. If these are medians of passes that vary, another measurement gives other medians. So passes are
resampled with replacement, as many as were measured; a pass is drawn for all operators at once, because a busy machine slows all of
them. The plan is evaluated with the new medians. For a pipeline the optimum of each draw is searched and bounded again; the distance of
the plan from that bound is the most that was lost by choosing it.

Effects that all passes share are not covered: another machine, another temperature, or a larger batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from ephemeron.partition.costs.table import costs_of
from ephemeron.partition.graph.graph import Graph, Node
from ephemeron.partition.graph.topology import Topology
from ephemeron.partition.placement.pipeline import best_pipeline, staging
from ephemeron.partition.placement.plan import PlacementPlan, SearchBudget, timer
from ephemeron.partition.schedule_simulator.simulator import replay

_log = logging.getLogger(__name__)

DRAWS = 100
WITHIN = (0.01, 0.05, 0.1)
HEAVY = 0.01
"""Share of all time from which on an operator's spread is reported."""
SEARCH = SearchBudget(time_limit_s=None, annealing_steps=2000, program_nodes=1)
"""Budget of the search for each draw: the dynamic program and its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """Robustness of a plan. Seconds are of its objective."""

    passes: int
    """Fewest measured passes of any operator."""
    spread: float
    """Interquartile range of the sum of all operators' passes, relative to its median."""
    widest: str
    """Operator with the largest spread, of those that take 1 % of the time or more."""
    widest_spread: float
    """Difference of its longest and shortest pass, relative to its median."""
    draws: int
    """Number of resamplings."""
    low_s: float
    """5 % quantile of the plan's value."""
    high_s: float
    """95 % quantile of the plan's value."""
    within: tuple[tuple[float, float], ...]
    """(x, share of draws in which the plan is proved to be within x of the optimum); empty if the plan is no pipeline."""
    lost: float | None
    """95 % quantile of the plan's relative distance from the bound; None if the plan is no pipeline."""


def robustness_of(
    graph: Graph,
    topology: Topology,
    plan: PlacementPlan,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    limit_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
) -> Robustness | None:
    """Robustness of a plan by resampling.

    Args:
        graph, topology, plan: as placed.
        draws: number; fewer at the time limit, but at least one.
        seed: of the draws.
        limit_s: seconds of `clock`.

    Returns:
        None: the graph has no measured passes.
    """
    measured = [n for n in graph.nodes if n.passes_s]
    if not measured:
        return None
    passes = min(len(rows) for n in measured for rows in n.passes_s.values())
    if passes < 2:
        return None
    rng, limit = Random(seed), timer(limit_s, clock)
    values: list[float] = []
    losses: list[float] = []
    for k in range(draws):
        if k and limit.left_s() <= 0:
            break
        chosen = [rng.randrange(passes) for _ in range(passes)]
        drawn = replace(graph, nodes=tuple(_drawn(n, chosen) for n in graph.nodes))
        value_s, bound_s = _replayed(drawn, topology, plan)
        values.append(value_s)
        if bound_s is not None and value_s > 0:
            losses.append(value_s / bound_s - 1 if bound_s > 0 else float("inf"))
    _log.info("resampled %d of %d times", len(values), draws)
    widest, widest_spread = _widest(measured)
    return Robustness(
        passes=passes,
        spread=_spread(measured, passes),
        widest=widest,
        widest_spread=widest_spread,
        draws=len(values),
        low_s=_quantile(values, 0.05),
        high_s=_quantile(values, 0.95),
        within=tuple((x, sum(lost <= x for lost in losses) / len(losses)) for x in WITHIN) if losses else (),
        lost=_quantile(losses, 0.95) if losses else None,
    )


def _drawn(n: Node, chosen: Sequence[int]) -> Node:
    forward = {k: median(rows[i][0] for i in chosen) for k, rows in n.passes_s.items()}
    backward = {k: median(rows[i][1] for i in chosen) for k, rows in n.passes_s.items()}
    return replace(n, forward_s={**n.forward_s, **forward}, backward_s={**n.backward_s, **backward})


def _replayed(graph: Graph, topology: Topology, plan: PlacementPlan) -> tuple[float, float | None]:
    """Value of the plan, and bound of a new search."""
    schedule = plan.schedule
    if plan.objective == "iteration":
        done = replay(graph, topology, plan.placement, schedule=schedule, orders=plan.orders, stages=plan.stages)
        return done.iteration_s, None
    costs = costs_of(graph, topology, micro_batches=schedule.micro_batches, recompute=schedule.recompute)
    own = staging(costs, schedule, costs.where(plan.placement), plan.stages)
    assert own is not None, "a plan for throughput is a pipeline"
    searched = best_pipeline(costs, schedule, budget=SEARCH, timer=timer(1.0), least=[own])
    return own.bottleneck_s, searched.bound_s


def _spread(nodes: Sequence[Node], passes: int) -> float:
    totals = sorted(sum(sum(rows[i]) for n in nodes for rows in n.passes_s.values()) for i in range(passes))
    middle = median(totals)
    return (_quantile(totals, 0.75) - _quantile(totals, 0.25)) / middle if middle else 0.0


def _widest(nodes: Sequence[Node]) -> tuple[str, float]:
    sums = {n.name: sorted(f + b for rows in n.passes_s.values() for f, b in rows) for n in nodes}
    whole = sum(median(s) for s in sums.values())
    heavy = {n: s for n, s in sums.items() if median(s) > 0 and median(s) >= HEAVY * whole}
    spread = {n: (s[-1] - s[0]) / median(s) for n, s in heavy.items()}
    name = max(spread, key=lambda n: spread[n], default="")
    return name, spread.get(name, 0.0)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
