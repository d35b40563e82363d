"""Fits of measurements: the coefficients of a profile, each with its expected error. Pure.

Everything is fitted in relative error: a step of 3 ms counts as much as one of 3 s, because a plan multiplies both by
thousands.

- `fit_steps`: a, b, m of FasDL equation 3-12 from (batch, memory, seconds), with confidence intervals for the
  coefficients and for any prediction, and the error on each measurement when it is left out.
- `fit_memory`: k, c of equation 4-1. A plan that under-predicts memory kills functions, so the line is raised by the
  largest residual: no measurement lies above it.
- `fit_rate`, `fit_transfers`: what an object takes, by size and quota. Four forms compete, by their error on sizes kept
  out. Every one is linear but for at most one number, which is searched; the rest is a non-negative robust least-squares
  fit, so there is no starting point to get wrong.

Measured on AWS Lambda with S3, mean error on every second size kept out (`python -m benchmarks.transfer`): 6.3 % on
uploads and 4.3 % on downloads with the form chosen from the other sizes alone; FasDL's form 11.8 % and 6.8 %, latency and
bandwidth 10.7 % and 9.2 %. Tying the coefficients of neighbouring quotas together was tried and made it worse (power,
uploads: 8.6 % without, 9.0 to 9.3 % with), so every quota is fitted separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ephemeron.errors import MissingExtra
from ephemeron.training.planner.model.rates import Affine, Array, Knee, Power, Rate, Saturating, Transfer

_TINY = 1e-9


def _scipy(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"scipy.{module}")
    except ModuleNotFoundError:
        raise MissingExtra("SciPy", "profile") from None


_WIDEST = 10.0
"""Logarithm of the widest interval: beyond, nothing is known, and nothing overflows."""


# -- a, b, m ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """Equation 3-12 as measured."""

    a: float
    b: float
    m: float
    plus_minus: dict[str, float]
    """Half width of the confidence interval of `a`, `b` and `m`; infinite where there are too few measurements."""
    level: float
    """Confidence level of all intervals."""
    residual: float
    """Root mean square of the relative residuals."""
    left_out: tuple[float, ...]
    """Relative error on each measurement when the others alone are fitted; empty where too few are left."""
    fixed: tuple[str, ...] = ()
    """Coefficients that the measurements say nothing of: 0."""
    _covariance: Array = field(default_factory=lambda: np.full((3, 3), np.inf), repr=False)
    _t: float = field(default=np.inf, repr=False)

    def seconds(self, batch: Array | float, memory_mb: Array | float) -> Array:
        """Equation 3-12."""
        return np.asarray(self.a * (np.asarray(batch) + self.b) / (np.asarray(memory_mb) + self.m))

    def half_width(self, batch: Array | float, memory_mb: Array | float) -> Array:
        """Relative half width of the interval of the predicted mean step, at any configuration."""
        j = _jacobian(np.asarray(batch, float), np.asarray(memory_mb, float), self.b, self.m)
        if not np.isfinite(self._t):
            return np.full(j.shape[:-1], np.inf)
        variance = np.einsum("...i,ij,...j->...", j, self._covariance, j)
        return np.asarray(np.expm1(np.minimum(self._t * np.sqrt(np.maximum(variance, 0.0)), _WIDEST)))


def fit_steps(
    batch: Sequence[float],
    memory_mb: Sequence[float],
    seconds: Sequence[float],
    *,
    spread: Sequence[float] | None = None,
    level: float = 0.95,
) -> StepFit:
    """Least squares of the logarithms, robust against outliers; the intervals count them in full.

    Args:
        batch, memory_mb, seconds: one entry per configuration that was measured.
        spread: relative standard error of each entry. The scatter about the fit is never taken for less than
            this: four points that happen to lie on the surface prove little.
        level: of the confidence intervals.

    Raises:
        ValueError: nothing was measured, or a value is not positive.
        MissingExtra: SciPy is not installed.
    """
    x, memory, y = (np.asarray(v, dtype=float) for v in (batch, memory_mb, seconds))
    if not len(x) == len(memory) == len(y) > 0 or min(x.min(), memory.min(), y.min()) <= 0:
        raise ValueError("as many batches, quotas and seconds, at least one, all positive")
    free = [True, len(np.unique(x)) > 1, len(np.unique(memory)) > 1]
    a, b, m = _solve(x, memory, y, free)
    residuals = np.log(a * (x + b) / (memory + m) / y)
    known = [True, free[1] and b < _MOST_B * float(x.max()), free[2]]  # at its bound, b says nothing of itself
    dof = len(y) - sum(free)
    covariance, t = np.full((3, 3), np.inf), np.inf
    plus_minus = dict.fromkeys("abm", np.inf)
    if dof > 0:
        floor = 0.0 if spread is None else float(np.mean(np.square(spread)))
        variance = max(float(residuals @ residuals) / dof, floor)
        j = _jacobian(x, memory, b, m) * known
        covariance = variance * np.linalg.pinv(j.T @ j, hermitian=True)
        t = float(_scipy("special").stdtrit(dof, 0.5 + level / 2))
        wide = t * np.sqrt(np.maximum(np.diag(covariance), 0.0))
        plus_minus = {"a": a * float(wide[0]), "b": float(wide[1]), "m": float(wide[2])}
        if free[1] and not known[1]:
            plus_minus["b"] = np.inf
    left_out = []
    for i in range(len(y)) if dof > 0 else ():
        rest = np.arange(len(y)) != i
        if len(np.unique(x[rest])) < 1 + free[1] or len(np.unique(memory[rest])) < 1 + free[2]:
            continue
        a_, b_, m_ = _solve(x[rest], memory[rest], y[rest], free)
        left_out.append(float(abs(a_ * (x[i] + b_) / (memory[i] + m_) / y[i] - 1)))
    return StepFit(
        a=a,
        b=b,
        m=m,
        plus_minus=plus_minus,
        level=level,
        residual=float(np.sqrt(np.mean(residuals**2))),
        left_out=tuple(left_out),
        fixed=tuple(n for n, f in zip("abm", free, strict=True) if not f),
        _covariance=covariance,
        _t=t,
    )


def _jacobian(batch: Array, memory: Array, b: float, m: float) -> Array:
    """Derivatives of log seconds by log a, b and m."""
    batch, memory = np.broadcast_arrays(batch, memory)
    return np.stack([np.ones(batch.shape), 1 / (batch + b), -1 / (memory + m)], axis=-1)


_OUTLIER = 0.1
"""Relative residuals above this count by their size: another process used the machine meanwhile."""

_MOST_B = 1000.0
"""In largest batches: a step that does not grow with the batch at all would have b without limit."""


def _solve(x: Array, memory: Array, y: Array, free: Sequence[bool]) -> tuple[float, float, float]:
    # With m given, seconds·(M + m) = a·B + a·b is linear: start there with m = 0.
    columns = np.stack([x, np.ones_like(x)], axis=1) if free[1] else x[:, None]
    start = _scipy("optimize").nnls(columns / (memory * y)[:, None], np.ones_like(y))[0]
    most_b = _MOST_B * float(x.max())
    b = min(float(start[1]) / max(float(start[0]), 1e-300), most_b) if free[1] else 0.0
    a = float(np.exp(np.mean(np.log(y * memory / (x + b)))))
    if free == [True, False, False]:
        return a, 0.0, 0.0
    scale = np.array([1.0, max(float(x.mean()), 1.0), float(memory.mean())])
    # A step of fewer samples than were measured costs at least its share: with b below 0 it would cost next to nothing.
    low = np.array([-np.inf, 0.0, -0.95 * float(memory.min())])
    high = np.array([np.inf, most_b * (1 + 1e-6), np.inf])
    index = np.flatnonzero(free)

    def unpack(p: Array) -> tuple[float, float, float]:
        full = np.zeros(3)
        full[index] = p * scale[index]
        return float(np.exp(full[0])), float(full[1]), float(full[2])

    def residuals(p: Array) -> Array:
        a, b, m = unpack(p)
        return np.asarray(np.log(a * (x + b) / (memory + m) / y))

    def slopes(p: Array) -> Array:
        _, b, m = unpack(p)
        return np.asarray(_jacobian(x, memory, b, m)[:, index] * scale[index])

    first = np.array([np.log(a), b, 0.0]) / scale
    found = _scipy("optimize").least_squares(
        residuals,
        first[index],
        jac=slopes,
        bounds=((low / scale)[index], (high / scale)[index]),
        xtol=1e-12,
        ftol=1e-12,
        loss="soft_l1",
        f_scale=_OUTLIER,
    )
    return unpack(found.x)


# -- k, c ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Equation 4-1 as measured, raised so that no measurement lies above it."""

    slope_mb: float
    base_mb: float
    raised_mb: float
    """Megabytes by which the least-squares line was raised."""


