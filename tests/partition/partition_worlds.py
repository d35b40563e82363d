"""Random small graphs and topologies, and exhaustive search as a reference for solvers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

from hypothesis import strategies as st

from ephemeron.partition import Device, Graph, Node, SearchBudget, Tensor, Topology, connected, replay

WORK = SearchBudget(time_limit_s=None, annealing_steps=1500, program_nodes=40, constraint_work=0.5)
"""Counted work only: the same everywhere."""
THOROUGH = SearchBudget(time_limit_s=None, annealing_steps=1500, program_nodes=20_000, constraint_work=60.0)
"""Enough to prove small instances."""


def drawn_graph(rng: Random, nodes: int, *, kinds: tuple[str, ...] = ("gpu",), groups: bool = False) -> Graph:
    """A random model: branching, with tensors of several readers, some without gradients, some free of cost."""
    made = []
    for i in range(nodes):
        forward = {k: rng.choice([0.0, *(rng.randint(1, 9),) * 5]) / 1.0 for k in kinds}
        made.append(
            Node(
                name=f"n{i}",
                forward_s=forward,
                backward_s={k: f * rng.choice([1.0, 2.0]) for k, f in forward.items()},
                parameter_bytes=rng.randint(0, 20),
                gradient_bytes=rng.randint(0, 20),
                optimizer_bytes=rng.randint(0, 40),
                group=rng.choice([None, None, "g"]) if groups else None,
            )
        )
    tensors = []
    for i in range(nodes):
        readers = [j for j in range(i + 1, min(nodes, i + 4)) if rng.random() < 0.5]
        if not readers and i + 1 < nodes and rng.random() < 0.8:
            readers = [rng.randrange(i + 1, nodes)]
        tensors.append(
            Tensor(
                name=f"t{i}",
                producer=f"n{i}",
                consumers=tuple(f"n{j}" for j in readers),
                nbytes=rng.randint(0, 30),
                gradient_nbytes=rng.choice([None, None, None, 0, 7]),
            )
        )
    return Graph(name="drawn", nodes=tuple(made), tensors=tuple(tensors))


def drawn_topology(rng: Random, graph: Graph, devices: int, *, kinds: tuple[str, ...] = ("gpu",), room: float = 10.0) -> Topology:
    """Unequal devices and links; memory: `room` times what an even share of the graph needs."""
    need = sum(n.state_bytes for n in graph.nodes) + sum(t.nbytes + t.gradient_bytes for t in graph.tensors)
    made = [
        Device(name=f"d{k}", kind=rng.choice(kinds), memory_bytes=int(room * need / devices) + 1, speed=rng.choice([1.0, 1.0, 0.8, 2.0]))
        for k in range(devices)
    ]
    return connected(made, lambda a, b: (rng.choice([0.0, 0.1, 1.0]), rng.choice([3.0, 10.0, 100.0])))


@st.composite
def worlds(draw: st.DrawFn, *, most_nodes: int = 7, most_devices: int = 3, tight: bool = True) -> tuple[Graph, Topology]:
    rng = Random(draw(st.integers(0, 2**32)))
    kinds = draw(st.sampled_from([("gpu",), ("gpu", "cpu")]))
    graph = drawn_graph(rng, draw(st.integers(1, most_nodes)), kinds=kinds, groups=draw(st.booleans()))
    room = draw(st.sampled_from([1.3, 2.0, 10.0])) if tight else 10.0
    return graph, drawn_topology(rng, graph, draw(st.integers(1, most_devices)), kinds=kinds, room=room)


def placements(graph: Graph, topology: Topology) -> Iterator[dict[str, str]]:
    """All that keep groups together."""
    units: dict[str, list[str]] = {}
    for n in graph.nodes:
        units.setdefault(n.name if n.group is None else f"group {n.group}", []).append(n.name)
    names = [d.name for d in topology.devices]
    for choice in itertools.product(names, repeat=len(units)):
        yield {name: at for unit, at in zip(units.values(), choice, strict=True) for name in unit}


def shortest_iteration_s(graph: Graph, topology: Topology) -> float:
    """The optimum, by trying everything; infinite if nothing fits."""
    best = float("inf")
    for placement in placements(graph, topology):
        if replay(graph, topology, placement).fits:
            best = min(best, _shortest_order_s(graph, topology, placement, best))
    return best


def least_bottleneck_s(graph: Graph, topology: Topology, schedule: object) -> float:
    """The optimum over all pipelines in all orders of their stages, by trying everything; infinite if none fits."""
    best = float("inf")
    for placement in placements(graph, topology):
        if not replay(graph, topology, placement).stages:
            continue
        for order in stage_orders(graph, placement):
            done = replay(graph, topology, placement, schedule=schedule, stages=order)  # type: ignore[arg-type]
            if done.fits:
                best = min(best, done.bottleneck_s)
    return best


def stage_orders(graph: Graph, placement: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """All orders of the used devices in which tensors only go forward."""
    feeds = {(placement[t.producer], placement[c]) for t in graph.tensors for c in t.consumers}
    for order in itertools.permutations(sorted(set(placement.values()))):
        if all(order.index(a) <= order.index(b) for a, b in feeds):
            yield order


def _shortest_order_s(graph: Graph, topology: Topology, placement: dict[str, str], best: float) -> float:
    """All active schedules (Giffler and Thompson): some optimal one is among them. Shares no code with the library."""
    links = {(k.source, k.target): k for k in topology.links}
    devices = {d.name: d for d in topology.devices}
    seconds: dict[tuple[str, ...], float] = {}
    place: dict[tuple[str, ...], object] = {}
    needs: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for n in graph.nodes:
        d = devices[placement[n.name]]
        f, b = ("f", n.name), ("b", n.name)
        seconds[f], seconds[b] = n.forward_s[d.kind] / d.speed, n.backward_s[d.kind] / d.speed
        place[f] = place[b] = d.name
        needs[f], needs[b] = set(), {f}
    for t in graph.tensors:
        home = placement[t.producer]
        for c in t.consumers:
            away = placement[c]
            if away == home:
                needs["f", c].add(("f", t.producer))
                needs["b", t.producer].add(("b", c))
                continue
            go, come = ("go", t.name, away), ("come", t.name, away)
            seconds[go], place[go] = links[home, away].seconds(t.nbytes), (home, away)
            needs[go] = {("f", t.producer)}
            needs["f", c].add(go)
            if t.gradient_bytes:
                seconds[come], place[come] = links[away, home].seconds(t.gradient_bytes), (away, home)
                needs.setdefault(come, set()).add(("b", c))
                needs["b", t.producer].add(come)
            else:
                needs["b", t.producer].add(("b", c))
    after: dict[tuple[str, ...], list[tuple[str, ...]]] = {task: [] for task in needs}
    for task, before in needs.items():
        for b in before:
            after[b].append(task)
    tail: dict[tuple[str, ...], float] = {}

    def rest(task: tuple[str, ...]) -> float:
        if task not in tail:
            tail[task] = seconds[task] + max((rest(x) for x in after[task]), default=0.0)
        return tail[task]

    found = best

    def go_on(done: dict[tuple[str, ...], float], free: dict[object, float]) -> None:
        nonlocal found
        ready = [x for x in needs if x not in done and all(b in done for b in needs[x])]
        if not ready:
            found = min(found, max(done.values()))
            return
        start = {x: max(free.get(place[x], 0.0), *(done[b] for b in needs[x]), 0.0) for x in ready}
        if max(start[x] + rest(x) for x in ready) >= found - 1e-12:
            return
        first = min(ready, key=lambda x: (start[x] + seconds[x], x))
        limit = start[first] + seconds[first]
        for x in ready:
            if place[x] == place[first] and (start[x] < limit or x == first):
                end = start[x] + seconds[x]
                go_on({**done, x: end}, {**free, place[x]: end})

    go_on({}, {})
    return found
