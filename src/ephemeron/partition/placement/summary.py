"""Summary of a plan by device, link and compared method, for table, JSON and page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Topology
from ephemeron.partition.placement.plan import PlacementCandidate, PlacementPlan
from ephemeron.partition.placement.robustness import Robustness
from ephemeron.partition.schedule_simulator.schedule import Replay
from ephemeron.units import exact_seconds, human_bytes

SAME = 5e-7
"""Relative difference below which a method is as good as the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One device that has work."""

    stage: int | None
    """From 0, in the order of the pipeline; None: there is no pipeline."""
    device: str
    operators: int
    parameter_bytes: int
    needed_bytes: int
    """Equation 5-18 for all micro-batches in flight."""
    peak_bytes: int
    """Maximum over time in the simulation."""
    memory_bytes: int
    """Memory of the device."""
    busy_s: float
    """Both passes of a micro-batch."""
    bottleneck: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """One direction between two devices that is used."""

    source: str
    target: str
    transfers: int
    """Per micro-batch."""
    nbytes: int
    """Per micro-batch."""
    busy_s: float
    """Per micro-batch."""
    bottleneck: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """Best result of one method."""

    method: str
    value_s: float | None
    """Objective; None: the placement is no pipeline and has to be one."""
    iteration_s: float | None
    over_bytes: int
    """Bytes over the memory of devices in sum."""
    longer: float | None
    """Excess over the plan, relatively; None: it cannot be chosen."""

    @property
    def verdict(self) -> str:
        """`+12.0%` relative to the plan, or the reason why it cannot be chosen."""
        if self.over_bytes:
            return f"does not fit: {human_bytes(self.over_bytes)} over"
        if self.longer is None:
            return "no pipeline"
        return "as good" if abs(self.longer) < SAME else f"{self.longer:+.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSummary:
    """Summary of a plan."""

    plan: PlacementPlan
    stages: tuple[StageRow, ...]
    links: tuple[LinkRow, ...]
    methods: tuple[MethodRow, ...]
    bottleneck: str
    """The busiest device, or link as `source → target`."""
    samples_s: float | None
    """Samples per second of a full pipeline, or of consecutive iterations. None: unknown batch size."""
    source: str = ""
    """Source of the times, from the graph."""
    robustness: Robustness | None = None
    """Robustness to resampled times; None: no measured passes."""

    @property
    def rests_on(self) -> str:
        """Sentence about the source of the times and the robustness of the plan."""
        source, r = self.source or "unknown source", self.robustness
        if r is None:
            return f"This holds for the times as given ({source}); without measured passes, its uncertainty is unknown."
        told = (
            f"This holds for the times as given ({source}). Quartiles of a pass are {r.spread:.0%} apart"
            + (f", passes of {r.widest} up to {r.widest_spread:.0%}" if r.widest else "")
            + f"; with passes resampled {r.draws} times, the plan takes {exact_seconds(r.low_s)} to {exact_seconds(r.high_s)} in 90 % of draws"
        )
        if not r.within:
            return f"{told}."
        shares = ", ".join(f"within {x:.0%} in {share:.0%}" for x, share in r.within)
        return f"{told}, and is proved to be {shares} of the optimum."

    def to_dict(self) -> dict[str, object]:
        """Document for JSON; keys as above and in `PlacementPlan`."""
        p = self.plan
        return {
            "graph": p.graph,
            "topology": p.topology,
            "objective": p.objective,
            "schedule": dataclasses.asdict(p.schedule),
            "value_s": p.value_s,
            "bound_s": p.bound_s,
            "gap": p.gap,
            "iteration_s": p.iteration_s,
            "samples_s": self.samples_s,
            "solver_s": p.solver_s,
            "method": p.method,
            "bottleneck": self.bottleneck,
            "stages": [dataclasses.asdict(r) for r in self.stages],
            "links": [dataclasses.asdict(r) for r in self.links],
            "methods": [dataclasses.asdict(r) for r in self.methods],
            "rests_on": {"source": self.source, "told": self.rests_on, "robustness": _robustness(self.robustness)},
            "placement": dict(p.placement),
        }


def _robustness(r: Robustness | None) -> dict[str, object] | None:
    if r is None:
        return None
    return {**dataclasses.asdict(r), "within": [{"of_the_best": x, "draws": share} for x, share in r.within]}


def summary_of(
    graph: Graph, topology: Topology, plan: PlacementPlan, done: Replay, *, robustness: Robustness | None = None
) -> PlacementSummary:
    """Summary of a plan.

    Args:
        graph, topology, plan: as placed.
        done: simulation of the plan.
        robustness: of the plan, if known.
    """
    parts = plan.schedule.micro_batches
    busiest = max(done.busy_s, key=lambda r: done.busy_s[r])
    order = done.stages or tuple(d.name for d in topology.devices if d.name in done.busy_s)
    nodes = {n.name: n for n in graph.nodes}
    memory = {d.name: d.memory_bytes for d in topology.devices}
    stages = []
    for k, device in enumerate(order):
        own = [nodes[n] for n, d in plan.placement.items() if d == device]
        stages.append(
            StageRow(
                stage=k if done.stages else None,
                device=device,
                operators=len(own),
                parameter_bytes=sum(n.parameter_bytes for n in own),
                needed_bytes=done.reserved_bytes[device],
                peak_bytes=done.peak_bytes[device],
                memory_bytes=memory[device],
                busy_s=done.busy_s[device] / parts,
                bottleneck=device == busiest,
            )
        )
    per_batch_s = plan.value_s * parts if plan.objective == "throughput" else plan.iteration_s
    return PlacementSummary(
        plan=plan,
        stages=tuple(stages),
        links=tuple(_links(graph, plan, done, busiest)),
        methods=tuple(_methods(plan)),
        bottleneck=" → ".join(busiest) if isinstance(busiest, tuple) else busiest,
        source=graph.source,
        robustness=robustness,
        samples_s=graph.batch_size / per_batch_s if graph.batch_size and per_batch_s > 0 else None,
    )


def _links(graph: Graph, plan: PlacementPlan, done: Replay, busiest: str | tuple[str, str]) -> Iterable[LinkRow]:
    parts = plan.schedule.micro_batches
    tensors = {t.name: t for t in graph.tensors}
    sent: dict[tuple[str, str], list[int]] = {}
    for s in done.spans:
        if isinstance(s.resource, tuple) and s.micro_batch == 0:
            t = tensors[s.what]
            sent.setdefault(s.resource, []).append(t.nbytes if s.direction == "forward" else t.gradient_bytes)
    for link, sizes in sorted(sent.items()):
        yield LinkRow(
            source=link[0],
            target=link[1],
            transfers=len(sizes),
            nbytes=sum(-(-n // parts) for n in sizes),
            busy_s=done.busy_s[link] / parts,
            bottleneck=link == busiest,
        )


def _methods(plan: PlacementPlan) -> Iterable[MethodRow]:
    best: dict[str, PlacementCandidate] = {}
    for c in plan.candidates:
        if c.name not in best or _rank(c) < _rank(best[c.name]):
            best[c.name] = c
    for c in sorted(best.values(), key=_rank):
        yield MethodRow(
            method=c.name,
            value_s=None if math.isinf(c.value_s) else c.value_s,
            iteration_s=None if math.isinf(c.iteration_s) else c.iteration_s,
            over_bytes=c.over_bytes,
            longer=c.value_s / plan.value_s - 1 if c.admitted and plan.value_s > 0 else None,
        )


def _rank(c: PlacementCandidate) -> tuple[bool, float, float, int]:
    return not c.admitted, c.value_s, c.iteration_s, c.over_bytes