def fit_memory(batch: Sequence[float], peak_mb: Sequence[float]) -> MemoryFit:
    """Least squares with a slope that is not negative, then safe.

    Raises:
        ValueError: nothing was measured.
    """
    x, y = np.asarray(batch, dtype=float), np.asarray(peak_mb, dtype=float)
    if not len(x) == len(y) > 0:
        raise ValueError("as many batches as peaks, at least one")
    centred = x - x.mean()
    slope = max(0.0, float(centred @ y) / float(centred @ centred)) if np.any(centred) else 0.0
    base = float(np.mean(y - slope * x))
    raised = max(0.0, float(np.max(y - slope * x - base)))
    return MemoryFit(slope_mb=slope, base_mb=max(0.0, base + raised), raised_mb=raised)


# -- transfers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Form:
    """A form that is linear but for one number."""

    grid: Callable[[Array], Array]
    """Values of that number worth trying, ascending, for the sizes that were measured."""
    columns: Callable[[float, Array], Array]
    """Shape (sizes, coefficients)."""
    make: Callable[[float, Array], Rate]


def _knees(s: Array) -> Array:
    inner = np.unique(s)[1:-1]
    return np.unique(np.concatenate([inner, (inner[1:] + inner[:-1]) / 2])) if len(inner) else s[-1:]


