"""Contents of a picture of a plan: choices by time and cost, machines, limits, and axes. Pure.

The terminal, the page and the PNG all draw a `Scatter`, so they show the same points on the same axes. An axis is
logarithmic where its values differ by more than `LOG_FROM`, and starts at 0 where that wastes less than half of it. What
would press the front into a corner stays out of the picture and is told in `beyond`: machines and limits more than
`FAR` times off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ephemeron.rendering.svg import Tick, log_ticks, ticks, time_ticks
from ephemeron.training.planner.plan import Choice, MachineEstimate, Plan
from ephemeron.training.report.headline import usd
from ephemeron.units import human_seconds

LOG_FROM = 15.0
FAR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterMark:
    """One point."""

    seconds: float
    cost_usd: float
    label: str
    """Short label, drawn beside the point."""
    words: str
    """Full description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One axis."""

    lo: float
    hi: float
    log: bool
    ticks: tuple[Tick, ...]

    def share(self, value: float) -> float:
        """Position of a value: 0 at `lo`, 1 at `hi`."""
        lo, hi, v = (math.log(x) for x in (self.lo, self.hi, value)) if self.log else (self.lo, self.hi, value)
        return (v - lo) / (hi - lo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """The picture."""

    choice: ScatterMark
    front: tuple[ScatterMark, ...]
    """Fastest first."""
    machines: tuple[ScatterMark, ...]
    deadline_s: float | None
    """Deadline, and below the budget; None: outside the picture."""
    budget_usd: float | None
    time: Reach
    cost: Reach
    beyond: tuple[str, ...]
    """Descriptions of what is outside the picture."""


@dataclass(slots=True)
class ScatterLabels:
    """Room for labels beside their points: a label that would cover another is left out. In pixels."""

    taken: list[tuple[float, float, float]] = field(default_factory=list)

    def room(self, x: float, y: float, words: str, *, letter: float = 6.8) -> bool:
        """Whether there is room at (x, y); takes it."""
        wide = letter * len(words)
        if any(x < a + w + 8 and a < x + wide + 8 and abs(y - b) < 13 for a, b, w in self.taken):
            return False
        self.taken.append((x, y, wide))
        return True


def scatter(plan: Plan) -> Scatter:
    """The picture of a plan."""
    choice = _choice(plan.choice)
    front = tuple(sorted(map(_choice, plan.front), key=lambda m: (m.seconds, m.cost_usd)))
    points = (choice, *front)
    slow, dear = max(m.seconds for m in points), max(m.cost_usd for m in points)
    machines: list[ScatterMark] = []
    beyond: list[ScatterMark] = []
    for row in plan.machines:
        if not row.fits:
            continue
        m = _machine(row)
        near = m.seconds <= FAR * slow and m.cost_usd <= FAR * dear
        (machines if near else beyond).append(m)
    far = [m.words for m in beyond]
    deadline, budget = plan.limits.deadline_s, plan.limits.budget_usd
    if deadline and deadline > FAR * slow:
        far.append(f"deadline {human_seconds(deadline)}")
        deadline = None
    if budget and budget > FAR * dear:
        far.append(f"budget {usd(budget)}")
        budget = None
    points = (*points, *machines)
    return Scatter(
        choice=choice,
        front=front,
        machines=tuple(machines),
        deadline_s=deadline or None,
        budget_usd=budget or None,
        time=_reach([m.seconds for m in points], deadline, time_ticks, _log_time_ticks),
        cost=_reach([m.cost_usd for m in points], budget, _cost_ticks, _log_cost_ticks),
        beyond=tuple(far),
    )


def _choice(c: Choice) -> ScatterMark:
    seconds, cost = c.predicted.seconds, c.predicted.cost_usd
    words = f"{functions(c)}, K = {c.aggregators}, {c.sync}: {human_seconds(seconds)}, {usd(cost)}"
    return ScatterMark(seconds=seconds, cost_usd=cost, label=f"{c.workers} × {c.memory_mb}", words=words)


def functions(c: Choice) -> str:
    """`8 functions of 1792 MB`."""
    return f"{c.workers} function{'s' if c.workers != 1 else ''} of {c.memory_mb} MB"


def _machine(row: MachineEstimate) -> ScatterMark:
    seconds, cost, name = row.seconds, row.cost_usd, row.name
    return ScatterMark(seconds=seconds, cost_usd=cost, label=name, words=f"{name}: {human_seconds(seconds)}, {usd(cost)}")


def _reach(
    values: Iterable[float],
    limit: float | None,
    even: Callable[[float, float, int], list[Tick]],
    decades: Callable[[float, float], list[Tick]],
) -> Reach:
    known = [v for v in (*values, limit or 0.0) if v > 0] or [1.0]
    lo, hi = min(known), max(known)
    if hi / lo > LOG_FROM:
        pad = (hi / lo) ** 0.06
        lo, hi = lo / pad, hi * pad
        return Reach(lo=lo, hi=hi, log=True, ticks=tuple(decades(lo, hi)))
    pad = 0.08 * ((hi - lo) or hi)
    lo = 0.0 if lo < 0.5 * hi else lo - pad
    return Reach(lo=lo, hi=hi + pad, log=False, ticks=tuple(even(lo, hi + pad, 6)))


def _cost_ticks(lo: float, hi: float, n: int) -> list[Tick]:
    return ticks(lo, hi, n, usd)


def _log_cost_ticks(lo: float, hi: float) -> list[Tick]:
    return [(v, usd(v)) for v, _ in log_ticks(lo, hi)]


_ROUND_S = [m * 10.0**k for k in range(-3, 1) for m in (1, 2, 5)] + [
    10,
    20,
    60,
    120,
    300,
    600,
    1200,
    *(3600.0 * m * 10.0**k for k in range(4) for m in (1, 2, 5)),
]


def _log_time_ticks(lo: float, hi: float) -> list[Tick]:
    return [(v, _round_time(v)) for v in _ROUND_S if lo <= v <= hi]


def _round_time(s: float) -> str:
    return f"{s:g} s" if s < 60 else f"{s / 60:g} min" if s < 3600 else f"{s / 3600:g} h"
