"""Incumbents of a search: one best candidate, or the Pareto front of time and cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ephemeron.training.planner.model.rates import Array
from ephemeron.training.planner.plan import PlanLimits
from ephemeron.training.planner.search.space import Option

ROUNDING = 1e-12
"""Bounds and predictions add the same numbers in different orders."""
TIE = 1e-9
"""Relative difference below which two times, or two costs, are one: the model adds in different orders."""


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
        """Sort key: the objective, then the other quantity, then the plainer configuration."""
        two = (self.cost_usd, self.seconds) if minimise == "cost" else (self.seconds, self.cost_usd)
        return (*two, self.workers, self.memory_mb, self.aggregators, self.batch)


@dataclass(slots=True)
class SearchResult:
    """Result of a search."""

    method: str
    best: Candidate | None = None
    evaluated: int = 0
    pruned: int = 0
    seconds: float = 0.0
    optimal: bool = False
    front: list[Candidate] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Points:
    """Computed candidates as columns: option, W, M, K, B^a, B^n, and their times and costs."""

    what: Array
    """(6, n)."""
    seconds: Array
    usd: Array

    def take(self, which: Array) -> Points:
        return Points(self.what[:, which], self.seconds[which], self.usd[which])

    def candidates(self, options: tuple[Option, ...]) -> list[Candidate]:
        """Every one as a value."""
        rows = zip(self.what.T.astype(int).tolist(), self.seconds.tolist(), self.usd.tolist(), strict=True)
        return [Candidate(options[o], w, m, k, ba, bn if w > k else ba, seconds, usd) for (o, w, m, k, ba, bn), seconds, usd in rows]

    def __len__(self) -> int:
        return len(self.seconds)


NONE = Points(np.empty((6, 0)), np.empty(0), np.empty(0))


class Best:
    """The best candidate within limits."""

    def __init__(self, minimise: str, limits: PlanLimits) -> None:
        self.minimise, self.limits = minimise, limits
        self.value = math.inf
        self.points = NONE

    def hopeless(self, seconds: Array, usd: Array) -> Array:
        """Which of these bounds can hold nothing better."""
        mine = usd if self.minimise == "cost" else seconds
        late, dear = seconds > self.limits.seconds * (1 + ROUNDING), usd > self.limits.usd * (1 + ROUNDING)
        return np.asarray((mine >= self.value) | late | dear)

    def take(self, p: Points) -> None:
        good = (p.seconds <= self.limits.seconds) & (p.usd <= self.limits.usd) & np.isfinite(p.seconds)
        p = p.take(good)
        mine = p.usd if self.minimise == "cost" else p.seconds
        least = float(mine.min(initial=math.inf))
        if least <= self.value and len(p):
            p = p.take(np.flatnonzero(mine == least))
            all_of = p if least < self.value else joined([self.points, p])
            second = all_of.seconds if self.minimise == "cost" else all_of.usd
            i = np.lexsort((*all_of.what[[5, 4, 3, 2, 1]], second))[:1]
            self.points, self.value = all_of.take(i), least


class Front:
    """Everything that nothing beats in both time and cost, fastest first."""

    def __init__(self, tolerance: float = 0.0) -> None:
        """Args: `tolerance`: what beats a point of the front in time, in cost or in both by less than this is not looked for."""
        self.points = NONE
        self.slack = 1 + max(tolerance, ROUNDING)

    def hopeless(self, seconds: Array, usd: Array) -> Array:
        """Which of these bounds can hold nothing that is not beaten."""
        if not len(self.points):
            return np.isinf(seconds)
        # Times ascend and costs descend along the front: the cheapest among those as fast is the last of them.
        i = np.searchsorted(self.points.seconds, seconds * self.slack, side="right") - 1
        return np.asarray((i >= 0) & (usd * self.slack >= self.points.usd[np.maximum(i, 0)]) | np.isinf(seconds))

    def take(self, p: Points) -> None:
        if len(self.points):
            # Slower than a point that is no dearer.
            i = np.searchsorted(self.points.seconds, p.seconds) - 1
            p = p.take(np.flatnonzero(((i < 0) | (p.usd < self.points.usd[i])) & np.isfinite(p.seconds)))
        else:
            p = p.take(np.flatnonzero(np.isfinite(p.seconds)))
        if not len(p):
            return
        all_of = joined([self.points, p])
        all_of = all_of.take(np.lexsort((*all_of.what[[5, 4, 3, 2, 1]], all_of.usd, all_of.seconds)))
        before = np.concatenate([[math.inf], np.minimum.accumulate(all_of.usd)[:-1]])
        self.points = all_of.take(np.flatnonzero(all_of.usd < before))

    def thinned(self) -> Points:
        """Without those that another one beats but for rounding: equally fast and dearer, or equally dear and slower."""
        p = self.points
        keep = np.ones(len(p), dtype=bool)
        if len(p) > 1:
            keep[:-1] &= p.seconds[:-1] < p.seconds[1:] * (1 - TIE)
            keep[1:] &= p.usd[1:] < p.usd[:-1] * (1 - TIE)
        return p.take(np.flatnonzero(keep))


def joined(parts: list[Points]) -> Points:
    """One after another."""
    if len(parts) == 1:
        return parts[0]
    return Points(
        np.concatenate([p.what for p in parts], axis=1), np.concatenate([p.seconds for p in parts]), np.concatenate([p.usd for p in parts])
    )
