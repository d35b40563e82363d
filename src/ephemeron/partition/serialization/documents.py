"""Graphs, topologies and plans as JSON documents with a version. Reading is strict.

    {"format": "ephemeron-graph", "version": 1, "name": "…", "source": "…", "batch_size": 64,
     "nodes": [{"name": "conv1", "forward_s": {"gpu": 0.01}, "backward_s": {"gpu": 0.02}, "parameter_bytes": 400,
                "gradient_bytes": 400, "optimizer_bytes": 800, "group": null, "module": "encoder.0"}],
     "tensors": [{"name": "x", "producer": "conv1", "consumers": ["relu1"], "nbytes": 1000, "gradient_nbytes": null}]}
    {"format": "ephemeron-topology", "version": 1, "name": "…",
     "devices": [{"name": "gpu0", "kind": "gpu", "memory_bytes": 24000000000, "speed": 1.0}],
     "links": [{"source": "gpu0", "target": "gpu1", "latency_s": 5e-5, "bandwidth_bytes_s": 1.2e10}]}

A newer version and an unknown key are errors: a misspelt cost would otherwise be a cost of 0.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Topology
from ephemeron.partition.placement.plan import Objective, PlacementCandidate, PlacementPlan
from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Schedule, Task

VERSION = 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkOrder:
    """Order in which one link sends."""

    source: str
    target: str
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Orders:
    """`DeviceOrders`, whose links are no keys in JSON."""

    compute: Mapping[str, tuple[Task, ...]]
    transfers: tuple[_LinkOrder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """`PlacementCandidate`; infinite values are null in JSON."""

    name: str
    value_s: float | None
    iteration_s: float | None
    over_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """`PlacementPlan` as it is written."""

    graph: str
    topology: str
    objective: Objective
    schedule: Schedule
    placement: Mapping[str, str]
    stages: tuple[str, ...] = ()
    orders: _Orders | None
    method: str
    value_s: float
    bound_s: float
    iteration_s: float
    solver_s: float
    reserved_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]
    candidates: tuple[_Candidate, ...] = ()


def graph_to_json(graph: Graph) -> str:
    """JSON that `parse_graph` reads."""
    return _text("graph", graph)


def topology_to_json(topology: Topology) -> str:
    """JSON that `parse_topology` reads."""
    return _text("topology", topology)


def plan_to_json(plan: PlacementPlan) -> str:
    """JSON that `parse_plan` reads."""
    shared = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    orders = None
    if plan.orders is not None:
        links = plan.orders.transfers.items()
        orders = _Orders(
            compute=plan.orders.compute, transfers=tuple(_LinkOrder(source=a, target=b, tasks=tasks) for (a, b), tasks in links)
        )
    candidates = tuple(
        _Candidate(name=c.name, value_s=_finite(c.value_s), iteration_s=_finite(c.iteration_s), over_bytes=c.over_bytes)
        for c in plan.candidates
    )
    return _text("plan", _Plan(**{**shared, "orders": orders, "candidates": candidates}))


def parse_graph(text: str, *, where: str = "graph") -> Graph:
    """Graph from JSON.

    Raises:
        JobError: not JSON, another format or version, an unknown or missing key, a wrong type, or not a graph; names the place.
    """
    return build(Graph, _opened(text, "graph", where), where=where)


def parse_topology(text: str, *, where: str = "topology") -> Topology:
    """Topology from JSON.

    Raises:
        JobError: as with `parse_graph`.
    """
    return build(Topology, _opened(text, "topology", where), where=where)


def parse_plan(text: str, *, where: str = "plan") -> PlacementPlan:
    """Plan from JSON.

    Raises:
        JobError: as with `parse_graph`.
    """
    read = build(_Plan, _opened(text, "plan", where), where=where)
    shared = {f.name: getattr(read, f.name) for f in dataclasses.fields(read)}
    orders = None
    if read.orders is not None:
        orders = DeviceOrders(compute=read.orders.compute, transfers={(k.source, k.target): k.tasks for k in read.orders.transfers})
    candidates = tuple(
        PlacementCandidate(
            name=c.name,
            value_s=math.inf if c.value_s is None else c.value_s,
            iteration_s=math.inf if c.iteration_s is None else c.iteration_s,
            over_bytes=c.over_bytes,
        )
        for c in read.candidates
    )
    return PlacementPlan(**{**shared, "orders": orders, "candidates": candidates})


def load(parse: Callable[..., _T], path: str | Path) -> _T:
    """Reads a file with one of the functions above.

    Raises:
        JobError: the file cannot be read, or is not such a document.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"{path} cannot be read: {e}") from None
    return parse(text, where=str(path))


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _text(kind: str, document: Graph | Topology | _Plan) -> str:
    header = {"format": f"ephemeron-{kind}", "version": VERSION}
    return json.dumps({**header, **plain(document)}, indent=1, allow_nan=False) + "\n"


def _opened(text: str, kind: str, where: str) -> Mapping[str, object]:
    """Body of a document, after its format and version."""
    try:
        raw = json.loads(text)
    except ValueError as e:
        raise JobError(f"{where} is not JSON: {e}") from None
    if not isinstance(raw, dict) or raw.pop("format", None) != f"ephemeron-{kind}":
        raise JobError(f"{where} is no {kind}", remedy=f'it should begin with "format": "ephemeron-{kind}"')
    version = raw.pop("version", None)
    if version != VERSION:
        raise JobError(f"{where} has version {version}", remedy=f"this release reads version {VERSION}")
    return raw
