"""Schedule simulator against schedules computed by hand, and invariants of every simulation."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partition_worlds import THOROUGH, worlds

from ephemeron.errors import JobError
from ephemeron.partition import (
    Device,
    DeviceOrders,
    Graph,
    Node,
    Schedule,
    Tensor,
    Topology,
    connected,
    parse_plan,
    place,
    plan_to_json,
    replay,
)


def model(times: dict[str, tuple[float, float]], edges: list[tuple[str, str, int]], state: int = 0) -> Graph:
    readers: dict[tuple[str, int], list[str]] = {}
    for u, v, nbytes in edges:
        readers.setdefault((u, nbytes), []).append(v)
    return Graph(
        nodes=tuple(Node(name=n, forward_s={"gpu": f}, backward_s={"gpu": b}, parameter_bytes=state) for n, (f, b) in times.items()),
        tensors=tuple(Tensor(name=f"{u}{nbytes}", producer=u, consumers=tuple(vs), nbytes=nbytes) for (u, nbytes), vs in readers.items()),
    )


def machines(names: str, *, memory: int = 10_000, latency: float = 0.0, bandwidth: float = 1.0) -> Topology:
    devices = [Device(name=n, kind="gpu", memory_bytes=memory) for n in names]
    return connected(devices, lambda a, b: (latency, bandwidth))


CHAIN = model({"a": (1, 2), "b": (1, 2)}, [("a", "b", 4)])


def spans(done: object) -> dict[tuple[str, str, int], tuple[float, float]]:
    return {(s.what, s.direction, s.micro_batch): (s.start_s, s.end_s) for s in done.spans}  # type: ignore[attr-defined]


def test_one_device_takes_the_sum():
    done = replay(CHAIN, machines("x"), {"a": "x", "b": "x"})
    assert done.iteration_s == 6
    assert done.busy_s == {"x": 6}
    assert done.stages == ("x",)


def test_two_devices_exchange_a_tensor_and_its_gradient():
    done = replay(CHAIN, machines("xy", latency=0.5, bandwidth=4), {"a": "x", "b": "y"})
    assert spans(done) == {
        ("a", "forward", 0): (0, 1),
        ("a4", "forward", 0): (1, 2.5),
        ("b", "forward", 0): (2.5, 3.5),
        ("b", "backward", 0): (3.5, 5.5),
        ("a4", "backward", 0): (5.5, 7),
        ("a", "backward", 0): (7, 9),
    }
    assert done.busy_s == {"x": 3, "y": 3, ("x", "y"): 1.5, ("y", "x"): 1.5}
    assert done.bottleneck_s == 3


def test_operators_of_one_device_do_not_overlap():
    """What NetSplit's program permits: two branches at once on one device."""
    fork = model({"s": (1, 1), "a": (5, 5), "b": (5, 5)}, [("s", "a", 1), ("s", "b", 1)])
    assert replay(fork, machines("x"), {"s": "x", "a": "x", "b": "x"}).iteration_s == 22


def test_transfers_of_one_link_follow_one_another_and_directions_are_apart():
    fork = Graph(
        nodes=tuple(Node(name=n, forward_s={"gpu": 1.0}, backward_s={"gpu": 0.0}) for n in "sab"),
        tensors=(
            Tensor(name="p", producer="s", consumers=("a",), nbytes=10, gradient_nbytes=0),
            Tensor(name="q", producer="s", consumers=("b",), nbytes=10, gradient_nbytes=0),
        ),
    )
    done = replay(fork, machines("xy"), {"s": "x", "a": "y", "b": "y"})
    sends = sorted(v for k, v in spans(done).items() if k[0] in "pq")
    assert sends == [(1, 11), (11, 21)]
    assert done.iteration_s == 22
    apart = replay(fork, machines("xyz"), {"s": "x", "a": "y", "b": "z"})
    assert apart.iteration_s == 12


