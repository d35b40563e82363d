"""Time and cost of an epoch by number and memory of its functions: the planner's performance model, corrected by measured epochs.

The performance model predicts BSP; runs of SIREN are HSP, whose polls and versions take longer. So its times and costs are multiplied by a
power of the number of functions, which is fitted to simulated runs (`fitting`), or to real ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import Count, NonNegative, Positive, Typed
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import Prediction, predict
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.task.learned_schedule import ActionBounds

FIRST, SECOND = 1, 2
"""Epochs of two predictions, whose difference is an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction(Typed):
    """Measured value divided by the predicted one: `factor · W^power`."""

    factor: Positive = 1.0
    power: float = 0.0
    error: NonNegative = 0.0
    """Mean relative error after the correction, of runs that were not fitted where there are any."""

    def of(self, workers: int) -> float:
        """The ratio for a number of functions; 1 for one, which exchanges nothing."""
        return float(self.factor * workers**self.power) if workers > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEpochs(Typed):
    """Mean epoch of a run with fixed functions."""

    workers: Count
    memory_mb: Count
    seconds: Positive
    cost_usd: Positive


@dataclass(frozen=True, slots=True)
class EpochCosts:
    """An epoch with so many functions of so much memory; seconds and US dollars."""

    workers: int
    memory_mb: int
    seconds: float
    cost_usd: float
    fetch_s: float
    compute_s: float
    update_s: float
    begin_s: float
    """Loading of data and parameters, when functions change."""
    cold_s: float
    """Start of new functions before that."""
    gb_s_usd: float
    """Price of a second of one of the functions."""


class EpochModel:
    """Epochs of a job on a platform.

    Args:
        profile: of the job.
        bounds: numbers and memory of functions.
        batch_size: samples of an iteration of a function.
        aggregators: K, as far as there are as many functions.
        seconds, cost: corrections.
    """

    def __init__(
        self,
        profile: Profile,
        bounds: ActionBounds,
        *,
        batch_size: int,
        aggregators: int,
        seconds: Correction | None = None,
        cost: Correction | None = None,
    ) -> None:
        self._profile, self._batch, self._aggregators = profile, batch_size, aggregators
        self._seconds, self._cost = seconds or Correction(), cost or Correction()
        self._bounds = bounds
        self.memory_needed_mb = float(profile.workload.memory_needed_mb(batch_size))

    @cached_property
    def table(self) -> dict[tuple[int, int], EpochCosts]:
        """Every number of functions and memory size in which a batch fits."""
        b = self._bounds
        workers = range(b.least_workers, b.most_workers + 1)
        quotas = [m for m in b.quotas_mb if m >= self.memory_needed_mb]
        found = self.epochs(workers, quotas)
        return {
            (e.workers, e.memory_mb): e
            for e in found
            if math.isfinite(e.seconds) and math.isfinite(e.cost_usd) and b.within(e.workers, e.memory_mb) == (e.workers, e.memory_mb)
        }

    def epochs(self, workers: Sequence[int], quotas_mb: Sequence[int]) -> list[EpochCosts]:
        """Epochs of all combinations."""
        w = np.repeat(np.asarray(workers, dtype=float), len(quotas_mb))
        m = np.tile(np.asarray(quotas_mb, dtype=float), len(workers))
        one, two = self._predicted(w, m, FIRST), self._predicted(w, m, SECOND)
        with np.errstate(invalid="ignore"):
            seconds, usd = two.seconds - one.seconds, two.cost_usd - one.cost_usd
        fetch, update = two.download_s - one.download_s, two.upload_s - one.upload_s + two.aggregate_s - one.aggregate_s
        compute, platform = two.compute_s - one.compute_s, self._profile.platform
        rows = zip(*(_floats(x, w) for x in (w, m, seconds, usd, fetch, compute, update, one.load_s, one.start_s)), strict=True)
        return [
            EpochCosts(
                workers=int(n),
                memory_mb=int(q),
                seconds=s * self._seconds.of(int(n)),
                cost_usd=c * self._cost.of(int(n)),
                fetch_s=f,
                compute_s=p,
                update_s=u,
                begin_s=load,
                cold_s=start,
                gb_s_usd=q / 1024 * platform.price_gb_s,
            )
            for n, q, s, c, f, p, u, load, start in rows
        ]

    def _predicted(self, w: NDArray[np.float64], m: NDArray[np.float64], epochs: int) -> Prediction:
        terms = ExecutionOptions(epochs=epochs)
        k = np.minimum(w, self._aggregators)
        return predict(
            self._profile.workload,
            self._profile.platform,
            terms,
            workers=w,
            memory_mb=m,
            aggregators=k,
            batch=self._batch,
            other_batch=self._batch,
        )

    def corrected(self, fitted: Sequence[MeasuredEpochs], held_out: Sequence[MeasuredEpochs] = ()) -> EpochModel:
        """The model corrected by runs.

        Args:
            fitted: runs by which it is corrected.
            held_out: runs by which the errors are stated; none: the same.
        """
        raw = EpochModel(self._profile, self._bounds, batch_size=self._batch, aggregators=self._aggregators)
        base = {(r.workers, r.memory_mb): raw.epochs([r.workers], [r.memory_mb])[0] for r in (*fitted, *held_out)}
        corrections = []
        for name in ("seconds", "cost_usd"):
            ratios = {r: getattr(r, name) / getattr(base[r.workers, r.memory_mb], name) for r in (*fitted, *held_out)}
            found = _fitted([(r.workers, ratios[r]) for r in fitted if r.workers > 1])
            errors = [abs(found.of(r.workers) / ratios[r] - 1) for r in (held_out or fitted)]
            corrections.append(dataclasses.replace(found, error=float(np.mean(errors))))
        seconds, cost = corrections
        return EpochModel(self._profile, self._bounds, batch_size=self._batch, aggregators=self._aggregators, seconds=seconds, cost=cost)

    @property
    def corrections(self) -> tuple[Correction, Correction]:
        """Of seconds and of cost."""
        return self._seconds, self._cost


def _fitted(ratios: Sequence[tuple[int, float]]) -> Correction:
    if not ratios:
        return Correction()
    x, y = np.log([w for w, _ in ratios]), np.log([r for _, r in ratios])
    if len(set(x.tolist())) < 2:
        return Correction(factor=float(np.exp(y.mean())))
    power, constant = np.polyfit(x, y, 1)
    return Correction(factor=float(np.exp(constant)), power=float(power))


def _floats(x: object, like: NDArray[np.float64]) -> list[float]:
    found: list[float] = np.broadcast_to(np.asarray(x, dtype=float), like.shape).tolist()
    return found
