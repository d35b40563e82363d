"""A dynamic programme over epochs: a bound on the mean time to the target within the budget, and a schedule.

The budget is priced. For a price of λ seconds per US dollar, the least `time + λ · cost` from every loss to the target is found in one
pass over a fine grid of losses, since an epoch that does not lower the loss is of no use. By weak duality, the largest of these values less
`λ · budget`, over all prices, is a lower bound of the mean problem: it leaves out the scatter of epochs, later starts of functions, and that
an action takes effect an epoch later. Discretising the budget instead gave bounds 10 % wide with 240 points. The schedule takes, epoch by
epoch, the fastest price whose expected cost is within what is left of the budget. Near-exact: numbers of functions and memory sizes are
thinned (`choices`), losses interpolated.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, change
from ephemeron.tuning.siren.epoch_model import EpochCosts

LOSSES, PRICES = 600, 60
"""Points of the grid of losses, and prices."""
MOST_WORKERS, MOST_QUOTAS = 32, 8
"""Choices: numbers of functions, and memory sizes of each."""
MARGIN = 0.02
"""Share of the budget that the schedule keeps for scatter."""


class DynamicProgramme:
    """Least time to the target by loss and price of the budget.

    Args:
        spec: of the environment.
        margin: share of the expected cost that the schedule keeps.
    """

    def __init__(self, spec: EnvironmentSpec, *, margin: float = MARGIN) -> None:
        self.spec, self._margin = spec, margin
        env = Environment(spec, noisy=False)
        self.choices = choices(env)
        top = 1.02 * max(spec.curve.start, *spec.curve.knots)
        self._grid = np.linspace(math.log(spec.target_loss), math.log(top), LOSSES)
        slow = np.array([env.mean_slowest[e.workers] for e in self.choices])
        self._seconds = np.array([e.seconds for e in self.choices]) * slow
        self._usd = np.array([e.cost_usd for e in self.choices]) * slow
        starts = np.array([change(None, e, ahead=spec.ahead) for e in self.choices])
        self._start_s, self._start_usd = starts[:, 0], starts[:, 1]
        scale = float(np.median(self._seconds) / np.median(self._usd))
        self.prices = np.concatenate([[0.0], scale * np.geomspace(1e-3, 1e3, PRICES - 1)])
        after = [[env.transitions.after(math.exp(x), e.workers) for e in self.choices] for x in self._grid]
        self._solve(np.log(after))

    def _solve(self, after: NDArray[np.float64]) -> None:
        """Fills the tables: [price, loss] of value, seconds, US dollars, epochs and best choice."""
        n, step = len(self._grid), self._grid[1] - self._grid[0]
        costs = self._seconds + self.prices[:, None] * self._usd
        shape = (len(self.prices), n)
        self._value, self._time, self._cost, self._epochs = (np.full(shape, np.inf) for _ in range(4))
        self._best = np.zeros(shape, dtype=int)
        for table in (self._value, self._time, self._cost, self._epochs):
            table[:, 0] = 0.0
        rows = np.arange(len(self.prices))
        for i in range(1, n):
            place = np.clip((after[i] - self._grid[0]) / step, 0.0, i - 1)
            useful = np.flatnonzero(after[i] < self._grid[i] - 1e-9)
            if not useful.size:
                continue
            low = place[useful].astype(int)
            high, part = np.minimum(low + 1, i - 1), place[useful] - low
            totals = costs[:, useful] + _between(self._value, low, high, part)
            best = np.argmin(totals, axis=1)
            self._value[:, i], self._best[:, i] = totals[rows, best], useful[best]
            lo, hi, f, a = low[best], high[best], part[best], useful[best]
            for table, own in ((self._time, self._seconds[a]), (self._cost, self._usd[a]), (self._epochs, 1.0)):
                table[:, i] = own + np.where(f > 0, table[rows, lo] * (1 - f) + table[rows, hi] * f, table[rows, lo])

    @property
    def bound_s(self) -> float:
        """Lower bound of the mean time of a run within the budget; infinite: the target cannot be reached."""
        place = (
            len(self._grid) - 1
            if self.spec.curve.start >= math.exp(self._grid[-1])
            else self._place(self.spec.curve.start)
        )
        starts = np.min(self._start_s + self.prices[:, None] * self._start_usd, axis=1)
        values = starts + self._value[:, place] - self.prices * self.spec.budget_usd
        return float(np.max(values))

    def _place(self, loss: float) -> int:
        step = self._grid[1] - self._grid[0]
        return int(np.clip(math.floor((math.log(loss) - self._grid[0]) / step), 0, len(self._grid) - 1))

    def choose(self, env: Environment) -> EpochCosts:
        """The choice for the epoch in which the next action takes effect."""
        loss, spent = env.expected()
        i = max(1, min(self._place(loss) + 1, len(self._grid) - 1))
        left, epochs = self.spec.budget_usd - spent, self.spec.epochs - len(env.history)
        cost = self._cost[:, i] * (1 + self._margin)
        if not env.history:
            cost = cost + self._start_usd[self._best[:, i]]
        fits = np.flatnonzero((cost <= left) & (self._epochs[:, i] <= epochs))
        price = int(fits[0]) if fits.size else int(np.argmin(np.where(self._epochs[:, i] <= epochs, cost, np.inf)))
        return self.choices[int(self._best[price, i])]


def _between(
    table: NDArray[np.float64], low: NDArray[np.int64], high: NDArray[np.int64], part: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Values between columns; a column that is not reached is infinite."""
    with np.errstate(invalid="ignore"):
        mixed = table[:, low] * (1 - part) + table[:, high] * part
    return np.where(part > 0, mixed, table[:, low])


def choices(env: Environment) -> list[EpochCosts]:
    """Choices of the dynamic programme: for each number of functions, memory sizes that none of the others excels in time and cost."""
    wanted = np.unique(np.geomspace(env.workers[0], env.workers[-1], MOST_WORKERS).round().astype(int))
    found: list[EpochCosts] = []
    for w in wanted.tolist():
        rows = sorted((e for e in env.table.values() if e.workers == w), key=lambda e: (e.cost_usd, e.seconds))
        front: list[EpochCosts] = []
        for e in rows:
            if not front or e.seconds < front[-1].seconds * 0.999:
                front.append(e)
        take = np.unique(np.linspace(0, len(front) - 1, min(len(front), MOST_QUOTAS)).round().astype(int))
        found += [front[i] for i in take if front]
    return found
