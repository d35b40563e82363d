"""What a plan wants to know of a space, each thing looked for once, all of it in the same tables."""

from __future__ import annotations

import dataclasses
from functools import cache

from ephemeron.planning.pareto import Best, Candidate, Front
from ephemeron.planning.search import Query, Search
from ephemeron.planning.space import Limits, Space

TOLERANCE = 0.005
"""By which a configuration may be better than the nearest one of the front that is listed."""


class Answers:
    """Questions to one space. Optima are exact; the front is complete up to `TOLERANCE`."""

    def __init__(self, space: Space, limits: Limits, minimise: str) -> None:
        self.space, self.limits, self.minimise = space, limits, minimise
        self.wider = int(min(2 * space.largest_global_batch, space.workload.samples))
        self.search = Search(space, largest_global_batch=self.wider)
        self._front = Front(TOLERANCE)
        self.search.run(self._front)
        self.ask = cache(self._ask)

    def best(self) -> Candidate | None:
        """Within the limits."""
        return self.ask(self.minimise, self.limits)

    def without(self, limit: str) -> Candidate | None:
        """The best where `deadline_s` or `budget_usd` does not count."""
        return self.ask(self.minimise, dataclasses.replace(self.limits, **{limit: None}))

    def free(self, minimise: str, **limits: float) -> Candidate | None:
        """The best whatever it costs, or takes, but for the limits given."""
        return self.ask(minimise, Limits(**limits))  # type: ignore[arg-type]

    def with_wider_batches(self) -> Candidate | None:
        """The best if the global batch might be twice as large."""
        if self.wider <= self.space.largest_global_batch:
            return None
        return self.ask(self.minimise, self.limits, Query(largest_global_batch=self.wider))

    def alone(self) -> Candidate | None:
        """The cheapest single function."""
        return self.ask("cost", Limits(), Query(workers=frozenset([1])))

    def other_workers(self, best: Candidate) -> list[tuple[str, Candidate]]:
        """The next best number of functions, and one more or less, outside the limits where it has to be."""
        others = frozenset(range(1, self.space.most_workers + 1)) - {best.workers}
        found = [("next best W", self.ask(self.minimise, self.limits, Query(workers=others)))]
        for step in (-1, 1):
            if best.workers + step >= 1:
                only = Query(workers=frozenset([best.workers + step]))
                within = self.ask(self.minimise, self.limits, only)
                found.append((f"{step:+d} worker", within or self.ask(self.minimise, Limits(), only)))
        return [(why, c) for why, c in found if c is not None]

    def other_quotas(self, best: Candidate) -> list[tuple[str, Candidate]]:
        """One memory step more or less for the same functions, batches chosen anew."""
        quotas = list(map(float, self.space.quotas))
        i = quotas.index(float(best.memory_mb))
        found = []
        for step in (-1, 1):
            if 0 <= i + step < len(quotas):
                query = Query(
                    workers=frozenset([best.workers]), memory_mb=quotas[i + step], aggregators=best.aggregators
                )
                c = self.ask(self.minimise, Limits(), query)
                if c is not None:
                    found.append((f"{step:+d} memory step", c))
        return found

    def everything(self) -> list[Candidate]:
        """The front, whatever the limits, fastest first."""
        points = self._front.thinned()
        return [points.candidate(self.space.options, i) for i in range(len(points))]

    def front(self) -> list[Candidate]:
        """The part of it that keeps the limits."""
        return [c for c in self.everything() if c.seconds <= self.limits.seconds and c.cost_usd <= self.limits.usd]

    def _ask(self, minimise: str, limits: Limits, query: Query | None = None) -> Candidate | None:
        target = Best(minimise, limits)
        query = query or Query()
        target.take(self.search.known(query, limits))
        self.search.run(target, query)
        if query.largest_global_batch is None:
            self._front.take(target.points)
        return target.points.candidate(self.space.options, 0) if len(target.points) else None
