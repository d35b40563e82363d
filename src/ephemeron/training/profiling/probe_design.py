"""Which configurations to probe next, and when to stop. Pure: measurements in, decisions out.

Equation 3-12 has three coefficients, so the corners of the range of batches and quotas nearly determine it. From there
on, the next probe is the one that promises to narrow the widest confidence interval most per second that it takes.
Some configurations in the middle are never used for fitting: the error on them is the one to believe, since it also
shows where the form itself is wrong, which no interval does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.training.planner.model.fit import StepFit, fit_steps
from ephemeron.training.planner.model.provenance import Probe, StepProvenance

MOST_PROBES = 14
"""Beyond this, more of the same machine's noise teaches little."""
LEAST_PROBES = 5
SECOND_LOOKS = 4
OUT_OF_LINE = 0.1
"""Relative residual from which a probe may be looked at again."""
OVERHEAD_S = 0.5
"""Seconds of a probe beside its windows; without it many cheap probes would look cheaper than they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One configuration, measured."""

    batch: int
    memory_mb: int
    seconds: float
    """Seconds of a step: the median of the windows' means."""
    spread: float
    """Relative standard error."""
    peak_mb: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Batches and quotas that are probed, both ascending."""

    batches: tuple[int, ...]
    quotas: tuple[int, ...]

    @property
    def corners(self) -> list[tuple[int, int]]:
        """(batch, quota), the cheapest quota last."""
        pairs = [(b, m) for m in (self.quotas[-1], self.quotas[0]) for b in (self.batches[0], self.batches[-1])]
        return list(dict.fromkeys(pairs))

    @property
    def kept_out(self) -> list[tuple[int, int]]:
        """Never fitted: the middle quota with the batches at a third and two thirds; none where there is no middle."""
        b, m = self.batches, self.quotas
        if len(b) < 3 or len(m) < 3:
            return []
        return list(dict.fromkeys([(b[len(b) // 3], m[len(m) // 2]), (b[2 * len(b) // 3], m[len(m) // 2])]))

    @property
    def candidates(self) -> list[tuple[int, int]]:
        """Everything that may be probed for the fit."""
        out = set(self.kept_out)
        return [(b, m) for m in self.quotas for b in self.batches if (b, m) not in out]


def steps_of(low: int, high: int, count: int, *, multiple: int = 1) -> tuple[int, ...]:
    """About `count` whole numbers from `low` to `high`, in equal ratios, multiples of `multiple` in between."""
    inner = np.geomspace(low, high, count)[1:-1]
    rounded = [round(x / multiple) * multiple for x in inner]
    return tuple(sorted({low, high, *(x for x in rounded if low < x < high)}))


def fit(cells: Sequence[Measurement]) -> StepFit:
    """Equation 3-12 through the cells."""
    return fit_steps([c.batch for c in cells], [c.memory_mb for c in cells], [c.seconds for c in cells], spread=[c.spread for c in cells])


def widest(fitted: StepFit, over: Range) -> float:
    """The largest relative half width of the interval of a predicted step, over the whole range."""
    batch, memory = np.meshgrid(over.batches, over.quotas)
    return float(np.max(fitted.half_width(batch, memory)))


def enough(cells: Sequence[Measurement], over: Range, confidence: float) -> bool:
    """Whether every step in the range is predicted within the wanted share."""
    return len(cells) >= min(LEAST_PROBES, len(over.candidates)) and widest(fit(cells), over) <= confidence


def next_probe(cells: Sequence[Measurement], over: Range) -> tuple[int, int] | None:
    """The configuration that promises most per second; None when there is nothing left to gain."""
    if len(cells) >= MOST_PROBES:
        return None
    probed = {(c.batch, c.memory_mb) for c in cells}
    missing = [corner for corner in over.corners if corner not in probed]
    if missing:
        return missing[0]
    fitted = fit(cells)
    batch, memory = np.meshgrid(over.batches, over.quotas)
    grid = _rows(fitted, batch.ravel(), memory.ravel())
    known = _rows(fitted, np.array([c.batch for c in cells]), np.array([c.memory_mb for c in cells]))
    information = known.T @ known
    warm = {c.memory_mb for c in cells}
    # Spread the probes before repeating one: a second look shows noise, another place shows the form.
    options = [c for c in over.candidates if c not in probed] or over.candidates
    best, most = None, np.inf
    for b, m in options:
        row = _rows(fitted, np.array([b]), np.array([m]))
        after = np.linalg.pinv(information + row.T @ row, hermitian=True)
        width = float(np.sqrt(np.max(np.einsum("gi,ij,gj->g", grid, after, grid))))
        price = width * (1 + 0.1 * (OVERHEAD_S * (m not in warm) + float(fitted.seconds(b, m))))
        if price < most:
            best, most = (b, m), price
    return best


def doubtful(cells: Sequence[Measurement]) -> Measurement | None:
    """The cell that took longest against the fit, if that is out of line with the others; None: all are plausible.

    Other load on a machine only ever makes a step longer, so it deserves a second look.
    """
    fitted = fit(cells)
    over = [float(np.log(c.seconds / fitted.seconds(c.batch, c.memory_mb))) for c in cells]
    worst = int(np.argmax(over))
    usual = float(np.median(np.abs(over)))
    return cells[worst] if over[worst] > max(OUT_OF_LINE, 2 * usual) else None


def _rows(fitted: StepFit, batch: np.ndarray, memory: np.ndarray) -> np.ndarray:
    # In units of the fit's own coefficients, so that the three are of one size.
    b, m = batch + fitted.b, memory + fitted.m
    scale_b, scale_m = float(np.mean(b)), float(np.mean(m))
    return np.stack([np.ones(len(batch)), scale_b / b, -scale_m / m], axis=-1)


def step_provenance(
    fitted: StepFit, cells: Sequence[Measurement], kept_out: Sequence[Measurement], over: Range, confidence: float | None, stopped: str
) -> StepProvenance:
    """Intervals of the coefficients and errors on the probes."""
    errors = [abs(float(fitted.seconds(c.batch, c.memory_mb)) / c.seconds - 1) for c in kept_out]

    def row(c: Measurement) -> Probe:
        return Probe(
            batch=c.batch,
            memory_mb=c.memory_mb,
            seconds=round(c.seconds, 6),
            spread=round(c.spread, 4),
            predicted_s=round(float(fitted.seconds(c.batch, c.memory_mb)), 6),
            half_width=finite(float(fitted.half_width(c.batch, c.memory_mb))),
            peak_mb=round(c.peak_mb, 1),
        )

    return StepProvenance(
        level=fitted.level,
        plus_minus={k: finite(v) for k, v in fitted.plus_minus.items()},
        half_width=finite(widest(fitted, over)),
        wanted=confidence,
        stopped=stopped,
        residual=finite(fitted.residual),
        left_out_error=finite(_mean(fitted.left_out)),
        kept_out_error=finite(_mean(errors)),
        kept_out_worst=finite(max(errors, default=math.nan)),
        batches=tuple(over.batches),
        quotas_mb=tuple(over.quotas),
        fixed=tuple(fitted.fixed),
        probes=tuple(map(row, cells)),
        kept_out=tuple(map(row, kept_out)),
    )


def finite(value: float) -> float | None:
    """A rounded number for JSON; None for infinity and NaN."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
