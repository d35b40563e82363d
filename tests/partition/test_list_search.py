"""List schedules and dispatching: results are feasible, agree with the simulator, and are not worse than their starts."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partition_worlds import drawn_graph, drawn_topology, worlds

from ephemeron.partition import replay
from ephemeron.partition.costs.table import costs_of
from ephemeron.partition.placement.baselines import m_etf
from ephemeron.partition.placement.list_search import dispatched, forward_backward_improved, list_search, mirrored
from ephemeron.partition.placement.plan import timer
from ephemeron.partition.placement.sequencing import makespan_s, orders_of, ranked_order, timed

FOREVER = timer(None)


@given(world=worlds(most_nodes=9), seed=st.integers(0, 2**20))
def test_the_simulator_can_follow_a_dispatched_order(world, seed):
    graph, topology = world
    costs = costs_of(graph, topology)
    rng = Random(seed)
    of_cluster = [rng.randrange(len(costs.devices)) for _ in costs.clusters]
    where = [0] * len(costs.nodes)
    for d, cluster in zip(of_cluster, costs.clusters, strict=True):
        for i in cluster:
            where[i] = d
    n = len(where)
    order = dispatched(costs, where, ranked_order(costs, where))
    assert sorted(order) == list(range(2 * n))
    done = replay(graph, topology, costs.placement(where), orders=orders_of(costs, where, order))
    assert done.iteration_s == pytest.approx(makespan_s(costs, where, order))
    start_s = timed(costs, where, order).start_s
    assert [start_s[op] for op in order] == sorted(start_s), "listed as they begin"
    best_s, best = forward_backward_improved(costs, mirrored(costs), where, order)
    assert best_s == makespan_s(costs, where, best) <= makespan_s(costs, where, order)
    again = replay(graph, topology, costs.placement(where), orders=orders_of(costs, where, best))
    assert again.iteration_s == pytest.approx(best_s)


@given(world=worlds(most_nodes=9), seed=st.integers(0, 2**20))
def test_what_is_found_can_be_followed_and_keeps_groups_together(world, seed):
    graph, topology = world
    costs = costs_of(graph, topology)
    known = m_etf(costs)
    found = list_search(costs, rng=Random(seed), steps=12, timer=FOREVER, known=[known])
    again = list_search(costs, rng=Random(seed), steps=12, timer=FOREVER, known=[known])
    assert found == again, "counted work repeats"
    assert found.steps == 12
    for cluster in costs.clusters:
        assert len({found.where[i] for i in cluster}) == 1
    done = replay(graph, topology, costs.placement(found.where), orders=orders_of(costs, found.where, found.order))
    assert done.iteration_s == pytest.approx(found.makespan_s)
    assert sum(done.over_bytes.values()) == found.over_bytes
    assert (found.over_bytes, found.makespan_s) <= (costs.over(known), makespan_s(costs, known, ranked_order(costs, known)))


def test_more_runs_are_never_worse():
    rng = Random(3)
    graph = drawn_graph(rng, 40)
    costs = costs_of(graph, drawn_topology(rng, graph, 3, room=2.0))
    found = [list_search(costs, rng=Random(1), steps=k, timer=FOREVER) for k in (1, 15, 60)]
    values = [(f.over_bytes, f.makespan_s) for f in found]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]


def test_mirrored_costs_take_as_long():
    """Without transfers of unequal bytes it is the same model, read backwards."""
    rng = Random(4)
    graph = drawn_graph(rng, 20)
    costs = costs_of(graph, drawn_topology(rng, graph, 1))
    mirror = mirrored(costs)
    where = [0] * len(costs.nodes)
    assert makespan_s(mirror, where, ranked_order(mirror, where)) == pytest.approx(makespan_s(costs, where, ranked_order(costs, where)))
    assert mirrored(mirror).forward == costs.forward
    assert mirrored(mirror).send == costs.send
