"""Placement against exhaustive search, against its baselines, and under changes that must not make it worse."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_worlds import THOROUGH, WORK, drawn_graph, drawn_topology, least_bottleneck_s, shortest_iteration_s, worlds

from ephemeron.errors import JobError, MissingExtra, PlanInfeasible
from ephemeron.partition import Device, Graph, Node, PlacementPlan, Schedule, SearchBudget, Tensor, Topology, connected, place, replay
from ephemeron.partition.costs.table import costs_of
from ephemeron.partition.placement.baselines import even_split, m_etf, m_sct, m_topo, netsplit, pesto
from random_schedules import examples

pytest.importorskip("ortools", reason="no OR-tools; pip install 'ephemeron[partition]'")
pytest.importorskip("scipy", reason="no SciPy; pip install 'ephemeron[partition]'")

PIPELINED = Schedule(kind="1f1b", micro_batches=4)


def placed(graph: Graph, topology: Topology, **more: object) -> PlacementPlan | None:
    """None: refused, for memory."""
    try:
        return place(graph, topology, **more)  # type: ignore[arg-type]
    except PlanInfeasible:
        return None


@pytest.mark.parametrize("seed", range(15))
def test_an_iteration_is_as_short_as_exhaustive_search_finds(seed):
    rng = Random(seed)
    graph = drawn_graph(rng, rng.randint(2, 5), groups=seed % 3 == 0)
    topology = drawn_topology(rng, graph, 2, room=rng.choice([1.5, 3.0]))
    best = shortest_iteration_s(graph, topology)
    plan = placed(graph, topology, objective="iteration", budget=THOROUGH)
    if best == float("inf"):
        assert plan is None
        return
    assert plan is not None
    assert plan.value_s == pytest.approx(best, rel=2e-4)
    assert plan.bound_s <= best * (1 + 1e-6)
    assert plan.gap < 2e-4, "and this is proved"


def test_eight_operators_on_two_devices():
    rng = Random(102)
    graph = drawn_graph(rng, 8)
    topology = drawn_topology(rng, graph, 2, room=3.0)
    plan = place(graph, topology, objective="iteration", budget=THOROUGH)
    assert plan.gap < 2e-4
    assert shortest_iteration_s(graph, topology) == pytest.approx(plan.value_s, rel=2e-4)


@pytest.mark.parametrize("seed", range(15))
def test_a_pipeline_is_as_fast_as_exhaustive_search_finds(seed):
    rng = Random(seed)
    graph = drawn_graph(rng, rng.randint(2, 6), groups=seed % 3 == 0)
    topology = drawn_topology(rng, graph, rng.choice([2, 3]), room=rng.choice([2.0, 4.0, 20.0]))
    best = least_bottleneck_s(graph, topology, PIPELINED)
    plan = placed(graph, topology, schedule=PIPELINED, budget=THOROUGH)
    if plan is None:
        assert best == float("inf")
        return
    assert plan.value_s == pytest.approx(best, rel=2e-3)
    assert plan.bound_s <= best * (1 + 1e-6)
    assert plan.gap < 2e-3


@pytest.mark.slow
def test_seven_operators_in_a_pipeline_of_three():
    rng = Random(7)
    graph = drawn_graph(rng, 7)
    topology = drawn_topology(rng, graph, 3, room=6.0)
    plan = place(graph, topology, schedule=PIPELINED, budget=THOROUGH)
    assert plan.value_s == pytest.approx(least_bottleneck_s(graph, topology, PIPELINED), rel=2e-3)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(world=worlds(), objective=st.sampled_from(["iteration", "throughput"]))
def test_the_bound_is_never_above_the_value(world, objective):
    """For all evaluated candidates, not only for the plan."""
    graph, topology = world
    schedule = PIPELINED if objective == "throughput" else Schedule()
    plan = placed(graph, topology, objective=objective, schedule=schedule, budget=WORK)
    if plan is None:
        return
    assert 0 <= plan.bound_s <= plan.value_s
    assert 0 <= plan.gap <= 1
    for candidate in plan.candidates:
        if candidate.admitted:
            assert plan.bound_s <= candidate.value_s * (1 + 1e-9)
            assert plan.value_s <= candidate.value_s
    done = replay(graph, topology, plan.placement, schedule=schedule, orders=plan.orders, stages=plan.stages)
    assert done.fits
    assert done.iteration_s == pytest.approx(plan.iteration_s)
    assert plan.value_s == pytest.approx(done.iteration_s if objective == "iteration" else done.bottleneck_s)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["iteration", "throughput"])
@pytest.mark.parametrize("block", range(3))
def test_never_worse_than_a_baseline(objective, block):
    """60 random instances, at night 120: each baseline is run and simulated separately."""
    rng = Random(f"{objective} {block}")
    budget = SearchBudget(time_limit_s=None, annealing_steps=300, program_nodes=5, constraint_work=0.05)
    schedule = PIPELINED if objective == "throughput" else Schedule()
    compared = 0
    for _ in range(examples(20)):
        graph = drawn_graph(rng, rng.randint(3, 12))
        topology = drawn_topology(rng, graph, rng.choice([2, 3]), room=rng.choice([2.0, 5.0]))
        plan = placed(graph, topology, objective=objective, schedule=schedule, budget=budget)
        costs = costs_of(graph, topology, micro_batches=schedule.micro_batches)
        methods = (even_split, m_topo, m_etf, m_sct, lambda c: pesto(c, node_limit=5), lambda c: netsplit(c, node_limit=5))
        for method in methods:
            done = replay(graph, topology, costs.placement(method(costs)), schedule=schedule)
            if not done.fits or (objective == "throughput" and not done.stages):
                continue
            assert plan is not None, "a baseline fits, so there is a plan"
            compared += 1
            assert plan.value_s <= (done.iteration_s if objective == "iteration" else done.bottleneck_s) * (1 + 1e-12)
    assert compared > 20


def relabelled(graph: Graph, rng: Random) -> Graph:
    names = [n.name for n in graph.nodes]
    new = dict(zip(names, [f"m{k}" for k in rng.sample(range(100), len(names))], strict=True))
    nodes = [replace(n, name=new[n.name]) for n in graph.nodes]
    tensors = [
        replace(t, producer=new[t.producer], consumers=tuple(rng.sample([new[c] for c in t.consumers], len(t.consumers))))
        for t in graph.tensors
    ]
    rng.shuffle(nodes)
    rng.shuffle(tensors)
    return replace(graph, nodes=tuple(nodes), tensors=tuple(tensors))


def scaled(graph: Graph, topology: Topology, factor: float) -> tuple[Graph, Topology]:
    def times(table: object) -> dict[str, float]:
        return {k: v * factor for k, v in table.items()}  # type: ignore[attr-defined]

    nodes = tuple(replace(n, forward_s=times(n.forward_s), backward_s=times(n.backward_s)) for n in graph.nodes)
    links = tuple(replace(k, latency_s=k.latency_s * factor, bandwidth_bytes_s=k.bandwidth_bytes_s / factor) for k in topology.links)
    return replace(graph, nodes=nodes), replace(topology, links=links)


@pytest.mark.parametrize("objective", ["iteration", "throughput"])
@pytest.mark.parametrize("seed", range(3))
def test_what_must_not_make_a_plan_worse(objective, seed):
    """Other names, other units of time, a faster link, one more device: all proved, so all comparable."""
    rng = Random(1000 + seed)
    graph = drawn_graph(rng, 5)
    topology = drawn_topology(rng, graph, 2, room=4.0)
    schedule = PIPELINED if objective == "throughput" else Schedule()

    def value_s(graph: Graph, topology: Topology) -> float:
        plan = place(graph, topology, objective=objective, schedule=schedule, budget=THOROUGH)
        assert plan.gap < 2e-3
        return plan.value_s

    known = value_s(graph, topology)
    near = 1 + 2e-3
    assert value_s(relabelled(graph, rng), topology) == pytest.approx(known, rel=2e-3)
    assert value_s(*scaled(graph, topology, 1e-4)) == pytest.approx(known * 1e-4, rel=2e-3)
    fast = replace(topology, links=(replace(topology.links[0], bandwidth_bytes_s=1e9, latency_s=0.0), *topology.links[1:]))
    assert value_s(graph, fast) <= known * near
    names = [d.name for d in topology.devices]
    links = {(k.source, k.target): k for k in topology.links}
    more = connected(
        [*topology.devices, Device(name="more", kind="gpu", memory_bytes=topology.devices[0].memory_bytes)],
        lambda a, b: (
            (links[a.name, b.name].latency_s, links[a.name, b.name].bandwidth_bytes_s)
            if a.name in names and b.name in names
            else (0.5, 5.0)
        ),
    )
    assert value_s(graph, more) <= known * near


def test_the_same_seed_gives_the_same_plan():
    rng = Random(5)
    graph = drawn_graph(rng, 14)
    topology = drawn_topology(rng, graph, 3, room=3.0)
    first, second = (place(graph, topology, objective="iteration", budget=WORK) for _ in range(2))
    assert first.placement == second.placement
    assert first.orders == second.orders
    assert (first.value_s, first.bound_s) == (second.value_s, second.bound_s)


def test_a_known_placement_is_not_lost():
    rng = Random(6)
    graph = drawn_graph(rng, 14)
    topology = drawn_topology(rng, graph, 3, room=3.0)
    good = place(graph, topology, objective="iteration", budget=WORK)
    little = SearchBudget(time_limit_s=None, annealing_steps=1, program_nodes=1, constraint_work=1e-6)
    own = replay(graph, topology, good.placement)
    again = place(graph, topology, objective="iteration", budget=little, seeds=[good.placement])
    assert again.value_s <= own.iteration_s


def test_a_time_limit_is_kept_on_the_clock_that_is_given():
    """A clock that runs a hundred times as fast ends the search long before its work is done."""
    rng = Random(8)
    graph = drawn_graph(rng, 12)
    topology = drawn_topology(rng, graph, 2, room=3.0)
    ticks = iter(range(10**9))

    def clock() -> float:
        return next(ticks) * 0.01

    plan = place(graph, topology, objective="iteration", budget=SearchBudget(time_limit_s=2.0), clock=clock)
    assert plan.solver_s <= 3.0


CHAIN = Graph(
    name="chain",
    nodes=tuple(Node(name=f"n{i}", forward_s={"gpu": 1.0}, backward_s={"gpu": 2.0}, parameter_bytes=10) for i in range(4)),
    tensors=tuple(Tensor(name=f"t{i}", producer=f"n{i}", consumers=(f"n{i + 1}",), nbytes=80) for i in range(3)),
)


def two(memory: int) -> Topology:
    return connected([Device(name=n, kind="gpu", memory_bytes=memory) for n in "xy"], lambda a, b: (0.0, 100.0))


def test_too_little_memory_says_how_much_and_what_fits():
    """40 bytes of states, 480 of tensors with gradients: 520, and the devices have 240."""
    with pytest.raises(PlanInfeasible, match=r"280 bytes\) are missing") as caught:
        place(CHAIN, two(120), objective="iteration", budget=WORK)
    assert caught.value.binding == "memory"
    assert "a plan fits with 1f1b, micro_batches=7, or for a batch of 31 % of this one" in str(caught.value)
    schedule = Schedule(kind="1f1b", micro_batches=7)
    assert place(CHAIN, two(120), schedule=schedule, budget=WORK).placement
    with pytest.raises(PlanInfeasible):
        place(CHAIN, two(120), schedule=replace(schedule, micro_batches=6), budget=WORK)
    smaller = tuple(replace(t, nbytes=int(0.31 * t.nbytes)) for t in CHAIN.tensors)
    assert place(replace(CHAIN, tensors=smaller), two(120), objective="iteration", budget=WORK).placement


def test_states_that_never_fit_are_not_cut_into_micro_batches():
    with pytest.raises(PlanInfeasible, match="parameters, gradients and optimiser alone take"):
        place(CHAIN, two(19), objective="iteration", budget=WORK)


@pytest.mark.parametrize("objective", ["iteration", "throughput"])
def test_enough_in_sum_but_not_on_each(objective):
    """Three nodes of 60 bytes on two devices of 100: two of them never fit on one."""
    three = replace(CHAIN, nodes=tuple(replace(n, parameter_bytes=60) for n in CHAIN.nodes[:3]), tensors=())
    with pytest.raises(PlanInfeasible, match=r"no placement of chain was found that fits: .* \(20 bytes\) over") as caught:
        place(three, two(100), objective=objective, budget=WORK)
    assert "up to 1024 micro-batches no placement was found that fits" in str(caught.value)


def test_one_group_that_no_device_holds_is_named():
    wide = replace(CHAIN, nodes=(replace(CHAIN.nodes[0], parameter_bytes=900), *CHAIN.nodes[1:]))
    with pytest.raises(PlanInfeasible, match="n0 of chain needs"):
        place(wide, two(800), objective="iteration", budget=WORK)


def test_micro_batches_shorten_the_iteration_of_a_chain():
    whole = place(CHAIN, two(1000), objective="iteration", budget=THOROUGH)
    parts = place(CHAIN, two(1000), schedule=Schedule(kind="1f1b", micro_batches=16), budget=THOROUGH)
    assert whole.value_s == pytest.approx(12.0)
    assert parts.iteration_s < 8.0
    assert parts.value_s == pytest.approx(6.0 / 16, rel=2e-3)


def test_of_many_devices_only_some_orders_are_tried_and_the_bound_still_holds():
    """Six equal devices and twelve equal operators: two on each."""
    graph = replace(
        CHAIN,
        nodes=tuple(replace(CHAIN.nodes[0], name=f"n{i}") for i in range(12)),
        tensors=tuple(Tensor(name=f"t{i}", producer=f"n{i}", consumers=(f"n{i + 1}",), nbytes=1) for i in range(11)),
    )
    six = connected([Device(name=n, kind="gpu", memory_bytes=1000) for n in "uvwxyz"], lambda a, b: (0.0, 100.0))
    plan = place(graph, six, schedule=PIPELINED, budget=WORK)
    assert plan.value_s == pytest.approx(2 * 3 / 4)
    assert plan.bound_s == pytest.approx(2 * 3 / 4)


@pytest.fixture
def too_large(monkeypatch):
    """Every graph is taken for one that the mixed-integer program is too large for."""
    module = sys.modules["ephemeron.partition.placement.place"]
    for name, value in (("PROGRAM_NODES", 0), ("CONSTRAINT_NODES", 0), ("SERIAL", 0.0)):
        monkeypatch.setattr(module, name, value)


def test_a_bound_of_divided_operators_is_never_above_the_shortest_iteration(too_large):
    for seed in range(12):
        rng = Random(seed)
        graph = drawn_graph(rng, rng.randint(2, 5), groups=seed % 3 == 0)
        topology = drawn_topology(rng, graph, 2, room=rng.choice([1.5, 3.0]))
        best = shortest_iteration_s(graph, topology)
        plan = placed(graph, topology, objective="iteration", budget=WORK)
        if best < float("inf") and plan is not None:
            assert plan.bound_s <= best * (1 + 1e-6) <= plan.value_s * (1 + 2e-6)


def test_a_long_chain_is_divided_and_made_whole_within_less_memory(too_large):
    """The faster device does not hold all; what is divided fits exactly, and rounded only with room to spare."""
    rng = Random(0)
    nodes = [
        Node(name=f"n{i}", forward_s={"gpu": t}, backward_s={"gpu": 2 * t}, parameter_bytes=rng.randint(50, 150))
        for i, t in enumerate(rng.uniform(0.5, 1.5) for _ in range(60))
    ]
    tensors = [Tensor(name=f"t{i}", producer=f"n{i}", consumers=(f"n{i + 1}",), nbytes=rng.randint(1, 9)) for i in range(59)]
    graph = Graph(name="long", nodes=tuple(nodes), tensors=tuple(tensors))
    devices = [Device(name=n, kind="gpu", memory_bytes=4000, speed=speed) for n, speed in (("fast", 1.0), ("slow", 0.8))]
    topology = connected(devices, lambda a, b: (0.0, 100.0))
    plan = place(graph, topology, objective="iteration", budget=WORK)
    rounded = [c for c in plan.candidates if c.name == "relaxed program, rounded"]
    assert rounded
    assert not rounded[-1].over_bytes
    assert plan.gap < 0.02
    alone = sum(n.forward_s["gpu"] + n.backward_s["gpu"] for n in nodes)
    assert plan.bound_s > alone * 1.01, "more than the longest way alone proves"


def test_an_iteration_of_micro_batches_is_compared_by_its_replay():
    schedule = Schedule(kind="1f1b", micro_batches=4)
    plan = place(CHAIN, two(1000), objective="iteration", schedule=schedule, budget=WORK)
    assert plan.value_s == plan.iteration_s == min(c.iteration_s for c in plan.candidates if c.admitted)
    assert plan.bound_s >= 6.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"objective": "throughput", "schedule": Schedule()}, "does not go with a plain schedule"),
        ({"seeds": [{"n0": "x"}]}, "node n1 is on no device"),
    ],
)
def test_what_does_not_agree_is_refused(more, message):
    with pytest.raises(JobError, match=message):
        place(CHAIN, two(1000), budget=WORK, **more)


def test_an_empty_budget_is_refused():
    with pytest.raises(JobError, match="workers = 0 should be above 0"):
        SearchBudget(workers=0)


@pytest.mark.parametrize(("module", "objective"), [("scipy.optimize", "throughput"), ("ortools.sat.python", "iteration")])
def test_an_absent_solver_is_named_with_the_command(module, objective, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    rng = Random(9)
    graph = drawn_graph(rng, 12)
    topology = drawn_topology(rng, graph, 2, room=3.0)
    with pytest.raises(MissingExtra, match=r"pip install 'ephemeron\[partition\]'"):
        place(graph, topology, objective=objective, budget=WORK)
