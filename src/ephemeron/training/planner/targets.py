"""Several questions to one space, asked of the same blocks at once: a block has one bit for each that still wants it.

At this scale a search costs what its calls cost, not what its numbers cost; ten questions that share their calls cost
little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.training.planner.model.rates import Array
from ephemeron.training.planner.search.bounds import Blocks, Ranges
from ephemeron.training.planner.search.pareto import ROUNDING, Best, Front, Points
from ephemeron.training.planner.search.space import Space
from ephemeron.training.planner.search.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which part of the space to search. None: all of it."""

    workers: frozenset[int] | None = None
    memory_mb: float | None = None
    aggregators: int | None = None
    largest_global_batch: int | None = None
    """May exceed the space's."""
    options: frozenset[int] | None = None
    """Indices of the space's options."""

    @property
    def free(self) -> bool:
        """Whether it holds every W, M, K and option."""
        return all(x is None for x in (self.workers, self.memory_mb, self.aggregators, self.options))

    def holds(self, what: Array, largest: float) -> Array:
        """Which candidates are in it.

        Args:
            what: option, W, M, K, B^a and B^n, as `Points` have them.
            largest: global batch.
        """
        option, w, m, k, x, y = what
        good = x * k + y * (w - k) <= largest
        if self.workers is not None and w.size:
            good &= self.allowed(int(w.max()))[w.astype(int)]
        if self.memory_mb is not None:
            good &= m == self.memory_mb
        if self.aggregators is not None:
            good &= k == self.aggregators
        if self.options is not None:
            good &= np.isin(option, sorted(self.options))
        return np.asarray(good)

    def allowed(self, most: int) -> Array:
        """Which W from 0 to `most` are in it."""
        found = np.ones(most + 1, dtype=bool)
        if self.workers is not None:
            found[:] = False
            found[[w for w in self.workers if w <= most]] = True
        return found


ALL = Query()


class Targets:
    """Targets of the search, each with its part of the space."""

    def __init__(self, asked: Sequence[tuple[Best | Front, Query]], space: Space, most: int) -> None:
        """Args: `most`: W."""
        self.asked = tuple(asked)
        own = [float(q.largest_global_batch or space.largest_global_batch) for _, q in asked]
        self._own = own
        self.widest = max(own)
        self.groups = [(g, sum(1 << i for i, x in enumerate(own) if x == g)) for g in sorted(set(own))]
        """Largest global batches, and the bits of those who allow just that one."""
        best = [(i, t) for i, (t, _) in enumerate(asked) if isinstance(t, Best)]
        self._best = [t for _, t in best]
        self._bits = np.array([1 << i for i, _ in best], dtype=np.int64)
        self._cost = np.array([[t.minimise == "cost"] for t in self._best])
        self._seconds = np.array([[t.limits.seconds * (1 + ROUNDING)] for t in self._best])
        self._usd = np.array([[t.limits.usd * (1 + ROUNDING)] for t in self._best])
        self._fronts = [(1 << i, t) for i, (t, _) in enumerate(asked) if isinstance(t, Front)]
        self.by_cost = bool(self._fronts) or bool(self._cost.any())
        """Whether some target would rather see cheap candidates first than fast ones."""
        self._free = sum(1 << i for i, (_, q) in enumerate(asked) if q.free)
        self._narrow = []
        for i, (_, q) in enumerate(asked):
            if not q.free:
                before = None if q.workers is None else np.concatenate([[0], np.cumsum(q.allowed(most))])
                self._narrow.append((1 << i, q, before))
        only = space.only_workers
        self._only = None if only is None else np.cumsum([0, *(w in only for w in range(most + 1))])

    def reach(self, first_mb: float, last_mb: float) -> bool:
        """Whether any target wants quotas from the first to the last."""
        return any(q.memory_mb is None or first_mb <= q.memory_mb <= last_mb for _, q in self.asked)

    def settled(self) -> bool:
        """Whether every target has a candidate that prunes the rest well."""
        return not self._fronts and self.valued()

    def valued(self) -> bool:
        """Whether every optimum is bounded from above."""
        return all(len(t.points) for t in self._best)

    def largest(self, asked: Array) -> Array | float:
        """The largest global batch of every block, or of all; those who want a block allow the same one."""
        found: Array | float = self.groups[0][0]
        for largest, bits in self.groups[1:]:
            found = np.where(asked & bits, largest, found)
        return found

    def possible(self, space: Space, t: Tables, b: Blocks, r: Ranges) -> Array | int:
        """Bits of those in whose part of the space a block holds anything."""
        found: Array | int = self._free
        for bit, q, before in self._narrow:
            good = np.ones(len(b), dtype=bool)
            if before is not None:
                good &= _any(before, r)
            if q.memory_mb is not None:
                quotas = space.quotas
                good &= (quotas[t.first[b.column]] <= q.memory_mb) & (quotas[t.last[b.column]] >= q.memory_mb)
            if q.aggregators is not None:
                good &= (r.k0 <= q.aggregators) & (r.k1 >= q.aggregators)
            if q.options is not None:
                good &= np.isin([f.option for f in t.families], sorted(q.options))[t.family[b.column]]
            found = found | np.where(good, bit, 0)
        return found if self._only is None else np.where(_any(self._only, r), found, 0)

    def hopeful(self, seconds: Array, usd: Array) -> Array:
        """Bits of those that may find something better where these are the bounds."""
        found: Array = np.zeros(len(seconds), dtype=np.int64)
        if self._best:
            value = np.array([[t.value] for t in self._best])
            good = np.where(self._cost, usd, seconds) < value
            good &= seconds <= self._seconds
            good &= usd <= self._usd
            found = self._bits @ good
        for bit, front in self._fronts:
            found = found | np.where(front.hopeless(seconds, usd), 0, bit)
        return found

    def take(self, p: Points) -> None:
        """Offers computed candidates to all."""
        for (target, q), largest in zip(self.asked, self._own, strict=True):
            whole = q.free and largest == self.widest
            target.take(p if whole else p.take(np.flatnonzero(q.holds(p.what, largest))))


def _any(before: Array, r: Ranges) -> Array:
    """Whether one of a block's W is allowed; `before`: how many smaller ones are."""
    last = len(before) - 2
    w0, w1 = np.minimum(r.w0, last).astype(int), np.minimum(r.w1, last).astype(int)
    return np.asarray(before[w1 + 1] > before[w0])


__all__ = ["ALL", "Query", "Targets"]
