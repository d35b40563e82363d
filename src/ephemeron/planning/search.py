"""Searches over a space: exact by branch and bound, the thesis's two stages, and plain loops to check both.

`exact` splits nothing but the memory quotas: for every (terms, W, K, B^a) at once, a block of quotas is bounded from
below in time and cost, and is dropped when the bound is beyond a limit or no better than the best candidate so far;
what is left is split, down to single quotas, which are computed. Millions of candidates take numpy a fraction of a
second, and what was dropped was dropped for a reason that is proven: the gap is 0.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ephemeron.performance.model import Prediction
from ephemeron.performance.profile import Array
from ephemeron.planning.space import Limits, Option, Space

CHUNK = 1 << 15
"""Candidates that are computed at once: their arrays stay in the cache."""
FEW = 1 << 13
"""Candidates that are computed rather than bounded again."""
FAN = 12
"""Parts that a block of quotas is split into."""
DELTAS = (0.6, 0.7, 0.8, 0.9, 1.0)
"""Shrinking factors of algorithm 3.2."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point of the space, computed."""

    option: Option
    workers: int
    memory_mb: int
    aggregators: int
    batch: int
    other_batch: int
    seconds: float
    cost_usd: float

    def key(self, minimise: str) -> tuple[float, ...]:
        """What is compared: the aim, then the other, then the plainer configuration."""
        two = (self.cost_usd, self.seconds) if minimise == "cost" else (self.seconds, self.cost_usd)
        return (*two, self.workers, self.memory_mb, self.aggregators, self.batch)


@dataclass(slots=True)
class Found:
    """What a search returns."""

    method: str
    best: Candidate | None = None
    evaluated: int = 0
    pruned: int = 0
    seconds: float = 0.0
    optimal: bool = False
    front: list[Candidate] = field(default_factory=list)


@dataclass(slots=True)
class _Block:
    """Shapes of one option that share an interval of quotas."""

    option: Option
    w: Array
    k: Array
    b: Array
    low: int
    high: int
    """Indices of quotas, `low` to `high` inclusive."""
    bound: Array


def exact(space: Space, limits: Limits, *, minimise: str = "cost", front: bool = False) -> Found:
    """The optimum, proven; with `front`, everything that nothing beats in both time and cost.

    Args:
        space: to search.
        limits: deadline and budget, both kept.
        minimise: `cost` or `time`.
        front: find the whole Pareto front within the limits instead of one optimum (its best is the optimum).
    """
    began = time.perf_counter()
    found = Found("exact", optimal=True)
    best = _Front() if front else _Best(minimise)
    total = 0
    pending: list[tuple[float, int, _Block]] = []
    number = itertools.count()

    def push(blocks: list[_Block]) -> None:
        for block in blocks:
            heapq.heappush(pending, (float(block.bound.min()), next(number), block))

    last = len(space.quotas) - 1
    for o in space.options:
        w, k, b = space.shapes(o)
        total += len(w) * len(space.quotas)
        if len(w):
            push(_split(space, o, w, k, b, 0, last, limits, best))
    while pending:
        # The most promising block first, so that good candidates come early and prune the rest.
        _, _, block = heapq.heappop(pending)
        keep = best.may_improve_by(block.bound)
        if not keep.any():
            continue
        w, k, b = block.w[keep], block.k[keep], block.b[keep]
        quotas = space.quotas[block.low : block.high + 1]
        if len(quotas) == 1 or len(w) * len(quotas) <= FEW:
            found.evaluated += _compute(space, block.option, w, k, b, quotas, limits, best)
        else:
            push(_split(space, block.option, w, k, b, block.low, block.high, limits, best))
    found.front = best.candidates(minimise)
    found.best = min(found.front, key=lambda c: c.key(minimise), default=None)
    found.pruned = total - found.evaluated
    found.seconds = time.perf_counter() - began
    return found


def _split(
    space: Space, o: Option, w: Array, k: Array, b: Array, low: int, high: int, limits: Limits, best: _Best | _Front
) -> list[_Block]:
    """The parts of a block that may hold something."""
    edges = np.unique(np.linspace(low, high + 1, min(FAN, high - low + 1) + 1).astype(int))
    blocks = []
    for first, end in itertools.pairwise(edges):
        m_low, m_high = space.quotas[first], space.quotas[end - 1]
        held = (space.workload.memory_needed_mb(b) <= m_high + 1e-9) & space.together(w, m_low)
        parts = []
        for at in _chunks(np.flatnonzero(held)):
            seconds, usd = space.bound(o, w[at], m_low, m_high, k[at], b[at])
            keep = (seconds <= limits.seconds) & (usd <= limits.usd) & best.may_improve(seconds, usd)
            parts.append((at[keep], best.order(seconds, usd)[keep]))
        at = np.concatenate([p[0] for p in parts]) if parts else np.empty(0, dtype=int)
        if len(at):
            bound = np.concatenate([p[1] for p in parts])
            blocks.append(_Block(o, w[at], k[at], b[at], int(first), int(end - 1), bound))
    return blocks


