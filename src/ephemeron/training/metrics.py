"""Metrics of the test set, from sums over its slices: one definition for functions, progress, results and reports.

Accuracy is a number only where every slice counted right and wrong answers; a loss only where it is finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, TypedDict


class Metrics(TypedDict):
    """Means over the test set; None where there is no such number."""

    loss: float | None
    accuracy: float | None


class Sums(Protocol):
    """Sums over a slice of the test set."""

    @property
    def loss_sum(self) -> float:
        """Mean loss times samples."""

    @property
    def correct(self) -> int | None:
        """Right answers; None where outputs and targets are no classes."""

    @property
    def counted(self) -> int | None:
        """Answers that could be right; None: one of each sample."""

    @property
    def samples(self) -> int: ...


def means(slices: Iterable[Sums]) -> Metrics:
    """Means over all slices, each weighted by what it counted."""
    parts = [s for s in slices if s.samples]
    samples = sum(s.samples for s in parts)
    if not samples:
        return {"loss": None, "accuracy": None}
    loss = sum(s.loss_sum for s in parts) / samples
    right = [s.correct for s in parts if s.correct is not None]
    counted = sum(s.samples if s.counted is None else s.counted for s in parts)
    known = len(right) == len(parts) and counted > 0
    return {"loss": loss if math.isfinite(loss) else None, "accuracy": sum(right) / counted if known else None}
