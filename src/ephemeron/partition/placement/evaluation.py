"""Evaluation of proposed placements by the schedule simulator."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Topology
from ephemeron.partition.placement.pipeline import staging
from ephemeron.partition.placement.plan import Objective, PlacementCandidate
from ephemeron.partition.schedule_simulator.replay import Replay
from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Schedule
from ephemeron.partition.schedule_simulator.simulator import replay

TIGHT = 1e-4
"""Relative gap at which a plan is proved."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementEvaluation:
    """A proposed placement with its simulation."""

    candidate: PlacementCandidate
    where: tuple[int, ...]
    """Device by node."""
    replay: Replay | None
    """None: the schedule recomputes and the placement is no pipeline, so it cannot run."""


@dataclass(slots=True)
class PlacementTrial:
    """All placements evaluated so far."""

    graph: Graph
    topology: Topology
    schedule: Schedule
    objective: Objective
    costs: Costs
    evaluated: list[PlacementEvaluation] = field(default_factory=list)

    def evaluate(
        self, name: str, where: Sequence[int], orders: DeviceOrders | None = None, stages: Sequence[str] = ()
    ) -> PlacementEvaluation:
        """Simulation of a placement, which is added to `evaluated`.

        Args:
            name: of the method that proposed it.
            where: device by node.
            orders: of tasks, for the whole batch; None: those of the schedule's rule.
            stages: devices in the order of the pipeline; empty: their order in the graph.
        """
        if self.schedule.recompute and staging(self.costs, self.schedule, where) is None:
            candidate = PlacementCandidate(name=name, value_s=float("inf"), iteration_s=float("inf"), over_bytes=0)
            self.evaluated.append(PlacementEvaluation(candidate=candidate, where=tuple(where), replay=None))
            return self.evaluated[-1]
        done = replay(self.graph, self.topology, self.costs.placement(where), schedule=self.schedule, orders=orders, stages=stages)
        if self.objective == "iteration":
            value_s = done.iteration_s
        else:
            value_s = done.bottleneck_s if done.stages else float("inf")
        candidate = PlacementCandidate(name=name, value_s=value_s, iteration_s=done.iteration_s, over_bytes=sum(done.over_bytes.values()))
        _log.debug("evaluated %s: %s", name, candidate)
        self.evaluated.append(PlacementEvaluation(candidate=candidate, where=tuple(where), replay=done))
        return self.evaluated[-1]

    @property
    def best(self) -> PlacementEvaluation | None:
        """Best placement that can be chosen; None: there is none."""
        admitted = [j for j in self.evaluated if j.candidate.admitted]
        return min(admitted, key=lambda j: (j.candidate.value_s, j.candidate.iteration_s), default=None)

    def least_over_bytes(self) -> dict[str, int] | None:
        """Excess by device of the least overfull placement that can run."""
        found = [j for j in self.evaluated if j.candidate.value_s < float("inf") and j.replay is not None]
        best = min(found, key=lambda j: j.candidate.over_bytes, default=None)
        return None if best is None or best.replay is None else dict(best.replay.over_bytes)

    def proved(self, bound_s: float) -> bool:
        """Whether the best placement is optimal by a lower bound."""
        best = self.best
        return best is not None and bound_s >= best.candidate.value_s * (1 - TIGHT)
