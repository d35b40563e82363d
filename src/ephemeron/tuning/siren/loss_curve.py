"""Loss after an epoch, as a function of the loss before it and of the number of functions.

Stochastic gradient descent: a step lowers the loss by a rate that depends on the loss, and the noise of its gradient raises it, both by
powers of the number of functions W:

    loss' = loss − W^speed · rate(loss) + W^spread · noise · loss^power,       samples / (W · batch) steps an epoch

With one learning rate for all W, speed is near 0 and spread near −1: steps average the batches of W functions, and more functions bring
fewer, less noisy steps. With learning rates in proportion to W (`scale_learning_rate`, as if each function's gradient was a step of its own,
which is SIREN's update), both are near 1: an epoch brings as much progress with many functions as with few, in less time, but the noise
limits the loss earlier. Speed and spread are fitted, too, with these values where the runs say nothing else. The rate is piecewise linear
between knots, in logarithms. Coefficients are fitted to runs with real gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import Count, NonNegative, Positive, Typed
from ephemeron.errors import JobError, MissingExtra

Array: TypeAlias = NDArray[np.float64]

SUBSTEPS = 16
"""Steps of integration of an epoch, at most."""
KNOTS = 6
GRID = 256
"""Points at which transitions are tabulated."""
SMOOTHNESS = 0.05
"""Weight of differences between rates of neighbouring knots."""
EXPECTED = 0.1
"""Weight of differences between the powers of W and those of the learning-rate rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve(Typed):
    """Coefficients of the loss of one job, with their error."""

    start: Positive
    """Loss before training."""
    samples: Count
    """Of an epoch."""
    batch_size: Count
    """Of a function."""
    knots: tuple[Positive, ...]
    """Losses between which the rate is interpolated, ascending."""
    rates: tuple[Positive, ...]
    """Relative decrease of the loss by a step, at the knots."""
    noise: NonNegative
    power: NonNegative = 1.0
    speed: float = 0.0
    """Power of the number of functions in the decrease by a step."""
    spread: float = -1.0
    """Power of the number of functions in the noise of a step."""
    error: NonNegative = 0.0
    """Mean relative error of the losses of runs that were not fitted; of those fitted, where there are no others."""
    epochs_error: NonNegative = 0.0
    """Mean relative error of epochs until a loss near the runs' lowest, likewise."""
    scatter: NonNegative = 0.0
    """Log-normal spread of the losses of the fitted runs around what follows from the epoch before."""
    runs: tuple[Count, ...] = ()
    """Numbers of functions of the runs that were fitted."""
    held_out: tuple[Count, ...] = ()
    """Numbers of functions of the runs by which the errors were measured."""

    def after_epoch(self, loss: Array | float, workers: Array | float) -> Array:
        """Loss after an epoch; shapes broadcast."""
        before, w = np.broadcast_arrays(np.asarray(loss, dtype=float), np.asarray(workers, dtype=float))
        steps = np.ceil(self.samples / (w * self.batch_size))
        substeps = int(min(SUBSTEPS, steps.max()))
        knots, rates = np.log(self.knots), np.log(self.rates)
        x, each = np.log(before), steps / substeps
        faster, noisier = w**self.speed, self.noise * w**self.spread
        for _ in range(substeps):
            slope = -faster * np.exp(np.interp(x, knots, rates)) + noisier * np.exp((self.power - 1) * x)
            x = x + np.clip(each * slope, -1.0, 0.5)
        return np.asarray(np.exp(np.clip(x, knots[0] - 2, knots[-1] + 1)))

    def losses(self, workers: Sequence[int]) -> list[float]:
        """Losses after epochs with these numbers of functions."""
        found, loss = [], self.start
        for w in workers:
            loss = float(self.after_epoch(loss, w))
            found.append(loss)
        return found

    def epochs_to(self, target: float, workers: int, most: int = 10_000) -> float:
        """Epochs until a loss, interpolated; infinite where it is not reached."""
        return epochs_until([self.start, *self.losses([workers] * most)], target)


def epochs_until(losses: Sequence[float], target: float) -> float:
    """Epochs until a loss is reached, interpolated between the losses before the first epoch and after each; infinite: never."""
    for i, (before, after) in enumerate(itertools.pairwise(losses)):
        if after <= target:
            return i + (before - target) / (before - after) if before > target else float(i)
    return math.inf


