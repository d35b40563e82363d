"""Initial blocks of configurations, and their division into smaller ones."""

from __future__ import annotations

import numpy as np

from ephemeron.training.planner.model.rates import Array
from ephemeron.training.planner.search.bounds import Blocks, Ranges
from ephemeron.training.planner.search.tables import Tables


def octaves(most: int) -> tuple[Array, Array]:
    """Aligned blocks that cover 1 to `most`, each about half as long as where it begins: levels and indices."""
    levels, indices = [], []
    at = 0
    while at < most:
        level = max(0, at.bit_length() - 2)
        levels.append(level)
        indices.append(at >> level)
        at += 1 << level
    return np.array(levels), np.array(indices)


def groups(t: Tables) -> Array:
    """Begins of groups of adjacent quotas: narrow where quotas are small."""
    begins = []
    for i in range(len(t.families)):
        columns = np.flatnonzero(t.family == i)
        levels, indices = octaves(len(columns))
        begins.append(columns[0] + (indices << levels))
    return np.concatenate(begins)


def first_blocks(t: Tables, most: int) -> Blocks:
    """Few blocks that cover everything: narrow where W and K are small.

    Args:
        most: W.
    """
    parts = []
    for i, f in enumerate(t.families):
        columns = np.flatnonzero(t.family == i)
        wl, wi = octaves(min(f.most, most))
        kl, ki = wl, wi
        if not f.tied:
            k_levels, k_indices = octaves(f.most_k)
            a, b = (x.ravel() for x in np.meshgrid(np.arange(len(wl)), np.arange(len(k_levels)), indexing="ij"))
            possible = (k_indices[b] << k_levels[b]) + 1 < ((wi[a] + 1) << wl[a])
            a, b = a[possible], b[possible]
            wl, wi, kl, ki = wl[a], wi[a], k_levels[b], k_indices[b]
        wl, wi, kl, ki = (np.tile(x, len(columns)) for x in (wl, wi, kl, ki))
        column = np.repeat(columns, len(wl) // len(columns))
        parts.append(Blocks.of(column, wl, wi, kl, ki))
    return Blocks.joined(parts)


def halved(t: Tables, b: Blocks) -> Blocks:
    """Four blocks of each, or two where W or K is single, or tied to the other."""
    parts = []
    tied = t.tied[b.column]
    by_w, by_k = b.w_level > 0, (b.k_level > 0) & ~tied
    for dw in (0, 1):
        for dk in (0, 1):
            keep = np.flatnonzero((by_w | (dw == 0)) & (by_k | (dk == 0)))
            some = b.take(keep)
            w, k, same = by_w[keep], by_k[keep], tied[keep]
            w_level, w_index = some.w_level - w, np.where(w, 2 * some.w_index + dw, some.w_index)
            k_level, k_index = some.k_level - k, np.where(k, 2 * some.k_index + dk, some.k_index)
            k_level, k_index = np.where(same, w_level, k_level), np.where(same, w_index, k_index)
            parts.append(some.having(w_level=w_level, w_index=w_index, k_level=k_level, k_index=k_index))
    return Blocks.joined(parts)


def cut(b: Blocks, r: Ranges, parts: int) -> Blocks:
    """`parts` intervals of B^a of each; where that is single, of B^n, and its upper end by itself."""
    by_x = r.x1 > r.x0
    low, high = np.where(by_x, r.x0, r.y0), np.where(by_x, r.x1, r.y1 - 1)
    edges = low + np.floor((high - low + 1) * np.arange(parts + 1)[:, None] / parts)
    i, j = np.nonzero(edges[1:] > edges[:-1])
    ends = np.flatnonzero(~by_x)
    some, x = np.concatenate([j, ends]), np.concatenate([by_x[j], by_x[ends]])
    first, last = (np.concatenate([v, r.y1[ends]]) for v in (edges[i, j], edges[i + 1, j] - 1))
    return b.take(some).having(
        x0=np.where(x, first, r.x0[some]),
        x1=np.where(x, last, r.x1[some]),
        y0=np.where(x, r.y0[some], first),
        y1=np.where(x, r.y1[some], last),
    )
