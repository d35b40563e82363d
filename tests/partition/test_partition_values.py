"""Graphs and topologies refuse what is wrong, and survive JSON."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from partition_worlds import WORK, worlds

from ephemeron.errors import JobError
from ephemeron.partition import (
    Device,
    Graph,
    Link,
    Node,
    Schedule,
    Tensor,
    Topology,
    graph_to_json,
    parse_graph,
    parse_plan,
    parse_topology,
    place,
    plan_to_json,
    topology_to_json,
)


def node(name: str, **more: object) -> Node:
    known = {"forward_s": {"gpu": 1.0}, "backward_s": {"gpu": 1.0}}
    return Node(name=name, **{**known, **more})  # type: ignore[arg-type]


def edge(u: str, v: str, nbytes: int = 1) -> Tensor:
    return Tensor(name=f"{u}-{v}", producer=u, consumers=(v,), nbytes=nbytes)


@pytest.mark.parametrize(
    ("nodes", "tensors", "message"),
    [
        ([], [], "has no node"),
        ([node("a"), node("a")], [], "node a is there twice"),
        ([node("a"), node("b")], [edge("a", "b"), edge("a", "b")], "tensor a-b is there twice"),
        ([node("a")], [edge("a", "b")], "tensor a-b has the consumer b, which is no node"),
        ([node("a")], [edge("b", "a")], "tensor b-a has the producer b, which is no node"),
        ([node("a", parameter_bytes=-1)], [], "node a: parameter_bytes = -1 should be a number from 0"),
        ([node("a", forward_s={"gpu": -2.0})], [], r"node a: forward_s\[gpu\] = -2.0 should be a number from 0"),
        ([node("a", backward_s={"gpu": float("nan")})], [], r"backward_s\[gpu\] = nan"),
        ([node("a"), node("b", forward_s={"cpu": 1.0})], [], "give both for the same kinds of device as node a: gpu"),
        ([node("a"), node("b")], [edge("a", "b", -4)], "tensor a-b: nbytes = -4"),
        ([node("a")], [edge("a", "a")], "cycle: a → a"),
    ],
)
def test_a_wrong_graph_is_refused_with_the_place(nodes, tensors, message):
    with pytest.raises(JobError, match=message):
        Graph(nodes=tuple(nodes), tensors=tuple(tensors))


def test_a_cycle_is_named():
    nodes = tuple(node(n) for n in "sabcz")
    edges = (edge("s", "a"), edge("a", "b"), edge("b", "c"), edge("c", "a"), edge("c", "z"))
    with pytest.raises(JobError) as caught:
        Graph(nodes=nodes, tensors=edges)
    named = str(caught.value).split("cycle: ")[1].split(";")[0].split(" → ")
    assert named[0] == named[-1]
    assert set(named) == {"a", "b", "c"}
    assert all((u, v) in {("a", "b"), ("b", "c"), ("c", "a")} for u, v in itertools.pairwise(named))


TWO = (Device(name="x", kind="gpu", memory_bytes=1), Device(name="y", kind="gpu", memory_bytes=1))
XY = Link(source="x", target="y", latency_s=0.0, bandwidth_bytes_s=1.0)
YX = Link(source="y", target="x", latency_s=0.0, bandwidth_bytes_s=1.0)


@pytest.mark.parametrize(
    ("devices", "links", "message"),
    [
        ((), (), "has no device"),
        ((TWO[0], TWO[0]), (), "device x is there twice"),
        (TWO, (XY,), "there is no link y → x"),
        (TWO, (XY, YX, XY), "link x → y is there twice"),
        (TWO, (XY, YX, replace(XY, target="z")), "z is no device"),
        (TWO, (XY, YX, replace(XY, target="x")), "from a device to itself"),
        (TWO, (replace(XY, bandwidth_bytes_s=0.0), YX), "bandwidth_bytes_s = 0.0 should be a number above 0"),
        (TWO, (replace(XY, latency_s=-1.0), YX), "latency_s = -1.0 should be a number from 0"),
        ((replace(TWO[0], speed=0.0),), (), "speed = 0.0 should be a number above 0"),
    ],
)
def test_a_wrong_topology_is_refused_with_the_place(devices, links, message):
    with pytest.raises(JobError, match=message):
        Topology(devices=devices, links=links)


@pytest.mark.parametrize(
    ("kind", "parts", "message"), [("zigzag", 1, "not known"), ("plain", 2, "takes the batch whole"), ("gpipe", 0, "micro_batches = 0")]
)
def test_a_wrong_schedule_is_refused(kind, parts, message):
    with pytest.raises(JobError, match=message):
        Schedule(kind=kind, micro_batches=parts)


@given(world=worlds())
def test_values_survive_json(world):
    graph, topology = world
    assert parse_graph(graph_to_json(graph)) == graph
    assert parse_topology(topology_to_json(topology)) == topology


@pytest.mark.parametrize("objective", ["iteration", "throughput"])
def test_a_plan_survives_json(objective):
    graph = Graph(nodes=tuple(node(n) for n in "abc"), tensors=(edge("a", "b"), edge("b", "c")))
    devices = tuple(replace(d, memory_bytes=100) for d in TWO)
    plan = place(graph, Topology(devices=devices, links=(XY, YX)), objective=objective, budget=WORK)
    again = parse_plan(plan_to_json(plan))
    assert again == plan
    assert again.gap == plan.gap


GOOD = graph_to_json(Graph(nodes=(node("a"), node("b")), tensors=(edge("a", "b"),)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.update(version=2), "has version 2; this release reads version 1"),
        (lambda g: g.update(format="onnx"), "is no graph"),
        (lambda g: g.update(colour=1), "unknown key colour"),
        (lambda g: g.pop("nodes"), "graph: missing key nodes"),
        (lambda g: g["nodes"][0].pop("name"), r"graph: nodes\[0\]: missing key name"),
        (lambda g: g["nodes"][1].update(forward_s=3), r"graph: nodes\[1\].forward_s = 3 should be a table"),
        (lambda g: g["nodes"][1].update(parameter_bytes="4"), r"nodes\[1\].parameter_bytes = '4' should be a whole number"),
        (lambda g: g["nodes"][1].update(forward_s={"gpu": True}), r"nodes\[1\].forward_s.gpu = True should be a number"),
        (lambda g: g["tensors"][0].update(consumers=[1]), r"tensors\[0\].consumers\[0\] = 1 should be text"),
        (lambda g: g["tensors"][0].update(nbyte=1), r"tensors\[0\]: unknown key nbyte; did you mean nbytes"),
    ],
)
def test_wrong_json_is_refused_with_the_place(change, message):
    table = json.loads(GOOD)
    change(table)
    with pytest.raises(JobError, match=message):
        parse_graph(json.dumps(table))


def test_what_is_not_json_is_said_to_be_none():
    with pytest.raises(JobError, match=r"model\.json is not JSON"):
        parse_graph("{", where="model.json")


def test_a_graph_may_know_its_batch_and_its_modules():
    node = Node(name="a", forward_s={"gpu": 1.0}, backward_s={"gpu": 1.0}, module="encoder.0")
    graph = Graph(nodes=(node,), batch_size=4)
    assert parse_graph(graph_to_json(graph)) == graph
    with pytest.raises(JobError, match="batch_size = 0 should be a whole number from 1"):
        Graph(nodes=(node,), batch_size=0)