_FORMS: dict[type[Rate], _Form] = {
    Affine: _Form(
        grid=lambda s: np.zeros(1),
        columns=lambda _, s: np.stack([np.ones_like(s), s], axis=1),
        make=lambda _, c: Affine(latency_s=float(c[0]), mb_s=float(1 / max(c[1], _TINY))),
    ),
    Saturating: _Form(
        grid=lambda s: np.geomspace(0.02 / s.max(), 10 / s.min(), 30),
        columns=lambda t, s: (s / -np.expm1(-t * s))[:, None],
        make=lambda t, c: Saturating(p_mb_s=float(1 / max(c[0], _TINY)), t_per_mb=float(t)),
    ),
    Power: _Form(
        grid=lambda s: np.linspace(0.3, 2.0, 18),
        columns=lambda g, s: np.stack([np.ones_like(s), s**g], axis=1),
        make=lambda g, c: Power(latency_s=float(c[0]), s_per_mb=float(max(c[1], _TINY)), exponent=float(g)),
    ),
    Knee: _Form(
        grid=_knees,
        columns=lambda k, s: np.stack([np.ones_like(s), np.minimum(s, k), np.maximum(s - k, 0.0)], axis=1),
        make=lambda k, c: Knee(latency_s=float(c[0]), s_per_mb=float(max(c[1], _TINY)), knee_mb=float(k), s_per_mb_beyond=float(c[2])),
    ),
}
FORMS: tuple[type[Rate], ...] = tuple(_FORMS)
"""The simplest first: of equals, the first is taken."""
_SOFT = 0.05
"""Relative residuals above this count by their size, not by its square."""
_FOLDS = 6
_ZOOMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFit:
    """One direction at one quota."""

    rate: Rate
    error: float
    """Mean relative error on sizes kept out."""
    errors: dict[str, float]
    """Errors of all forms that were tried."""


def fit_form(form: type[Rate], size_mb: Sequence[float] | Array, seconds: Sequence[float] | Array) -> Rate:
    """One form, by least squares of the relative error, robust against outliers.

    Raises:
        MissingExtra: SciPy is not installed.
    """
    s, y = np.asarray(size_mb, dtype=float), np.asarray(seconds, dtype=float)
    how = _FORMS[form]
    grid = how.grid(s)
    tried = [_robust(how.columns(float(g), s), y) for g in grid]
    best = min(range(len(grid)), key=lambda i: tried[i][0])
    shape, (loss, coefficients) = float(grid[best]), tried[best]
    if len(grid) > 1:
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
        for _ in range(_ZOOMS):
            for finer in np.linspace(low, high, 9)[1:-1]:
                other = _robust(how.columns(float(finer), s), y)
                if other[0] < loss:
                    shape, (loss, coefficients) = float(finer), other
            low, high = max(low, shape - (high - low) / 8), min(high, shape + (high - low) / 8)
    return how.make(shape, coefficients)


def _robust(columns: Array, y: Array) -> tuple[float, Array]:
    """Loss and non-negative coefficients; iteratively re-weighted (soft L1)."""
    nnls = _scipy("optimize").nnls
    scaled = columns / y[:, None]
    size = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    weight = np.ones_like(y)
    for _ in range(6):
        c = nnls(scaled / size * weight[:, None], weight)[0] / size
        off = scaled @ c - 1
        weight = (1 + (off / _SOFT) ** 2) ** -0.25
    return float(np.sum(np.sqrt(1 + (off / _SOFT) ** 2) - 1)), c


