"""Methods that NetSplit compares with (section 6.2.1), as starts of the search and for comparison. Each returns the device of every node.

m-TOPO, m-ETF and m-SCT are Baechi's list heuristics. Baechi has one linear cost of communication and schedules one pass; these do
the same by default. With the times of both passes and true links they are better than published, and that form is compared, too. A
node's time is that of the device in question. Nodes of one group follow the first of them. If no device has room left, the one with
most free memory is taken, and the simulator reports that the placement does not fit.

Co-location: nodes at the ends of heavy edges are merged (NetSplit, section 5.2.3, algorithm 3).

The ends of edges are merged from the heaviest edge on, unless the group would exceed the smallest device, until fewer than a given
number of groups is left; the thesis uses 2n for n devices. So few groups are cheap for a solver, but leave it little to decide, so only
the published baselines use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.milp_model import MilpProgram, iteration_program

Passes = Literal["forward", "both"]
"""Passes whose times a list heuristic uses."""


def even_split(costs: Costs, *, by: Literal["nodes", "time"] = "nodes") -> list[int]:
    """Split by layers: equal segments of the topological order, one per device, by number of nodes or by time."""
    n, size = len(costs.nodes), len(costs.devices)
    cluster_of = _cluster_of(costs)
    mean = [sum(f) + sum(b) for f, b in zip(costs.forward, costs.backward, strict=True)]
    total = n if by == "nodes" else sum(mean)
    where = [-1] * n
    passed = 0.0
    for i in range(n):
        weight = 1.0 if by == "nodes" else mean[i]
        if where[i] < 0:
            d = min(size - 1, int(size * (passed + weight / 2) / total)) if total else 0
            for j in costs.clusters[cluster_of[i]]:
                where[j] = d
        passed += weight
    return where


def m_topo(costs: Costs) -> list[int]:
    """m-TOPO: nodes in topological order fill one device after another up to Σ d_i / m + max d_i, d_i being node i's memory."""
    n, size = len(costs.nodes), len(costs.devices)
    need = [costs.state[i] + sum(costs.held[t] for t in costs.outputs[i]) for i in range(n)]
    per_cluster = [sum(need[i] for i in c) for c in costs.clusters]
    cap = sum(need) / size + max(per_cluster)
    where = [-1] * n
    cluster_of = _cluster_of(costs)
    d, used = 0, 0.0
    for i in range(n):
        if where[i] >= 0:
            continue
        g = cluster_of[i]
        while d < size - 1 and used + per_cluster[g] > min(cap, costs.capacity[d]):
            d, used = d + 1, 0.0
        used += per_cluster[g]
        for j in costs.clusters[g]:
            where[j] = d
    return where


def m_etf(costs: Costs, *, passes: Passes = "forward", true_links: bool = False) -> list[int]:
    """m-ETF: of all nodes whose predecessors are placed and all devices with room, the pair that can begin first is next (6-1).

    Args:
        costs: the model.
        passes: whose times count.
        true_links: False: all links have the mean cost.
    """
    return _earliest(costs if true_links else _mean_links(costs), passes, favourite=None)


def m_sct(costs: Costs, *, passes: Passes = "forward", true_links: bool = False, time_limit_s: float = 10.0) -> list[int]:
    """m-SCT: m-ETF in which a device that has just run a node waits for that node's favourite child, except for urgent nodes.

    Favourites come from Hanen and Munier's linear program, with mean times and mean links: x_ij = 0 if j is i's favourite. A
    node has at most one favourite child and is the favourite of at most one; from 0.1 on a child is no favourite.

    Raises:
        MissingExtra: SciPy is not installed.
    """
    times = _times(costs, passes)
    size = len(costs.devices)
    pairs = [(p, q) for p in range(size) for q in range(size) if p != q]
    program = MilpProgram()
    longest = sum(map(max, times)) + sum(max(map(max, m)) for m in costs.send)
    scale = max(longest, 1e-12) / 1000
    total = program.variable(cost=1.0)
    starts = [program.variable() for _ in costs.nodes]
    out: dict[int, dict[int, int]] = {}
    into: dict[int, dict[int, int]] = {}
    for i in range(len(costs.nodes)):
        mean = sum(times[i]) / size / scale
        program.row({total: 1.0, starts[i]: -1.0}, least=mean)
        for t in costs.outputs[i]:
            sent = sum(costs.send[t][p][q] for p, q in pairs) / max(1, len(pairs)) / scale
            for v in costs.consumers[t]:
                x = out.setdefault(i, {}).get(v)
                if x is None:
                    x = out[i][v] = into.setdefault(v, {})[i] = program.variable(0.0, 1.0)
                program.row({starts[v]: 1.0, starts[i]: -1.0, x: -sent}, least=mean)
    for around in (out, into):
        for columns in around.values():
            program.row(dict.fromkeys(columns.values(), 1.0), least=len(columns) - 1.0)
    solution = program.solve(time_limit_s=time_limit_s, relaxed=True)
    favourite: dict[int, int] = {}
    values = solution.values or ()
    for i, children in out.items() if values else ():
        child = min(children, key=lambda v: (values[children[v]], v))
        if values[children[child]] < 0.1:
            favourite[i] = child
    return _earliest(costs if true_links else _mean_links(costs), passes, favourite=favourite)


