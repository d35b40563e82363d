"""Canonical order and unit of a graph and a topology, the same for all relabellings and rescalings.

A search with a limit depends on the order of its input and on the last bits of numbers. So operators, tensors and devices are ordered by
their properties (colour refinement after Weisfeiler and Leman: nodes are equal if they have equal costs and equal neighbours), and times
are divided by their sum and rounded to 40 bits. Names are kept, but decide nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Topology

BITS = 40
SAME = 1e-9
"""Relative difference below which two numbers have the same rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalProblem:
    """A problem in canonical order and unit."""

    graph: Graph
    topology: Topology
    unit_s: float
    """Seconds of the original problem per canonical second."""


def canonical(graph: Graph, topology: Topology) -> CanonicalProblem:
    """Canonical form of a problem. The times of all operators on all kinds of devices add up to one."""
    unit_s = math.fsum(s for n in graph.nodes for table in (n.forward_s, n.backward_s) for s in table.values()) or 1.0
    return CanonicalProblem(graph=_graph(graph, unit_s), topology=_topology(graph, topology, unit_s), unit_s=unit_s)


def _graph(graph: Graph, unit_s: float) -> Graph:
    number = {n.name: i for i, n in enumerate(graph.nodes)}
    times = _ranks([s for n in graph.nodes for table in (n.forward_s, n.backward_s) for s in table.values()])
    kinds = _order_of_kinds(graph)
    groups: dict[str, list[int]] = {}
    for i, n in enumerate(graph.nodes):
        if n.group is not None:
            groups.setdefault(n.group, []).append(i)
    made = [(number[t.producer], [number[c] for c in t.consumers]) for t in graph.tensors]
    colours = _numbered(
        [
            (
                tuple(times[n.forward_s[k]] for k in kinds),
                tuple(times[n.backward_s[k]] for k in kinds),
                n.parameter_bytes,
                n.gradient_bytes,
                n.optimizer_bytes,
                len(groups.get(n.group or "", ())),
            )
            for n in graph.nodes
        ]
    )
    count = 0
    while len(set(colours)) > count:
        count = len(set(colours))
        around: list[list[tuple[Any, ...]]] = [[] for _ in colours]
        for t, (u, readers) in zip(graph.tensors, made, strict=True):
            size = (t.nbytes, t.gradient_bytes)
            around[u].append((0, size, tuple(sorted(colours[v] for v in readers))))
            for v in readers:
                around[v].append((1, size, (colours[u], len(readers))))
        for own in groups.values():
            together = tuple(sorted(colours[i] for i in own))
            for i in own:
                around[i].append((2, (0, 0), together))
        colours = _numbered([(c, tuple(sorted(a))) for c, a in zip(colours, around, strict=True)])
    place = _topological(made, colours)
    nodes = sorted(graph.nodes, key=lambda n: place[number[n.name]])
    tensors = [replace(t, consumers=tuple(sorted(t.consumers, key=lambda c: place[number[c]]))) for t in graph.tensors]
    tensors.sort(key=lambda t: (place[number[t.producer]], tuple(place[number[c]] for c in t.consumers), t.nbytes, t.gradient_bytes))

    def scaled(table: Mapping[str, float]) -> dict[str, float]:
        return {k: _kept(s / unit_s) for k, s in table.items()}

    return replace(
        graph,
        nodes=tuple(replace(n, forward_s=scaled(n.forward_s), backward_s=scaled(n.backward_s)) for n in nodes),
        tensors=tuple(tensors),
    )


def _topology(graph: Graph, topology: Topology, unit_s: float) -> Topology:
    """Devices ordered by speed, memory and links; equal ones in the order given."""
    devices = topology.devices
    number = {d.name: i for i, d in enumerate(devices)}
    totals = [sum(n.forward_s.get(d.kind, 0.0) + n.backward_s.get(d.kind, 0.0) for n in graph.nodes) / d.speed for d in devices]
    speeds = _ranks(totals)
    kind = {k: i for i, k in enumerate(_order_of_kinds(graph))}
    colours = _numbered([(speeds[s], d.memory_bytes, kind.get(d.kind, -1)) for s, d in zip(totals, devices, strict=True)])
    latency, bandwidth = (_ranks([k.latency_s for k in topology.links]), _ranks([k.bandwidth_bytes_s for k in topology.links]))
    links = [(number[k.source], number[k.target], (latency[k.latency_s], bandwidth[k.bandwidth_bytes_s])) for k in topology.links]
    count = 0
    while len(set(colours)) > count:
        count = len(set(colours))
        around: list[list[tuple[int, tuple[int, int], int]]] = [[] for _ in devices]
        for a, b, cost in links:
            around[a].append((0, cost, colours[b]))
            around[b].append((1, cost, colours[a]))
        colours = _numbered([(c, tuple(sorted(x))) for c, x in zip(colours, around, strict=True)])
    order = sorted(devices, key=lambda d: colours[number[d.name]])
    place = {d.name: i for i, d in enumerate(order)}
    scaled = [
        replace(k, latency_s=_kept(k.latency_s / unit_s), bandwidth_bytes_s=_kept(k.bandwidth_bytes_s * unit_s)) for k in topology.links
    ]
    return replace(topology, devices=tuple(order), links=tuple(sorted(scaled, key=lambda k: (place[k.source], place[k.target]))))


def _topological(made: Sequence[tuple[int, list[int]]], colours: Sequence[int]) -> list[int]:
    """Position of each node: after its inputs; then successors of the latest node first, then by colour."""
    waits = [0] * len(colours)
    feeds: list[dict[int, None]] = [{} for _ in colours]
    for u, readers in made:
        for v in readers:
            if v not in feeds[u]:
                feeds[u][v] = None
                waits[v] += 1
    sources: list[list[int]] = [[] for _ in colours]
    place = [-1] * len(colours)
    free: list[tuple[int, int, tuple[int, ...], int]] = [(0, colours[i], (), i) for i, w in enumerate(waits) if w == 0]
    heapq.heapify(free)
    count = 0
    while free:
        *_, u = heapq.heappop(free)
        place[u] = count
        count += 1
        for v in feeds[u]:
            sources[v].append(place[u])
            waits[v] -= 1
            if waits[v] == 0:
                heapq.heappush(free, (-max(sources[v]), colours[v], tuple(sorted(sources[v])), v))
    return place


def _order_of_kinds(graph: Graph) -> list[str]:
    """Kinds of devices ordered by their times, equal ones by name."""
    totals = {k: sum(n.forward_s[k] + n.backward_s[k] for n in graph.nodes) for k in graph.nodes[0].forward_s}
    ranks = _ranks(totals.values())
    return sorted(totals, key=lambda k: (ranks[totals[k]], k))


def _ranks(values: Iterable[float]) -> dict[float, int]:
    """Ranks in ascending order; nearly equal numbers share one."""
    made: dict[float, int] = {}
    last = -math.inf
    rank = -1
    for v in sorted(set(values)):
        if v - last > SAME * abs(v):
            rank, last = rank + 1, v
        made[v] = rank
    return made


def _numbered(keys: Sequence[tuple[Any, ...]]) -> list[int]:
    """Numbers of keys in their order; equal keys have the same."""
    number = {key: k for k, key in enumerate(sorted(set(keys)))}
    return [number[key] for key in keys]


def _kept(value: float) -> float:
    """Value rounded to 40 bits, which removes the effect of units on the last bits."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, BITS)), exponent - BITS)
