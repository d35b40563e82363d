"""Graphs and topologies for the benchmark of placement: random ones, and generated layers of the thesis's models.

**Random graphs**: `branching` has layers of two to six operators, each of which reads one to three of the layer before
(like AmoebaNet's cells); `chain` is a chain with long skip connections (like U-Net). Backward
passes take one and a half to two and a half times as long as forward passes.

**Models** of NetSplit's table 6-3. The thesis states number of nodes and memory, and no cost of any operator, so times are
*assumed*: forward work is drawn for each operator of a generated architecture and scaled to a total, backward is twice forward,
and memory is scaled so that the graph needs the memory of table 6-3. With twice forward for every operator, Pesto's
program and NetSplit's are the same, because they differ only in their knowledge of backward passes: these graphs cannot
distinguish them.
"""

from __future__ import annotations

import itertools
from random import Random

from ephemeron.partition import Device, Graph, Node, Tensor, Topology, connected

MB = 1_000_000


def branching(nodes: int, seed: int, *, heavy: float = 1.0) -> Graph:
    """Random graph with layers of two to six operators.

    Args:
        nodes: number of operators.
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
        for u in above:  # every output is read
            if not any(u in reads[i] for i in layer):
                reads[rng.choice(layer)].append(u)
    return _graph(f"branching-{nodes}-{seed}", count + 1, reads, rng, heavy)


def chain(nodes: int, seed: int, *, heavy: float = 1.0) -> Graph:
    """Chain whose second half reads the first half again, in reverse order."""
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
        Tensor(name=f"t{u}", producer=f"n{u}", consumers=tuple(readers.get(u, ())), nbytes=int(heavy * rng.uniform(5, 80) * MB))
        for u in range(count)
    ]
    return Graph(name=name, nodes=tuple(made), tensors=tuple(tensors), source="random")


def three_devices(graph: Graph, *, room: float = 1.25) -> Topology:
    """Three devices of speeds 1, 1 and 0.8.

    The link between the first two has 12 GB/s and 50 µs, the others a quarter of the bandwidth and four times the latency.
    Memory: `room` times a third of the graph's need.
    """
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


THESIS = {
    # nodes and MB at a batch of 128 (table 6-3), batch trained (section 6.2.2), assumed seconds of all passes on one device
    "AmoebaNet-D": (784, 117_756.06, 64, 2.0),
    "Wide ResNet-152": (388, 115_179.77, 64, 1.5),
    "U-Net": (134, 50_121.92, 128, 3.0),
    "DeepLab-V3": (417, 168_094.43, 48, 2.6),
}


def three_gpus() -> Topology:
    """Table 6-2 as used in section 6.2.2: three cards of 24 GB, the last two behind one PCIe switch (PIX), else NODE.

    The figure with the speeds is missing; 12 GB/s and 20 µs behind a switch, 6 GB/s and 40 µs across are *assumed*.
    """
    devices = [Device(name=f"gpu{k}", kind="gpu", memory_bytes=24_000_000_000) for k in range(3)]

    def rate(a: Device, b: Device) -> tuple[float, float]:
        return (20e-6, 12e9) if {a.name, b.name} == {"gpu1", "gpu2"} else (40e-6, 6e9)

    return connected(devices, rate, name="table 6-2")


def thesis_model(name: str) -> Graph:
    """Generated model after table 6-3: its architecture, number of nodes and memory; times are assumed."""
    nodes, memory_mb, batch, total_s = THESIS[name]
    rng = Random(name)
    reads: dict[int, list[int]] = {}
    if name == "AmoebaNet-D":
        _cells(reads, nodes, rng)
    elif name == "U-Net":
        reads.update({i: [i - 1] for i in range(1, nodes)})
        for level in range(1, 5):  # the encoder's outputs, read again by the decoder
            reads[nodes - 1 - level * 13].append(level * 13)
    else:
        backbone = nodes if name == "Wide ResNet-152" else nodes - 29
        reads.update({i: [i - 1] for i in range(1, nodes)})
        for first in range(4, backbone - 8, 8):  # bottleneck blocks with a shortcut
            reads[first + 7].append(first - 1)
        if name == "DeepLab-V3":  # five branches of four (ASPP), put together, then the decoder
            join = backbone + 20
            for branch in range(5):
                reads[backbone + 4 * branch] = [backbone - 1]
            reads[join] = [backbone + 4 * branch + 3 for branch in range(5)]
    return _scaled(name, nodes, reads, memory_mb * MB * batch / 128, total_s, rng)


def _cells(reads: dict[int, list[int]], nodes: int, rng: Random) -> None:
    """18 cells, each of five sums of two chains that begin at the two cells before or at an earlier sum, and then all joined."""
    reads.update({i: [i - 1] for i in range(1, 5)})
    count, before, last = 5, 3, 4
    for cell in range(18):
        states = [before, last]
        for block in range(5):
            ends = []
            for _ in range(2):
                length = 4 if (cell + block) % 3 == 0 else 3
                at = rng.choice(states)
                for _ in range(length):
                    reads[count] = [at]
                    at, count = count, count + 1
                ends.append(at)
            reads[count] = ends
            states.append(count)
            count += 1
        reads[count] = states[2:]
        before, last = last, count
        count += 1
    while count < nodes:
        reads[count] = [last]
        last, count = count, count + 1
    for extra in [i for i in reads if i >= nodes]:
        del reads[extra]


def _scaled(name: str, count: int, reads: dict[int, list[int]], need_bytes: float, total_s: float, rng: Random) -> Graph:
    """Work of operators: every third operator is heavy (a convolution). Tensors shrink with depth; parameters grow."""
    work = [rng.uniform(4, 12) if i % 3 == 1 else rng.uniform(0.2, 1.0) for i in range(count)]
    size = [(1.5 - i / count) * rng.uniform(0.5, 1.5) for i in range(count)]
    weight = [(0.2 + i / count) * rng.uniform(0.5, 1.5) if i % 3 == 1 else 0.0 for i in range(count)]
    to_s = total_s / (3 * sum(work))
    to_tensor = 0.9 * need_bytes / (2 * sum(size))
    to_weight = 0.1 * need_bytes / (4 * sum(weight))
    readers: dict[int, list[str]] = {}
    for i, above in sorted(reads.items()):
        for u in dict.fromkeys(above):
            readers.setdefault(u, []).append(f"n{i}")
    nodes = []
    for i in range(count):
        parameters = int(weight[i] * to_weight)
        nodes.append(
            Node(
                name=f"n{i}",
                forward_s={"gpu": work[i] * to_s},
                backward_s={"gpu": 2 * work[i] * to_s},
                parameter_bytes=parameters,
                gradient_bytes=parameters,
                optimizer_bytes=2 * parameters,
            )
        )
    tensors = tuple(
        Tensor(name=f"t{i}", producer=f"n{i}", consumers=tuple(readers.get(i, ())), nbytes=int(size[i] * to_tensor)) for i in range(count)
    )
    return Graph(
        name=name,
        nodes=tuple(nodes),
        tensors=tensors,
        source="architecture, number of nodes and memory of NetSplit's table 6-3; times assumed",
    )
