"""Chains of downsets over classes of devices: against every placement there is, and proofs for many devices of a few kinds."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

pytest.importorskip("scipy", reason="no SciPy; pip install 'ephemeron[partition]'")

from hypothesis import example, given, settings
from hypothesis import strategies as st
from partition_worlds import THOROUGH, drawn_graph, drawn_topology, least_bottleneck_s

from ephemeron.partition import Device, Graph, Node, Schedule, SearchBudget, Tensor, connected, replay
from ephemeron.partition.costs.table import costs_of
from ephemeron.partition.placement.chains import AdjacentSearch, ChainSearch
from ephemeron.partition.placement.downsets import (
    classes_of,
    coarse_classes_of,
    downsets_of,
    permutations,
    sequences,
    units_of,
    without_idle_ends,
)
from ephemeron.partition.placement.pipeline import best_pipeline
from ephemeron.partition.placement.plan import timer

BUDGET = SearchBudget(time_limit_s=None, annealing_steps=2000, program_nodes=1)
"""Too little for the mixed-integer program: what is proved, the dynamic program proves."""
PIPELINED = Schedule(kind="1f1b", micro_batches=8)
SCHEDULES = (PIPELINED, Schedule(kind="gpipe", micro_batches=2), Schedule(kind="1f1b", micro_batches=4, recompute=True))


def layers(count, times, *, nbytes=1_000_000, skip=0, seed=None):
    """A chain; with `skip`, each layer's output is also read so many layers later."""
    rng = Random(seed)
    nodes, tensors = [], []
    for i in range(count):
        t = 1.0 if seed is None else rng.uniform(0.5, 2.0)
        nodes.append(
            Node(
                name=f"n{i}",
                forward_s={k: t * f for k, f in times.items()},
                backward_s={k: 2 * t * f for k, f in times.items()},
                parameter_bytes=1000,
            )
        )
        readers = [j for j in dict.fromkeys((i + 1, i + skip)) if i < j < count]
        if readers:
            tensors.append(Tensor(name=f"t{i}", producer=f"n{i}", consumers=tuple(f"n{j}" for j in readers), nbytes=nbytes))
    return Graph(name="layers", nodes=tuple(nodes), tensors=tuple(tensors))


def machines(counts, *, bandwidth=1e9, inside=None, per_machine=1, memory=1 << 40):
    made = [Device(name=f"{k}{i}", kind=k, memory_bytes=memory) for k, count in counts.items() for i in range(count)]
    number = {d.name: i // per_machine for i, d in enumerate(made)}
    return connected(made, lambda a, b: (0.0, inside if inside and number[a.name] == number[b.name] else bandwidth))


def searched(graph, topology, schedule=PIPELINED, budget=BUDGET):
    costs = costs_of(graph, topology, micro_batches=schedule.micro_batches, recompute=schedule.recompute)
    done = best_pipeline(costs, schedule, budget=budget, timer=timer(None))
    value = min(s.bottleneck_s for s in done.found)
    return value, 1 - done.bound_s / value, done.found[0]


@settings(max_examples=25, deadline=None)
@example(seed=60, schedule=SCHEDULES[2])
@given(seed=st.integers(0, 2**32), schedule=st.sampled_from(SCHEDULES))
def test_bounds_and_plans_against_every_placement(seed, schedule):
    rng = Random(seed)
    kinds = rng.choice([("gpu",), ("gpu", "cpu")])
    graph = drawn_graph(rng, rng.randint(1, 6), kinds=kinds, groups=rng.random() < 0.5)
    topology = drawn_topology(rng, graph, rng.randint(1, 3), kinds=kinds, room=rng.choice([1.5, 10.0]))
    optimum = least_bottleneck_s(graph, topology, schedule)
    costs = costs_of(graph, topology, micro_batches=schedule.micro_batches, recompute=schedule.recompute)
    downsets = downsets_of(without_idle_ends(costs, units_of(costs)))
    assert downsets is not None
    for classes in (classes_of(costs), coarse_classes_of(costs)):
        search = ChainSearch(costs, schedule, downsets, classes)
        limit = 1.01 * optimum if optimum < math.inf else 1e6
        least, exact = search.below(limit, "least", timer(None)), AdjacentSearch(search).below(limit, timer(None))
        assert least.complete
        assert exact.complete
        if 0 < optimum < math.inf:
            assert least.chain is not None
            assert exact.chain is not None
            assert least.chain.value_s <= exact.chain.value_s * (1 + 1e-9)
            assert exact.chain.value_s <= optimum * (1 + 1e-9)
            assert search.below(least.chain.value_s, "least", timer(None)).chain is None
    done = best_pipeline(costs, schedule, budget=THOROUGH, timer=timer(None))
    if optimum < math.inf:
        assert done.bound_s <= optimum * (1 + 1e-9)
        for s in done.found:
            replayed = replay(graph, topology, costs.placement(s.where), schedule=schedule, stages=s.device_names(costs))
            assert replayed.fits
            assert replayed.bottleneck_s == pytest.approx(s.bottleneck_s, rel=1e-9, abs=1e-12)
            assert s.bottleneck_s >= optimum * (1 - 1e-9)
        if 0 < optimum < math.inf:
            assert min(s.bottleneck_s for s in done.found) == pytest.approx(optimum, rel=2e-3)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), skip=st.sampled_from([0, 2]))
