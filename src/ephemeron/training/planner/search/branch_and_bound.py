"""Exact search over a space by branch and bound.

`Search` tabulates exchanges once (`tables`) and answers any number of queries from them: the whole front of time against
cost, or the best within limits for some W, K and M. A query starts from blocks of quotas, W and K, bounds each from
below in time and cost with all its batches (`bounds`), drops those that what is known beats, halves the others, and at
single (W, M, K) settles the batches:

- equal batches: with n iterations in an epoch, the time is the same for every batch that gives n, and grows with n, so the
  smallest batch of the least n is best, unless functions hand off, where another batch may save an invocation: then the rest of the
  interval, smaller and larger, is bounded like any block, and halved;
- unequal ones: intervals of B^a and of B^n are halved like all others, down to single integers.

What is dropped is dropped for a proven reason: the gap is 0, over every whole number of samples.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ephemeron.training.planner.model.prediction import Prediction
from ephemeron.training.planner.model.rates import Array
from ephemeron.training.planner.plan import PlanLimits
from ephemeron.training.planner.search.bounds import Blocks, Ranges, bound, pace, ranges
from ephemeron.training.planner.search.pareto import NONE, Best, Candidate, Front, Points, SearchResult, joined
from ephemeron.training.planner.search.space import Space
from ephemeron.training.planner.search.tables import PLACE, Tables, families, tabulate
from ephemeron.training.planner.targets import ALL, Query, Targets

CHUNK = 96
"""Quotas that are tabulated together."""
THIN = 64
"""Quotas that are searched first where there are many."""
AT_ONCE = 1 << 14
"""Blocks that are bounded together: their arrays stay in the cache."""
SMALL = 1 << 9
"""Blocks of one optimum up to which further halves cost less than another round of bounds."""
WAITING = 1 << 9
"""Single (W, M, K) that wait for others, to be settled together: few say little about the rest."""
FEW = 1 << 12
"""Intervals of batches up to which they are cut into many at once, instead of halves."""
LEAST_PARTS, MOST_PARTS = 8, 64
"""Intervals that one is cut into then: the fewer there are, the more."""
SAMPLED = 200
"""Promising blocks of which one candidate is computed before the others are looked at."""
MANY = 1 << 10
"""Blocks from which on that is worth a call of the model."""


class Search:
    """One space, its tables, and queries over them."""

    def __init__(self, space: Space, *, largest_global_batch: int | None = None) -> None:
        """Args: `largest_global_batch`: of any query, where one asks for more than the space's own."""
        self.space = space
        self.families = families(space)
        self.most = int(min(space.most_workers, largest_global_batch or space.largest_global_batch))
        self.evaluated = 0
        self._computed: list[Points] = []
        self._tables: dict[tuple[int, int], list[_Columns]] = {}

    def run(self, target: Best | Front, query: Query = ALL) -> None:
        """Improves `target` until nothing in the query's part of the space can."""
        self.run_all([(target, query)])

    def run_all(self, asked: Sequence[tuple[Best | Front, Query]]) -> None:
        """Improves several targets at once, each until nothing in its query's part of the space can."""
        count = len(self.space.quotas)
        if not count or not self.families or not asked:
            return
        targets = Targets(asked, self.space, self.most)
        fits = np.flatnonzero(self.space.workload.largest_batch(self.space.quotas) >= 1)
        for first in range(int(fits[0]) if len(fits) else count, count, CHUNK):
            last = min(first + CHUNK, count) - 1
            if targets.reach(self.space.quotas[first], self.space.quotas[last]):
                for columns in self._tabulated(first, last):
                    _Descent(self, columns, targets).run()

    def _tabulated(self, first: int, last: int) -> list[_Columns]:
        found = self._tables.get((first, last))
        if found is None:
            tables = tabulate(self.space, self.families, first, last, self.most)
            merged = [t.merged(groups(t)) for t in tables]
            found = [_Columns(t, c, first_blocks(c, self.most), {}) for t, c in zip(tables, merged, strict=True)]
            if len(self.space.quotas) <= 4 * CHUNK:
                self._tables[first, last] = found
        return found

    def predict(self, option: Array, w: Array, m: Array, k: Array, x: Array, y: Array, largest: float) -> Points:
        """Computes candidates, those that are not allowed as infinite."""
        space = replace(self.space, largest_global_batch=int(largest))
        seconds, usd = np.full(len(w), np.inf), np.full(len(w), np.inf)
        for i in np.unique(option):
            at = np.flatnonzero(option == i)
            o = space.options[int(i)]
            mine = w[at], m[at], k[at], x[at], y[at]
            p = space.predict(o, *mine)
            fits = space.fits(o, *mine)
            seconds[at], usd[at] = np.where(fits, p.seconds, np.inf), np.where(fits, p.cost_usd, np.inf)
        self._computed.append(Points(np.array([option, w, m, k, x, y]), seconds, usd))
        return self._computed[-1]

    def known(self, query: Query, limits: PlanLimits) -> Points:
        """Candidates of the query's part of the space, within limits, that were computed for other queries."""
        self._computed = [joined(self._computed)] if self._computed else [NONE]
        p = self._computed[0]
        largest = query.largest_global_batch or self.space.largest_global_batch
        good = (p.seconds <= limits.seconds) & (p.usd <= limits.usd) & query.holds(p.what, largest)
        return p.take(np.flatnonzero(good))

    def computed(self) -> int:
        """Candidates that were computed, each counted once."""
        if not self._computed:
            return 0
        all_of = joined(self._computed).what
        code = np.zeros(all_of.shape[1])
        for row, width in zip(all_of, (64, 1 << 10, 1 << 15, 1 << 10, 1 << 18, 1 << 18), strict=True):
            code = code * 1.6180339887 + row * (1.0 + width * 1e-3)
        return len(np.unique(code))


