"""Downsets (ideals) of a model: cuts in two parts across which tensors only go forward. Each pipeline is a chain of downsets.

Nodes that have to be on one stage are one *unit*: clusters, and all nodes on a path from a cluster back to itself. A chain of n units
has n + 1 downsets, a residual network few more, parallel branches the product of theirs. So they are enumerated up to a limit, and a
graph with more has no table ("Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020, section 5).

Classes of interchangeable devices, by which orders of devices are enumerated.

Two devices are of one class if they have the same speed, memory and links. n devices of k classes have n! / Π cᵢ! orders instead of n!,
and the state of a chain of stages is the number of used devices of each class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.partition.costs.table import Costs

MOST_DOWNSETS = 80_000
MOST_BYTES = 256 << 20
"""Limit of the table, units × downsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Sets of nodes that are on one stage in every pipeline, in topological order."""

    nodes: tuple[tuple[int, ...], ...]
    """Nodes by unit, ascending."""
    unit: tuple[int, ...]
    """By node."""
    before: tuple[int, ...]
    """By unit: mask of units whose tensors it reads."""
    after: tuple[tuple[int, ...], ...]
    """By unit: those that read its tensors."""
    followers: frozenset[int] = frozenset()
    """Nodes without cost in time that were merged with their only neighbour: no plan is faster without the merge, but one may need less
    memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Downsets:
    """All sets of units that contain with each unit its inputs; ascending by number of units, from the empty to the full set."""

    units: Units
    masks: tuple[int, ...]
    table: Any
    """Downsets × units, bool."""
    packed: Any
    """The table as downsets × words of 64 bits."""
    ready: tuple[int, ...]
    """By downset: mask of the units that may come next."""


def units_of(costs: Costs) -> Units:
    """Units of a model: clusters, merged with all nodes on cycles through them."""
    count = len(costs.clusters)
    cluster = [0] * len(costs.nodes)
    for g, own in enumerate(costs.clusters):
        for i in own:
            cluster[i] = g
    edges: list[dict[int, None]] = [{} for _ in range(count)]
    for t, u in enumerate(costs.producer):
        for v in costs.consumers[t]:
            if cluster[u] != cluster[v]:
                edges[cluster[u]][cluster[v]] = None
    component = _components(edges)  # numbered in reverse topological order
    number = [max(component) - c for c in component] if component else []
    size = max(number, default=-1) + 1
    nodes: list[list[int]] = [[] for _ in range(size)]
    for i, g in enumerate(cluster):
        nodes[number[g]].append(i)
    before, after = [0] * size, [dict[int, None]() for _ in range(size)]
    for g, readers in enumerate(edges):
        for h in readers:
            a, b = number[g], number[h]
            if a != b:
                before[b] |= 1 << a
                after[a][b] = None
    unit = tuple(number[g] for g in cluster)
    return Units(nodes=tuple(map(tuple, nodes)), unit=unit, before=tuple(before), after=tuple(map(tuple, after)))


def without_idle_ends(costs: Costs, units: Units) -> Units:
    """Units in which those without cost in time and with one neighbour only are merged with it, repeatedly.

    On their neighbour's stage they add no time and save a transfer, so the least bottleneck stays the same except for memory.
    """
    idle = [all(max(costs.forward[i]) + max(costs.backward[i]) == 0 for i in own) and len(own) > 0 for own in units.nodes]
    around: list[set[int]] = [set(readers) for readers in units.after]
    for u, readers in enumerate(units.after):
        for v in readers:
            around[v].add(u)
    home = list(range(len(units.nodes)))
    todo = [u for u in home if idle[u] and len(around[u]) == 1]
    while todo:
        u = todo.pop()
        if len(around[u]) != 1:
            continue
        (v,) = around[u]
        home[u] = v
        around[u].clear()
        around[v].discard(u)
        if idle[v] and len(around[v]) == 1:
            todo.append(v)

    def annealed_stages(u: int) -> int:
        while home[u] != u:
            u = home[u]
        return u

    kept = [u for u in range(len(home)) if home[u] == u]
    number = {u: k for k, u in enumerate(kept)}
    nodes: list[list[int]] = [[] for _ in kept]
    followers: set[int] = set()
    for u, own in enumerate(units.nodes):
        nodes[number[annealed_stages(u)]].extend(own)
        if home[u] != u:
            followers.update(own)
    after = tuple(tuple(number[v] for v in units.after[u] if home[v] == v) for u in kept)
    before = [0] * len(kept)
    for a, following in enumerate(after):
        for b in following:
            before[b] |= 1 << a
    unit = tuple(number[annealed_stages(u)] for u in units.unit)
    merged = tuple(tuple(sorted(own)) for own in nodes)
    return Units(nodes=merged, unit=unit, before=tuple(before), after=after, followers=frozenset(followers))


