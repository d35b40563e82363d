"""Other names, another order, other units of time or a device that is of no use: the same plan, though nothing is searched to the end."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

pytest.importorskip("ortools", reason="no OR-tools; pip install 'ephemeron[partition]'")
pytest.importorskip("scipy", reason="no SciPy; pip install 'ephemeron[partition]'")

from hypothesis import given
from hypothesis import strategies as st
from partition_worlds import drawn_graph, drawn_topology
from test_place import relabelled, scaled

from ephemeron.partition import Device, Schedule, SearchBudget, connected, place, replay
from ephemeron.partition.placement.canonical import canonical

CUT_OFF = SearchBudget(time_limit_s=None, annealing_steps=600, program_nodes=3, constraint_work=0.01)
"""So little that many plans are not the best: then the way that is searched shows."""
PIPELINED = Schedule(kind="1f1b", micro_batches=4)
SEEDS = range(5)


def world(seed, nodes=14, devices=3):
    rng = Random(3000 + seed)
    graph = drawn_graph(rng, nodes, groups=seed % 2 == 0)
    return rng, graph, drawn_topology(rng, graph, devices, room=4.0)


def value_s(graph, topology, objective):
    schedule = PIPELINED if objective == "throughput" else Schedule()
    plan = place(graph, topology, objective=objective, schedule=schedule, budget=CUT_OFF)
    done = replay(graph, topology, plan.placement, schedule=schedule, orders=plan.orders, stages=plan.stages)
    assert plan.value_s == (done.iteration_s if objective == "iteration" else done.bottleneck_s)
    assert plan.bound_s <= plan.value_s
    return plan.value_s


def reordered(topology, rng):
    devices, links = list(topology.devices), list(topology.links)
    rng.shuffle(devices)
    rng.shuffle(links)
    return replace(topology, devices=tuple(devices), links=tuple(links))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["iteration", "throughput"])
@pytest.mark.parametrize("seed", SEEDS)
def test_names_order_and_units_change_nothing(objective, seed):
    rng, graph, topology = world(seed)
    known = value_s(graph, topology, objective)
    assert value_s(relabelled(graph, rng), reordered(topology, rng), objective) == pytest.approx(known, rel=1e-9)
    for factor in (3.7e-4, 81.0):
        assert value_s(*scaled(graph, topology, factor), objective) == pytest.approx(known * factor, rel=1e-9)


@pytest.mark.parametrize("objective", ["iteration", "throughput"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_device_that_is_of_no_use_costs_nothing(objective, seed):
    _, graph, topology = world(seed, devices=2)
    links = {(k.source, k.target): k for k in topology.links}
    more = connected(
        [*topology.devices, Device(name="idle", kind="gpu", memory_bytes=1 << 40, speed=0.01)],
        lambda a, b: (
            (links[a.name, b.name].latency_s, links[a.name, b.name].bandwidth_bytes_s) if "idle" not in (a.name, b.name) else (50.0, 0.1)
        ),
    )
    assert value_s(graph, more, objective) <= value_s(graph, topology, objective) * (1 + 1e-9)


@given(seed=st.integers(0, 2**32))
def test_the_form_is_the_same_problem_in_one_order(seed):
    rng = Random(seed)
    graph = drawn_graph(rng, rng.randint(1, 8), kinds=("gpu", "cpu"), groups=rng.random() < 0.5)
    topology = drawn_topology(rng, graph, rng.randint(1, 4), kinds=("gpu", "cpu"))
    form = canonical(graph, topology)
    assert {n.name for n in form.graph.nodes} == {n.name for n in graph.nodes}
    assert form.graph.topological_order() == tuple(n.name for n in form.graph.nodes)
    other = canonical(*scaled(relabelled(graph, rng), reordered(topology, rng), 0.37))

    def costs(form):
        place = {n.name: i for i, n in enumerate(form.graph.nodes)}
        return (
            [(n.forward_s, n.backward_s, n.parameter_bytes, n.optimizer_bytes) for n in form.graph.nodes],
            [(place[t.producer], [place[c] for c in t.consumers], t.nbytes) for t in form.graph.tensors],
            [(d.kind, d.speed, d.memory_bytes) for d in form.topology.devices],
        )

    assert costs(form) == costs(other)
    placement = {n.name: rng.choice(topology.devices).name for n in graph.nodes}
    groups = {}
    placement = {n.name: groups.setdefault(n.group or n.name, placement[n.name]) for n in graph.nodes}
    there = replay(form.graph, form.topology, placement)
    here = replay(graph, topology, placement)
    assert there.bottleneck_s * form.unit_s == pytest.approx(here.bottleneck_s, rel=1e-9)
    assert there.reserved_bytes == here.reserved_bytes
