"""What a proof rests on, and how far the choice survives it: measured times are drawn again, and the plan is compared with the best for them.

A plan is proved for the numbers that it was given. Where these are medians of passes that differ, another day would have given others. So
passes are drawn with replacement, as many as were measured (a bootstrap: a pass is drawn for all operators at once, because a
busy machine slows them together), medians are taken again, and the plan is judged by them. For a pipeline the best for each draw is
searched and bounded anew; how far the plan is from that bound is the most that was lost by choosing it.

It does not know what all passes have in common: another machine, a colder one, or a larger batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from ephemeron.partition.costs.table import costs_of
from ephemeron.partition.graph.graph import Graph, Node
from ephemeron.partition.graph.topology import Topology
from ephemeron.partition.placement.pipeline import best_pipeline, staging
from ephemeron.partition.placement.plan import PlacementPlan
from ephemeron.partition.placement.search_budget import SearchBudget, timer
from ephemeron.partition.schedule_simulator.simulator import replay

DRAWS = 100
WITHIN = (0.01, 0.05, 0.1)
HEAVY = 0.01
"""Share of all time from which an operator's spread is told."""
SEARCH = SearchBudget(time_limit_s=None, annealing_steps=2000, program_nodes=1)
"""For each draw, from the plan on: the dynamic program, and what it takes to begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """How sure a plan is. Seconds are of its objective."""

    passes: int
    """Measured, of each operator; the fewest."""
    spread: float
    """Between the quartiles of the sum of all operators' passes, relative to its median."""
    widest: str
    """Operator whose passes are furthest apart, of those that take 1 % of the time or more."""
    widest_spread: float
    """Its longest pass less its shortest, relative to its median."""
    draws: int
    """Times that all passes were drawn again."""
    low_s: float
    """Of the plan, in 5 % of draws less."""
    high_s: float
    """Of the plan, in 5 % of draws more."""
    within: tuple[tuple[float, float], ...]
    """(x, share of draws in which the plan is proved to be within x of the best for them); empty: only pipelines are searched anew."""
    lost: float | None
    """Most by which the plan is behind the best, relatively, in 95 % of draws; None as above."""


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
    """Resamples.

    Args:
        graph, topology, plan: as placed.
        draws: how many; fewer where time ends, but one at least.
        seed: of the draws.
        limit_s: seconds of `clock`.

    Returns:
        None: the graph's times were given without the passes that they come from.
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
        value_s, bound_s = _judged(drawn, topology, plan)
        values.append(value_s)
        if bound_s is not None and value_s > 0:
            losses.append(value_s / bound_s - 1 if bound_s > 0 else float("inf"))
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


def _judged(graph: Graph, topology: Topology, plan: PlacementPlan) -> tuple[float, float | None]:
    """Value of the plan, and the bound of a search anew."""
    schedule = plan.schedule
    if plan.objective == "iteration":
        done = replay(graph, topology, plan.placement, schedule=schedule, orders=plan.orders, stages=plan.stages)
        return done.iteration_s, None
    costs = costs_of(graph, topology, micro_batches=schedule.micro_batches, recompute=schedule.recompute)
    own = staging(costs, schedule, costs.where(plan.placement), plan.stages)
    assert own is not None, "a plan for throughput is a pipeline"
    searched = best_pipeline(costs, schedule, effort=SEARCH, timer=timer(1.0), least=[own])
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
