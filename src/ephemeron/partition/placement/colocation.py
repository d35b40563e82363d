"""Co-location: nodes at the ends of heavy edges are merged (NetSplit, section 5.2.3, algorithm 3).

The ends of edges are merged from the heaviest edge on, unless the group would exceed the smallest device, until fewer than a given
number of groups is left; the thesis uses 2n for n devices. So few groups are cheap for a solver, but leave it little to decide, so only
the published baselines use them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ephemeron.partition.costs.table import Costs


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
