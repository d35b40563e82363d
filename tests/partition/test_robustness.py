"""What a proof rests on: spread of measured passes, and how often the plan stays near the best when they are drawn again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random

import pytest

pytest.importorskip("scipy", reason="no SciPy; pip install 'ephemeron[partition]'")
pytest.importorskip("ortools", reason="no OR-tools; pip install 'ephemeron[partition]'")

from partition_worlds import least_bottleneck_s
from test_chains import BUDGET, PIPELINED, layers, machines

from ephemeron.errors import JobError
from ephemeron.partition import Schedule, graph_to_json, parse_graph, place, replay
from ephemeron.partition.placement import robustness
from ephemeron.partition.placement.robustness import robustness_of
from ephemeron.partition.placement.summary import summary_of


def noisy(graph, factors, *, source="measured on a busy machine"):
    """Passes of every operator: its times by these factors, each operator's in an order of its own; times are their medians."""
    nodes = []
    for i, n in enumerate(graph.nodes):
        own = Random(i).sample(factors, len(factors))
        passes = tuple((n.forward_s["a"] * f, n.backward_s["a"] * f) for f in own)
        nodes.append(replace(n, passes_s={"a": passes}))
    return replace(graph, nodes=tuple(nodes), source=source)


def planned(graph, topology, schedule=PIPELINED, objective="throughput"):
    return place(graph, topology, objective=objective, schedule=schedule, budget=BUDGET)


def test_equal_passes_leave_no_uncertainty():
    graph, topology = noisy(layers(6, {"a": 1.0}), [1.0] * 9), machines({"a": 3})
    plan = planned(graph, topology)
    found = robustness_of(graph, topology, plan, draws=5)
    assert (found.spread, found.widest_spread, found.passes, found.draws) == (0.0, 0.0, 9, 5)
    assert found.low_s == found.high_s == pytest.approx(plan.value_s)
    assert found.within == ((0.01, 1.0), (0.05, 1.0), (0.1, 1.0))
    assert found.lost == pytest.approx(0.0, abs=1e-6)


def test_every_draw_is_evaluated_and_bounded_as_by_exhaustive_search(monkeypatch):
    graph, topology = noisy(layers(5, {"a": 1.0}, seed=4), [0.5, 0.8, 1.0, 1.3, 2.5]), machines({"a": 3}, bandwidth=1e7)
    plan = planned(graph, topology)
    seen, replayed = [], robustness._replayed

    def kept(drawn, *rest):
        made = replayed(drawn, *rest)
        seen.append((drawn, *made))
        return made

    monkeypatch.setattr(robustness, "_replayed", kept)
    found = robustness_of(graph, topology, plan, draws=8, limit_s=math.inf)
    losses = []
    for drawn, value_s, bound_s in seen:
        assert value_s == pytest.approx(replay(drawn, topology, plan.placement, schedule=PIPELINED).bottleneck_s)
        best = least_bottleneck_s(drawn, topology, PIPELINED)
        assert bound_s == pytest.approx(best)
        losses.append(value_s / best - 1)
    assert len(seen) == found.draws == 8
    assert max(losses) > 0.01, "the times vary enough for other plans to be better"
    for x, share in found.within:
        assert share == pytest.approx(sum(lost <= x for lost in losses) / 8)
    assert found.low_s < found.high_s


def test_the_spread_is_reported_with_the_proof():
    graph = layers(6, {"a": 1.0})
    graph = noisy(graph, [1.0] * 9)
    wild = replace(graph.nodes[2], passes_s={"a": tuple((1.0 * f, 2.0 * f) for f in (*[1.0] * 8, 5.11))})
    graph = replace(graph, nodes=(*graph.nodes[:2], wild, *graph.nodes[3:]))
    topology = machines({"a": 3})
    plan = planned(graph, topology)
    found = robustness_of(graph, topology, plan, draws=5)
    assert found.widest == "n2"
    assert found.widest_spread == pytest.approx(4.11)
    summary = summary_of(graph, topology, plan, replay(graph, topology, plan.placement, schedule=PIPELINED), robustness=found)
    assert "measured on a busy machine" in summary.rests_on
    assert "passes of n2 up to 411%" in summary.rests_on
    assert "within 1% in 100%" in summary.rests_on
    table = json.loads(json.dumps(summary.to_dict()))["rests_on"]
    assert table["robustness"]["widest_spread"] == pytest.approx(4.11)
    assert table["robustness"]["within"][0] == {"of_the_best": 0.01, "draws": 1.0}
    assert table["told"] == summary.rests_on


def test_an_iteration_has_an_interval_only():
    graph, topology = noisy(layers(5, {"a": 1.0}), [0.5, 1.0, 2.0]), machines({"a": 2})
    plan = planned(graph, topology, Schedule(), "iteration")
    found = robustness_of(graph, topology, plan, draws=8)
    assert found.within == ()
    assert found.lost is None
    assert found.low_s < plan.value_s < found.high_s


def test_times_without_passes_have_no_robustness():
    graph, topology = replace(layers(4, {"a": 1.0}), source="assumed"), machines({"a": 2})
    plan = planned(graph, topology)
    assert robustness_of(graph, topology, plan) is None
    summary = summary_of(graph, topology, plan, replay(graph, topology, plan.placement, schedule=PIPELINED))
    assert "times as given (assumed); without measured passes, its uncertainty is unknown" in summary.rests_on
    assert summary.to_dict()["rests_on"]["robustness"] is None


def test_time_ends_the_draws():
    graph, topology = noisy(layers(6, {"a": 1.0}), [0.5, 1.0, 2.0]), machines({"a": 3})
    ticks = iter(range(10**6))
    found = robustness_of(graph, topology, planned(graph, topology), draws=50, limit_s=3.0, clock=lambda: next(ticks))
    assert 1 <= found.draws < 5


def test_passes_are_kept_in_the_file_and_checked():
    graph = noisy(layers(3, {"a": 1.0}), [0.5, 1.0, 2.0])
    text = graph_to_json(graph)
    assert parse_graph(text) == graph
    table = json.loads(text)
    del table["nodes"][0]["passes_s"]
    assert parse_graph(json.dumps(table)).nodes[0].passes_s == {}
    table["nodes"][1]["passes_s"] = {"a": [[1.0]]}
    with pytest.raises(JobError, match=r"nodes\[1\]\.passes_s.a\[0\] = \[1.0\] should have 2 values"):
        parse_graph(json.dumps(table))
