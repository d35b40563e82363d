"""Reader of the public workloads of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020).

Their files list nodes with times on an accelerator and on a CPU core, edges with the time of a node's output, the number of
devices of each kind, and nodes that belong together (a colour). In training, backward nodes are separate nodes, of the colour of
their forward nodes. They are converted as follows:

- Nodes of a colour, and all nodes on a cycle with them, are one node, with the sum of forward and backward times.
- An output is a tensor. An edge against the pipeline is a gradient: for each node that reads it, a tensor of no bytes in the
  other direction, whose gradient has its bytes. Backward nodes without a forward node of their colour are ordered by their
  edges, reversed.
- One sample is one micro-batch. A link takes the time of the edge; there is one for each ordered pair of devices.

The cost models differ: there, a device is busy for computing *and* its transfers, one after the other, and CPU cores transfer for
free; here, devices and links work concurrently, and CPU cores are no exception. `their_load` is their measure, for any placement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ephemeron.partition import Device, Graph, Node, Tensor, Topology, connected

BYTES_S = 1e8
"""Bandwidth of a link. Bytes are the edges' times at this rate, so low that tensors need almost no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One file."""

    name: str
    graph: Graph
    topology: Topology
    raw: Mapping[str, Any]
    node_of: Mapping[int, str]
    """Node of the graph by the id of the file."""

    def their_load(self, placement: Mapping[str, str]) -> float:
        """Milliseconds of the busiest device by their measure: accelerators compute and transfer in turn."""
        where = {n["id"]: placement[self.node_of[n["id"]]] for n in self.raw["nodes"]}
        loads: dict[str, float] = {}
        for n in self.raw["nodes"]:
            d = where[n["id"]]
            loads[d] = loads.get(d, 0.0) + n["cpuLatency" if d.startswith("cpu") else "fpgaLatency"]
        ends: dict[int, set[str]] = {}
        cost: dict[int, float] = {}
        for e in self.raw["edges"]:
            cost[e["sourceId"]] = e["cost"]
            if where[e["destId"]] != where[e["sourceId"]]:
                ends.setdefault(e["sourceId"], set()).add(where[e["destId"]])
        for source, devices in ends.items():
            for d in {where[source], *devices}:
                if not d.startswith("cpu"):
                    loads[d] += cost[source]
        return max(loads.values())

    def placement_of(self, result: Mapping[str, Any]) -> dict[str, str]:
        """Devices of a placement that their program prints."""
        made: dict[str, str] = {}
        for kind, key in (("accelerator", "fpgas"), ("cpu", "cpus")):
            for k, machine in enumerate(result[key]):
                made |= {self.node_of[i]: f"{kind}{k}" for i in machine["nodes"]}
        return made


def workloads(folder: Path) -> list[Path]:
    """Files of the throughput problem in a checkout, by name."""
    return sorted((folder / "throughput-inputs").glob("*/*.json"))


