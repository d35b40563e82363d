"""Best cuts of one order, against all cuts."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.partition.graph.graph import Graph, Node, Tensor
from ephemeron.partition.placement.linear_partition import PipelineSegments, best_cuts, leanest_cuts


@st.composite
def graphs(draw):
    n = draw(st.integers(2, 7))
    groups = draw(st.lists(st.sampled_from([None, None, "a", "b"]), min_size=n, max_size=n))
    nodes = tuple(
        Node(
            name=f"n{i}",
            forward_s={"cpu": draw(st.integers(1, 9))},
            backward_s={"cpu": 0.0},
            parameter_bytes=draw(st.integers(0, 9)),
            group=g,
        )
        for i, g in enumerate(groups)
    )
    tensors = tuple(
        Tensor(
            name=f"t{i}",
            producer=f"n{i}",
            nbytes=draw(st.integers(0, 9)),
            consumers=tuple(f"n{j}" for j in draw(st.sets(st.integers(i + 1, n - 1), max_size=2))),
        )
        for i in range(n - 1)
    )
    return Graph(nodes=nodes, tensors=tensors)


def all_cuts(pieces, stages):
    inner = [c for c in pieces.cuts if 0 < c < pieces.count]
    for chosen in itertools.combinations(inner, stages - 1):
        ends = [0, *chosen, pieces.count]
        yield [pieces.piece(a, b) for a, b in itertools.pairwise(ends)]


def seconds(piece):
    return max(piece.compute_s, piece.in_bytes, piece.out_bytes)


def need(stage, piece):
    return piece.parameter_bytes + (3 - stage) * piece.made_bytes


@settings(max_examples=60, deadline=None)
@given(graph=graphs(), stages=st.integers(1, 4), memory=st.integers(5, 60))
def test_nothing_is_better(graph, stages, memory):
    pieces = PipelineSegments(graph)
    every = list(all_cuts(pieces, stages))
    fitting = [c for c in every if all(need(s, p) <= memory for s, p in enumerate(c))]
    best = best_cuts(pieces, stages, seconds=seconds, need=need, memory=memory)
    least = min((max(map(seconds, c)) for c in fitting), default=math.inf)
    assert (max(map(seconds, best)) if best else math.inf) == least
    lean = leanest_cuts(pieces, stages, need=need)
    assert (lean is None) == (not every)
    if lean is not None:
        assert max(need(s, p) for s, p in enumerate(lean)) == min(max(need(s, p) for s, p in enumerate(c)) for c in every)


@settings(max_examples=50, deadline=None)
@given(graph=graphs())
def test_segments_add_up_and_groups_stay_whole(graph):
    pieces = PipelineSegments(graph)
    names = [n.name for n in graph.nodes]
    for cut in pieces.cuts:
        left, right = pieces.piece(0, cut), pieces.piece(cut, pieces.count)
        assert left.compute_s + right.compute_s == pytest.approx(pieces.piece(0, pieces.count).compute_s)
        crossing = [t for t in graph.tensors if names.index(t.producer) < cut <= max((names.index(c) for c in t.consumers), default=-1)]
        assert right.in_bytes == left.out_bytes == sum(t.nbytes for t in crossing)
        groups = [{n.group for n in side if n.group} for side in (graph.nodes[:cut], graph.nodes[cut:])]
        assert not groups[0] & groups[1]
