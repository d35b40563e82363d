"""What can be chosen: FasDL section 3.4.2, as arrays.

A candidate is (terms, W, M, K, B^a); B^n follows from them by the synchronisation condition (3-22), as large as
memory (4-2) and the largest global batch (3-30) allow. Terms are the choices that have names: pattern,
synchronisation, compression, and with the platform profile the channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ephemeron.performance.model import (
    TINY_MB,
    Prediction,
    Terms,
    exchange,
    largest_nonaggregator_batch,
    predict,
    published,
    samples_in,
)
from ephemeron.performance.profile import (
    Affine,
    Array,
    PlatformProfile,
    Power,
    Profile,
    Rate,
    Transfer,
    Workload,
)

MOST_WORKERS = 256
LARGEST_GLOBAL_BATCH = 1024
"""Where neither user nor data set a smaller one."""
GAMMA_MIN = 0.5
"""Least share of the largest training rate, equation 3-33: smaller batches are not considered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user will accept."""

    deadline_s: float | None = None
    budget_usd: float | None = None
    max_global_batch: int | None = None

    @property
    def seconds(self) -> float:
        return math.inf if self.deadline_s is None else self.deadline_s

    @property
    def usd(self) -> float:
        return math.inf if self.budget_usd is None else self.budget_usd


@dataclass(frozen=True, slots=True)
class Option:
    """One combination of named choices, and where it would run."""

    terms: Terms
    platform: PlatformProfile
    optimist: PlatformProfile
    """The same, with transfers at every quota as fast as at any smaller one: for bounds that fall as quotas grow."""
    pessimist: PlatformProfile
    """The same, with transfers as slow as at any larger one."""

    def aggregators(self, workers: int) -> tuple[int, int]:
        """Least and largest K."""
        pattern = self.terms.pattern
        if pattern in ("all-reduce", "standalone", "parameter-server"):
            return 1, 1
        if pattern == "scatter-reduce":
            return workers, workers
        return 1, workers

    def workers(self, most: int) -> tuple[int, int]:
        """Least and largest W. One worker alone is pattern `standalone`."""
        return (1, 1) if self.terms.pattern == "standalone" else (2, most)


def option(terms: Terms, platform: PlatformProfile) -> Option:
    """Works out what bounds need."""
    return Option(terms, platform, _envelope(platform, fastest=True), _envelope(platform, fastest=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that is searched."""

    workload: Workload
    options: tuple[Option, ...]
    quotas: Array
    """Memory quotas, ascending."""
    batches: Array
    """Choices of B^a, ascending."""
    most_workers: int
    largest_global_batch: int
    model: str = "honest"
    """`honest`, or `published`: the thesis's equations to the letter."""
    total_memory_mb: float = 0.0
    """Of all functions; 0: any."""
    only_workers: frozenset[int] | None = None
    """W to consider; None: all from 1 to `most_workers`."""

    def predict(self, o: Option, w: Array, m: Array, k: Array, ba: Array, bn: Array) -> Prediction:
        """Time and cost of candidates."""
        f = predict if self.model == "honest" else published
        return f(self.workload, o.platform, o.terms, workers=w, memory_mb=m, aggregators=k, batch=ba, other_batch=bn)

    def bound(self, o: Option, w: Array, low: Array, high: Array, k: Array, ba: Array) -> tuple[Array, Array]:
        """Least seconds and US dollars of all candidates with quotas from `low` to `high`.

        Every time falls with the quota, if transfers are taken from the optimist, and with B^n, of which an upper
        bound is taken; of the cost of functions, time is taken at the larger quota and the price at the smaller one.
        """
        bn = self._most_other(o, w, low, high, k, ba)
        if self.model == "honest":
            asked = o.pessimist.seconds("down", TINY_MB, low)
            p = predict(self.workload, o.optimist, o.terms, workers=w, memory_mb=high, aggregators=k, batch=ba,
                        other_batch=bn, relaxed=True, asked_s=asked)  # fmt: skip
        else:
            p = published(self.workload, o.optimist, o.terms, workers=w, memory_mb=high, aggregators=k, batch=ba,
                          other_batch=bn, relaxed=True)  # fmt: skip
        return p.seconds, p.functions_usd * (low / high) + p.requests_usd + p.storage_usd

    def other_batch(self, o: Option, w: Array, m: Array, k: Array, ba: Array) -> Array:
        """B^n: equation 3-22, as far as 3-30 and 4-2 allow. Below B^a: there is none."""
        return self._capped(self._synchronous(o, w, m, k, ba), w, m, k, ba)

    def fits(self, w: Array, m: Array, k: Array, ba: Array, bn: Array) -> Array:
        """Whether memory (4-1), global batch (3-30) and the machine hold, and nobody's batch is impossible."""
        larger = np.where(w > k, np.maximum(ba, bn), ba)
        enough = self.workload.memory_needed_mb(larger) <= m + 1e-9
        allowed = ba * k + bn * (w - k) <= self.largest_global_batch
        return np.asarray(enough & allowed & ((bn >= ba) | (w == k)) & self.together(w, m))

    def together(self, w: Array, m: Array | float) -> Array:
        """Whether so many functions of that quota can run at once."""
        return np.asarray(w * m <= (self.total_memory_mb or np.inf))

    def shapes(self, o: Option) -> tuple[Array, Array, Array]:
        """All (W, K, B^a) whose global batch can be allowed, as three flat arrays."""
        w_low, w_high = o.workers(self.most_workers)
        found: list[tuple[Array, Array, Array]] = []
        for batch in self.batches:
            for workers in range(w_low, min(w_high, int(self.largest_global_batch // batch)) + 1):
                if self.only_workers is not None and workers not in self.only_workers:
                    continue
                low, high = o.aggregators(workers)
                each = np.arange(low, high + 1, dtype=float)
                found.append((np.full_like(each, workers), each, np.full_like(each, batch)))
        if not found:
            return np.empty(0), np.empty(0), np.empty(0)
        w, k, b = (np.concatenate(x) for x in zip(*found, strict=True))
        return w, k, b

    def size(self) -> int:
        """Number of candidates."""
        return sum(len(self.shapes(o)[0]) for o in self.options) * len(self.quotas)

    def _synchronous(self, o: Option, w: Array, m: Array, k: Array, ba: Array) -> Array:
        if self.model == "honest":
            return largest_nonaggregator_batch(
                self.workload, o.platform, o.terms, workers=w, aggregators=k, memory_mb=m, batch=ba
            )
        return self._published_other(o.platform, o, w, m, m, k, ba)

    def _published_other(
        self, platform: PlatformProfile, o: Option, w: Array, low: Array, high: Array, k: Array, ba: Array
    ) -> Array:
        if o.terms.sync != "hap":
            return ba
        shard = self.workload.model_mb / k
        spare = (w - 1) * platform.seconds("down", shard, low) + platform.seconds("up", shard, low)  # 3-3
        return np.where(w > k, np.floor(ba + spare * (high + self.workload.m) / self.workload.a + 1e-9), ba)

    def _most_other(self, o: Option, w: Array, low: Array, high: Array, k: Array, ba: Array) -> Array:
        """At least the B^n of every quota from `low` to `high`: exchanges at their slowest, computing at its fastest."""
        if o.terms.sync != "hap":
            return ba
        if self.model == "published":
            most = self._published_other(o.pessimist, o, w, low, high, k, ba)
        else:
            asked = o.optimist.seconds("down", TINY_MB, high)
            e = exchange(self.workload, o.pessimist, o.terms, workers=w, aggregators=k, memory_mb=low, asked_s=asked)
            f = exchange(self.workload, o.optimist, o.terms, workers=w, aggregators=k, memory_mb=high)
            spare = np.maximum(e.seconds - f.other_s, 0.0)
            most = np.where(w > k, samples_in(self.workload, o.platform, ba, spare, high), ba)
        return self._capped(most, w, high, k, ba)

    def _capped(self, bn: Array, w: Array, m: Array, k: Array, ba: Array) -> Array:
        others = np.maximum(w - k, 1)
        allowed = np.floor((self.largest_global_batch - ba * k) / others)
        return np.where(w > k, np.minimum(np.minimum(bn, allowed), self.workload.largest_batch(m)), ba)


def make_space(
    profile: Profile, terms: Sequence[Terms], *, limits: Limits, platforms: Sequence[PlatformProfile] = (),
    memory_step_mb: int | None = None, batch_step: int = 16, most_workers: int = MOST_WORKERS, model: str = "honest",
    memory_max_mb: int | None = None,
) -> Space:  # fmt: skip
    """The space of a profile.

    Args:
        profile: workload and platform.
        terms: named choices to search.
        limits: the user's.
        platforms: several, where the channel is left open; else the profile's own.
        memory_step_mb: between quotas; None: the platform's.
        batch_step: between choices of B^a. Powers of two below it are choices, too.
        most_workers: W at most.
        model: `honest` or `published`.
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
    options = tuple(
        option(t, p)
        for p in platforms
        for t in terms
        if (t.pattern == "parameter-server") == (p.channel == "server") or t.pattern == "standalone"
    )
    return Space(
        workload=workload, options=options, quotas=quotas, batches=batches,
        most_workers=min(most_workers, min(p.concurrency for p in platforms), int(largest // batches[0])),
        largest_global_batch=int(largest), model=model, total_memory_mb=platforms[0].total_memory_mb,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Extreme:
    """Node-wise least or largest transfer time over a set of measured quotas: a rate like any other."""

    rates: tuple[object, ...] = field(default_factory=tuple)
    fastest: bool = True

    def seconds(self, size_mb: Array | float) -> Array:
        at = np.stack([r.seconds(size_mb) for r in self.rates])  # type: ignore[attr-defined]
        return np.asarray(at.min(axis=0) if self.fastest else at.max(axis=0))

    @property
    def bandwidth_mb_s(self) -> float:
        each = [r.bandwidth_mb_s for r in self.rates]  # type: ignore[attr-defined]
        return float(max(each) if self.fastest else min(each))


def _undominated(rates: list[Rate], fastest: bool) -> list[Rate]:
    """Without those that another one of the same form beats at every size from 100 bytes to 100 GB."""

    def beats(a: Rate, b: Rate) -> bool:
        if isinstance(a, Affine) and isinstance(b, Affine):
            faster = a.latency_s <= b.latency_s and a.mb_s >= b.mb_s
            slower = a.latency_s >= b.latency_s and a.mb_s <= b.mb_s
        elif isinstance(a, Power) and isinstance(b, Power):
            ends = [(a.s_per_mb * s**a.exponent, b.s_per_mb * s**b.exponent) for s in (1e-4, 1e5)]
            wide = a.bandwidth_mb_s >= b.bandwidth_mb_s, a.bandwidth_mb_s <= b.bandwidth_mb_s
            faster = wide[0] and a.latency_s <= b.latency_s and all(x <= y for x, y in ends)
            slower = wide[1] and a.latency_s >= b.latency_s and all(x >= y for x, y in ends)
        else:
            return False
        return faster if fastest else slower

    kept: list[Rate] = []
    for i, b in enumerate(rates):
        if not any(beats(a, b) and not (beats(b, a) and i < j) for j, a in enumerate(rates) if j != i):
            kept.append(b)
    return kept


def _envelope(platform: PlatformProfile, *, fastest: bool) -> PlatformProfile:
    nodes = platform.transfer
    rows = []

    def extreme(rates: list[Rate]) -> Any:
        thin = _undominated(rates, fastest)
        return thin[0] if len(thin) == 1 else _Extreme(tuple(thin), fastest)

    for i, node in enumerate(nodes):
        seen = nodes[: i + 1] if fastest else nodes[i:]
        rows.append(
            Transfer(
                memory_mb=node.memory_mb,
                up=extreme([n.up for n in seen]),
                down=extreme([n.down for n in seen]),
            )
        )
    return replace(platform, transfer=tuple(rows))
