"""Stages for equal functions: an exact search over the cuts of one order of operators.

`place` searches all placements on any devices, with optional solvers. Functions are equal, and a pipeline of them is a sequence of
segments of the order in which the model computes. Dynamic programming finds the best sequence in n²·S steps for n operators and S
stages, fewer if groups must not be cut.

Costs are estimates of one iteration: a stage takes as long as the busiest of its processor and the two directions of its network, which
overlap (as in FuncPipe and in the worker). The least bottleneck wins; of equal ones, the least traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ephemeron.partition.graph.graph import Graph

Need = Callable[[int, "PipelineSegment"], float]
"""Memory that stage s needs for a segment, in the caller's unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSegment:
    """Operators `start:stop` of the order, as a stage."""

    start: int
    stop: int
    compute_s: float
    """Both passes of one iteration."""
    parameter_bytes: int
    made_bytes: int
    """Tensors that it produces."""
    enter_bytes: int
    """Tensors that cross its start."""
    in_bytes: int
    out_bytes: int
    """Traffic over both ends, tensors and gradients."""


class PipelineSegments:
    """All segments of a graph's order.

    Args:
        graph: nodes in topological order.
        kind: of device.
    """

    def __init__(self, graph: Graph, kind: str = "cpu") -> None:
        nodes, n = graph.nodes, len(graph.nodes)
        at = {node.name: i for i, node in enumerate(nodes)}
        made = [0] * n
        forward, back = [0] * (n + 1), [0] * (n + 1)
        for t in graph.tensors:
            i, last = at[t.producer], max((at[c] for c in t.consumers), default=at[t.producer])
            made[i] += t.nbytes
            for cut in range(i + 1, last + 1):
                forward[cut] += t.nbytes
                back[cut] += t.nbytes if t.gradient_nbytes is None else t.gradient_nbytes
        self.count = n
        self._forward, self._back = forward, back
        self._time = _sums(node.forward_s[kind] + node.backward_s[kind] for node in nodes)
        self._parameters = _sums(node.parameter_bytes for node in nodes)
        self._made = _sums(made)
        spans: dict[str, tuple[int, int]] = {}
        for i, node in enumerate(nodes):
            if node.group is not None:
                first, _ = spans.get(node.group, (i, i))
                spans[node.group] = (first, i)
        barred = {cut for first, last in spans.values() for cut in range(first + 1, last + 1)}
        barred |= {cut for cut in range(1, n) if self._time[cut] in (0.0, self._time[n])}  # no work on one side
        self.cuts = tuple(c for c in range(n + 1) if c not in barred)
        """Positions at which a stage may begin or end."""

    def piece(self, start: int, stop: int) -> PipelineSegment:
        """Segment from start to stop."""
        return PipelineSegment(
            start=start,
            stop=stop,
            compute_s=self._time[stop] - self._time[start],
            parameter_bytes=int(self._parameters[stop] - self._parameters[start]),
            made_bytes=int(self._made[stop] - self._made[start]),
            enter_bytes=self._forward[start],
            in_bytes=self._forward[start] + self._back[stop],
            out_bytes=self._forward[stop] + self._back[start],
        )


def best_cuts(
    pieces: PipelineSegments, stages: int, *, seconds: Callable[[PipelineSegment], float], need: Need, memory: float
) -> tuple[PipelineSegment, ...] | None:
    """Stages with the least bottleneck that all fit; None: there are none.

    Args:
        pieces: segments of the order.
        stages: number.
        seconds: time of a stage.
        need: memory of a stage.
        memory: of each function, in the unit of `need`.
    """

    def cost(s: int, p: PipelineSegment) -> float:
        return seconds(p) if need(s, p) <= memory else math.inf

    return _best(pieces, stages, cost)


def leanest_cuts(pieces: PipelineSegments, stages: int, *, need: Need) -> tuple[PipelineSegment, ...] | None:
    """Stages with the least maximum of memory; None: the order has too few cuts."""
    return _best(pieces, stages, need)


def _best(pieces: PipelineSegments, stages: int, cost: Callable[[int, PipelineSegment], float]) -> tuple[PipelineSegment, ...] | None:
    """Stages of the least cost; the table has the least (bottleneck, bytes sent) and the start of the stage, by stage and its end."""
    cuts = pieces.cuts
    table: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for s in range(stages):
        row: dict[int, tuple[float, float, int]] = {}
        for stop in cuts if s < stages - 1 else (pieces.count,):
            for start, (worst, sent, _) in table[-1].items():
                if start >= stop:
                    continue
                piece = pieces.piece(start, stop)
                value = max(worst, cost(s, piece))
                if math.isinf(value):
                    continue
                found = (value, sent + piece.in_bytes, start)
                if stop not in row or found[:2] < row[stop][:2]:
                    row[stop] = found
        table.append(row)
    if pieces.count not in table[-1]:
        return None
    made: list[PipelineSegment] = []
    stop = pieces.count
    for row in reversed(table[1:]):
        start = row[stop][2]
        made.append(pieces.piece(start, stop))
        stop = start
    return tuple(reversed(made))


def _sums(values: Iterable[float]) -> list[float]:
    made = [0.0]
    for v in values:
        made.append(made[-1] + v)
    return made