def test_a_tensor_is_sent_once_to_a_device_and_its_gradient_comes_back_once():
    fork = model({"s": (1, 1), "a": (1, 1), "b": (1, 1)}, [("s", "a", 3), ("s", "b", 3)])
    done = replay(fork, machines("xy"), {"s": "x", "a": "y", "b": "y"})
    assert done.busy_s[("x", "y")] == 3
    assert done.busy_s[("y", "x")] == 3
    # s 0–1, sent 1–4, then both branches forward and backward on y, 4–8; back 8–11; s 11–12
    assert done.iteration_s == 12


def test_gpipe_is_as_long_as_its_formula():
    """Equal stages, nothing sent: (M + S − 1)(f + b) / M."""
    done = replay(CHAIN, machines("xy", bandwidth=1e12), {"a": "x", "b": "y"}, schedule=Schedule(kind="gpipe", micro_batches=4))
    assert done.iteration_s == pytest.approx((4 + 1) * 3 / 4, abs=1e-9)
    assert done.in_flight == {"x": 4, "y": 4}


def test_1f1b_takes_as_long_as_gpipe_and_keeps_less():
    one = Schedule(kind="1f1b", micro_batches=8, overlap=False)
    graph, where = model({"a": (1, 2), "b": (1, 2)}, [("a", "b", 8)]), {"a": "x", "b": "y"}
    fast = machines("xy", bandwidth=1e15)
    done, whole = (replay(graph, fast, where, schedule=s) for s in (one, Schedule(kind="gpipe", micro_batches=8)))
    assert done.iteration_s == pytest.approx(whole.iteration_s)
    assert done.in_flight == {"x": 2, "y": 1}
    assert whole.peak_bytes["x"] >= 8
    assert done.peak_bytes["x"] <= 2 * 2
    # F0 F1 B0 F2 B1 F3 …: the first device begins its first backward pass after two forward passes
    order = [(s.direction, s.micro_batch) for s in done.spans if s.resource == "x"][:4]
    assert order == [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2)]


def test_overlap_hides_transfers_where_the_classic_depth_does_not():
    slow = machines("xy", bandwidth=3.2)
    graph, where = model({"a": (4, 8), "b": (4, 8)}, [("a", "b", 16)]), {"a": "x", "b": "y"}
    deep, classic = (replay(graph, slow, where, schedule=Schedule(kind="1f1b", micro_batches=16, overlap=o)) for o in (True, False))
    assert deep.bottleneck_s == classic.bottleneck_s == 0.75
    assert deep.iteration_s < classic.iteration_s
    assert deep.iteration_s <= (16 + 4) * deep.bottleneck_s


def test_memory_by_hand():
    """x holds a's state, its output until its backward pass ends, and the gradient that comes back."""
    graph = model({"a": (1, 2), "b": (1, 2)}, [("a", "b", 4)], state=100)
    done = replay(graph, machines("xy", memory=107), {"a": "x", "b": "y"})
    assert done.peak_bytes == {"x": 108, "y": 108}
    assert done.reserved_bytes == {"x": 108, "y": 108}
    assert done.over_bytes == {"x": 1, "y": 1}
    assert not done.fits


def test_memory_over_time_is_less_where_branches_do_not_meet():
    """Two tails that end in turn: their gradients are never there together."""
    fork = model({"s": (1, 1), "a": (1, 1), "b": (1, 1)}, [("s", "a", 5), ("s", "b", 6), ("a", "s2", 1)][:2])
    done = replay(fork, machines("x"), {"s": "x", "a": "x", "b": "x"})
    assert done.reserved_bytes == {"x": 22}
    assert 11 <= done.peak_bytes["x"] <= 22


def test_orders_are_followed():
    fork = model({"s": (1, 1), "a": (5, 1), "b": (2, 1)}, [("s", "a", 1), ("s", "b", 1)])
    where = dict.fromkeys("sab", "x")
    own = replay(fork, machines("x"), where)
    assert spans(own)["a", "forward", 0] == (1, 6), "the longest way first"
    other: tuple[tuple[str, str], ...] = (
        ("s", "forward"),
        ("b", "forward"),
        ("a", "forward"),
        ("b", "backward"),
        ("a", "backward"),
        ("s", "backward"),
    )
    done = replay(fork, machines("x"), where, orders=DeviceOrders(compute={"x": other}, transfers={}))  # type: ignore[dict-item]
    assert spans(done)["b", "forward", 0] == (1, 3)


