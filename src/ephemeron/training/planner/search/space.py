"""Search space of a plan: FasDL section 3.4.2, with every whole number of samples.

A candidate is (terms, W, M, K, B^a, B^n): named choices, integers and a quota that the platform sells. Terms are the
choices that have names: pattern, synchronisation, compression, and with the platform profile the channel. B^a and B^n
are any integers that memory (4-2) and the largest global batch (3-30) allow; B^n differs from B^a only under HAP and
where some rank does not aggregate. Over direct links K = W: fewer owners take longer and send as much (`direct_links`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import Prediction, largest_batch, largest_nonaggregator_batch, memory_needed_mb, predict
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, Workload
from ephemeron.training.planner.model.rates import Array
from ephemeron.training.planner.plan import PlanLimits

MOST_WORKERS = 256
LARGEST_GLOBAL_BATCH = 1024
"""Default if neither user nor data set a smaller one."""
GAMMA_MIN = 0.5
"""Least share of the largest training rate, equation 3-33: the thesis considers no smaller batches."""


@dataclass(frozen=True, slots=True)
class Option:
    """One combination of named choices, and where it would run."""

    terms: ExecutionOptions
    platform: PlatformProfile

    def aggregators(self, workers: int) -> tuple[int, int]:
        """Least and largest K."""
        pattern = self.terms.pattern
        if pattern in ("all-reduce", "standalone", "parameter-server"):
            return 1, 1
        if pattern == "scatter-reduce" or self.platform.direct is not None:
            return workers, workers
        return 1, workers

    def workers(self, most: int) -> tuple[int, int]:
        """Least and largest W. One worker alone is pattern `standalone`."""
        return (1, 1) if self.terms.pattern == "standalone" else (2, most)

    @property
    def unequal(self) -> bool:
        """Whether those who do not aggregate may have batches of their own."""
        return self.terms.sync == "hap" and self.terms.pattern in ("k-reduce", "all-reduce")

    @property
    def tied(self) -> bool:
        """Whether every rank aggregates: K = W, without a choice."""
        alone = self.terms.pattern in ("standalone", "scatter-reduce")
        return alone or (self.platform.direct is not None and self.terms.pattern == "k-reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that is searched."""

    workload: Workload
    options: tuple[Option, ...]
    quotas: Array
    """Memory quotas, ascending."""
    batches: Array
    """Choices of B^a of the thesis's own search, algorithm 3.1, ascending. `exact` takes every integer."""
    most_workers: int
    largest_global_batch: int
    published: Callable[..., Prediction] | None = None
    """The thesis's equations (`baselines.published`) in place of our model; None: our model."""
    total_memory_mb: float = 0.0
    """Sum of all functions' quotas; 0: no limit."""
    only_workers: frozenset[int] | None = None
    """W to consider; None: all from 1 to `most_workers`."""

    def predict(self, o: Option, w: Array, m: Array, k: Array, ba: Array, bn: Array) -> Prediction:
        """Time and cost of candidates."""
        return (self.published or predict)(
            self.workload, o.platform, o.terms, workers=w, memory_mb=m, aggregators=k, batch=ba, other_batch=bn
        )

    def other_batch(self, o: Option, w: Array, m: Array, k: Array, ba: Array) -> Array:
        """B^n of the thesis: equation 3-22, as far as 3-30 and 4-2 allow. Below B^a: there is none."""
        bn = self.synchronous(o, w, m, k, ba)
        allowed = np.floor((self.largest_global_batch - ba * k) / np.maximum(w - k, 1))
        return np.where(w > k, np.minimum(np.minimum(bn, allowed), self.largest_batch(o, m)), ba)

    def synchronous(self, o: Option, w: Array, m: Array, k: Array, ba: Array) -> Array:
        """The largest B^n with which no rank waits for those that do not aggregate: equation 3-22."""
        if self.published is None:
            return largest_nonaggregator_batch(self.workload, o.platform, o.terms, workers=w, aggregators=k, memory_mb=m, batch=ba)
        if o.terms.sync != "hap":
            return ba
        shard = self.workload.model_mb / k
        spare = (w - 1) * o.platform.seconds("down", shard, m) + o.platform.seconds("up", shard, m)  # 3-3
        return np.where(w > k, np.floor(ba + spare * (m + self.workload.m) / self.workload.a + 1e-9), ba)

    def fits(self, o: Option, w: Array, m: Array, k: Array, ba: Array, bn: Array) -> Array:
        """Whether memory (4-1), global batch (3-30) and the machine hold, and the batches are possible.

        The published equations leave out what the others' batches take (3-20 holds under condition 3-22), so there
        B^n is bounded by it.
        """
        larger = np.where(w > k, np.maximum(ba, bn), ba)
        enough = memory_needed_mb(self.workload, o.platform, o.terms, larger) <= m + 1e-9
        allowed = ba * k + bn * (w - k) <= self.largest_global_batch
        good = enough & allowed & (ba >= 1) & ((bn >= ba) | (w == k)) & self.together(w, m)
        if self.published is not None and o.unequal:
            good = good & ((w == k) | (bn <= self.synchronous(o, w, m, k, ba)))
        if self.only_workers is not None:
            good = good & np.isin(w, np.array(sorted(self.only_workers), dtype=float))
        return np.asarray(good)

    def largest_batch(self, o: Option, m: Array) -> Array:
        """The largest batch that functions of that quota hold (4-2)."""
        return largest_batch(self.workload, o.platform, o.terms, m)

    def together(self, w: Array, m: Array | float) -> Array:
        """Whether so many functions of that quota can run at once."""
        return np.asarray(w * m <= (self.total_memory_mb or np.inf))

    def candidates(self, o: Option, at_once: int = 1 << 16) -> Iterator[tuple[Array, Array, Array, Array]]:
        """All (W, K, B^a, B^n) that the largest global batch allows, as flat arrays of some `at_once`."""
        parts: list[tuple[Array, Array, Array, Array]] = []
        count = 0
        low, high = o.workers(min(self.most_workers, self.largest_global_batch))
        for w in range(low, high + 1):
            if self.only_workers is not None and w not in self.only_workers:
                continue
            first, last = o.aggregators(w)
            for k in range(first, last + 1):
                ba = np.arange(1, self.largest_global_batch // w + 1, dtype=float)
                bn = ba
                if o.unequal and w > k:
                    most = (self.largest_global_batch - ba * k) // (w - k)
                    bn = np.concatenate([np.arange(b, t + 1) for b, t in zip(ba, most, strict=True)])
                    ba = np.repeat(ba, (most - ba + 1).astype(int))
                parts.append((np.full_like(ba, w), np.full_like(ba, k), ba, bn))
                count += len(ba)
                if count >= at_once:
                    yield _joined(parts)
                    parts, count = [], 0
        if parts:
            yield _joined(parts)

    def size(self) -> int:
        """Number of candidates."""
        alike = Counter((o.terms.pattern, o.unequal, o.tied) for o in self.options)
        one = {(o.terms.pattern, o.unequal, o.tied): o for o in self.options}
        return sum(self._size(o) * alike[what] for what, o in one.items()) * len(self.quotas)

    def _size(self, o: Option) -> int:
        low, high = o.workers(min(self.most_workers, self.largest_global_batch))
        w = np.arange(low, high + 1)
        if self.only_workers is not None:
            w = w[np.isin(w, sorted(self.only_workers))]
        equal = self.largest_global_batch // w
        if not o.unequal:
            first, last = (np.array(x) for x in zip(*(o.aggregators(int(n)) for n in w), strict=True)) if len(w) else (w, w)
            return int((equal * (last - first + 1)).sum())
        others = np.concatenate([np.arange(1 if o.terms.pattern == "k-reduce" else n - 1, n) for n in w] or [w])
        all_of = np.concatenate([np.full(n - 1 if o.terms.pattern == "k-reduce" else 1, n) for n in w] or [w])
        pairs = _pairs(all_of, others, self.largest_global_batch)
        return int(pairs.sum() + (equal.sum() if o.terms.pattern == "k-reduce" else 0))


def _joined(parts: list[tuple[Array, Array, Array, Array]]) -> tuple[Array, Array, Array, Array]:
    w, k, ba, bn = (np.concatenate(x) for x in zip(*parts, strict=True))
    return w, k, ba, bn


def _pairs(workers: Array, others: Array, largest: int) -> Array:
    """Number of pairs 1 ≤ B^a ≤ B^n with B^a·W + (B^n − B^a)·(W − K) ≤ largest, for arrays of W and W − K."""
    w, others = workers.astype(float), others.astype(float)
    room = largest - w
    most = np.floor(room / others)
    return np.asarray(most + 1 + _floor_sum(most + 1, w, others, room - others * most))


def _floor_sum(n: Array, m: Array, a: Array, b: Array) -> Array:
    """Σ ⌊(a·i + b)/m⌋ for i from 0 to n − 1, as in Euclid's algorithm: a logarithmic number of steps.

    Of whole numbers below 2^53, kept as floats: their quotients round down to the same, at a fraction of the time.
    """
    total = np.zeros_like(n)
    left = np.arange(len(n))
    while len(left):
        by_a, by_b = np.floor(a / m), np.floor(b / m)
        total[left] += (n - 1) * n / 2 * by_a + n * by_b
        a, b = a - by_a * m, b - by_b * m
        top = a * n + b
        go = top >= m
        left, a, b, top, m = left[go], a[go], b[go], top[go], m[go]
        n = np.floor(top / m)
        b, m, a = top - n * m, a, m
    return total


def make_space(
    profile: Profile,
    terms: Sequence[ExecutionOptions],
    *,
    limits: PlanLimits,
    platforms: Sequence[PlatformProfile] = (),
    memory_step_mb: int | None = None,
    batch_step: int = 16,
    most_workers: int = MOST_WORKERS,
    published: Callable[..., Prediction] | None = None,
    memory_max_mb: int | None = None,
) -> Space:
    """The space of a profile.

    Args:
        profile: workload and platform.
        terms: named choices to search.
        limits: the user's.
        platforms: several, where the channel is left open; else the profile's own.
        memory_step_mb: between quotas; None: the platform's.
        batch_step: between the thesis's choices of B^a. Powers of two below it are choices, too.
        most_workers: W at most.
        published: see `Space`.
        memory_max_mb: instead of the platform's.
    """
    workload = profile.workload
    largest = limits.max_global_batch or min(workload.samples, LARGEST_GLOBAL_BATCH)
    largest = min(largest, workload.samples)
    lower = max(1.0, workload.b / (1 / GAMMA_MIN - 1))  # 3-34
    steps = np.arange(batch_step, largest + 1, batch_step, dtype=float)
    small = np.array([2.0**i for i in range(20) if 2**i < min(batch_step, largest + 1)])
    batches = np.unique(np.concatenate([small, steps]))
    batches = batches[batches >= min(lower, largest)]
    if not len(batches):
        batches = np.array([float(largest)])
    platforms = platforms or (profile.platform,)
    quotas = platforms[0].quotas(memory_step_mb).astype(float)
    if memory_max_mb is not None:
        quotas = quotas[quotas <= memory_max_mb]
    options = tuple(Option(t, p) for p in platforms for t in terms if _possible(t, p, platforms))
    return Space(
        workload=workload,
        options=options,
        quotas=quotas,
        batches=batches,
        most_workers=min(most_workers, min(p.concurrency for p in platforms)),
        largest_global_batch=int(largest),
        published=published,
        total_memory_mb=platforms[0].total_memory_mb,
    )


def _possible(terms: ExecutionOptions, platform: PlatformProfile, platforms: Sequence[PlatformProfile]) -> bool:
    """Whether a platform runs that pattern and protocol.

    Over direct links all ranks aggregate, so that HAP is BSP; one function alone is not searched once more with links.
    """
    if terms.pattern == "standalone":
        return platform.direct is None or all(p.direct is not None for p in platforms)
    if platform.direct is not None:
        return terms.pattern in ("k-reduce", "scatter-reduce") and terms.sync == "bsp"
    return (terms.pattern == "parameter-server") == (platform.channel == "server")