def pesto(costs: Costs, *, groups: int | None = None, time_limit_s: float = 10.0, node_limit: int = 10_000_000) -> list[int]:
    """Pesto for any number of devices, as the thesis extends it (6-2 to 6-7): forward passes only. Without a solution, m-TOPO's placement.

    Args:
        costs: the model.
        groups: co-location as for NetSplit; None: twice as many as devices.
        time_limit_s: of HiGHS.
        node_limit: branches of HiGHS.

    Raises:
        MissingExtra: SciPy is not installed.
    """
    return _published(costs, groups, time_limit_s, node_limit, backward=False)


def netsplit(costs: Costs, *, groups: int | None = None, time_limit_s: float = 10.0, node_limit: int = 10_000_000) -> list[int]:
    """NetSplit exactly as published: algorithm 3 down to 2n groups, then 5-11 to 5-18. Without a solution, m-TOPO's placement.

    Args and errors as with `pesto`.
    """
    return _published(costs, groups, time_limit_s, node_limit, backward=True)


def _published(costs: Costs, groups: int | None, time_limit_s: float, node_limit: int, *, backward: bool) -> list[int]:
    units = colocated(costs, groups=groups or 2 * len(costs.devices))
    formulated = iteration_program(costs, units, backward=backward, cuts=False)
    solution = formulated.program.solve(time_limit_s=time_limit_s, node_limit=node_limit, gap=1e-4)
    return formulated.where(solution) or m_topo(costs)


def _cluster_of(costs: Costs) -> list[int]:
    found = [0] * len(costs.nodes)
    for g, cluster in enumerate(costs.clusters):
        for i in cluster:
            found[i] = g
    return found


