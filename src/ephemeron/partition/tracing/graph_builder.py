"""Operator graph of a traced model, with costs from shapes; times and optimiser states are measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from ephemeron.partition.graph.graph import Graph, Node, Tensor
from ephemeron.partition.tracing.operators import Operator, Ties, last_writers, operators
from ephemeron.partition.tracing.side_effects import references
from ephemeron.partition.tracing.traced import Traced


def graph_of(
    traced: Traced,
    *,
    name: str = "model",
    forward_s: Mapping[str, Mapping[str, float]] | None = None,
    backward_s: Mapping[str, Mapping[str, float]] | None = None,
    optimizer_bytes: Mapping[str, int] | None = None,
    ties: Ties = "together",
    source: str = "structure only: times are 0",
) -> Graph:
    """Nodes and tensors of a model (NetSplit, sections 4.1 and 4.3).

    A shared parameter counts for the first operator that reads it; with ties apart, for each. Buffers count as parameters without a gradient.

    Args:
        traced: the model; bytes are those of its example batch.
        name: of the graph.
        forward_s, backward_s: seconds by operator and kind of device; by default 0 for the kind `cpu`.
        optimizer_bytes: by parameter; by default none.
        ties: whether operators that share a parameter stay together.
        source: where the costs come from.
    """
    nodes, counted = [], set[str]()
    none = {"cpu": 0.0}
    if forward_s:
        none = dict.fromkeys(next(iter(forward_s.values())), 0.0)
    found = operators(traced, ties=ties)
    for o in found:
        own = [n for n in o.states if ties == "apart" or n not in counted]
        counted.update(own)
        states = {n: traced.state(n) for n in own}
        trained = {n: t for n, t in states.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        nodes.append(
            Node(
                name=o.name,
                forward_s=dict((forward_s or {}).get(o.name, none)),
                backward_s=dict((backward_s or {}).get(o.name, none)),
                parameter_bytes=sum(t.numel() * t.element_size() for t in states.values()),
                gradient_bytes=sum(t.numel() * t.element_size() for t in trained.values()),
                optimizer_bytes=sum((optimizer_bytes or {}).get(n, 0) for n in trained),
                group=o.group,
                module=o.steps[0].origin if o.steps else "",
            )
        )
    return Graph(name=name, nodes=tuple(nodes), tensors=tuple(_tensors(traced, found)), source=source)


def _tensors(traced: Traced, found: Sequence[Operator]) -> Iterator[Tensor]:
    """Tensors of the graph. For later readers, the producer of a tensor that is changed in place is its last writer."""
    index = {s.name: i for i, s in enumerate(traced.program.steps)}
    writers = last_writers(traced, found)
    for o in found:
        for value in o.outputs:
            seen = traced.observation.values[value]
            readers = [r for r in found if value in r.inputs]
            written, writer = writers.get(seen.storage, (-1, o.name))
            if writer == o.name or index.get(value, -1) > written:
                writer, later = o.name, readers
            else:
                later = [r for r in readers if r.name != writer and _reads_at(r, value, index) > written]
            parts = [(value, o.name, [r for r in readers if r not in later])] if writer != o.name else []
            parts.append((value if not parts else f"{value} as {writer} leaves it", writer, later))
            for name, producer, consumers in parts:
                if consumers or not readers:
                    yield Tensor(
                        name=name,
                        producer=producer,
                        consumers=tuple(r.name for r in consumers),
                        nbytes=seen.nbytes,
                        gradient_nbytes=None if seen.needs_gradient else 0,
                    )


def _reads_at(reader: Operator, value: str, index: Mapping[str, int]) -> int:
    return min(index[s.name] for s in reader.steps if value in references(s))
