"""Errors of models that do not fit: missing bytes, limiting device and suggestions.

Algorithm 3 of NetSplit stops at "Insufficient Memory". Here the error names the missing bytes, the limiting device, and changes that
would fit (`suggestions`), each of them verified.
"""

from __future__ import annotations

from collections.abc import Mapping

from ephemeron.errors import PlanInfeasible
from ephemeron.partition.costs.table import Costs
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Topology
from ephemeron.partition.placement.search_budget import Timer
from ephemeron.partition.placement.suggestions import least_bytes, least_copies, what_fits
from ephemeron.partition.schedule_simulator.schedule import Schedule
from ephemeron.units import human_bytes


def refuse_what_cannot_fit(graph: Graph, topology: Topology, costs: Costs, schedule: Schedule, timer: Timer) -> None:
    """Check of memory before the search.

    Raises:
        PlanInfeasible: all devices together have too little memory, or none has enough for some group of nodes.
    """
    need, have = least_bytes(costs, schedule), sum(costs.capacity)
    if need > have:
        raise PlanInfeasible(
            f"{graph.name} needs at least {human_bytes(need)} and the devices have {human_bytes(have)} together: "
            f"{_missing(need - have)}; {what_fits(graph, topology, schedule, timer)}",
            binding="memory",
        )
    copies = least_copies(costs, schedule)
    largest = max(costs.capacity)
    roomiest = costs.devices[costs.capacity.index(largest)]
    for cluster in costs.clusters:
        tensors = {t for i in cluster for t in (*costs.inputs[i], *costs.outputs[i])}
        least = sum(costs.state[i] for i in cluster) + copies * sum(costs.held[t] for t in tensors)
        if least > largest:
            names = ", ".join(costs.nodes[i] for i in cluster[:3]) + (", …" if len(cluster) > 3 else "")
            raise PlanInfeasible(
                f"{names} of {graph.name} needs {human_bytes(least)} on one device and the largest, {roomiest}, has "
                f"{human_bytes(largest)}: {_missing(least - largest)}; {what_fits(graph, topology, schedule, timer)}",
                binding="memory",
            )


def no_plan_found(
    graph: Graph, topology: Topology, costs: Costs, schedule: Schedule, over_bytes: Mapping[str, int] | None, timer: Timer
) -> PlanInfeasible:
    """Error if memory suffices in sum, but no placement was found that fits every device.

    Args:
        graph, topology, costs, schedule: of the search.
        over_bytes: by device, of the least overfull placement; None: no placement can run.
        timer: for suggestions.
    """
    if over_bytes:
        worst = max(over_bytes, key=lambda d: over_bytes[d])
        capacity = costs.capacity[costs.devices.index(worst)]
        total = sum(over_bytes.values())
        best = (
            f"the best is {human_bytes(total)} ({total} bytes) over, most of it on {worst}, which needs "
            f"{human_bytes(capacity + over_bytes[worst])} and has {human_bytes(capacity)},"
        )
    else:
        best = "none of those that fit is a pipeline,"
    return PlanInfeasible(
        f"no placement of {graph.name} was found that fits: {best} though the devices have {human_bytes(sum(costs.capacity))} together "
        f"and {human_bytes(least_bytes(costs, schedule))} is the least that is needed; "
        f"{what_fits(graph, topology, schedule, timer)}",
        binding="memory",
    )


def _missing(nbytes: int) -> str:
    return f"{human_bytes(nbytes)} ({nbytes} bytes) are missing"
