"""When a model does not fit: how much is missing, and what would fit.

Algorithm 3 stops at "Insufficient Memory". Here the error says how many bytes are short, and with how many micro-batches a plan
was found that fits; it promises nothing that was not found.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from ephemeron.errors import PlanInfeasible
from ephemeron.partition.costs import Costs, costs_of
from ephemeron.partition.effort import Timer
from ephemeron.partition.graph import Graph
from ephemeron.partition.pipeline import feasible_pipeline
from ephemeron.partition.schedule import Schedule
from ephemeron.partition.stages import in_flight
from ephemeron.partition.topology import Topology

MOST_MICRO_BATCHES = 1024


def least_bytes(costs: Costs, schedule: Schedule) -> int:
    """What all devices together need at least: states once, and each tensor once for every micro-batch in flight."""
    copies = min(in_flight(schedule, len(costs.devices)))
    return sum(costs.state) + copies * sum(costs.held)


def refuse_what_cannot_fit(graph: Graph, topology: Topology, costs: Costs, schedule: Schedule, timer: Timer) -> None:
    """Refuses before anything is searched.

    Raises:
        PlanInfeasible: all devices together have too little memory, or none has enough for some group of nodes.
    """
    need, have = least_bytes(costs, schedule), sum(costs.capacity)
    if need > have:
        raise PlanInfeasible(
            f"{graph.name} needs at least {_gb(need)} and the devices have {_gb(have)}: {_gb(need - have)} ({need - have} bytes) "
            f"are missing; {what_fits(graph, topology, schedule, timer)}",
            binding="memory",
        )
    copies = min(in_flight(schedule, len(costs.devices)))
    for cluster in costs.clusters:
        tensors = {t for i in cluster for t in (*costs.inputs[i], *costs.outputs[i])}
        least = sum(costs.state[i] for i in cluster) + copies * sum(costs.held[t] for t in tensors)
        if least > max(costs.capacity):
            names = ", ".join(costs.nodes[i] for i in cluster[:3]) + (", …" if len(cluster) > 3 else "")
            raise PlanInfeasible(
                f"{names} of {graph.name} needs {_gb(least)} on one device and the largest has {_gb(max(costs.capacity))}: "
                f"{_gb(least - max(costs.capacity))} ({least - max(costs.capacity)} bytes) are missing; "
                f"{what_fits(graph, topology, schedule, timer)}",
                binding="memory",
            )


def no_plan_found(
    graph: Graph, topology: Topology, costs: Costs, schedule: Schedule, over_bytes: int, timer: Timer
) -> PlanInfeasible:
    """Enough memory in sum, but no placement was found that fits each device."""
    return PlanInfeasible(
        f"no placement of {graph.name} was found that fits: the best is {_gb(over_bytes)} ({over_bytes} bytes) over, though the "
        f"devices have {_gb(sum(costs.capacity))} and {_gb(least_bytes(costs, schedule))} is the least that is needed; "
        f"{what_fits(graph, topology, schedule, timer)}",
        binding="memory",
    )


def what_fits(graph: Graph, topology: Topology, schedule: Schedule, timer: Timer) -> str:
    """The fewest micro-batches (of powers of two) for which a pipeline that fits is found, as a sentence."""
    states = sum(n.state_bytes for n in graph.nodes)
    if states > sum(d.memory_bytes for d in topology.devices):
        return f"parameters, gradients and optimiser alone take {_gb(states)}: add devices, or take a smaller model"
    parts = max(2, 2 * schedule.micro_batches)
    while parts <= MOST_MICRO_BATCHES and timer.left_s() > 0:
        for overlap in (True, False):
            trial = replace(schedule, kind="1f1b", micro_batches=parts, overlap=overlap)
            costs = costs_of(graph, topology, micro_batches=parts)
            if feasible_pipeline(costs, trial, rng=Random(0), timer=timer) is not None:
                what = "" if overlap else " and overlap=False"
                return f"with 1f1b, micro_batches={parts}{what} a plan fits"
        parts *= 2
    return (
        f"up to {parts // 2} micro-batches nothing was found that fits: add devices or memory, or take a smaller batch"
    )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"
