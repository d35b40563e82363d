"""A model as operators and tensors with their costs. Values only; nothing here computes.

NetSplit (sections 4.2 to 4.4, table 5-1) describes a model by FP_u, BP_u and weight_u of every operator and size_t of every
variable. A variable is a *tensor* here, not an edge: it is sent to a device once and kept there once, independent of the number of
operators that read it (equation 5-18). Times are given per kind of device, so that one graph serves unequal devices.

The constructor checks a graph, so solvers need no checks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator, or several that are never separated."""

    name: str
    forward_s: Mapping[str, float]
    """FP_u of one whole batch, by kind of device."""
    backward_s: Mapping[str, float]
    """BP_u of one whole batch, by kind of device."""
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    """Bytes of the parameters' gradients."""
    optimizer_bytes: int = 0
    """Momenta and the like. NetSplit's α is (parameter + gradient + optimizer) / parameter: 4 with Adam."""
    group: str | None = None
    """Nodes of one group stay on one device, e.g. those that share a parameter."""
    module: str = ""
    """Path of the module that contains this operator, if known; for reports only."""
    passes_s: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Seconds of every measured forward and backward pass by kind of device, in the order of measuring; the times above are their medians.
    Placement ignores them, `robustness` resamples them. Empty: not measured."""

    @property
    def state_bytes(self) -> int:
        """Bytes on the device that do not depend on the batch."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A variable: the output of one node that others read."""

    name: str
    producer: str
    consumers: tuple[str, ...] = ()
    """Empty: an output of the model."""
    nbytes: int
    """Bytes of one whole batch."""
    gradient_nbytes: int | None = None
    """Bytes of its gradient. None: as `nbytes`. 0: no gradient is sent back, but the producer's backward pass still waits for those of the
    consumers."""

    @property
    def gradient_bytes(self) -> int:
        return self.nbytes if self.gradient_nbytes is None else self.gradient_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model: nodes, and tensors between them without a cycle.

    Raises:
        JobError: no node, a duplicate name, a tensor of an unknown node, a negative or missing cost, or a cycle; names the place.
    """

    name: str = "graph"
    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...] = ()
    source: str = ""
    """Source of the costs: device of the measurement, or assumption."""
    batch_size: int | None = None
    """Samples of one whole batch, if known."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise JobError(f"graph {self.name} has no node")
        _unique((n.name for n in self.nodes), f"graph {self.name}: node")
        _unique((t.name for t in self.tensors), f"graph {self.name}: tensor")
        kinds = set(self.nodes[0].forward_s)
        for n in self.nodes:
            self._check_node(n, kinds)
        known = {n.name for n in self.nodes}
        for t in self.tensors:
            self._check_tensor(t, known)
        if self.batch_size is not None and self.batch_size < 1:
            raise JobError(f"graph {self.name}: batch_size = {self.batch_size} should be a whole number from 1")
        self.topological_order()

    def topological_order(self) -> tuple[str, ...]:
        """Names of the nodes, each after its inputs; otherwise in the order given.

        Raises:
            JobError: the graph has a cycle; names its nodes.
        """
        index = {n.name: i for i, n in enumerate(self.nodes)}
        successors: list[set[int]] = [set() for _ in self.nodes]
        for t in self.tensors:
            successors[index[t.producer]].update(index[c] for c in t.consumers)
        waits = [0] * len(self.nodes)
        for after in successors:
            for v in after:
                waits[v] += 1
        free = [i for i, w in enumerate(waits) if w == 0]
        order: list[int] = []
        while free:
            u = heapq.heappop(free)
            order.append(u)
            for v in sorted(successors[u]):
                waits[v] -= 1
                if waits[v] == 0:
                    heapq.heappush(free, v)
        if len(order) < len(self.nodes):
            cycle = " → ".join(self.nodes[i].name for i in _cycle(successors, {i for i, w in enumerate(waits) if w > 0}))
            raise JobError(f"graph {self.name} has a cycle: {cycle}", remedy="a model's operators must form no loop")
        return tuple(self.nodes[i].name for i in order)

    def _check_node(self, n: Node, kinds: set[str]) -> None:
        where = f"graph {self.name}: node {n.name}"
        if set(n.forward_s) != kinds or set(n.backward_s) != kinds or not kinds:
            raise JobError(
                f"{where} has forward times for {_listed(n.forward_s)} and backward times for {_listed(n.backward_s)}",
                remedy=f"give both for the same kinds of device as node {self.nodes[0].name}: {_listed(kinds)}",
            )
        for label, times in (("forward_s", n.forward_s), ("backward_s", n.backward_s)):
            for kind, value in times.items():
                _at_least_zero(value, f"{where}: {label}[{kind}]")
        for label in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            _at_least_zero(getattr(n, label), f"{where}: {label}")

    def _check_tensor(self, t: Tensor, known: set[str]) -> None:
        where = f"graph {self.name}: tensor {t.name}"
        for role, names in (("producer", (t.producer,)), ("consumer", t.consumers)):
            for name in names:
                if name not in known:
                    raise JobError(f"{where} has the {role} {name}, which is no node", remedy="name a node of the graph")
        _unique(t.consumers, f"{where}: consumer")
        _at_least_zero(t.nbytes, f"{where}: nbytes")
        _at_least_zero(t.gradient_bytes, f"{where}: gradient_nbytes")


def _unique(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise JobError(f"{what} {name} is there twice", remedy="give each a name of its own")
        seen.add(name)


def _at_least_zero(value: float, where: str) -> None:
    if not 0 <= value < math.inf:
        raise JobError(f"{where} = {value} should be a number from 0")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no kind of device"


def _cycle(successors: list[set[int]], among: set[int]) -> list[int]:
    """A cycle within nodes that all wait for each other; its first and last node are the same."""
    predecessors: dict[int, int] = {}
    for u in sorted(among):
        for v in successors[u]:
            if v in among:
                predecessors[v] = u
    at, seen = min(among), dict[int, int]()
    path: list[int] = []
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = predecessors[at]
    loop = path[seen[at] :]
    return [at, *reversed(loop)]