def test_near_chains_are_solved_to_proof(seed, skip):
    rng = Random(seed)
    graph = layers(rng.randint(2, 6), {"a": 1.0, "b": 0.4}, nbytes=rng.choice([10**6, 10**9]), skip=skip, seed=seed)
    topology = machines({"a": rng.randint(1, 2), "b": rng.randint(0, 2)}, bandwidth=rng.choice([1e8, 1e9, 1e10]))
    value, gap, _ = searched(graph, topology)
    assert value == pytest.approx(least_bottleneck_s(graph, topology, PIPELINED), rel=1e-9)
    if not skip:
        assert gap <= 1e-8


def test_eleven_layers_on_six_devices_have_no_gap():
    value, gap, _ = searched(layers(11, {"a": 1.0}), machines({"a": 6}))
    assert value == pytest.approx(2 * 3.0 / 8)
    assert gap <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "kinds"),
    [
        (24, {"a": 2, "b": 4}, "two kinds"),
        (40, {"a": 8}, "one kind"),
        (40, {"a": 2, "b": 3, "c": 3}, "three kinds"),
        (60, {"a": 4, "b": 12}, "two kinds"),
        (60, {"a": 4, "b": 8, "c": 4}, "three kinds"),
        (100, {"a": 64}, "one kind"),
        (100, {"a": 16, "b": 48}, "two kinds"),
    ],
    ids=str,
)
@pytest.mark.parametrize("bandwidth", [1e9, 1e7])
def test_many_devices_of_a_few_kinds_are_proved(count, devices, kinds, bandwidth):
    graph = layers(count, {"a": 0.3, "b": 1.0, "c": 2.5}, seed=1)
    _, gap, plan = searched(graph, machines(devices, bandwidth=bandwidth))
    assert gap <= 1e-8
    assert plan.over_bytes == 0


def test_fewer_devices_may_be_better():
    graph = layers(12, {"a": 1.0}, nbytes=80_000_000)
    value, gap, plan = searched(graph, machines({"a": 6}, bandwidth=2e6))
    assert gap <= 1e-9
    assert value == pytest.approx(12 * 3 / 8), "every transfer takes 5 s, the whole model 4.5 s on one device"
    assert len(set(plan.stage)) == 1


def test_machines_with_slow_links_between_them_are_filled_one_after_the_other():
    graph = layers(24, {"a": 1.0}, nbytes=16_000_000, seed=3)
    topology = machines({"a": 8}, bandwidth=2e6, inside=1e9, per_machine=4)
    costs = costs_of(graph, topology, micro_batches=8)
    assert classes_of(costs).counts == (4, 4)
    _, gap, plan = searched(graph, topology)
    assert gap <= 1e-8
    groups = [costs.devices[d] for d in plan.line.devices]
    assert sum((int(a[1:]) < 4) != (int(b[1:]) < 4) for a, b in itertools.pairwise(groups)) <= 1


def test_memory_decides_where_it_is_scarce():
    graph = layers(12, {"a": 1.0}, nbytes=1_000_000)
    need = sum(n.state_bytes for n in graph.nodes) + 12 * 2 * 1_000_000
    topology = machines({"a": 4}, memory=int(0.45 * need))
    costs = costs_of(graph, topology, micro_batches=8)
    done = best_pipeline(costs, PIPELINED, budget=THOROUGH, timer=timer(None))
    best = min(s.bottleneck_s for s in done.found)
    assert best == pytest.approx(9 / 8)
    assert done.bound_s <= best * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_downsets_are_all_there_are(seed):
    rng = Random(seed)
    graph = drawn_graph(rng, rng.randint(1, 8), groups=rng.random() < 0.5)
    costs = costs_of(graph, drawn_topology(rng, graph, 2))
    units = units_of(costs)
    found = downsets_of(units)
    assert found is not None
    size = len(units.nodes)
    expected = {mask for mask in range(1 << size) if all(not mask >> u & 1 or not units.before[u] & ~mask for u in range(size))}
    assert set(found.masks) == expected
    assert len(found.masks) == len(expected)
    for mask, row in zip(found.masks, found.table, strict=True):
        assert mask == sum(1 << u for u in range(size) if row[u])
    for cluster in costs.clusters:
        assert len({units.unit[i] for i in cluster}) == 1


def test_too_many_downsets_leave_the_bound_of_loads():
    wide = [Node(name=f"n{i}", forward_s={"a": 1.0}, backward_s={"a": 2.0}) for i in range(24)]
    graph = Graph(name="wide", nodes=tuple(wide))
    costs = costs_of(graph, machines({"a": 7}), micro_batches=8)
    assert downsets_of(units_of(costs), most=1000) is None
    value, gap, _ = searched(graph, machines({"a": 7}))
    assert value == pytest.approx(4 * 3 / 8)
    assert 0 <= gap <= 1 - 24 / 7 / 4


@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_sequences_are_counted_right(counts):
    total = sum(len(list(permutations(counts, n))) for n in range(1, sum(counts) + 1))
    assert total == sequences(counts)
    for n in range(1, sum(counts) + 1):
        every = list(permutations(counts, n))
        assert len(set(every)) == len(every)