def read(path: Path) -> Workload:
    """Graph and topology of one file."""
    raw = json.loads(path.read_text())
    nodes = {n["id"]: n for n in raw["nodes"]}
    back = {i for i, n in nodes.items() if n["isBackwardNode"]}
    colours: dict[Any, list[int]] = {}
    for i, n in nodes.items():
        colours.setdefault(("colour", n["colorClass"]) if "colorClass" in n else ("node", i), []).append(i)
    colour = {i: key for key, own in colours.items() for i in own}
    reads: dict[int, set[int]] = {}
    cost: dict[int, float] = {}
    for e in raw["edges"]:
        reads.setdefault(e["sourceId"], set()).add(e["destId"])
        cost[e["sourceId"]] = e["cost"]
    forward = {(colour[u], colour[v]) for u, own in reads.items() for v in own if u not in back and v not in back}
    alone = {key for key, own in colours.items() if all(i in back for i in own)}
    mirrored = {
        (colour[v], colour[u])
        for u, own in reads.items()
        for v in own
        if u in back and v in back and (colour[u] in alone or colour[v] in alone)
    }
    merged = _merged(list(colours), forward | mirrored)
    home = {i: merged[colour[i]] for i in nodes}
    order = {key: k for k, key in enumerate(dict.fromkeys(home[i] for i in nodes))}
    name = {key: f"n{k}" for key, k in order.items()}
    above = _ancestors({(merged[a], merged[b]) for a, b in forward | mirrored if merged[a] != merged[b]}, set(order))
    tensors: list[Tensor] = []
    for u, own in reads.items():
        against = [v for v in own if home[v] != home[u] and home[v] in above[home[u]]]
        along = {home[v] for v in own if home[v] != home[u]} - {home[v] for v in against}
        nbytes = round(cost[u] * 1e-3 * BYTES_S)
        if along:
            readers = tuple(sorted(name[k] for k in along))
            tensors.append(Tensor(name=f"t{u}", producer=name[home[u]], consumers=readers, nbytes=nbytes, gradient_nbytes=0))
        for key in sorted({home[v] for v in against}, key=order.__getitem__):
            tensors.append(
                Tensor(name=f"t{u} to {name[key]}", producer=name[key], consumers=(name[home[u]],), nbytes=0, gradient_nbytes=nbytes)
            )
    parts = {key: [nodes[i] for i in nodes if home[i] == key] for key in order}
    label = f"{path.parent.name}/{path.stem}"
    graph = Graph(
        name=label,
        nodes=tuple(
            Node(
                name=name[key],
                forward_s=_seconds(n for n in own if not n["isBackwardNode"]),
                backward_s=_seconds(n for n in own if n["isBackwardNode"]),
                parameter_bytes=round(sum(n.get("size", 0.0) for n in own)),
            )
            for key, own in parts.items()
        ),
        tensors=tuple(tensors),
        source="profiled by the authors of the workload",
    )
    memory = round(raw["maxSizePerFPGA"])
    devices = [Device(name=f"accelerator{k}", kind="accelerator", memory_bytes=memory) for k in range(raw["maxFPGAs"])]
    devices += [Device(name=f"cpu{k}", kind="cpu", memory_bytes=1 << 50) for k in range(raw["maxCPUs"])]
    topology = connected(devices, lambda _, __: (0.0, BYTES_S), name=label)
    return Workload(name=label, graph=graph, topology=topology, raw=raw, node_of={i: name[key] for i, key in home.items()})


def _seconds(nodes: Any) -> dict[str, float]:
    own = list(nodes)
    return {"accelerator": sum(n["fpgaLatency"] for n in own) * 1e-3, "cpu": sum(n["cpuLatency"] for n in own) * 1e-3}


def _ancestors(edges: set[tuple[Any, Any]], keys: set[Any]) -> dict[Any, set[Any]]:
    readers: dict[Any, list[Any]] = {}
    waits = dict.fromkeys(keys, 0)
    for a, b in edges:
        readers.setdefault(a, []).append(b)
        waits[b] += 1
    found: dict[Any, set[Any]] = {k: set() for k in keys}
    free = [k for k, w in waits.items() if w == 0]
    while free:
        a = free.pop()
        for b in readers.get(a, ()):
            found[b] |= found[a] | {a}
            waits[b] -= 1
            if waits[b] == 0:
                free.append(b)
    return found


def _merged(keys: list[Any], edges: set[tuple[Any, Any]]) -> dict[Any, Any]:
    """Key of each node's cycle: nodes that reach one another are one."""
    readers: dict[Any, list[Any]] = {}
    sources: dict[Any, list[Any]] = {}
    for a, b in sorted(edges, key=str):
        readers.setdefault(a, []).append(b)
        sources.setdefault(b, []).append(a)
    finished: list[Any] = []
    seen: set[Any] = set()
    for root in keys:
        stack = [(root, iter(readers.get(root, ())))] if root not in seen else []
        seen.add(root)
        while stack:
            at, left = stack[-1]
            for b in left:
                if b not in seen:
                    seen.add(b)
                    stack.append((b, iter(readers.get(b, ()))))
                    break
            else:
                finished.append(at)
                stack.pop()
    made: dict[Any, Any] = {}
    for root in reversed(finished):
        todo = [] if root in made else [root]
        while todo:
            at = todo.pop()
            if at not in made:
                made[at] = root
                todo.extend(sources.get(at, ()))
    return made
