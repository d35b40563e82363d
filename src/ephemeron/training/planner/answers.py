"""Questions of a plan to its search space, each searched once, all in the same tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ephemeron.training.planner.plan import PlanLimits
from ephemeron.training.planner.search.branch_and_bound import Search
from ephemeron.training.planner.search.pareto import Best, Candidate, Front, Points
from ephemeron.training.planner.search.space import Space
from ephemeron.training.planner.targets import ALL, Query

TOLERANCE = 0.005
"""Relative difference by which a configuration may be better than the nearest listed one of the front."""
ALONE = Query(workers=frozenset([1]))


Question = tuple[str, PlanLimits, Query]
"""Objective, limits, and part of the space."""


class PlanAnswers:
    """Questions to one space. Optima are exact; the front is complete up to `TOLERANCE`."""

    def __init__(self, space: Space, limits: PlanLimits, minimise: str) -> None:
        self.space, self.limits, self.minimise = space, limits, minimise
        self.wider = int(min(2 * space.largest_global_batch, space.workload.samples))
        self.search = Search(space, largest_global_batch=self.wider)
        self._front = Front(TOLERANCE)
        self._listed: tuple[Points, list[Candidate]] | None = None
        self._known: dict[Question, Candidate | None] = {}
        first: list[Question] = [
            (minimise, limits, ALL),
            ("cost", PlanLimits(), ALL),
            ("time", PlanLimits(), ALL),
            ("cost", PlanLimits(), ALONE),
            *((minimise, _without(limits, name), ALL) for name in ("deadline_s", "budget_usd")),
        ]
        self._ask_all(first, front=True)

    @property
    def _wide(self) -> Query:
        return Query(largest_global_batch=self.wider)

    def best(self) -> Candidate | None:
        """Within the limits."""
        return self.ask(self.minimise, self.limits)

    def without(self, limit: str) -> Candidate | None:
        """The best where `deadline_s` or `budget_usd` does not count."""
        return self.ask(self.minimise, _without(self.limits, limit))

    def free(self, minimise: str, *, deadline_s: float | None = None, budget_usd: float | None = None) -> Candidate | None:
        """The best within the limits given here, instead of those of the plan."""
        return self.ask(minimise, PlanLimits(deadline_s=deadline_s, budget_usd=budget_usd))

    def with_wider_batches(self) -> Candidate | None:
        """The best if the global batch might be twice as large."""
        if self.wider <= self.space.largest_global_batch:
            return None
        return self.ask(self.minimise, self.limits, self._wide)

    def alone(self) -> Candidate | None:
        """The cheapest single function."""
        return self.ask("cost", PlanLimits(), ALONE)

    def beside(self, best: Candidate, *, workers: bool = True) -> list[tuple[str, Candidate]]:
        """Neighbours of the best: the next best W and one function more or less (unless W is given), one memory step.

        Another number of functions is looked for within the limits, and outside them where it has to be; another quota
        without limits, for the same functions, batches chosen anew.
        """
        others = frozenset(range(1, self.space.most_workers + 1)) - {best.workers}
        steps = {step: Query(workers=frozenset([best.workers + step])) for step in (-1, 1) if best.workers + step >= 1}
        quotas = list(map(float, self.space.quotas))
        i = quotas.index(float(best.memory_mb))
        same = frozenset([best.workers])
        sizes = {
            step: Query(workers=same, memory_mb=quotas[i + step], aggregators=best.aggregators)
            for step in (-1, 1)
            if 0 <= i + step < len(quotas)
        }
        asked: list[tuple[str, Question]] = []
        if workers:
            asked.append(("next best W", (self.minimise, self.limits, Query(workers=others))))
            asked += [(f"{step:+d} worker", (self.minimise, self.limits, q)) for step, q in steps.items()]
        asked += [(f"{step:+d} memory step", (self.minimise, PlanLimits(), q)) for step, q in sizes.items()]
        together = [question for _, question in asked]
        if self.wider > self.space.largest_global_batch:
            together.append((self.minimise, self.limits, self._wide))
        self._ask_all(together)
        found = []
        for why, (minimise, limits, query) in asked:
            c = self.ask(minimise, limits, query)
            if c is None and query in steps.values():
                c = self.ask(minimise, PlanLimits(), query)
            if c is not None:
                found.append((why, c))
        return found

    def by_channel(self) -> dict[str, Candidate | None]:
        """The best within the limits of each kind of channel; one function alone counts where it was searched."""
        options: dict[str, list[int]] = {}
        for i, o in enumerate(self.space.options):
            options.setdefault(o.platform.channel, []).append(i)
        asked = {name: Query(options=frozenset(mine)) for name, mine in options.items()}
        self._ask_all([(self.minimise, self.limits, query) for query in asked.values()])
        return {name: self.ask(self.minimise, self.limits, query) for name, query in asked.items()}

    def everything(self) -> list[Candidate]:
        """The front without limits, fastest first."""
        points = self._front.points
        if self._listed is None or self._listed[0] is not points:
            self._listed = points, self._front.thinned().candidates(self.space.options)
        return self._listed[1]

    def front(self) -> list[Candidate]:
        """The part of it that keeps the limits."""
        return [c for c in self.everything() if c.seconds <= self.limits.seconds and c.cost_usd <= self.limits.usd]

    def ask(self, minimise: str, limits: PlanLimits, query: Query = ALL) -> Candidate | None:
        """The best within limits, in a part of the space."""
        self._ask_all([(minimise, limits, query)])
        return self._known[_plain((minimise, limits, query))]

    def _ask_all(self, questions: Sequence[Question], *, front: bool = False) -> None:
        """Answers those that are new, together, and finds the Pareto front if `front`."""
        new = {q: Best(q[0], q[1]) for q in map(_plain, questions) if q not in self._known}
        if not new:
            return
        for (_, limits, query), target in new.items():
            target.take(self.search.known(query, limits))
        targets: list[tuple[Best | Front, Query]] = [(self._front, ALL)] if front else []
        self.search.run_all([*targets, *((target, q[2]) for q, target in new.items())])
        for q, target in new.items():
            points = target.points
            if q[2].largest_global_batch is None:
                self._front.take(points)
            self._known[q] = next(iter(points.candidates(self.space.options)), None)


def _without(limits: PlanLimits, name: str) -> PlanLimits:
    return dataclasses.replace(limits, **{name: None})


def _plain(question: Question) -> Question:
    """Normal form of a question: the space has its largest global batch already."""
    minimise, limits, query = question
    return minimise, dataclasses.replace(limits, max_global_batch=None), query
