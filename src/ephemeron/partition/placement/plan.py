"""A placement with its value and proved bound: the result of `place`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ephemeron.errors import JobError
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


# -- limits of solvers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """Limits of one call of `place`. With counted limits only, the same seed and one worker, results are reproducible; with a time limit they
    depend on the speed of the machine.

    Raises:
        JobError: a limit that is not above zero.
    """

    time_limit_s: float | None = 60.0
    """Limit of the whole call; None: counted limits only."""
    annealing_steps: int = 10_000_000
    """Placements and orders tried by annealing."""
    program_nodes: int = 10_000_000
    """Branches of each mixed-integer program (HiGHS)."""
    constraint_work: float = 1e9
    """CP-SAT's deterministic time, about seconds of an idle core."""
    workers: int = 1
    """Threads of CP-SAT. More than one finds more, but results are not reproducible."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "annealing_steps", "program_nodes", "constraint_work", "workers"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise JobError(f"budget: {name} = {value} should be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """Rest of a time limit."""

    end_s: float
    """End on the clock; infinite: no limit."""
    clock: Callable[[], float] = time.monotonic

    def left_s(self) -> float:
        return max(0.0, self.end_s - self.clock())

    def part(self, share: float) -> Timer:
        """A timer that ends when this share of what is left has passed."""
        now_s = self.clock()
        return Timer(end_s=now_s + share * max(0.0, self.end_s - now_s), clock=self.clock)


def timer(limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> Timer:
    """A timer that begins now."""
    return Timer(end_s=float("inf") if limit_s is None else clock() + limit_s, clock=clock)