def _mean_links(costs: Costs) -> Costs:
    """Costs in which every link has the mean cost of all."""
    size = len(costs.devices)

    def mean(matrix: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        value = sum(map(sum, matrix)) / max(1, size * (size - 1))
        return tuple(tuple(0.0 if p == q else value for q in range(size)) for p in range(size))

    return replace(costs, send=tuple(map(mean, costs.send)), back=tuple(map(mean, costs.back)))


def _times(costs: Costs, passes: Passes) -> list[tuple[float, ...]]:
    if passes == "forward":
        return list(costs.forward)
    return [tuple(a + b for a, b in zip(f, s, strict=True)) for f, s in zip(costs.forward, costs.backward, strict=True)]


class Room:
    """Memory by equation 5-18 while clusters are placed one by one."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.left = list(costs.capacity)
        self.there: list[set[int]] = [set() for _ in costs.devices]

    def need(self, cluster: Sequence[int], d: int) -> int:
        """Bytes that the cluster adds to a device."""
        costs = self.costs
        tensors = {t for i in cluster for t in (*costs.inputs[i], *costs.outputs[i])} - self.there[d]
        return sum(costs.state[i] for i in cluster) + sum(costs.held[t] for t in tensors)

    def take(self, cluster: Sequence[int], d: int) -> None:
        self.left[d] -= self.need(cluster, d)
        self.there[d] |= {t for i in cluster for t in (*self.costs.inputs[i], *self.costs.outputs[i])}


def _earliest(costs: Costs, passes: Passes, *, favourite: dict[int, int] | None) -> list[int]:
    n, size = len(costs.nodes), len(costs.devices)
    times = _times(costs, passes)
    both_ways = passes == "both"
    cluster_of = _cluster_of(costs)
    room = Room(costs)
    where = [-1] * n
    end = [0.0] * n
    free = [0.0] * size
    awake: list[tuple[int, float] | None] = [None] * size
    waits = [len({costs.producer[t] for t in costs.inputs[i]}) for i in range(n)]
    ready = [i for i in range(n) if waits[i] == 0]

    def arrives(i: int, d: int) -> float:
        latest = 0.0
        for t in costs.inputs[i]:
            u = costs.producer[t]
            sent = 0.0
            if where[u] != d:
                sent = costs.send[t][where[u]][d]
                if both_ways and costs.returns[t]:
                    sent += costs.back[t][d][where[u]]
            latest = max(latest, end[u] + sent)
        return latest

    def key(i: int, d: int) -> tuple[float, int, int, int]:
        at = arrives(i, d)
        start = max(free[d], at)
        waiting = awake[d]
        if waiting is not None and waiting[0] != i and at > free[d]:
            start = max(start, waiting[1])  # the device stays free for the favourite, unless this one is urgent
        return start, int(waiting is None or waiting[0] != i), i, d

    while ready:
        pairs = [
            (i, d)
            for i in ready
            for d in ([where[i]] if where[i] >= 0 else range(size))
            if where[i] >= 0 or room.need(costs.clusters[cluster_of[i]], d) <= room.left[d]
        ]
        if pairs:
            i, d = min(pairs, key=_by(key))
        else:
            i = ready[0]
            d = max(range(size), key=lambda x: room.left[x])
        if where[i] < 0:
            room.take(costs.clusters[cluster_of[i]], d)
            for j in costs.clusters[cluster_of[i]]:
                where[j] = d
        start = max(free[d], arrives(i, d))
        end[i] = free[d] = start + times[i][d]
        awake[d] = None
        if favourite is not None and i in favourite:
            child = favourite[i]
            longest = max((max(map(max, costs.send[t])) for t in costs.outputs[i] if child in costs.consumers[t]), default=0.0)
            awake[d] = (child, end[i] + longest)
        ready.remove(i)
        for v in dict.fromkeys(v for t in costs.outputs[i] for v in costs.consumers[t]):
            waits[v] -= 1
            if waits[v] == 0:
                ready.append(v)
    return where


def _by(key: Callable[[int, int], tuple[float, int, int, int]]) -> Callable[[tuple[int, int]], tuple[float, int, int, int]]:
    return lambda pair: key(*pair)


# -- co-location --------------------------------------------------------------------------------------------------


def colocated(costs: Costs, *, groups: int) -> tuple[tuple[int, ...], ...]:
    """Groups of clusters, merged along the heaviest edges.

    Args:
        costs: the model.
        groups: merging continues while there are at least so many, as in line 11 of algorithm 3; one less may be left.

    Returns:
        Nodes of each group, ascending; groups by their first node.
    """
    parent = list(range(len(costs.nodes)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    state = list(costs.state)
    touching = [{*costs.inputs[i], *costs.outputs[i]} for i in range(len(costs.nodes))]

    def merge(a: int, b: int) -> int:
        a, b = find(a), find(b)
        if len(touching[a]) < len(touching[b]):
            a, b = b, a
        parent[b] = a
        state[a] += state[b]
        touching[a] |= touching[b]
        return a

    left = len(costs.nodes)
    for cluster in costs.clusters:
        for i in cluster[1:]:
            if find(i) != find(cluster[0]):
                merge(cluster[0], i)
                left -= 1
    limit = min(costs.capacity)
    weight = [costs.held[t] for t in range(len(costs.tensors))]
    edges = [(-weight[t], t, v) for t in range(len(weight)) for v in costs.consumers[t]]
    for _, t, v in sorted(edges):
        if left < groups:
            break
        a, b = find(costs.producer[t]), find(v)
        if a == b or state[a] + state[b] + sum(costs.held[x] for x in touching[a] | touching[b]) > limit:
            continue
        merge(a, b)
        left -= 1
    return grouped([find(i) for i in range(len(parent))])


def grouped(roots: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of nodes with the same root."""
    groups: dict[int, list[int]] = {}
    for i, root in enumerate(roots):
        groups.setdefault(root, []).append(i)
    return tuple(tuple(g) for g in groups.values())