def rate_error(rate: Rate, size_mb: Array, seconds: Array) -> Array:
    """Relative errors, not negative."""
    return np.asarray(np.abs(rate.seconds(size_mb) / seconds - 1))


def fit_rate(size_mb: Sequence[float], seconds: Sequence[float], *, forms: Sequence[type[Rate]] = FORMS) -> RateFit:
    """The form that predicts sizes it has not seen best, fitted to all.

    Args:
        size_mb, seconds: measurements; a size may occur more than once, and is then kept out as a whole.
        forms: that compete.

    Raises:
        ValueError: nothing was measured, or a value is not positive.
        MissingExtra: SciPy is not installed.
    """
    s, y = np.asarray(size_mb, dtype=float), np.asarray(seconds, dtype=float)
    if not len(s) == len(y) > 0 or min(s.min(), y.min()) <= 0:
        raise ValueError("as many sizes as seconds, at least one, all positive")
    errors = {form: _kept_out(form, s, y) for form in forms}
    best = _choose(errors)
    named = {form.__name__: error for form, error in errors.items()}
    return RateFit(rate=fit_form(best, s, y), error=errors[best], errors=named)


def _kept_out(form: type[Rate], s: Array, y: Array) -> float:
    sizes = np.unique(s)
    folds = min(len(sizes), _FOLDS)
    if folds < 4:
        return float(np.mean(rate_error(fit_form(form, s, y), s, y))) if form is Affine else np.inf
    errors = []
    for fold in range(folds):
        out = np.isin(s, sizes[fold::folds])
        errors.append(rate_error(fit_form(form, s[~out], y[~out]), s[out], y[out]))
    return float(np.mean(np.concatenate(errors)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFit:
    """All quotas, both directions."""

    transfer: tuple[Transfer, ...]
    up: dict[float, RateFit]
    """Rates by quota."""
    down: dict[float, RateFit]

    @property
    def error_up(self) -> float:
        """Mean relative error on sizes kept out."""
        return float(np.mean([f.error for f in self.up.values()]))

    @property
    def error_down(self) -> float:
        return float(np.mean([f.error for f in self.down.values()]))


@dataclass(frozen=True, slots=True)
class TimingSample:
    """One object, one way."""

    direction: str
    """`up` or `down`."""
    memory_mb: float
    size_mb: float
    seconds: float


def fit_transfers(timings: Sequence[TimingSample], *, forms: Sequence[type[Rate]] = FORMS) -> TransferFit:
    """Every quota by itself, in the form that predicts its direction best over all quotas together.

    Raises:
        ValueError: a quota was measured in one direction only.
        MissingExtra: SciPy is not installed.
    """
    fits: dict[str, dict[float, RateFit]] = {}
    for direction in ("up", "down"):
        by_quota = {q: _of(timings, q, direction) for q in sorted({t.memory_mb for t in timings})}
        tried = [{form.__name__: _kept_out(form, s, y) for form in forms} for s, y in by_quota.values()]
        mean = {form: float(np.mean([errors[form.__name__] for errors in tried])) for form in forms}
        best = _choose(mean)
        fits[direction] = {
            q: RateFit(rate=fit_form(best, s, y), error=errors[best.__name__], errors=errors)
            for (q, (s, y)), errors in zip(by_quota.items(), tried, strict=True)
        }
    up, down = fits["up"], fits["down"]
    transfer = tuple(Transfer(memory_mb=q, up=up[q].rate, down=down[q].rate) for q in up)
    return TransferFit(transfer=transfer, up=up, down=down)


def _of(timings: Sequence[TimingSample], quota: float, direction: str) -> tuple[Array, Array]:
    mine = [t for t in timings if t.memory_mb == quota and t.direction == direction]
    s, y = np.array([t.size_mb for t in mine]), np.array([t.seconds for t in mine])
    if not len(mine) or min(s.min(), y.min()) <= 0:
        raise ValueError(f"at {quota:g} MB: at least one transfer in each direction, all sizes and seconds positive")
    return s, y


def _choose(errors: dict[type[Rate], float]) -> type[Rate]:
    """The best; a later form has to be better than the best before it by 5 % of it and 0.1 % of what is predicted."""
    forms = list(errors)
    best = forms[0]
    for form in forms[1:]:
        if errors[form] < 0.95 * errors[best] - 0.001:
            best = form
    return best
