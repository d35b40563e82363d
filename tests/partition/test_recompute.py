"""Recomputation against numbers worked out by hand, against exhaustive search, and what holds for every pipeline."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from partition_worlds import THOROUGH, WORK, drawn_graph, drawn_topology, least_bottleneck_s, worlds

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.partition import Device, Graph, Node, Schedule, Tensor, connected, parse_plan, place, plan_to_json, replay
from ephemeron.partition.costs.table import costs_of
from ephemeron.partition.placement.pipeline import staging

pytest.importorskip("scipy", reason="no SciPy; pip install 'ephemeron[partition]'")

KEPT = Schedule(kind="1f1b", micro_batches=4)
AGAIN = replace(KEPT, recompute=True)
CHAIN = Graph(
    name="chain",
    nodes=tuple(Node(name=n, forward_s={"gpu": 4.0}, backward_s={"gpu": 8.0}, parameter_bytes=10) for n in "abcdef"),
    tensors=tuple(Tensor(name=u + v, producer=u, consumers=(v,), nbytes=40, gradient_nbytes=80) for u, v in pairwise("abcdef")),
)
HALVES = {n: "x" if n in "abc" else "y" for n in "abcdef"}


def two(memory_bytes: int = 10_000):
    return connected([Device(name=n, kind="gpu", memory_bytes=memory_bytes) for n in "xy"], lambda a, b: (0.0, 100.0))


def test_by_hand():
    """Of x's tensors ab comes from the model's input and cd is sent: both count 3 times (in flight); bc is inside: once."""
    kept, again = (replay(CHAIN, two(), HALVES, schedule=s) for s in (KEPT, AGAIN))
    assert kept.in_flight == again.in_flight == {"x": 3, "y": 1}
    part = 40 // 4 + 80 // 4
    assert kept.reserved_bytes == {"x": 30 + 3 * 3 * part, "y": 30 + (3 + 1 + 1) * part}
    assert again.reserved_bytes == {"x": 30 + (3 + 1 + 3) * part, "y": 30 + (3 + 1 + 1) * part}
    assert kept.busy_s["x"] == pytest.approx(36)
    assert again.busy_s["x"] == pytest.approx(36 + 12), "forward once more"
    assert again.bottleneck_s == pytest.approx(12)


def test_a_stage_begins_when_everything_is_there_and_then_does_nothing_else():
    done = replay(CHAIN, two(), HALVES, schedule=AGAIN)
    for device in "xy":
        turns = [(s.micro_batch, s.direction) for s in done.spans if s.resource == device]
        assert len([a for a, b in pairwise(turns) if a != b]) == 2 * 4 - 1, "eight turns, none interrupted"


@pytest.mark.parametrize("seed", range(16))
def test_a_pipeline_is_as_fast_as_exhaustive_search_finds(seed):
    rng = Random(seed)
    graph = drawn_graph(rng, rng.randint(2, 6), groups=seed % 3 == 0)
    topology = drawn_topology(rng, graph, rng.choice([2, 3]), room=rng.choice([1.5, 2.0, 4.0]))
    best = least_bottleneck_s(graph, topology, AGAIN)
    try:
        plan = place(graph, topology, schedule=AGAIN, budget=THOROUGH)
    except PlanInfeasible:
        assert best == float("inf")
        return
    assert plan.value_s == pytest.approx(best, rel=2e-3)
    assert plan.bound_s <= best * (1 + 1e-6)
    assert replay(graph, topology, plan.placement, schedule=AGAIN, stages=plan.stages).fits
    assert parse_plan(plan_to_json(plan)) == plan


@st.composite
def pipelines(draw: st.DrawFn):
    """A world and stages along its nodes, which are in topological order."""
    graph, topology = draw(worlds(most_nodes=9, tight=False))
    rng = Random(draw(st.integers(0, 2**20)))
    cuts = sorted(rng.randint(0, len(graph.nodes)) for _ in topology.devices[1:])
    where = {n.name: topology.devices[sum(c <= i for c in cuts)].name for i, n in enumerate(graph.nodes)}
    assume(len({(n.group, where[n.name]) for n in graph.nodes if n.group}) <= 1)
    return graph, topology, where


@given(world=pipelines(), kind=st.sampled_from(["gpipe", "1f1b"]), parts=st.integers(1, 5), overlap=st.booleans())
def test_it_never_needs_more_memory_and_is_a_schedule(world, kind, parts, overlap):
    graph, topology, where = world
    kept = Schedule(kind=kind, micro_batches=parts, overlap=overlap)
    before, after = (replay(graph, topology, where, schedule=s) for s in (kept, replace(kept, recompute=True)))
    forward: dict[object, float] = defaultdict(float)
    for s in before.spans:
        forward[s.resource] += (s.end_s - s.start_s) * (s.direction == "forward" and isinstance(s.resource, str))
    by_resource = defaultdict(list)
    turns = defaultdict(list)
    for s in after.spans:
        by_resource[s.resource].append((s.start_s, s.end_s))
        turns[s.resource].append((s.micro_batch, s.direction))
    for resource, intervals in by_resource.items():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(intervals)))
        assert after.busy_s[resource] == pytest.approx(before.busy_s[resource] + forward[resource])
        if isinstance(resource, str):
            assert sum(a != b for a, b in pairwise(turns[resource])) == 2 * parts - 1, "no pass is interrupted"
    for d in (d.name for d in topology.devices):
        assert after.reserved_bytes[d] <= before.reserved_bytes[d]
        assert after.peak_bytes[d] <= after.reserved_bytes[d]
    ended = {(s.what, s.direction, s.micro_batch, s.resource): s for s in after.spans}
    for t in graph.tensors:
        home = where[t.producer]
        for c in t.consumers:
            for m in range(parts):
                read = ended[c, "forward", m, where[c]]
                made = ended[t.producer, "forward", m, home]
                assert made.end_s <= read.start_s + 1e-9
                if where[c] != home:
                    sent = ended[t.name, "forward", m, (home, where[c])]
                    assert made.end_s <= sent.start_s + 1e-9
                    assert sent.end_s <= read.start_s + 1e-9


@given(world=pipelines(), schedule=st.sampled_from([AGAIN, replace(AGAIN, kind="gpipe")]))
def test_solvers_and_simulator_agree_on_memory_and_load(world, schedule):
    graph, topology, where = world
    tight = replace(topology, devices=tuple(replace(d, memory_bytes=1) for d in topology.devices))
    costs = costs_of(graph, tight, micro_batches=4, recompute=True)
    as_stages = staging(costs, schedule, costs.where(where))
    done = replay(graph, tight, where, schedule=schedule)
    assert as_stages is not None
    assert as_stages.over_bytes == sum(done.over_bytes.values())
    assert as_stages.bottleneck_s == pytest.approx(done.bottleneck_s)


def test_placements_that_are_no_pipeline_cannot_recompute():
    where = {n: "xy"[i % 2] for i, n in enumerate("abcdef")}
    with pytest.raises(JobError, match="recompute needs stages"):
        replay(CHAIN, two(), where, schedule=AGAIN)
    plan = place(CHAIN, two(), objective="iteration", schedule=AGAIN, budget=WORK)
    assert plan.value_s == plan.iteration_s
    assert plan.bound_s <= plan.value_s


def test_a_whole_batch_has_nothing_to_recompute():
    with pytest.raises(JobError, match="recompute would save nothing"):
        Schedule(recompute=True)


WIDE = Graph(
    name="wide",
    batch_size=64,
    nodes=tuple(Node(name=n, forward_s={"gpu": 1.0}, backward_s={"gpu": 2.0}) for n in "abcdefgh"),
    tensors=tuple(Tensor(name=u + v, producer=u, consumers=(v,), nbytes=8 if v in "be" else 80) for u, v in pairwise("abcdefgh")),
)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_it_is_offered_where_it_makes_a_model_fit(kind):
    """Narrow where it is cut and wide inside: three micro-batches in flight are too much, one is not."""
    schedule = Schedule(kind=kind, micro_batches=4)
    with pytest.raises(PlanInfeasible, match="a plan fits with recompute=True") as caught:
        place(WIDE, two(180), schedule=schedule, budget=WORK)
    assert "of 64 samples" in str(caught.value)
    plan = place(WIDE, two(180), schedule=replace(schedule, recompute=True), budget=WORK)
    assert max(plan.reserved_bytes.values()) <= 180
    samples = int(str(caught.value).split("for a batch of ")[1].split()[0])
    fewer = tuple(replace(t, nbytes=t.nbytes * samples // 64) for t in WIDE.tensors)
    assert place(replace(WIDE, tensors=fewer), two(180), schedule=schedule, budget=WORK).placement


def test_the_device_that_binds_is_named():
    """Two nodes of 60 bytes and one of 60 on devices of 100 each: some device holds two."""
    three = replace(CHAIN, nodes=tuple(replace(n, parameter_bytes=60) for n in CHAIN.nodes[:3]), tensors=())
    with pytest.raises(PlanInfeasible, match=r"most of it on [xy], which needs .* and has"):
        place(three, two(100), budget=WORK)
