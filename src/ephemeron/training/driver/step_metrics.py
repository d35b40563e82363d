"""Metrics of a run by step, merged over its ranks as their events arrive.

A row is complete when every rank has reported. What a replaced function reports again changes no complete row; a resumed run
repeats iterations, and its rows are made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ephemeron.events import Evaluated, Event, Measured, Progress, RunStarted
from ephemeron.runs.cost import Membership
from ephemeron.runs.metrics import means

Split = Literal["train", "evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step."""

    step: int
    """Iterations completed."""
    epoch: float
    """Epochs completed, in parts of an epoch."""
    t: float
    """When the last rank reported, in run seconds."""
    split: Split
    """`train`: means over the batch of the step. `evaluation`: over the evaluation data, after the step."""
    metrics: Mapping[str, float]
    """By name. A training loss may be NaN."""


@dataclass(slots=True)
class StepMerger:
    """Merges what ranks report.

    Args:
        merged: whether functions merge evaluations themselves: what single ranks report of them is then left out. Otherwise
            the sums of all ranks are a row, and what functions have merged, if anything, a later row of the same step.
    """

    merged: bool = False
    _members: Membership = field(default_factory=Membership)
    _epoch_length: float = 1.0
    _last: dict[Split, int] = field(default_factory=dict)
    """The last complete step of this session."""
    _progress: dict[int, dict[int, Progress]] = field(default_factory=dict)
    """By iteration and rank, what is not complete."""
    _evaluated: dict[int, dict[int, Evaluated]] = field(default_factory=dict)
    _measured: int = -1
    """Last step whose metrics functions have merged themselves."""

    def feed(self, event: Event) -> StepMetrics | None:
        """The row that an event completes, if it completes one. Rows of one split come in the order of their steps."""
        self._members.feed(event)
        match event:
            case RunStarted():
                self._epoch_length = event.iterations / max(1, event.epochs)
                self._last, self._measured = {}, -1
            case Progress():
                return self._trained(event)
            case Evaluated() if not self.merged:
                return self._evaluation(event)
            case Measured() if event.iteration > self._measured:
                self._measured = event.iteration
                known = {name: value for name, value in event.metrics.items() if value is not None}
                return self._row("evaluation", event.iteration, event.t, known)
        return None

    def _row(self, split: Split, step: int, t: float, metrics: Mapping[str, float]) -> StepMetrics:
        epoch = round(step / self._epoch_length, 6)
        return StepMetrics(step=step, epoch=epoch, t=t, split=split, metrics=metrics)

    def _trained(self, event: Progress) -> StepMetrics | None:
        step = event.iteration + 1
        if step <= self._last.get("train", 0):
            return None
        ranks = self._progress.setdefault(event.iteration, {})
        known = ranks.get(event.rank)
        if known is None or event.attempt >= known.attempt:
            ranks[event.rank] = event
        if len(ranks) < self._members.workers_at(event.iteration):
            return None
        del self._progress[event.iteration]
        self._last["train"] = step
        return self._row("train", step, max(e.t for e in ranks.values()), _merged(ranks.values()))

    def _evaluation(self, event: Evaluated) -> StepMetrics | None:
        step = event.iteration
        if step <= self._last.get("evaluation", -1):
            return None
        ranks = self._evaluated.setdefault(step, {})
        known = ranks.get(event.rank)
        if known is None or event.attempt >= known.attempt:
            ranks[event.rank] = event
        if len(ranks) < self._members.workers_at(step - 1):
            return None
        del self._evaluated[step]
        self._last["evaluation"] = step
        found = means(ranks[rank] for rank in sorted(ranks))
        metrics = {name: value for name, value in found.items() if value is not None}
        if not metrics or step <= self._measured:
            return None
        return self._row("evaluation", step, max(e.t for e in ranks.values()), metrics)


def _merged(reports: Iterable[Progress]) -> dict[str, float]:
    """Loss and further metrics, weighted by what they are means over on the ranks that report them."""
    sums: dict[str, tuple[float, float]] = {}
    for report in sorted(reports, key=lambda e: e.rank):
        if report.terms:
            for name, value in {"loss": report.loss, **report.metrics}.items():
                total, terms = sums.get(name, (0.0, 0.0))
                sums[name] = total + value * report.terms, terms + report.terms
    return {name: total / terms for name, (total, terms) in sums.items()}
