"""Means over ranks of what every iteration reports, weighted by samples.

A replaced function repeats iterations; the highest attempt counts, as in the report. Growing arrays of 12 bytes for each rank and
iteration let a repetition take its predecessor's place, so an iteration is right as soon as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class IterationMeans:
    """The mean of one quantity for each iteration."""

    def __init__(self) -> None:
        self._attempts = np.full((4, 64), -1, dtype=np.int32)
        self._values = np.zeros((4, 64), dtype=np.float32)
        self._weights = np.zeros((4, 64), dtype=np.float32)
        self._sums, self._totals, self._times = (np.zeros(64) for _ in range(3))
        self._end = 0

    def add(
        self,
        ranks: Sequence[int],
        iterations: Sequence[int],
        attempts: Sequence[int],
        values: Sequence[float],
        weights: Sequence[float],
        times: Sequence[float],
    ) -> None:
        """Adds reports, one element of each sequence for one report. A value that is not finite makes its mean NaN."""
        if not ranks:
            return
        r, i, a = (np.asarray(x, dtype=np.int64) for x in (ranks, iterations, attempts))
        v, w, t = (np.asarray(x, dtype=np.float64) for x in (values, weights, times))
        self._reserve(int(r.max()) + 1, int(i.max()) + 1)
        self._end = max(self._end, int(i.max()) + 1)
        order = np.lexsort((a, r * self._attempts.shape[1] + i))
        r, i, a, v, w, t = r[order], i[order], a[order], v[order], w[order], t[order]
        last = np.append((np.diff(r) != 0) | (np.diff(i) != 0), True)
        last &= a >= self._attempts[r, i]
        r, i, a, v, w, t = r[last], i[last], a[last], v[last], w[last], t[last]
        repeated = self._attempts[r, i] >= 0
        self._attempts[r, i], self._values[r, i], self._weights[r, i] = a, v, w
        np.maximum.at(self._times, i, t)
        if repeated.any():
            columns = np.unique(i)
            self._sums[columns] = (self._values[:, columns].astype(np.float64) * self._weights[:, columns]).sum(axis=0)
            self._totals[columns] = self._weights[:, columns].sum(axis=0, dtype=np.float64)
        else:
            np.add.at(self._sums, i, v * w)
            np.add.at(self._totals, i, w)

    def curve(self) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """Iterations that were reported, in order; their means; the run seconds of their last report."""
        at = np.flatnonzero(self._totals[: self._end] > 0)
        return at, self._sums[at] / self._totals[at], self._times[at]

    def last(self) -> float | None:
        """The mean of the last iteration whose mean is finite; None: there is none."""
        _, means, _ = self.curve()
        finite = means[np.isfinite(means)]
        return float(finite[-1]) if finite.size else None

    def _reserve(self, ranks: int, iterations: int) -> None:
        rows, columns = self._attempts.shape
        if ranks > rows or iterations > columns:
            shape = (max(rows, ranks + ranks // 4), columns if iterations <= columns else 2 * iterations)
            for name, empty in (("_attempts", -1), ("_values", 0), ("_weights", 0)):
                old = getattr(self, name)
                grown = np.full(shape, empty, dtype=old.dtype)
                grown[:rows, :columns] = old
                setattr(self, name, grown)
            for name in ("_sums", "_totals", "_times"):
                setattr(self, name, np.concatenate((getattr(self, name), np.zeros(shape[1] - columns))))


def thinned(values: Floats, limit: int) -> npt.NDArray[np.int64]:
    """Places of at most `limit` values: the lowest and the highest of each bin, so that no spike is lost."""
    n = len(values)
    if n <= limit:
        return np.arange(n)
    bins = np.linspace(0, n, max(2, limit // 2) + 1).astype(int)
    kept = {0, n - 1}
    for a, b in pairwise(bins):
        part = values[a:b]
        if np.isfinite(part).any():
            kept |= {a + int(np.nanargmin(part)), a + int(np.nanargmax(part))}
        else:
            kept.add(int(a))
    return np.asarray(sorted(kept))


def moving_mean(values: Floats, window: int) -> Floats:
    """Centred mean of the finite values within a window, which shrinks at the ends."""
    finite = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(finite)))
    middle = np.arange(len(values))
    reach = np.minimum(window // 2, np.minimum(middle, len(values) - 1 - middle))
    low, high = middle - reach, middle + reach + 1
    n = count[high] - count[low]
    return np.where(n > 0, (total[high] - total[low]) / np.maximum(n, 1), np.nan)
