"""Arithmetic of the solvers against the independent simulator; co-location and bounds against small examples."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partition_worlds import drawn_graph, drawn_topology, placements, shortest_iteration_s, worlds

from ephemeron.partition import Device, Graph, Node, Schedule, Tensor, Topology, connected, replay
from ephemeron.partition.costs.table import costs_of
from ephemeron.partition.placement.annealing import anneal
from ephemeron.partition.placement.baselines import colocated, even_split, m_etf, m_sct, m_topo
from ephemeron.partition.placement.energetic_bound import energy_bound_s
from ephemeron.partition.placement.milp_model import load_program, path_bound_s, ramps_s
from ephemeron.partition.placement.pipeline import staging
from ephemeron.partition.placement.plan import timer
from ephemeron.partition.placement.sequencing import makespan_s, orders_of, ranked_order
from ephemeron.partition.placement.stages import DeviceOrder, annealed_stages, cuts, repaired, staged

SCHEDULES = [
    Schedule(kind="gpipe", micro_batches=3),
    Schedule(kind="1f1b", micro_batches=2),
    Schedule(kind="1f1b", micro_batches=8),
    Schedule(kind="1f1b", micro_batches=8, overlap=False),
]


def somewhere(graph: Graph, topology: Topology, seed: int) -> dict[str, str]:
    rng = Random(seed)
    names = [d.name for d in topology.devices]
    homes: dict[str, str] = {}
    return {n.name: homes.setdefault(f"group {n.group}" if n.group else n.name, rng.choice(names)) for n in graph.nodes}


@given(world=worlds(most_nodes=9), seed=st.integers(0, 2**20))
def test_annealing_times_a_placement_as_the_simulator_does(world, seed):
    """The simulator takes the same time for any feasible order."""
    graph, topology = world
    costs = costs_of(graph, topology)
    where = costs.where(somewhere(graph, topology, seed))
    found = anneal(costs, costs.clusters, where, ranked_order(costs, where), rng=Random(seed), steps=60, timer=timer(None))
    done = replay(graph, topology, costs.placement(found.where), orders=orders_of(costs, found.where, found.order))
    assert done.iteration_s == pytest.approx(makespan_s(costs, found.where, found.order))
    assert sum(done.over_bytes.values()) == found.over_bytes == costs.over(found.where)
    assert list(done.reserved_bytes.values()) == costs.reserved(found.where)


@given(world=worlds(most_nodes=9), seed=st.integers(0, 2**20), schedule=st.sampled_from(SCHEDULES))
def test_loads_of_a_pipeline_are_those_of_the_simulator(world, seed, schedule):
    graph, topology = world
    costs = costs_of(graph, topology, micro_batches=schedule.micro_batches)
    line = DeviceOrder(devices=tuple(range(len(costs.devices))), flight=(1,) * len(costs.devices))
    rng = Random(seed)
    stage = repaired(costs, [rng.randrange(len(costs.devices)) for _ in costs.nodes])
    where = staged(costs, line, stage).where
    done = replay(graph, topology, costs.placement(where), schedule=schedule)
    known = staging(costs, schedule, where)
    assert known is not None
    assert [costs.devices[d] for d in known.line.devices] == list(done.stages)
    assert list(known.line.flight) == [done.in_flight[d] for d in done.stages]
    assert known.bottleneck_s == pytest.approx(done.bottleneck_s)
    assert known.over_bytes == sum(done.over_bytes.values())


@given(world=worlds(most_nodes=9), seed=st.integers(0, 2**20))
def test_moves_keep_the_books(world, seed):
    """Loads after many moves are those of a fresh count."""
    graph, topology = world
    costs = costs_of(graph, topology, micro_batches=4)
    size = len(costs.devices)
    line = DeviceOrder(devices=tuple(range(size)), flight=tuple(range(size, 0, -1)))
    found = annealed_stages(costs, line, repaired(costs, [0] * len(costs.nodes)), rng=Random(seed), steps=200, timer=timer(None))
    fresh = staged(costs, line, found.stage)
    assert found.bottleneck_s == pytest.approx(fresh.bottleneck_s)
    assert found.over_bytes == fresh.over_bytes
    for t, u in enumerate(costs.producer):
        assert all(found.stage[u] <= found.stage[v] for v in costs.consumers[t])


@given(world=worlds(most_nodes=5, most_devices=2, tight=False), seed=st.integers(0, 2**20))
def test_bounds_are_below_every_replay(world, seed):
    graph, topology = world
    costs = costs_of(graph, topology)
    done = replay(graph, topology, somewhere(graph, topology, seed))
    assert energy_bound_s(costs) <= done.iteration_s * (1 + 1e-9)
    assert path_bound_s(costs) <= done.iteration_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_are_below_the_optimum(seed):
    pytest.importorskip("scipy", reason="no SciPy; pip install 'ephemeron[partition]'")
    rng = Random(seed)
    graph = drawn_graph(rng, 5)
    topology = drawn_topology(rng, graph, 2)
    best = shortest_iteration_s(graph, topology)
    costs = costs_of(graph, topology)
    divided = load_program(costs, costs.clusters)
    assert divided.program.solve().bound * divided.scale_s <= best * (1 + 1e-6)
    assert energy_bound_s(costs) <= best * (1 + 1e-9)


def layered(widths: list[int], forward: float, backward: float) -> Graph:
    nodes, tensors, last = [], [], list[str]()
    for k, width in enumerate(widths):
        layer = [f"l{k}.{i}" for i in range(width)]
        nodes += [Node(name=n, forward_s={"gpu": forward}, backward_s={"gpu": backward}) for n in layer]
        tensors += [Tensor(name=f"t{n}", producer=n, consumers=tuple(layer), nbytes=0) for n in last]
        last = layer
    return Graph(nodes=tuple(nodes), tensors=tuple(tensors))


def same(count: int) -> Topology:
    return connected([Device(name=f"d{k}", kind="gpu", memory_bytes=1) for k in range(count)], lambda a, b: (0.0, 1.0))


def test_the_energetic_bound_includes_bottlenecks_of_the_graph():
    """1-4-1-4-1 operators of 1 s and 2 s on two devices: 7 rounds forward, 14 s backward. Loads say 16.5, the path 15."""
    costs = costs_of(layered([1, 4, 1, 4, 1], 1.0, 2.0), same(2))
    assert path_bound_s(costs) == pytest.approx(15)
    assert energy_bound_s(costs, moments=40) == pytest.approx(21)


def test_ramps_by_hand():
    """A second device begins once the source's output has come to it; a third likewise, there are two readers."""
    graph = layered([1, 2, 1], 1.0, 2.0)
    slow = connected(same(3).devices, lambda a, b: (0.25, 1.0))
    # gradients of no bytes are not sent
    assert ramps_s(costs_of(graph, slow)) == ([0.0, 1.25, 1.25, 2.25], [0.0, 2.0, 2.0, 4.0])