def _compute(
    space: Space, o: Option, w: Array, k: Array, b: Array, quotas: Array, limits: Limits, best: _Best | _Front
) -> int:
    for at in _chunks(np.arange(len(w) * len(quotas))):
        shape, quota = at % len(w), at // len(w)
        ws, ks, bs = w[shape], k[shape], b[shape]
        ms = np.broadcast_to(quotas[0], at.shape) if len(quotas) == 1 else quotas[quota]
        bn = space.other_batch(o, ws, ms, ks, bs)
        p = space.predict(o, ws, ms, ks, bs, bn)
        ok = space.fits(ws, ms, ks, bs, bn) & (p.seconds <= limits.seconds) & (p.cost_usd <= limits.usd)
        ok &= np.isfinite(p.seconds)
        if ok.any():
            best.take(o, ws[ok], ms[ok], ks[ok], bs[ok], bn[ok], p.seconds[ok], p.cost_usd[ok])
    return len(w) * len(quotas)


def _chunks(indices: Array) -> Iterator[Array]:
    for start in range(0, len(indices), CHUNK):
        yield indices[start : start + CHUNK]


class _Best:
    """The best candidate so far."""

    def __init__(self, minimise: str) -> None:
        self.minimise = minimise
        self.best: Candidate | None = None
        self.value = math.inf

    def order(self, seconds: Array, usd: Array) -> Array:
        """By which blocks are ranked, and compared with the best."""
        return usd if self.minimise == "cost" else seconds

    def may_improve(self, seconds: Array, usd: Array) -> Array:
        return np.asarray(self.order(seconds, usd) <= self.value)

    def may_improve_by(self, bound: Array) -> Array:
        return np.asarray(bound <= self.value)

    def take(self, o: Option, w: Array, m: Array, k: Array, b: Array, bn: Array, seconds: Array, usd: Array) -> None:
        first, second = (usd, seconds) if self.minimise == "cost" else (seconds, usd)
        i = int(np.lexsort((b, k, m, w, second, first))[0])
        candidate = _candidate(o, w, m, k, b, bn, seconds, usd, i)
        if self.best is None or candidate.key(self.minimise) < self.best.key(self.minimise):
            self.best, self.value = candidate, float(first[i])

    def candidates(self, minimise: str) -> list[Candidate]:
        return [] if self.best is None else [self.best]


class _Front:
    """Everything so far that nothing beats in both time and cost."""

    def __init__(self) -> None:
        self.kept: list[Candidate] = []
        self.seconds = np.empty(0)
        self.usd = np.empty(0)

    def order(self, seconds: Array, usd: Array) -> Array:
        return usd

    def may_improve(self, seconds: Array, usd: Array) -> Array:
        if not self.kept:
            return np.ones(np.shape(usd), dtype=bool)
        # Times ascend and costs descend along the front: the cheapest among those as fast is the last of them.
        i = np.searchsorted(self.seconds, seconds, side="right") - 1
        return np.where(i >= 0, usd < self.usd[np.maximum(i, 0)], True)

    def may_improve_by(self, bound: Array) -> Array:
        return np.ones(len(bound), dtype=bool)  # decided when the block was made, and again when it is split

    def take(self, o: Option, w: Array, m: Array, k: Array, b: Array, bn: Array, seconds: Array, usd: Array) -> None:
        new = self.may_improve(seconds, usd)
        order = np.flatnonzero(new)[np.lexsort((usd[new], seconds[new]))]
        least = math.inf
        for i in order:
            if usd[i] < least:
                least = float(usd[i])
                self.kept.append(_candidate(o, w, m, k, b, bn, seconds, usd, int(i)))
        self._thin()

    def _thin(self) -> None:
        self.kept.sort(key=lambda c: c.key("time"))
        thin: list[Candidate] = []
        for c in self.kept:
            if not thin or c.cost_usd < thin[-1].cost_usd:
                thin.append(c)
        self.kept = thin
        self.seconds = np.array([c.seconds for c in thin])
        self.usd = np.array([c.cost_usd for c in thin])

    def candidates(self, minimise: str) -> list[Candidate]:
        return self.kept


def _candidate(
    o: Option, w: Array, m: Array, k: Array, b: Array, bn: Array, seconds: Array, usd: Array, i: int
) -> Candidate:
    return Candidate(o, int(w[i]), int(m[i]), int(k[i]), int(b[i]), int(bn[i]), float(seconds[i]), float(usd[i]))