def downsets_of(units: Units, *, most: int = MOST_DOWNSETS) -> Downsets | None:
    """All downsets; None: there are more than `most`, or their table would be too large."""
    size = len(units.nodes)
    most = min(most, MOST_BYTES // max(size, 1))
    first = sum(1 << i for i in range(size) if not units.before[i])
    ready = {0: first}
    level = [0]
    while level:
        following: list[int] = []
        for mask in level:
            left = ready[mask]
            while left:
                bit = left & -left
                left ^= bit
                larger = mask | bit
                if larger in ready:
                    continue
                may = ready[mask] ^ bit
                for w in units.after[bit.bit_length() - 1]:
                    if not units.before[w] & ~larger:
                        may |= 1 << w
                ready[larger] = may
                following.append(larger)
                if len(ready) > most:
                    return None
        level = following
    masks = tuple(ready)
    width = max(1, -(-size // 64)) * 8
    raw = np.frombuffer(b"".join(m.to_bytes(width, "little") for m in masks), dtype=np.uint8).reshape(len(masks), width)
    table = np.unpackbits(raw, axis=1, bitorder="little")[:, :size].astype(bool)
    return Downsets(units=units, masks=masks, table=table, packed=raw.copy().view(np.uint64), ready=tuple(ready[m] for m in masks))


def _components(edges: Sequence[dict[int, None]]) -> list[int]:
    """Tarjan's strongly connected components, without recursion."""
    found: list[int] = [-1] * len(edges)
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on: set[int] = set()
    count = 0
    for root in range(len(edges)):
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        on.add(root)
        work = [(root, iter(edges[root]))]
        while work:
            at, readers = work[-1]
            for w in readers:
                if w not in index:
                    index[w] = low[w] = len(index)
                    stack.append(w)
                    on.add(w)
                    work.append((w, iter(edges[w])))
                    break
                if w in on:
                    low[at] = min(low[at], index[w])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[at])
                if low[at] == index[at]:
                    while True:
                        w = stack.pop()
                        on.discard(w)
                        found[w] = count
                        if w == at:
                            break
                    count += 1
    return found


# -- classes of interchangeable devices ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClasses:
    """Devices by class."""

    members: tuple[tuple[int, ...], ...]
    """Devices of each class, ascending; classes by their first."""
    exact: bool
    """Whether links are the same for all members; else the fastest link of any two members counts."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Devices of each class."""
        return tuple(len(m) for m in self.members)

    def of(self, order: Sequence[int]) -> list[int]:
        """Devices for a sequence of classes: the first free one of each."""
        free = [iter(m) for m in self.members]
        return [next(free[x]) for x in order]


def classes_of(costs: Costs) -> DeviceClasses:
    """Coarsest classes of interchangeable devices."""
    size = len(costs.devices)
    kinds = _kinds(costs)

    def alike(a: int, b: int) -> bool:
        others = [d for d in range(size) if d not in (a, b)]
        return all(m[a][b] == m[b][a] and all(m[a][d] == m[b][d] and m[d][a] == m[d][b] for d in others) for m in distinct)

    distinct = set(costs.send) | set(costs.back)
    found: list[list[int]] = []
    for d in range(size):
        for own in found:
            if kinds[own[0]] == kinds[d] and alike(own[0], d):
                own.append(d)
                break
        else:
            found.append([d])
    return DeviceClasses(members=tuple(map(tuple, found)), exact=True)


def coarse_classes_of(costs: Costs) -> DeviceClasses:
    """Classes by speed and memory only, without links."""
    found: dict[int, list[int]] = {}
    for d, kind in enumerate(_kinds(costs)):
        found.setdefault(kind, []).append(d)
    return DeviceClasses(members=tuple(map(tuple, found.values())), exact=False)


def sequences(counts: Sequence[int]) -> int:
    """Number of sequences of classes of any length above 0, with at most `counts` of each."""
    by_length = [1] + [0] * sum(counts)  # exponential generating functions, in whole numbers
    for c in counts:
        new = [0] * len(by_length)
        for n, ways in enumerate(by_length):
            if ways:
                for k in range(min(c, len(by_length) - 1 - n) + 1):
                    new[n + k] += ways * math.comb(n + k, k)
        by_length = new
    return sum(by_length[1:])


def permutations(counts: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """All sequences of classes of a length, in lexicographic order."""
    left = list(counts)
    made: list[int] = []

    def go() -> Iterator[tuple[int, ...]]:
        if len(made) == length:
            yield tuple(made)
            return
        for x, c in enumerate(left):
            if c:
                left[x] -= 1
                made.append(x)
                yield from go()
                made.pop()
                left[x] += 1

    return go()


def _kinds(costs: Costs) -> list[int]:
    numbers: dict[object, int] = {}
    columns = zip(zip(*costs.forward, strict=True), zip(*costs.backward, strict=True), costs.capacity, strict=True)
    return [numbers.setdefault(column, len(numbers)) for column in columns]
