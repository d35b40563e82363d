"""Graphs and topologies for the benchmark of placement: random ones, and generated layers of the thesis' models.

**Random graphs**, as used when solvers were first tried on this problem: `branching` has layers of two to six operators, each of
which reads one to three of the layer before (like AmoebaNet's cells); `chain` is a chain with long skips (like U-Net). Backward
passes take one and a half to two and a half times as long as forward passes.

**Models** of NetSplit's table 6-3. The thesis states number of nodes and memory, and no cost of any operator, so times are
*assumed*: forward work is drawn for each operator of a generated architecture and scaled to a total, backward is twice forward, and
memory is scaled so that the graph needs what table 6-3 states.
"""

from __future__ import annotations

import itertools
from random import Random

from ephemeron.partition import Device, Graph, Node, Tensor, Topology, connected

MB = 1_000_000


def branching(nodes: int, seed: int, *, heavy: float = 1.0) -> Graph:
    """Layers of two to six operators.

    Args:
        nodes: how many.
        seed: of everything that is drawn.
        heavy: bytes of tensors, times this.
    """
    rng = Random(f"branching {nodes} {seed}")
    layers: list[list[int]] = [[0]]
    count = 1
    while count < nodes - 1:
        width = min(rng.randint(2, 6), nodes - 1 - count)
        layers.append(list(range(count, count + width)))
        count += width
    layers.append([count])
    reads: dict[int, list[int]] = {}
    for above, layer in itertools.pairwise(layers):
        for i in layer:
            reads[i] = rng.sample(above, min(len(above), rng.randint(1, 3)))
        for u in above:  # everything is read by somebody
            if not any(u in reads[i] for i in layer):
                reads[rng.choice(layer)].append(u)
    return _graph(f"branching-{nodes}-{seed}", count + 1, reads, rng, heavy)


def chain(nodes: int, seed: int, *, heavy: float = 1.0) -> Graph:
    """A chain of which the first half is read again by the second, mirrored."""
    rng = Random(f"chain {nodes} {seed}")
    reads = {i: [i - 1] for i in range(1, nodes)}
    for i in range(2, nodes // 2 - 1, max(2, nodes // 10)):
        reads[nodes - 1 - i].append(i)
    return _graph(f"chain-{nodes}-{seed}", nodes, reads, rng, heavy)


def _graph(name: str, count: int, reads: dict[int, list[int]], rng: Random, heavy: float) -> Graph:
    made = []
    for i in range(count):
        forward = rng.uniform(0.002, 0.02)
        made.append(
            Node(
                name=f"n{i}",
                forward_s={"gpu": forward},
                backward_s={"gpu": forward * rng.uniform(1.5, 2.5)},
                parameter_bytes=(size := rng.randrange(1, 40) * MB),
                gradient_bytes=size,
                optimizer_bytes=2 * size,
            )
        )
    readers: dict[int, list[str]] = {}
    for i, above in sorted(reads.items()):
        for u in above:
            readers.setdefault(u, []).append(f"n{i}")
    tensors = [
        Tensor(
            name=f"t{u}",
            producer=f"n{u}",
            consumers=tuple(readers.get(u, ())),
            nbytes=int(heavy * rng.uniform(5, 80) * MB),
        )
        for u in range(count)
    ]
    return Graph(name=name, nodes=tuple(made), tensors=tuple(tensors), source="random")


def three_devices(graph: Graph, *, room: float = 1.25) -> Topology:
    """Speeds 1, 1 and 0.8; between the first two 12 GB/s and 50 µs, elsewhere a quarter of it and four times that. Memory: `room`
    times a third of what the graph needs."""
    need = sum(n.state_bytes for n in graph.nodes) + sum(t.nbytes + t.gradient_bytes for t in graph.tensors)
    least = max(n.state_bytes for n in graph.nodes)
    devices = [
        Device(name=f"d{k}", kind="gpu", speed=speed, memory_bytes=int(max(room * need / 3, least)))
        for k, speed in enumerate((1.0, 1.0, 0.8))
    ]

    def rate(a: Device, b: Device) -> tuple[float, float]:
        fast = {a.name, b.name} == {"d0", "d1"}
        return (50e-6, 12e9) if fast else (200e-6, 3e9)

    return connected(devices, rate, name="three devices")
