"""Effect of a profile's uncertainty on a plan, by resampling.

A proof is about a profile. What was measured has an interval, so each source of doubt is drawn anew many times, within its
interval, and the configurations at hand (the chosen one, the front, the alternatives) are compared again: how long and
dear the chosen one then is, how often it keeps the limits, and how often it is still the best of them. To first order: each
phase of a predicted run is scaled by what it depends on, so that a draw costs next to nothing; a change of batches
in answer to a draw is not looked for.

A factor is lognormal. Steps: the profile's 95 % interval. Transfers: their mean error on sizes kept out of the fit, one
factor for a run's uploads and one for its downloads, since a link is slow as a whole. Cold starts: ± 50 %, assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ephemeron.training.planner.model.profile import PlatformProfile
from ephemeron.training.planner.model.provenance import Provenance
from ephemeron.training.planner.model.rates import Array
from ephemeron.training.planner.plan import Choice, PlanLimits, Uncertainty
from ephemeron.units import duration

DRAWS = 400
COLD_START = 0.5
INTERVAL = (0.05, 0.95)
SAME = 0.01
"""A choice that is dearer than the best by less than this share counts as the same."""
SEED = 20


def sources_of(fit: Provenance, platform: PlatformProfile, *, measured: bool) -> dict[str, float | None]:
    """Relative half widths of 95 % intervals, by what they are of. None: not known.

    Args:
        fit: how the profile was measured.
        platform: where the plan would run.
        measured: whether that is the platform that was profiled, not a built-in one.
    """
    cold = COLD_START if platform.cold_start_s else None
    if platform.direct is not None:  # exchanges are not over the store, whose errors are known
        return {"compute": fit.steps.half_width, "links": None, "cold start": cold}
    transfer = fit.platform.transfer
    up = transfer.error_up if measured else platform.error_up
    down = transfer.error_down if measured else platform.error_down
    return {"compute": fit.steps.half_width, "upload": _wide(up), "download": _wide(down), "cold start": cold}


def resampled(
    sources: Mapping[str, float | None], chosen: Choice, others: Sequence[Choice], limits: PlanLimits, minimise: str
) -> Uncertainty:
    """Effect of the intervals on the choice, by `DRAWS` draws of all sources at once."""
    known = {name: half for name, half in sources.items() if half}
    choices = [chosen, *(c for c in others if c.configuration != chosen.configuration)]
    parts = _parts(choices)
    rng = np.random.default_rng(SEED)
    drawn = {name: np.exp(rng.standard_normal(DRAWS) * math.log1p(half) / 1.96) for name, half in sorted(known.items())}
    seconds, usd = _scaled(parts, drawn)
    best, same = _again(seconds, usd, limits, minimise)
    away = best[~same & (best > 0)]
    alone = {n: float(_again(*_scaled(parts, {n: d}), limits, minimise)[1].mean()) for n, d in drawn.items()}
    worst = min(alone, key=lambda n: alone[n], default=None)
    instead = int(np.bincount(away).argmax()) if len(away) else None
    return Uncertainty(
        sources=dict(sources),
        draws=DRAWS,
        time_s=_interval(seconds[0]),
        cost_usd=_interval(usd[0]),
        keeps_limits=float(((seconds[0] <= limits.seconds) & (usd[0] <= limits.usd)).mean()),
        same_choice=float(same.mean()),
        instead=None if instead is None else _words(choices[instead]),
        sensitive_to=worst if worst is not None and alone[worst] < 1 else None,
    )


def _interval(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, INTERVAL)
    return float(low), float(high)


def sentences(u: Uncertainty | None) -> list[str]:
    """The uncertainty of a plan for people; empty where it is not known."""
    if u is None:
        return []
    known = [f"{name} ± {half:.0%}" for name, half in u.sources.items() if half]
    unknown = [name for name, half in u.sources.items() if half is None]
    low, high = u.time_s
    cheap, dear = u.cost_usd
    text = f"rests on {', '.join(known)}" if known else "rests on a profile that states no uncertainty"
    text += f"; of {' and '.join(unknown)} the profile states none" if known and unknown else ""
    if known:
        text += f": {duration(low)} to {duration(high)} and ${cheap:.4g} to ${dear:.4g} in 90 % of {u.draws} resamplings"
    found = [text]
    if known and u.keeps_limits < 1:
        found.append(f"the limits are kept in {u.keeps_limits:.0%} of them")
    if known:
        instead = f"; else mostly {u.instead}" if u.instead and u.same_choice < 1 else ""
        what = f", what matters most is {u.sensitive_to}" if u.sensitive_to else ""
        found.append(f"the choice stays the same in {u.same_choice:.0%} of them{instead}{what}")
    return found


def extrapolated(platform: PlatformProfile, choice: Choice, model_mb: float) -> list[str]:
    """Sizes and quotas of a choice beyond the measured ones, and the assumptions made there."""
    found = []
    if platform.measured_mb:
        stored = choice.workers > 1 and platform.direct is None
        sizes = {"shards": model_mb / choice.aggregators} if stored else {}
        for name, size in {**sizes, "the model": model_mb}.items():
            if size > platform.measured_mb:
                found.append(
                    f"{name} of {size:.0f} MB: transfers were measured up to {platform.measured_mb:g} MB, beyond it the bandwidth "
                    f"at {platform.measured_mb:g} MB is assumed"
                )
    most = platform.transfer[-1].memory_mb
    if len(platform.transfer) > 1 and choice.memory_mb > most:
        found.append(
            f"functions of {choice.memory_mb:,} MB: transfers were measured up to {most:,.0f} MB, larger functions are "
            "assumed to be no faster"
        )
    return found


def _parts(choices: Sequence[Choice]) -> dict[str, Array]:
    """Columns of seconds by source of doubt, and of dollars by what they grow with: one value per choice."""
    phases = [c.predicted.phases_s for c in choices]
    rest = [c.predicted.seconds - sum(p.values()) for c, p in zip(choices, phases, strict=True)]
    return {
        "compute": np.array([p["compute"] for p in phases]),
        "upload": np.array([p["upload"] + p["aggregate"] / 2 + p["relay"] / 2 for p in phases]),
        "download": np.array([p["download"] + p["load"] + p["aggregate"] / 2 + p["relay"] / 2 for p in phases]),
        "cold start": np.array([p["start"] for p in phases]),
        "rest": np.array(rest),
        "seconds": np.array([c.predicted.seconds for c in choices]),
        "functions": np.array([c.predicted.cost["functions"] for c in choices]),
        "other": np.array([c.predicted.cost_usd - c.predicted.cost["functions"] for c in choices]),
    }


def _scaled(parts: Mapping[str, Array], drawn: Mapping[str, Array]) -> tuple[Array, Array]:
    """Seconds and dollars, choices × draws."""
    one = np.ones(DRAWS)
    seconds = parts["rest"][:, None] * one
    for name in ("compute", "upload", "download", "cold start"):
        seconds = seconds + parts[name][:, None] * drawn.get(name, one)
    return seconds, parts["functions"][:, None] * seconds / parts["seconds"][:, None] + parts["other"][:, None]


def _again(seconds: Array, usd: Array, limits: PlanLimits, minimise: str) -> tuple[Array, Array]:
    """The best of each draw, and whether the chosen one, the first, is as good."""
    mine = usd if minimise == "cost" else seconds
    mine = np.where((seconds <= limits.seconds) & (usd <= limits.usd), mine, np.inf)
    best = mine.argmin(axis=0)
    least = mine.min(axis=0)
    return best, np.isfinite(mine[0]) & (mine[0] <= least * (1 + SAME))


def _words(c: Choice) -> str:
    return f"{c.workers} × {c.memory_mb:,} MB, {c.pattern}, {c.sync}"


def _wide(error: float | None) -> float | None:
    """A 95 % half width from a mean absolute relative error."""
    return error * 1.96 * math.sqrt(math.pi / 2) if error else None