@dataclass(frozen=True, slots=True)
class _Columns:
    """Tables of every single quota and of groups of them, and where every query over them begins."""

    fine: Tables
    coarse: Tables
    blocks: Blocks
    """Blocks that cover everything."""
    begin: dict[float, tuple[Blocks, Ranges]]
    """The same with their bounds and ranges, by the largest global batch."""


class _Descent:
    """Some targets over one set of columns."""

    def __init__(self, search: Search, columns: _Columns, targets: Targets) -> None:
        self.search, self.space, self.targets = search, search.space, targets
        self.columns, self.fine, self.coarse = columns, columns.fine, columns.coarse

    def run(self) -> None:
        blocks = self._begun()
        self._sample(self.coarse, blocks)
        blocks = self._bounded(self.fine, self._refined(self._alive(blocks)))
        narrow = blocks.take(np.empty(0, dtype=int))
        while len(blocks):
            single = (blocks.w_level == 0) & (blocks.k_level == 0)
            narrow = Blocks.joined([narrow, blocks.take(single)])
            blocks = blocks.take(~single)
            if len(narrow) > WAITING or not self.targets.valued():
                narrow = self._settled(narrow)
            if len(blocks) > MANY:
                self._sample(self.fine, blocks)
            blocks = self._bounded(self.fine, self._split(self._alive(blocks)))
        while len(narrow):
            narrow = self._settled(narrow)

    def _split(self, b: Blocks) -> Blocks:
        """Halves, and halves of halves as long as they are few."""
        b = halved(self.fine, b)
        while len(b) <= SMALL and (b.w_level.any() or b.k_level.any()):
            b = halved(self.fine, b)
        return b

    # -- blocks -----------------------------------------------------------------------------------------------

    def _begun(self) -> Blocks:
        """The blocks that cover everything, as far as the targets search them; blocks and bounds are the same for all targets."""
        t = self.coarse
        parts = []
        for largest, bits in self.targets.groups:
            known = self.columns.begin.get(largest)
            if known is None:
                b = self.columns.blocks
                r = ranges(t, b, largest, self.search.most)
                b, r = b.take(r.some), r.take(r.some)
                some = [np.arange(at, min(at + AT_ONCE, len(b))) for at in range(0, len(b), AT_ONCE)]
                found = [bound(self.space, t, b.take(i), r.take(i), largest) for i in some]
                if found:
                    seconds, usd = (np.concatenate(x) for x in zip(*found, strict=True))
                    b = b.having(seconds=seconds, usd=usd)
                known = self.columns.begin[largest] = b, r
            b, r = known
            parts.append(self._alive(b.having(asked=np.asarray(bits & self.targets.possible(self.space, t, b, r)))))
        return Blocks.joined(parts)

    def _refined(self, b: Blocks) -> Blocks:
        """Blocks of single quotas in place of those of groups of quotas."""
        family, first, last = (x[b.column] for x in (self.coarse.family, self.coarse.first, self.coarse.last))
        many = (last - first + 1).astype(int)
        begins = np.searchsorted(self.fine.family, family) + first - self.fine.first[0]
        column = np.repeat(begins, many) + np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        return b.take(np.repeat(np.arange(len(b)), many)).having(column=column)

    def _bounded(self, t: Tables, b: Blocks) -> Blocks:
        """With their bounds, and without those that hold nothing."""
        parts = []
        for start in range(0, len(b), AT_ONCE):
            some = b.take(np.arange(start, min(start + AT_ONCE, len(b)))) if len(b) > AT_ONCE else b
            r = ranges(t, some, self.targets.largest(some.asked), self.search.most)
            asked = np.asarray(some.asked & self.targets.possible(self.space, t, some, r))
            keep = np.flatnonzero(r.some & (asked != 0))
            if len(keep) < len(some):
                some, r, asked = some.take(keep), r.take(keep), asked[keep]
            some = some.having(asked=asked)
            if len(some):
                seconds, usd = bound(self.space, t, some, r, self.targets.largest(some.asked))
                parts.append(self._alive(some.having(seconds=seconds, usd=usd)))
        return Blocks.joined(parts) if parts else b.take(np.empty(0, dtype=int))

    def _alive(self, b: Blocks) -> Blocks:
        """Those that some target may still want, each with who does."""
        asked = b.asked & self.targets.hopeful(b.seconds, b.usd)
        keep = np.flatnonzero(asked)
        return b.take(keep).having(asked=asked[keep])

    # -- candidates -------------------------------------------------------------------------------------------

    def _sample(self, t: Tables, b: Blocks) -> None:
        """Computes one candidate of each of the most promising blocks, so that good ones prune the rest."""
        if not len(b) or self.targets.settled():
            return
        order = np.lexsort((b.usd, b.seconds))
        usd = b.usd[order]
        edge = order[np.flatnonzero(usd <= np.minimum.accumulate(usd))]
        if len(edge) > SAMPLED:
            edge = edge[np.unique(np.linspace(0, len(edge) - 1, SAMPLED).astype(int))]
        some = b.take(edge)
        r = ranges(t, some, self.targets.largest(some.asked), self.search.most)
        w = np.floor((r.w0 + r.w1) / 2)
        tied = t.tied[some.column]
        k = np.where(tied, w, np.minimum(np.floor((r.k0 + r.k1) / 2), w - 1))
        at = np.maximum((t.first[some.column] + t.last[some.column]) // 2, t.first[some.column])
        self._compute_all(t, some, w, k, at, self._batches(t, some, r, w, k))

    def _batches(self, t: Tables, b: Blocks, r: Ranges, w: Array, k: Array) -> list[tuple[Array, Array]]:
        """Good batches for single W and K: the smallest that give as few iterations as can be, and are balanced."""
        memory, largest = t.largest_batch[b.column], self.targets.largest(b.asked)
        most = np.minimum(largest, w * memory)
        if not t.unequal:
            x = np.maximum(np.minimum(np.floor(most / w), r.x1), r.x0)
            x = np.clip(np.ceil(self._least(w * x) / w), r.x0, x)
            return [(x, x)]
        e, o = pace(t, b, r)
        spread = np.maximum(e - o, 0.0) / t.constants[PLACE["sample_s"], b.column]
        wanted, others = self._least(most), np.maximum(w - k, 1)
        balanced = (wanted - (w - k) * spread) / w
        found = []
        for x in (np.floor(balanced), np.floor(balanced) + 1):
            x = np.clip(x, r.x0, r.x1)
            top = np.minimum(np.minimum(memory, np.floor((largest - x * k) / others)), r.y1)
            y = np.maximum(np.minimum(np.ceil((wanted - k * x) / others), top), np.maximum(r.y0, x))
            fuller = np.minimum(np.ceil((wanted - y * (w - k)) / k), np.minimum(y, r.x1))
            found.append((np.maximum(x, np.where(y == top, fuller, 0)), y))
        return found

    def _least(self, most: Array) -> Array:
        """The least global batch that gives as few iterations as the largest one."""
        if self.space.published is not None:
            return np.floor(most)
        samples = float(self.space.workload.samples)
        n = np.maximum(np.ceil(samples / most * (1 - 1e-12)), 1.0)
        return np.ceil(samples / n * (1 - 1e-12))

    def _compute(self, t: Tables, b: Blocks, w: Array, k: Array, quota: Array, x: Array, y: Array) -> Points:
        option = np.array([f.option for f in t.families])[t.family[b.column]]
        p = self.search.predict(option, w, self.space.quotas[quota], k, x, np.where(w > k, y, x), self.targets.widest)
        self.targets.take(p)
        return p

    def _compute_all(self, t: Tables, b: Blocks, w: Array, k: Array, quota: Array, batches: list[tuple[Array, Array]]) -> None:
        """Computes blocks with several batches each."""
        n = len(batches)
        x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
        w, k, quota = (np.tile(v, n) for v in (w, k, quota))
        self._compute(t, b.take(np.tile(np.arange(len(b)), n)), w, k, quota, x, y)

    def _settled(self, b: Blocks) -> Blocks:
        """Single (W, M, K): computes what is best in each, and returns what may hold better all the same."""
        order = np.argsort(b.usd if self.targets.by_cost else b.seconds)
        rest = []
        for start in range(0, len(b), AT_ONCE // 4):
            some = self._alive(b.take(order[start : start + AT_ONCE // 4]))
            if len(some):
                rest.append((self._unequal if self.fine.unequal else self._equal)(some))
        return Blocks.joined(rest) if rest else b.take(np.empty(0, dtype=int))

    def _equal(self, b: Blocks) -> Blocks:
        t = self.fine
        r = ranges(t, b, self.targets.largest(b.asked), self.search.most)
        ((x, _),) = self._batches(t, b, r, r.w0, r.k0)
        p = self._compute(t, b, r.w0, r.k0, t.first[b.column], x, x)
        if self.space.published is not None:
            return b.take(np.empty(0, dtype=int))
        # Without hand-offs nothing in the rest can be better. With them anything can: invocations have whole iterations, and where
        # it dies, smaller batches may live.
        may = ~(p.seconds < t.constants[PLACE["brief_s"], b.column])
        parts = []
        for x0, x1 in ((r.x0, x - 1), (x + 1, r.x1)):
            i = np.flatnonzero(may & (x0 <= x1))
            parts.append(b.take(i).having(x0=x0[i], x1=x1[i]))
        rest = Blocks.joined(parts)
        if len(rest) <= FEW // LEAST_PARTS:
            low, high = rest.x0, rest.x1
            whole = ranges(t, rest, self.targets.largest(rest.asked), self.search.most)
            return self._bounded(t, cut(rest, replace(whole, x0=low, x1=high, y0=high, y1=high), _parts(len(rest))))
        middle = np.floor((rest.x0 + rest.x1) / 2)
        upper = rest.having(x0=middle + 1).take(np.flatnonzero(rest.x1 > rest.x0))
        return self._bounded(t, Blocks.joined([rest.having(x1=middle), upper]))

    def _unequal(self, b: Blocks) -> Blocks:
        t = self.fine
        r = ranges(t, b, self.targets.largest(b.asked), self.search.most)
        whole = np.flatnonzero((b.x1 == 0) & (b.y1 == 0))
        if len(whole):  # for the first time at this (W, M, K)
            some, part = b.take(whole), r.take(whole)
            self._compute_all(t, some, part.w0, part.k0, t.first[some.column], self._batches(t, some, part, part.w0, part.k0))
        single = (r.x0 == r.x1) & (r.y0 == r.y1)
        if single.any():
            i = np.flatnonzero(single)
            self._compute(t, b.take(i), r.w0[i], r.k0[i], t.first[b.column[i]], r.x0[i], r.y0[i])
        i = np.flatnonzero(~single & ((b.asked & self.targets.hopeful(b.seconds, b.usd)) != 0))
        if not len(i):
            return b.take(i)
        some, r = b.take(i), r.take(i)
        if len(i) <= FEW // LEAST_PARTS:
            return self._bounded(t, cut(some, r, _parts(len(i))))
        by_x = r.x1 > r.x0
        middle = np.floor((r.x0 + r.x1) / 2)
        low = some.having(x0=r.x0, x1=np.where(by_x, middle, r.x1), y0=r.y0, y1=r.y1)
        high = some.having(x0=np.where(by_x, middle + 1, r.x0), x1=r.x1, y0=r.y0, y1=r.y1)
        # A single B^a: the upper end by itself, and the rest halved.
        middle_y = np.floor((r.y0 + r.y1 - 1) / 2)
        low = low.having(y1=np.where(by_x, low.y1, middle_y))
        high = high.having(y0=np.where(by_x, high.y0, r.y1))
        inner = np.flatnonzero(~by_x & (middle_y + 1 <= r.y1 - 1))
        rest = some.having(x0=r.x0, x1=r.x1, y0=middle_y + 1, y1=r.y1 - 1).take(inner)
        return self._bounded(t, Blocks.joined([low, high, rest]))


def _parts(blocks: int) -> int:
    """Number of intervals that each of so few blocks is cut into."""
    return min(max(FEW // max(blocks, 1), LEAST_PARTS), MOST_PARTS)


def exact(space: Space, limits: PlanLimits, *, minimise: str = "cost", front: bool = False, tolerance: float = 0.0) -> SearchResult:
    """The optimum, proven; with `front`, everything that nothing beats in both time and cost.

    Args:
        space: to search.
        limits: deadline and budget, both kept.
        minimise: `cost` or `time`.
        front: find the whole Pareto front within the limits instead of one optimum (its best is the optimum).
    """
    began = time.perf_counter()
    search = Search(space)
    target = Front(tolerance) if front else Best(minimise, limits)
    thin = len(space.quotas) // THIN
    some = Search(replace(space, quotas=space.quotas[::thin])) if thin > 1 else None
    if some is not None:  # quotas are searched chunk by chunk: the first would otherwise know of nothing good elsewhere
        some.run(target)
    search.run(target)
    points = target.thinned() if isinstance(target, Front) else target.points
    all_of = points.candidates(space.options)
    within = [c for c in all_of if c.seconds <= limits.seconds and c.cost_usd <= limits.usd]
    best = min(within, key=lambda c: c.key(minimise), default=None)
    evaluated = search.computed() + (0 if some is None else some.computed())
    return SearchResult(
        "exact",
        best=best,
        evaluated=evaluated,
        pruned=max(space.size() - evaluated, 0),
        seconds=time.perf_counter() - began,
        optimal=True,
        front=within,
    )


def predictions_of(space: Space, candidates: Sequence[Candidate]) -> list[Prediction]:
    """Everything that is predicted of some candidates."""
    found: dict[int, Prediction] = {}
    for o in space.options:
        mine = [i for i, c in enumerate(candidates) if c.option is o]
        if mine:
            rows = [candidates[i] for i in mine]
            numbers = [(c.workers, c.memory_mb, c.aggregators, c.batch, c.other_batch) for c in rows]
            w, m, k, b, bn = np.array(numbers, dtype=float).T
            p = space.predict(o, w, m, k, b, bn)
            found.update(zip(mine, p.each(), strict=True))
    return [found[i] for i in range(len(candidates))]


# -- initial blocks of configurations -----------------------------------------------------------------------------


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