@given(world=worlds(most_nodes=9), groups=st.integers(1, 9))
def test_coplacement_merges_heavy_edges_within_memory(world, groups):
    graph, topology = world
    costs = costs_of(graph, topology)
    found = colocated(costs, groups=groups)
    assert sorted(i for g in found for i in g) == list(range(len(costs.nodes)))
    of = {i: k for k, g in enumerate(found) for i in g}
    for cluster in costs.clusters:
        assert len({of[i] for i in cluster}) == 1
    if len(costs.clusters) >= groups:
        assert len(found) >= groups - 1
    smallest = min(costs.capacity)
    clusters = {frozenset(c) for c in costs.clusters}
    for group in found:
        tensors = {t for i in group for t in (*costs.inputs[i], *costs.outputs[i])}
        held = sum(costs.state[i] for i in group) + sum(costs.held[t] for t in tensors)
        assert held <= smallest or frozenset(group) in clusters


def test_coplacement_takes_the_heaviest_edge_first():
    nodes = tuple(Node(name=n, forward_s={"gpu": 1.0}, backward_s={"gpu": 1.0}) for n in "abcd")
    tensors = tuple(Tensor(name=u, producer=u, consumers=(v,), nbytes=b) for u, v, b in (("a", "b", 1), ("b", "c", 9), ("c", "d", 4)))
    topology = connected([Device(name=n, kind="gpu", memory_bytes=100) for n in "xy"], lambda a, b: (0.0, 1.0))
    costs = costs_of(Graph(nodes=nodes, tensors=tensors), topology)
    assert colocated(costs, groups=4) == ((0,), (1, 2), (3,))
    assert colocated(costs, groups=3) == ((0,), (1, 2, 3))


@given(world=worlds(most_nodes=9))
def test_baselines_place_every_node_and_keep_groups(world):
    pytest.importorskip("scipy", reason="no SciPy; pip install 'ephemeron[partition]'")
    graph, topology = world
    costs = costs_of(graph, topology)
    for where in (
        even_split(costs),
        even_split(costs, by="time"),
        m_topo(costs),
        m_etf(costs),
        m_etf(costs, passes="both", true_links=True),
        m_sct(costs),
    ):
        replay(graph, topology, costs.placement(where))  # refuses what is absent or torn


def test_etf_uses_both_branches_at_once():
    """Two equal branches and fast links: one on each device, so forward passes take half as long."""
    graph = layered([1, 2, 1], 4.0, 4.0)
    costs = costs_of(graph, connected(same(2).devices, lambda a, b: (0.1, 1.0)))
    where = m_etf(costs)
    assert where[1] != where[2]


def test_topo_fills_devices_in_turn():
    """Four nodes of 10 bytes on two devices: the cap is 20 + 10."""
    nodes = tuple(Node(name=f"n{i}", forward_s={"gpu": 1.0}, backward_s={"gpu": 1.0}, parameter_bytes=10) for i in range(4))
    tensors = tuple(Tensor(name=f"t{i}", producer=f"n{i}", consumers=(f"n{i + 1}",), nbytes=0) for i in range(3))
    roomy = connected([Device(name=n, kind="gpu", memory_bytes=999) for n in "xy"], lambda a, b: (0.0, 1.0))
    assert m_topo(costs_of(Graph(nodes=nodes, tensors=tensors), roomy)) == [0, 0, 0, 1]


def test_cuts_are_the_best_on_a_chain():
    rng = Random(3)
    for _ in range(10):
        n = rng.randint(3, 7)
        nodes = tuple(Node(name=f"n{i}", forward_s={"gpu": float(rng.randint(1, 9))}, backward_s={"gpu": 1.0}) for i in range(n))
        tensors = tuple(Tensor(name=f"t{i}", producer=f"n{i}", consumers=(f"n{i + 1}",), nbytes=rng.randint(1, 40)) for i in range(n - 1))
        graph = Graph(nodes=nodes, tensors=tensors)
        topology = connected([Device(name=d, kind="gpu", memory_bytes=10**6) for d in "xyz"], lambda a, b: (0.0, 4.0))
        costs = costs_of(graph, topology)
        line = DeviceOrder(devices=(0, 1, 2), flight=(1, 1, 1))
        found = staged(costs, line, cuts(costs, line, range(n)))
        best = math.inf
        for placement in placements(graph, topology):
            where = costs.where(placement)
            if all(a <= b for a, b in itertools.pairwise(where)):
                best = min(best, staged(costs, line, where).bottleneck_s)
        assert found.bottleneck_s == pytest.approx(best)