def test_orders_that_wait_for_themselves_are_refused():
    wrong = DeviceOrders(compute={"x": (("b", "forward"), ("a", "forward"), ("b", "backward"), ("a", "backward"))}, transfers={})
    with pytest.raises(JobError, match="deadlock after"):
        replay(CHAIN, machines("x"), {"a": "x", "b": "x"}, orders=wrong)


def test_orders_of_something_else_are_refused():
    wrong = DeviceOrders(compute={"x": (("a", "forward"),)}, transfers={})
    with pytest.raises(JobError, match="do not name each of its tasks once"):
        replay(CHAIN, machines("x"), {"a": "x", "b": "x"}, orders=wrong)


@pytest.mark.parametrize(
    ("placement", "message"), [({"a": "x"}, "node b is on no device"), ({"a": "x", "b": "z"}, "node b is on z, which is no device")]
)
def test_a_wrong_placement_is_named(placement, message):
    with pytest.raises(JobError, match=message):
        replay(CHAIN, machines("xy"), placement)


def test_a_group_on_two_devices_is_refused():
    graph = Graph(nodes=tuple(Node(name=n, forward_s={"gpu": 1}, backward_s={"gpu": 1}, group="tied") for n in "ab"))
    with pytest.raises(JobError, match="group tied is on several devices: a is on x, b on y"):
        replay(graph, machines("xy"), {"a": "x", "b": "y"})


def test_a_device_of_a_kind_without_times_is_named():
    with pytest.raises(JobError, match="kind tpu, for which node a has no times"):
        replay(CHAIN, connected([Device(name="x", kind="tpu", memory_bytes=1)], lambda a, b: (0, 1)), {"a": "x", "b": "x"})


