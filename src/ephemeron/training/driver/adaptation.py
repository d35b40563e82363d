"""Changes of a running run that is about to miss its deadline or its budget: the rest is planned anew from what was measured. Pure.

The time of an iteration is measured per epoch and divided into computing, which depends on the batch of a function and not on
their number, and the rest, the exchange. An aggregator receives W - 1 shards of size S/K, every function sends and receives S: so
the exchange of W functions with K aggregators takes time in proportion to 2 + (W - 1)/K, and requests are in
proportion to W K (FasDL, equations 3-24 and 3-25). Samples that are left divided by the global batch give the iterations that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ephemeron.events import Event, GenerationStarted, Progress, RunStarted
from ephemeron.functions.base import Limits
from ephemeron.runs.cost import CostMeter
from ephemeron.training.job.generation import Generation, Resize, resized_values
from ephemeron.training.worker.spec import RunSpec

SLACK = 1.02
"""Factor by which the projection must miss a limit: measurements scatter."""
MOST_FACTOR = 8
"""Largest factor by which the number of functions grows at once."""


class Rest(NamedTuple):
    """The rest of a run with some number of functions, projected."""

    workers: int
    ends_s: float
    """Run time at its end."""
    cost_usd: float
    """Cost of the whole run."""


@dataclass(slots=True)
class Adaptation:
    """Projections of one run, from its events.

    Args:
        spec: in the first generation.
        limits: of the platform.
    """

    spec: RunSpec
    limits: Limits
    _ends: list[float] = field(default_factory=list)
    """Times at which rank 0 ended the iterations of the epoch."""
    _compute_s: list[float] = field(default_factory=list)
    """Computing time of each iteration, of any rank, in the epoch."""
    _before: tuple[float, float] = (0.0, 0.0)
    """Run time and storage cost at the beginning of the epoch."""
    _asked: bool = False
    """Whether a change was asked for that has not begun."""

    def feed(self, event: Event, meter: CostMeter) -> Resize | None:
        """Takes one event into account; returns the change that should be asked for, if there is one.

        Args:
            event: that `meter` has been fed with.
            meter: of the run.
        """
        match event:
            case RunStarted():
                self._begin(event.t, meter)
            case GenerationStarted():
                self.spec, self._asked = self.spec.in_generation(_members(self.spec, event)), False
                self._begin(event.t, meter)
            case Progress():
                self._compute_s.append(sum(end - start for phase, start, end in event.spans if phase == "compute"))
                if event.rank == 0:
                    self._ends.append(event.t)
                    if event.iteration + 1 < self.spec.iterations and self.spec.timeline.starts_epoch(event.iteration + 1):
                        return self._epoch_ended(event.iteration + 1, event.t, meter)
        return None

    def _begin(self, t: float, meter: CostMeter) -> None:
        self._ends, self._compute_s, self._before = [t], [], (t, meter.storage_usd(t))

    def _epoch_ended(self, iteration: int, t: float, meter: CostMeter) -> Resize | None:
        wanted = None if self._asked or len(self._ends) < 3 else self._wanted(iteration, t, meter)
        self._begin(t, meter)
        self._asked |= wanted is not None
        return wanted

    def _wanted(self, iteration: int, t: float, meter: CostMeter) -> Resize | None:
        now = self.project(self.spec.configuration.workers, iteration, t, meter)
        if self._holds(now, SLACK):
            return None
        most = min(self.limits.concurrency, MOST_FACTOR * now.workers, self.spec.samples // self.spec.configuration.batch_size)
        others = [self.project(workers, iteration, t, meter) for workers in range(1, max(1, most) + 1)]
        fitting = [rest for rest in others if self._holds(rest, 1.0)]
        if fitting:
            best = min(fitting, key=lambda rest: rest.cost_usd)
        else:  # neither: as soon as possible within the budget, else as cheaply as possible
            paid = [rest for rest in others if self.spec.budget_usd is None or rest.cost_usd <= self.spec.budget_usd]
            best = min(paid, key=lambda rest: rest.ends_s) if paid else min(others, key=lambda rest: rest.cost_usd)
        return None if best.workers == now.workers else Resize(workers=best.workers)

    def _holds(self, rest: Rest, slack: float) -> bool:
        deadline_s, budget_usd = self.spec.deadline_s, self.spec.budget_usd
        in_time = deadline_s is None or rest.ends_s <= slack * deadline_s
        return in_time and (budget_usd is None or rest.cost_usd <= slack * budget_usd)

    def project(self, workers: int, iteration: int, t: float, meter: CostMeter) -> Rest:
        """The rest of the run with so many functions.

        Args:
            workers: number of functions.
            iteration: which is computed next, the first one of an epoch.
            t: run time.
            meter: of the run.
        """
        spec, c = self.spec, self.spec.configuration
        steps = [b - a for a, b in zip(self._ends, self._ends[1:], strict=False)]
        each_s = median(steps)
        compute_s = min(each_s, median(self._compute_s or [0.0]))
        resize = Resize(workers=workers)
        k = resized_values(resize, workers=c.workers, aggregators=c.aggregators, pattern=c.pattern)["aggregators"]
        exchange = (2 + (workers - 1) / k) / (2 + (c.workers - 1) / c.aggregators) if workers > 1 else 0.0
        other_s = compute_s + (each_s - compute_s) * exchange
        then = spec.in_generation(spec.resized(resize, iteration))
        left = then.iterations - iteration
        storage_usd = (meter.storage_usd(t) - self._before[1]) / max(1, len(steps))
        functions_usd = spec.prices.functions_usd(workers * c.memory_mb / 1024 * other_s, 0)
        each_usd = functions_usd + storage_usd * workers * k / (c.workers * c.aggregators)
        return Rest(workers, t + left * other_s, meter.cost_usd(t) + left * each_usd)


def _members(spec: RunSpec, event: GenerationStarted) -> Generation:
    return Generation(
        number=event.generation,
        from_iteration=event.from_iteration,
        from_epoch=event.from_epoch,
        used_samples=spec.timeline.used_before(event.from_iteration),
        workers=event.workers,
        memory_mb=event.memory_mb,
        aggregators=event.aggregators,
        batch_size=event.batch_size,
        nonaggregator_batch_size=event.nonaggregator_batch_size,
        request=event.request,
    )
