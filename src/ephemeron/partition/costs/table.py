"""The cost model of the solvers: everything by index, for one micro-batch, without names. The schedule simulator does not use it.

Nodes are numbered in topological order, so that a loop over nodes visits each after its inputs. Nodes of one group form one
*cluster*, the unit that is placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ephemeron.errors import JobError
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a graph on a topology, for one of M micro-batches. N nodes, D devices, T tensors, C clusters."""

    nodes: tuple[str, ...]
    devices: tuple[str, ...]
    tensors: tuple[str, ...]
    forward: tuple[tuple[float, ...], ...]
    """N × D seconds."""
    backward: tuple[tuple[float, ...], ...]
    """N × D seconds."""
    producer: tuple[int, ...]
    """By tensor."""
    consumers: tuple[tuple[int, ...], ...]
    """By tensor; may be empty."""
    send: tuple[tuple[tuple[float, ...], ...], ...]
    """T × D × D seconds: the tensor from p to q; 0 where p = q."""
    back: tuple[tuple[tuple[float, ...], ...], ...]
    """T × D × D seconds: the gradient from p to q."""
    returns: tuple[bool, ...]
    """By tensor: whether a gradient is sent."""
    state: tuple[int, ...]
    """By node: bytes that do not depend on the batch."""
    held: tuple[int, ...]
    """By tensor: bytes of it and of its gradient, per micro-batch in flight."""
    capacity: tuple[int, ...]
    """By device."""
    clusters: tuple[tuple[int, ...], ...]
    """Nodes of each, ascending."""
    outputs: tuple[tuple[int, ...], ...]
    """By node: its output tensors."""
    inputs: tuple[tuple[int, ...], ...]
    """By node: its input tensors."""

    def reserved(self, where: Sequence[int]) -> list[int]:
        """Memory by equation 5-18 for one micro-batch in flight.

        Args:
            where: the device of every node.

        Returns:
            Bytes by device.
        """
        held = [0] * len(self.devices)
        for i, d in enumerate(where):
            held[d] += self.state[i]
        for t, u in enumerate(self.producer):
            for d in {where[u], *(where[v] for v in self.consumers[t])}:
                held[d] += self.held[t]
        return held

    def over(self, where: Sequence[int]) -> int:
        """Bytes over the capacity of devices, summed."""
        return sum(max(0, h - c) for h, c in zip(self.reserved(where), self.capacity, strict=True))

    def placement(self, where: Sequence[int]) -> dict[str, str]:
        """Placement with names."""
        return {name: self.devices[d] for name, d in zip(self.nodes, where, strict=True)}

    def where(self, placement: Mapping[str, str]) -> list[int]:
        """Device number by node."""
        number = {name: d for d, name in enumerate(self.devices)}
        return [number[placement[name]] for name in self.nodes]


def costs_of(graph: Graph, topology: Topology, *, micro_batches: int = 1, recompute: bool = False) -> Costs:
    """Cost tables of a graph on a topology.

    Args:
        graph: with costs of a whole batch.
        topology: the devices.
        micro_batches: M; times and bytes of tensors are divided by it, latencies and states are not.
        recompute: backward passes take the time of both passes.

    Raises:
        JobError: a device is of a kind for which the graph has no times.
    """
    names = graph.topological_order()
    number = {name: i for i, name in enumerate(names)}
    nodes = {n.name: n for n in graph.nodes}
    devices = topology.devices
    kinds = set(graph.nodes[0].forward_s)
    for d in devices:
        if d.kind not in kinds:
            raise JobError(
                f"device {d.name} is of the kind {d.kind}, for which graph {graph.name} has no times",
                remedy=f"measure it, or use one of {', '.join(sorted(kinds))}",
            )
    links = {(k.source, k.target): k for k in topology.links}
    parts = micro_batches

    def matrix(nbytes: int) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(0.0 if p is q else links[p.name, q.name].seconds(nbytes / parts) for q in devices) for p in devices)

    inputs: list[list[int]] = [[] for _ in names]
    outputs: list[list[int]] = [[] for _ in names]
    for t, tensor in enumerate(graph.tensors):
        outputs[number[tensor.producer]].append(t)
        for c in tensor.consumers:
            inputs[number[c]].append(t)
    clusters: dict[tuple[str, str], list[int]] = {}
    for i, name in enumerate(names):
        group = nodes[name].group
        clusters.setdefault(("node", name) if group is None else ("group", group), []).append(i)
    back_s = {n.name: {k: s + (n.forward_s[k] if recompute else 0.0) for k, s in n.backward_s.items()} for n in graph.nodes}
    return Costs(
        nodes=names,
        devices=tuple(d.name for d in devices),
        tensors=tuple(t.name for t in graph.tensors),
        forward=tuple(tuple(nodes[n].forward_s[d.kind] / d.speed / parts for d in devices) for n in names),
        backward=tuple(tuple(back_s[n][d.kind] / d.speed / parts for d in devices) for n in names),
        producer=tuple(number[t.producer] for t in graph.tensors),
        consumers=tuple(tuple(sorted(number[c] for c in t.consumers)) for t in graph.tensors),
        send=tuple(matrix(t.nbytes) for t in graph.tensors),
        back=tuple(matrix(t.gradient_bytes) for t in graph.tensors),
        returns=tuple(t.gradient_bytes > 0 for t in graph.tensors),
        state=tuple(nodes[n].state_bytes for n in names),
        held=tuple(-(-t.nbytes // parts) + -(-t.gradient_bytes // parts) for t in graph.tensors),
        capacity=tuple(d.memory_bytes for d in devices),
        clusters=tuple(tuple(c) for c in clusters.values()),
        outputs=tuple(tuple(x) for x in outputs),
        inputs=tuple(tuple(x) for x in inputs),
    )
