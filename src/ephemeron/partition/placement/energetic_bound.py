"""Lower bound of one iteration by energetic reasoning: heads, tails and work.

All devices together do at most S units of work per second; a pass's work is its time on the fastest device for it. A pass cannot begin
before all its direct and indirect predecessors are done. These need at least their work divided by S, and longer if few of them can run
at once: of a pass that can begin at e, at most t − e units can be done until t. So for any set of passes and any two times t and t',
measured from the earliest begin of the set and back from the begin of its successor,

    head ≥ t + t' + Σ max(0, work − done until t − done in the last t') / S

(Fernandez and Bussell's bound, with devices of unequal speed). Larger heads raise later heads. Tails are computed in the same
way from the end. An iteration takes at least head + work + tail of any pass. With one loss at the end, all forward passes come before
it and all backward passes after it, so both phases are bounded separately, including bottlenecks inside the graph, which load and path
bounds ignore. Communication does not count: all nodes that exchange tensors might share a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ephemeron.partition.costs.table import Costs


def energy_bound_s(costs: Costs, *, moments: int = 12) -> float:
    """Lower bound of one iteration in seconds.

    Args:
        costs: the model.
        moments: number of values of each of t and t'; more is tighter and slower.
    """
    n = len(costs.nodes)
    times = np.array([*costs.forward, *costs.backward])
    work = times.min(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.where(times > 0, work[:, None] / np.where(times > 0, times, 1.0), 0.0)
    speed = float(rates.max(axis=0).sum())
    if speed <= 0:
        return 0.0
    before: list[list[int]] = [[] for _ in range(2 * n)]
    after: list[list[int]] = [[] for _ in range(2 * n)]
    arcs = [(i, n + i) for i in range(n)]
    for t, u in enumerate(costs.producer):
        for v in costs.consumers[t]:
            arcs += [(u, v), (n + v, n + u)]
    for a, b in dict.fromkeys(arcs):
        after[a].append(b)
        before[b].append(a)
    order = [*range(n), *range(2 * n - 1, n - 1, -1)]
    heads = _heads(order, before, work, speed, moments)
    tails = _heads(order[::-1], after, work, speed, moments)
    everything = _needed(heads, tails, work, speed, moments)
    return float(max(everything, (heads + work + tails).max())) * (1 - 1e-9)


def _heads(order: list[int], before: list[list[int]], work: Any, speed: float, moments: int) -> Any:
    """Earliest begin of each pass in seconds."""
    size = len(order)
    heads = np.zeros(size)
    way = np.full((size, size), -np.inf)  # way[b, a]: from a's end to b's begin
    for b in order:
        if not before[b]:
            continue
        for p in before[b]:
            np.maximum(way[b], way[p] + work[p], out=way[b])
            way[b, p] = max(way[b, p], 0.0)
            heads[b] = max(heads[b], heads[p] + work[p])
        needed = np.flatnonzero(way[b] >= 0)
        heads[b] = max(heads[b], _needed(heads[needed], way[b, needed], work[needed], speed, moments))
    return heads


def _needed(heads: Any, tails: Any, work: Any, speed: float, moments: int) -> float:
    """Bound of one set of passes."""
    begins, ends = _some(heads, moments), _some(tails, moments)
    early = np.clip(begins[None, :] - heads[:, None], 0.0, work[:, None])
    late = np.clip(ends[None, :] - tails[:, None], 0.0, work[:, None])
    rest = np.maximum(work[:, None, None] - early[:, :, None] - late[:, None, :], 0.0).sum(axis=0) / speed
    total = begins[:, None] + ends[None, :] + rest
    # without remaining work t and t' may overlap
    return float(np.where(rest > 1e-9 * (work.sum() + 1e-300), total, 0.0).max())


def _some(values: Any, moments: int) -> Any:
    """Smallest distinct values, where ramps are, and a sample of the others."""
    known = np.unique(values)
    if len(known) <= moments:
        return known
    few = moments // 2
    spread = np.linspace(few, len(known) - 1, moments - few).astype(int)
    return known[np.concatenate([np.arange(few), spread])]