def fit_curve(
    runs: Mapping[int, Sequence[float]],
    *,
    start: float,
    samples: int,
    batch_size: int,
    scaled: bool = False,
    held_out: Mapping[int, Sequence[float]] | None = None,
) -> LossCurve:
    """The curve of a job.

    Args:
        runs: losses after each epoch, by number of functions.
        start: loss before training.
        samples: of an epoch.
        batch_size: of a function.
        scaled: whether learning rates are in proportion to the number of functions.
        held_out: further runs, by which the error is measured; None: it is that of the fitted ones.

    Raises:
        JobError: a loss is not positive and finite, or there are too few.
        MissingExtra: SciPy is not installed.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise MissingExtra("SciPy", "siren") from None
    everything = [x for losses in (*runs.values(), *(held_out or {}).values()) for x in losses]
    if len(everything) < 3 or not all(math.isfinite(x) and x > 0 for x in (start, *everything)):
        raise JobError("no loss curve can be fitted: losses must be positive and finite", remedy="monitor a loss")
    knots = np.geomspace(0.8 * min(everything), 1.05 * max(start, *everything), KNOTS)
    known = [(w, np.log([start, *losses[:-1]]), np.log(losses)) for w, losses in runs.items()]

    expected = np.array([1.0, 1.0] if scaled else [0.0, -1.0])

    def curve(p: Array) -> LossCurve:
        return LossCurve(
            start=start,
            samples=samples,
            batch_size=batch_size,
            knots=tuple(knots.tolist()),
            rates=tuple(np.exp(p[:KNOTS]).tolist()),
            noise=float(np.exp(p[KNOTS])),
            power=float(p[KNOTS + 1]),
            speed=float(p[KNOTS + 2]),
            spread=float(p[KNOTS + 3]),
            runs=tuple(runs),
        )

    def residuals(p: Array) -> Array:
        tried = curve(p)
        single = [np.log(tried.after_epoch(np.exp(x), w)) - y for w, x, y in known]
        whole = [np.log(tried.losses([w] * len(y))) - y for w, _, y in known]
        return np.concatenate([*single, *whole, SMOOTHNESS * np.diff(p[:KNOTS]), EXPECTED * (p[KNOTS + 2 :] - expected)])

    w, x, y = min(known, key=lambda k: k[0])
    steps = math.ceil(samples / (w * batch_size))
    rate = math.log(max(1e-6, float(np.max(x - y)) / steps))
    first = np.array([rate] * KNOTS + [rate - 3.0, 1.0, *expected])
    low = [math.log(1e-8)] * KNOTS + [math.log(1e-12), 0.0, *(expected - 1.0)]
    high = [0.0] * KNOTS + [0.0, 3.0, *(expected + 1.0)]
    found = curve(least_squares(residuals, np.clip(first, low, high), bounds=(low, high), max_nfev=150).x)
    judged = held_out or runs
    loss_error, epochs_error = errors_of(found, judged)
    single = [np.log(found.after_epoch(np.exp(x), w)) - y for w, x, y in known]
    return replace(
        found, error=loss_error, epochs_error=epochs_error, scatter=float(np.std(np.concatenate(single))), held_out=tuple(held_out or ())
    )


def errors_of(curve: LossCurve, runs: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Mean relative errors of a curve's losses, and of its epochs until a loss 10 % above the lowest that all runs reach."""
    losses = [abs(a / b - 1) for w, run in runs.items() for a, b in zip(curve.losses([w] * len(run)), run, strict=True)]
    target = 1.1 * max(min(run) for run in runs.values())
    epochs = []
    for w, run in runs.items():
        real, fitted = epochs_until([curve.start, *run], target), curve.epochs_to(target, w, 4 * len(run))
        epochs.append(abs(min(fitted, 4.0 * len(run)) / real - 1))
    return float(np.mean(losses)), float(np.mean(epochs))


class Transitions:
    """Losses after an epoch, tabulated for fast look-up.

    Args:
        curve: of a job.
        workers: all numbers of functions, ascending.
    """

    def __init__(self, curve: LossCurve, workers: Sequence[int]) -> None:
        low = curve.knots[0] / 4
        self._grid = np.linspace(math.log(low), math.log(2 * curve.start), GRID)
        columns = curve.after_epoch(np.exp(self._grid)[:, None], np.asarray(workers, dtype=float)[None, :])
        self._after = {w: np.log(columns[:, i]) for i, w in enumerate(workers)}

    def after(self, loss: float, workers: int) -> float:
        """Loss after an epoch."""
        return math.exp(float(np.interp(math.log(loss), self._grid, self._after[workers])))
