"""Suggestions for a model that does not fit: more micro-batches, recomputation, a smaller batch. Each is tried, none is estimated.

A change is suggested only if a placement was found that fits by the simulator's memory. Others may also fit, because the search is a
quick one.

Errors of models that do not fit: missing bytes, limiting device and suggestions.

Algorithm 3 of NetSplit stops at "Insufficient Memory". Here the error names the missing bytes, the limiting device, and changes that
would fit (`suggestions`), each of them verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from ephemeron.errors import PlanInfeasible
from ephemeron.partition.costs.table import Costs, costs_of
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Topology
from ephemeron.partition.placement.pipeline import feasible_pipeline
from ephemeron.partition.placement.plan import Timer
from ephemeron.partition.placement.stages import in_flight
from ephemeron.partition.schedule_simulator.schedule import Schedule
from ephemeron.partition.schedule_simulator.simulator import reserved_bytes
from ephemeron.units import human_bytes

MOST_MICRO_BATCHES = 1024
SHARES = 128
"""Parts of a batch if the number of its samples is unknown."""


def least_copies(costs: Costs, schedule: Schedule) -> int:
    """Least copies of a tensor on a device that touches it."""
    return 1 if schedule.recompute else min(in_flight(schedule, len(costs.devices)))


def least_bytes(costs: Costs, schedule: Schedule) -> int:
    """Least memory of all devices together: states once, and the least copies of each tensor."""
    return sum(costs.state) + least_copies(costs, schedule) * sum(costs.held)


def what_fits(graph: Graph, topology: Topology, schedule: Schedule, timer: Timer) -> str:
    """Sentence with the fewest micro-batches, recomputation, and the largest batch for which a placement was found."""
    states = sum(n.state_bytes for n in graph.nodes)
    if states > sum(d.memory_bytes for d in topology.devices):
        return f"parameters, gradients and optimiser alone take {human_bytes(states)}: add devices, or take a smaller model"
    trial = _SuggestionTrial(graph=graph, topology=topology, timer=timer)
    found: list[str] = []
    recomputed = False
    if not schedule.recompute and schedule.kind != "plain":
        recomputed = trial.fits(replace(schedule, recompute=True), timer.part(0.2))
        if recomputed:
            found.append("with recompute=True")
    fewest = trial.fewest(schedule, timer.part(0.4))
    if fewest is not None:
        found.append(f"with {_words(fewest)}")
    elif not recomputed and not schedule.recompute:
        fewest = trial.fewest(replace(schedule, kind="1f1b", recompute=True), timer.part(0.5))
        if fewest is not None:
            found.append(f"with {_words(fewest)} and recompute=True")
    smaller = trial.largest_batch(schedule, timer)
    if smaller:
        found.append(smaller)
    if found:
        return f"a plan fits {', or '.join(found)}"
    most = trial.most_micro_batches
    return f"up to {most} micro-batches no placement was found that fits, nor for a smaller batch: add devices or memory"


def _words(schedule: Schedule) -> str:
    shallow = "" if schedule.overlap else " and overlap=False"
    return f"1f1b, micro_batches={schedule.micro_batches}{shallow}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SuggestionTrial:
    graph: Graph
    topology: Topology
    timer: Timer

    @property
    def most_micro_batches(self) -> int:
        """Limit of micro-batches; each has at least one sample."""
        return min(MOST_MICRO_BATCHES, self.graph.batch_size or MOST_MICRO_BATCHES)

    def fits(self, schedule: Schedule, timer: Timer, *, share: float = 1.0) -> bool:
        """Whether a placement is found, for a share of the batch."""
        graph = self.graph if share == 1.0 else _smaller(self.graph, share)
        costs = costs_of(graph, self.topology, micro_batches=schedule.micro_batches, recompute=schedule.recompute)
        if least_bytes(costs, schedule) > sum(costs.capacity):
            return False
        found = feasible_pipeline(costs, schedule, rng=Random(0), timer=timer)
        if found is None:
            return False
        need = reserved_bytes(graph, self.topology, costs.placement(found.where), schedule=schedule, stages=found.device_names(costs))
        return all(need[d.name] <= d.memory_bytes for d in self.topology.devices)

    def fewest(self, schedule: Schedule, timer: Timer) -> Schedule | None:
        """1F1B with the fewest micro-batches above the schedule's, by doubling and bisection."""

        def tried(parts: int) -> Schedule | None:
            for overlap in (True, False):
                trial = replace(schedule, kind="1f1b", micro_batches=parts, overlap=overlap)
                if trial != schedule and self.fits(trial, timer.part(0.3)):
                    return trial
            return None

        most = self.most_micro_batches
        low, parts = schedule.micro_batches, max(2, 2 * schedule.micro_batches)
        best: Schedule | None = None
        if schedule.kind != "plain":
            best = tried(low)  # the same number, but 1F1B, or without overlap
            if best is not None:
                return best
        while best is None and low < most and timer.left_s() > 0:
            parts = min(parts, most)
            best = tried(parts)
            if best is None:
                low, parts = parts, 2 * parts
        while best is not None and best.micro_batches - low > 1 and timer.left_s() > 0:
            middle = (low + best.micro_batches) // 2
            found = tried(middle)
            if found is None:
                low = middle
            else:
                best = found
        return best

    def largest_batch(self, schedule: Schedule, timer: Timer) -> str:
        """Largest part of the batch with the same schedule; empty: none was found."""
        samples = self.graph.batch_size
        steps = samples or SHARES
        low, high = 0, steps
        while high - low > 1 and timer.left_s() > 0:
            middle = (low + high) // 2
            if self.fits(schedule, timer.part(0.3), share=middle / steps):
                low = middle
            else:
                high = middle
        if not low or (samples and low < schedule.micro_batches):
            return ""
        return f"for a batch of {low} of {samples} samples" if samples else f"for a batch of {100 * low / steps:.0f} % of this one"


def _smaller(graph: Graph, share: float) -> Graph:
    """Graph with tensors of a part of the batch; times do not change."""
    tensors = tuple(replace(t, nbytes=_part(t.nbytes, share), gradient_nbytes=_part(t.gradient_bytes, share)) for t in graph.tensors)
    return replace(graph, tensors=tensors)


def _part(nbytes: int, share: float) -> int:
    return -int(-nbytes * share // 1)


# -- errors of models that do not fit -----------------------------------------------------------------------------


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