@given(
    world=worlds(),
    seed=st.integers(0, 2**20),
    schedule=st.sampled_from(
        [
            Schedule(),
            Schedule(kind="gpipe", micro_batches=3),
            Schedule(kind="1f1b", micro_batches=4),
            Schedule(kind="1f1b", micro_batches=4, overlap=False),
        ]
    ),
)
def test_every_replay_is_a_schedule(world, seed, schedule):
    """Nothing overlaps, nothing begins before what it needs, everything is done once, and memory is as promised."""
    graph, topology = world
    names = [d.name for d in topology.devices]
    homes: dict[str, str] = {}
    where = {}
    for k, n in enumerate(graph.nodes):
        pick = names[(seed // (k + 1) + seed % (k + 7)) % len(names)]
        where[n.name] = homes.setdefault(n.group, pick) if n.group else pick
    done = replay(graph, topology, where, schedule=schedule)
    parts = schedule.micro_batches
    by_resource = defaultdict(list)
    for s in done.spans:
        by_resource[s.resource].append((s.start_s, s.end_s))
    for intervals in by_resource.values():
        intervals.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(intervals))
    at = {(s.what, s.direction, s.micro_batch, s.resource): s for s in done.spans}
    assert len(at) == len(done.spans)
    for m in range(parts):
        for n in graph.nodes:
            f, b = (at[n.name, d, m, where[n.name]] for d in ("forward", "backward"))
            assert f.end_s <= b.start_s + 1e-9
        for t in graph.tensors:
            home = where[t.producer]
            made, used = (at[t.producer, d, m, home] for d in ("forward", "backward"))
            for c in t.consumers:
                away = where[c]
                read, returned = (at[c, d, m, away] for d in ("forward", "backward"))
                if home == away or not t.gradient_bytes:
                    assert returned.end_s <= used.start_s + 1e-9
                else:
                    sent = at[t.name, "backward", m, (away, home)]
                    assert returned.end_s <= sent.start_s + 1e-9
                    assert sent.end_s <= used.start_s + 1e-9
                if home == away:
                    assert made.end_s <= read.start_s + 1e-9
                else:
                    sent = at[t.name, "forward", m, (home, away)]
                    assert made.end_s <= sent.start_s + 1e-9
                    assert sent.end_s <= read.start_s + 1e-9
    assert done.iteration_s >= done.bottleneck_s * parts - 1e-9
    for d in names:
        assert done.peak_bytes[d] <= done.reserved_bytes[d], "5-18 for what is in flight is enough"


@given(world=worlds(), seed=st.integers(0, 2**20))
def test_a_replay_under_its_own_orders_is_the_same(world, seed):
    graph, topology = world
    names = [d.name for d in topology.devices]
    homes: dict[str, str] = {}
    where = {n.name: homes.setdefault(n.group or n.name, names[(seed >> k) % len(names)]) for k, n in enumerate(graph.nodes)}
    done = replay(graph, topology, where)
    again = replay(graph, topology, where, orders=done.orders())
    assert again.iteration_s == pytest.approx(done.iteration_s)
    assert again.spans
    assert len(again.spans) == len(done.spans)


SIDES = Graph(
    nodes=tuple(Node(name=n, forward_s={"gpu": 1.0}, backward_s={"gpu": 2.0}) for n in "pqr"),
    tensors=(Tensor(name="tp", producer="p", consumers=("r",), nbytes=40), Tensor(name="tq", producer="q", consumers=("r",), nbytes=4)),
)
"""Two branches that exchange nothing, and a node that reads both."""


def test_order_of_independent_stages_decides_what_is_in_flight():
    placed = {"p": "x", "q": "y", "r": "z"}
    schedule = Schedule(kind="1f1b", micro_batches=4, overlap=False)
    topology = machines("xyz", memory=60)
    first, second = (replay(SIDES, topology, placed, schedule=schedule, stages=order) for order in ("xyz", "yxz"))
    assert first.in_flight == {"x": 3, "y": 2, "z": 1}
    assert second.in_flight == {"x": 2, "y": 3, "z": 1}
    assert first.reserved_bytes == {"x": 3 * 20, "y": 2 * 2, "z": 3 * 20 + 2 * 2}
    assert second.reserved_bytes == {"x": 2 * 20, "y": 3 * 2, "z": 2 * 20 + 3 * 2}
    assert not first.fits
    assert second.fits
    assert second.stages == ("y", "x", "z")
    assert replay(SIDES, topology, placed, schedule=schedule).stages == ("x", "y", "z")


@pytest.mark.parametrize(
    ("stages", "said"), [("xy", "should name each used device once"), ("xxz", "once: x, y, z"), ("xzy", "y sends to z and comes after it")]
)
def test_orders_of_stages_that_do_not_run_are_refused(stages, said):
    with pytest.raises(JobError, match=said):
        replay(SIDES, machines("xyz"), {"p": "x", "q": "y", "r": "z"}, stages=stages)


def test_a_plan_keeps_the_order_of_stages_that_fits():
    """p fits only where one micro-batch is in flight: on the last stage, though it is first in the graph."""
    graph = Graph(nodes=SIDES.nodes[:2], tensors=tuple(replace(t, consumers=()) for t in SIDES.tensors))
    schedule = Schedule(kind="1f1b", micro_batches=4, overlap=False)
    topology = machines("xy", memory=25)
    plan = parse_plan(plan_to_json(place(graph, topology, schedule=schedule, budget=THOROUGH)))
    assert plan.value_s == 3 / 4
    assert plan.gap == 0
    assert plan.stages == (plan.placement["q"], plan.placement["p"])
    assert not replay(graph, topology, plan.placement, schedule=schedule).fits
    done = replay(graph, topology, plan.placement, schedule=schedule, stages=plan.stages)
    assert done.fits
    assert done.bottleneck_s == plan.value_s
