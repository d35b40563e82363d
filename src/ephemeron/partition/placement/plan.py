"""A placement with what it is worth and how far it can be from the best: the value that `place` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Schedule

Objective = Literal["throughput", "iteration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCandidate:
    """One placement that was judged."""

    name: str
    """The method that made it."""
    value_s: float
    """Of the objective, replayed; infinite where the placement is no pipeline and has to be one."""
    iteration_s: float
    """One iteration, replayed; infinite where the schedule cannot run it, because it recomputes and this is no pipeline."""
    over_bytes: int
    """By how much devices are overfull in sum; 0: it fits."""

    @property
    def admitted(self) -> bool:
        """Whether it can be chosen at all."""
        return self.over_bytes == 0 and self.value_s < float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The best placement that was found."""

    graph: str
    topology: str
    objective: Objective
    """`throughput`: seconds per micro-batch of the busiest device or link. `iteration`: seconds of one iteration."""
    schedule: Schedule
    placement: Mapping[str, str]
    """Device by node."""
    stages: tuple[str, ...] = ()
    """Devices in the order of the pipeline; empty: tensors go to and fro, so there is none."""
    orders: DeviceOrders | None
    """What devices and links have to follow for the time to hold; None: the schedule's own rule does."""
    method: str
    """Which candidate this is."""
    value_s: float
    """Of the objective, replayed by the judge."""
    bound_s: float
    """Proved: no placement that fits has a lesser value."""
    iteration_s: float
    """One iteration, replayed."""
    solver_s: float
    """Wall time of the search."""
    reserved_bytes: Mapping[str, int]
    """By device, equation 5-18."""
    peak_bytes: Mapping[str, int]
    """By device, over time."""
    candidates: tuple[PlacementCandidate, ...] = ()
    """Everything that was judged, in that order."""

    @property
    def gap(self) -> float:
        """How much better, relatively, the best placement can be at most; 0: this is it."""
        return 0.0 if self.value_s == 0 else 1.0 - self.bound_s / self.value_s