def brute_force(space: Space, limits: Limits, *, minimise: str = "cost") -> Found:
    """Plain loops over everything, one candidate at a time. Slow; what `exact` is held against."""
    began = time.perf_counter()
    found = Found("brute-force", optimal=True)
    for o in space.options:
        for w, k, b in zip(*space.shapes(o), strict=True):
            for m in space.quotas:
                found.evaluated += 1
                _consider(found, evaluate(space, o, w, m, k, b), limits, minimise)
    found.seconds = time.perf_counter() - began
    return found


def _consider(found: Found, one: Candidate | None, limits: Limits, minimise: str) -> None:
    if one is None or one.seconds > limits.seconds or one.cost_usd > limits.usd or math.isinf(one.seconds):
        return
    if found.best is None or one.key(minimise) < found.best.key(minimise):
        found.best = one


def evaluate(space: Space, o: Option, w: float, m: float, k: float, b: float) -> Candidate | None:
    """One candidate; None if memory or the global batch forbid it."""
    ws, ms, ks, bs = (np.array([float(x)]) for x in (w, m, k, b))
    bn = space.other_batch(o, ws, ms, ks, bs)
    if not space.fits(ws, ms, ks, bs, bn)[0]:
        return None
    p = space.predict(o, ws, ms, ks, bs, bn)
    return _candidate(o, ws, ms, ks, bs, bn, p.seconds, p.cost_usd, 0)


def prediction_of(space: Space, c: Candidate) -> Prediction:
    """Everything that is predicted of a candidate."""
    w, m, k, b, bn = (np.array([float(x)]) for x in (c.workers, c.memory_mb, c.aggregators, c.batch, c.other_batch))
    return space.predict(c.option, w, m, k, b, bn).at(0)


def two_stage(space: Space, limits: Limits, *, minimise: str = "cost") -> Found:
    """FasDL, algorithms 3.1 and 3.2 as published: ScatterReduce first, then K and B^n for its W, M and B^a.

    A heuristic: it proves nothing, and finds nothing where ScatterReduce has no configuration that comes near. Of the
    options it takes K-REDUCE under HAP, or what comes nearest to it.
    """
    began = time.perf_counter()
    found = Found("two-stage")
    hap = [o for o in space.options if o.terms.sync == "hap"]
    for o in hap or space.options:
        for delta in DELTAS:
            stage = _shrunk(space, o, limits, delta, found, minimise)
            if stage is None:
                continue
            w, m, b = stage
            low, high = (1, w) if w > 1 else (1, 1)
            for k in range(low, high + 1):
                found.evaluated += 1
                _consider(found, evaluate(space, o, w, m, k, b), limits, minimise)
    found.seconds = time.perf_counter() - began
    return found


def _shrunk(
    space: Space, o: Option, limits: Limits, delta: float, found: Found, minimise: str
) -> tuple[int, int, int] | None:
    """Algorithm 3.1: W, M and B^a of the cheapest ScatterReduce under T_max/δ and B^g_max·δ.

    Its lines 15 to 17 leave the loop over batches at the first one that is too slow, which is the smallest, although
    larger ones are faster; its text gives up a quota only if no batch is fast enough. The text is followed.
    """
    best: tuple[float, int, int, int] | None = None
    quotas = space.quotas[::-1]
    for w in range(*_inclusive(o.workers(space.most_workers))):
        m, b = (x.ravel() for x in np.meshgrid(quotas, space.batches, indexing="ij"))
        ws = np.full_like(m, w)
        p = space.predict(o, ws, m, ws, b, b)
        found.evaluated += len(m)
        grid = (len(quotas), len(space.batches))
        seconds, usd = p.seconds.reshape(grid), p.cost_usd.reshape(grid)
        upper = space.workload.largest_batch(quotas)
        for i in range(len(quotas)):
            stop = True
            for j, batch in enumerate(space.batches):
                if batch > upper[i] or batch * w > space.largest_global_batch * delta:
                    break
                if seconds[i, j] > limits.seconds / delta:
                    continue
                stop = False
                value = usd[i, j] if minimise == "cost" else seconds[i, j]
                if best is None or value < best[0]:
                    best = (float(value), w, int(quotas[i]), int(batch))
            if stop:
                break
    return None if best is None else best[1:]


def _inclusive(bounds: tuple[int, int]) -> tuple[int, int]:
    return bounds[0], bounds[1] + 1


METHODS: dict[str, Callable[..., Found]] = {"exact": exact, "two-stage": two_stage, "brute-force": brute_force}
