"""A placement with its value and proved bound: the result of `place`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Schedule

Objective = Literal["throughput", "iteration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCandidate:
    """One evaluated placement."""

    name: str
    """Method that proposed it."""
    value_s: float
    """Simulated objective; infinite if the placement is no pipeline and has to be one."""
    iteration_s: float
    """Simulated iteration; infinite if the schedule recomputes and the placement is no pipeline, so that it cannot run."""
    over_bytes: int
    """Bytes over the memory of devices in sum; 0: it fits."""

    @property
    def admitted(self) -> bool:
        """Whether it can be chosen."""
        return self.over_bytes == 0 and self.value_s < float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The best placement found."""

    graph: str
    topology: str
    objective: Objective
    """`throughput`: seconds per micro-batch of the busiest device or link. `iteration`: seconds of one iteration."""
    schedule: Schedule
    placement: Mapping[str, str]
    """Device by node."""
    stages: tuple[str, ...] = ()
    """Devices in the order of the pipeline; empty: tensors go in both directions, so there is no pipeline."""
    orders: DeviceOrders | None
    """Orders of devices and links for which the time holds; None: those of the schedule's rule."""
    method: str
    """Method of the chosen candidate."""
    value_s: float
    """Simulated objective."""
    bound_s: float
    """Proved lower bound of the value of any placement that fits."""
    iteration_s: float
    """Simulated iteration."""
    solver_s: float
    """Wall time of the search."""
    reserved_bytes: Mapping[str, int]
    """Equation 5-18, by device."""
    peak_bytes: Mapping[str, int]
    """Maximum over time, by device."""
    candidates: tuple[PlacementCandidate, ...] = ()
    """All evaluated placements in order of evaluation."""

    @property
    def gap(self) -> float:
        """Most by which the best placement can be better, relatively; 0: this is the best."""
        return 0.0 if self.value_s == 0 else 1.0 - self.bound_s / self.value_s
