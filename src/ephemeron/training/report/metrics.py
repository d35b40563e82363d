"""Learning curves of a run, from the reports of all ranks.

Ranks report their own batch, so the loss of an iteration is the mean over ranks weighted by samples: unequal
batches would bias a plain mean. A replaced function repeats iterations; the highest attempt is the one whose
gradient counted, so it alone is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from ephemeron.events import Evaluated, Measured, Progress
from ephemeron.runs.metrics import Metrics, means

Points = tuple[tuple[float, float], ...]
"""(x, y) pairs in the order of x. Where y is NaN the line has a gap."""

DRAWN_POINTS = 2000
"""More points than this in one line cannot be told apart, and make a page slow."""

_DRAWN = ("loss", "accuracy")
"""Metrics that the learning chart has."""

_SMOOTH_FROM = 120
"""Fewer iterations than this are legible without a smoothed line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """The test set after one epoch, all ranks' slices together."""

    epoch: int
    """Epochs completed."""
    iteration: int
    t: float
    """When the last slice was done, in run seconds."""
    metrics: Metrics
    """By name; None where it is not finite or there is no such number."""
    samples: int
    ranks: int
    """Number of ranks that reported; fewer than in other epochs when one died."""

    @property
    def loss(self) -> float | None:
        """Loss; None: not finite."""
        return self.metrics.get("loss")

    @property
    def accuracy(self) -> float | None:
        """None: the program reports none."""
        return self.metrics.get("accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Loss per iteration and evaluations per epoch."""

    loss: Points = ()
    """(iteration, sample-weighted mean loss); thinned for drawing, extremes kept, with a gap where it is not finite."""
    smooth: Points = ()
    """Moving mean over `window` iterations; empty for short runs."""
    window: int = 1
    last_loss: float | None = None
    """Mean of the last iteration that has a finite loss."""
    iterations: int = 0
    """Distinct iterations that at least one rank finished."""
    not_finite: int = 0
    """Iterations whose loss is NaN or infinite: they cannot be drawn."""
    evaluations: tuple[EvaluationPoint, ...] = ()
    curves: tuple[tuple[str, Points], ...] = ()
    """By name, `train/…` for numbers of iterations and `evaluation/…` for those of evaluations, all but losses and accuracies:
    (iteration, value), thinned for drawing."""

    @property
    def final(self) -> EvaluationPoint | None:
        """The last evaluation that all ranks took part in."""
        most = max((e.ranks for e in self.evaluations), default=0)
        return next((e for e in reversed(self.evaluations) if e.ranks == most), None)


def learning(progress: Iterable[Progress], evaluated: Iterable[Evaluated], measured: Iterable[Measured] = ()) -> Learning:
    """Merges what the ranks reported."""
    progress = _counted(progress)
    losses = [(i, values["loss"]) for i, values in _means(progress)]
    stretches = list(_finite_stretches(losses))
    finite = sum(map(len, stretches))
    window = max(1, finite // 60) if finite >= _SMOOTH_FROM else 1
    evaluations = _evaluations(evaluated, {m.iteration: m.metrics for m in measured})
    return Learning(
        loss=_with_gaps(stretches, finite),
        smooth=_with_gaps([_moving_mean(s, window) for s in stretches], finite) if window > 1 else (),
        window=window,
        last_loss=stretches[-1][-1][1] if stretches else None,
        iterations=len(losses),
        not_finite=len(losses) - finite,
        evaluations=evaluations,
        curves=tuple((name, thin(points)) for name, points in _curves(progress, evaluations).items()),
    )


def _finite_stretches(losses: Iterable[tuple[int, float]]) -> Iterator[list[tuple[float, float]]]:
    """The longest runs of points whose loss is finite."""
    for finite, points in groupby(losses, key=lambda p: math.isfinite(p[1])):
        if finite:
            yield [(float(i), loss) for i, loss in points]


def _with_gaps(stretches: list[list[tuple[float, float]]], total: int) -> Points:
    """One line of them all, thinned in proportion, NaN between them."""
    found: list[tuple[float, float]] = []
    for stretch in stretches:
        if found:
            found.append(((found[-1][0] + stretch[0][0]) / 2, math.nan))
        found += thin(stretch, max(4, DRAWN_POINTS * len(stretch) // total))
    return tuple(found)


def _counted(progress: Iterable[Progress]) -> list[Progress]:
    """One report for each rank and iteration: that of the highest attempt."""
    best: dict[tuple[int, int], Progress] = {}
    for p in progress:
        old = best.get((p.rank, p.iteration))
        if old is None or p.attempt >= old.attempt:
            best[p.rank, p.iteration] = p
    return list(best.values())


def _means(reports: Iterable[Progress]) -> list[tuple[int, dict[str, float]]]:
    """(iteration, weighted means over ranks of the loss and of what else they report), sorted."""
    sums: dict[int, dict[str, tuple[float, float]]] = {}
    for p in reports:
        for name, value in {"loss": p.loss, **p.metrics}.items() if p.terms else ():
            of = sums.setdefault(p.iteration, {})
            total, terms = of.get(name, (0.0, 0.0))
            of[name] = (total + value * p.terms, terms + p.terms)
    return [(i, {name: total / terms for name, (total, terms) in of.items()}) for i, of in sorted(sums.items())]


def _curves(reports: Iterable[Progress], evaluations: Iterable[EvaluationPoint]) -> dict[str, list[tuple[float, float]]]:
    """Points of every metric but loss and accuracy, where it is finite."""
    found: dict[str, list[tuple[float, float]]] = {}
    told = [(f"train/{n}", i + 1, v) for i, values in _means(reports) for n, v in values.items() if n not in _DRAWN]
    told += [(f"evaluation/{n}", e.iteration, v) for e in evaluations for n, v in e.metrics.items() if n not in _DRAWN and v is not None]
    for name, iteration, value in told:
        if math.isfinite(value):
            found.setdefault(name, []).append((float(iteration), value))
    return found


def _evaluations(evaluated: Iterable[Evaluated], measured: Mapping[int, Metrics]) -> tuple[EvaluationPoint, ...]:
    best: dict[tuple[int, int], Evaluated] = {}
    for e in evaluated:
        old = best.get((e.iteration, e.rank))
        if old is None or e.attempt >= old.attempt:
            best[e.iteration, e.rank] = e
    points: dict[int, list[Evaluated]] = {}
    for e in best.values():
        points.setdefault(e.iteration, []).append(e)
    return tuple(_one_point(parts, measured.get(iteration)) for iteration, parts in sorted(points.items()) if any(p.samples for p in parts))


def _one_point(parts: list[Evaluated], merged: Metrics | None) -> EvaluationPoint:
    return EvaluationPoint(
        epoch=parts[0].epoch,
        iteration=parts[0].iteration,
        t=max(p.t for p in parts),
        metrics=means(parts) if merged is None else merged,
        samples=sum(p.samples for p in parts),
        ranks=len(parts),
    )


def _moving_mean(points: list[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Centred; at the ends the window shrinks, so that the line begins and ends with the data."""
    y = np.array([p[1] for p in points])
    total = np.concatenate([[0.0], np.cumsum(y)])
    middle = np.arange(len(y))
    reach = np.minimum(window // 2, np.minimum(middle, len(y) - 1 - middle))
    low, high = middle - reach, middle + reach + 1
    mean = (total[high] - total[low]) / (high - low)
    return [(x, float(m)) for (x, _), m in zip(points, mean, strict=True)]


def thin(points: list[tuple[float, float]], limit: int = DRAWN_POINTS) -> Points:
    """At most `limit` points: the lowest and the highest of each bin, so that no spike is lost."""
    if len(points) <= limit:
        return tuple(points)
    inner = points[1:-1]
    edges = np.linspace(0, len(inner), (limit - 2) // 2 + 1).astype(int)
    kept = [points[0]]
    for a, b in pairwise(edges):
        part = inner[a:b]
        if part:
            kept.extend(sorted({min(part, key=_y), max(part, key=_y)}))
    return (*kept, points[-1])


def _y(point: tuple[float, float]) -> float:
    return point[1]
