"""Metrics of the evaluation data, as sums over its slices: one definition for functions, progress, results and reports.

A sum and the number of its terms merge exactly, whichever function has which slice. A metric is a number only where every
slice that has samples knows it, and where it is finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

Metrics: TypeAlias = Mapping[str, float | None]
"""By name; None where there is no such number. `loss` is always among them."""
MetricSum: TypeAlias = tuple[float, float] | None
"""Total and number of terms; None: a part of the slice has no such number."""


LOADER = "/dataloader_idx_"
"""In the name of a metric of one of several loaders: a slice with none of its samples has no such metric, and counts nothing."""


class Sums(Protocol):
    """Sums over a slice of the evaluation data."""

    @property
    def sums(self) -> Mapping[str, MetricSum]: ...

    @property
    def samples(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationSums:
    """Evaluation of a slice."""

    samples: int = 0
    sums: Mapping[str, MetricSum] = field(default_factory=dict)
    """By name of the metric."""
    states: Mapping[str, np.ndarray] = field(default_factory=dict)
    """States of metrics that are no sums, by `metric/state`: they are merged where the metric's class is known."""

    def plus(self, other: Sums) -> EvaluationSums:
        """The sums over both slices. An empty slice changes nothing."""
        return merged((self, other))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, EvaluationSums)
            and (self.samples, self.sums) == (other.samples, other.sums)
            and self.states.keys() == other.states.keys()
            and all(np.array_equal(a, other.states[name]) for name, a in self.states.items())
        )

    __hash__ = None  # type: ignore[assignment]


def merged(slices: Iterable[Sums]) -> EvaluationSums:
    """The sums over all slices, added in the given order."""
    parts = [s for s in slices if s.samples]
    names = dict.fromkeys(name for part in parts for name in part.sums)
    sums = {name: _sum([part.sums.get(name, (0.0, 0.0) if LOADER in name else None) for part in parts]) for name in names}
    return EvaluationSums(sum(p.samples for p in parts), sums)


def means(slices: Iterable[Sums]) -> dict[str, float | None]:
    """Means over all slices, each weighted by what it counted."""
    found = {name: _mean(total) for name, total in merged(slices).sums.items()}
    return {"loss": None, **found}


def counted(total: float, count: float) -> tuple[float, float]:
    """A total and the number of its terms. A total of no terms is nothing, also where it was computed as 0/0."""
    return (total, count) if count else (0.0, 0.0)


def _sum(parts: list[MetricSum]) -> MetricSum:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return sum(total for total, _ in known), sum(count for _, count in known)


def _mean(total: MetricSum) -> float | None:
    if total is None or not total[1]:
        return None
    mean = total[0] / total[1]
    return mean if math.isfinite(mean) else None
