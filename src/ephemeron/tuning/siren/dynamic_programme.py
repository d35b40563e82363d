"""A dynamic programme over epochs: a bound on the mean time to the target within the budget, and a schedule.

A state is the loss before an epoch and the functions of that epoch; a choice is the functions of the next one, made before the epoch begins
(`ahead`, when functions for a change start while an epoch runs) or after it. Changes cost what they cost in the environment, and losses
scatter as they do there. The budget is priced: for a price of λ seconds per US dollar, the least mean of `time + λ · cost` to the target is
found by value iteration, from below, over a grid of losses in ascending order. By weak duality, the largest of these values less
`λ · budget`, over all prices, is a lower bound of the mean time of every schedule that keeps the budget in each run. It leaves out that starts
may take longer than an epoch, and the limit of epochs. The schedule takes, epoch by epoch, the fastest price whose expected cost is within
what is left of the budget. Near-exact: numbers of functions and memory sizes are thinned (`choices`), losses interpolated, scatter is a
quadrature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, change
from ephemeron.tuning.siren.epoch_model import EpochCosts

Array: TypeAlias = NDArray[np.float64]

LOSSES, LOSSES_QUIET, PRICES = 200, 500, 40
"""Points of the grid of losses, with and without scatter, and prices."""
NODES = 7
"""Points of the quadrature over the scatter of losses."""
SWEEPS, ACCURACY = 80, 1e-3
"""Passes of value iteration, at most; relative change of a pass after which it ends."""
MOST_WORKERS, MOST_QUOTAS = 12, 4
"""Choices: numbers of functions, and memory sizes of each."""
MARGIN = 0.02
"""Share of the budget that the schedule keeps for scatter."""


@dataclass(frozen=True, slots=True)
class _After:
    """Losses after an epoch: a sparse matrix from the grid of losses to numbers of functions."""

    columns: NDArray[np.int64]
    """Points of the grid."""
    weights: Array
    """Their probabilities, by number of functions; what is missing to 1 reaches the target."""

    def expect(self, table: Array) -> Array:
        """Mean of a table [loss, price, choice]: [number of functions, price, choice]; 0 once the target is reached."""
        chosen = table[self.columns]
        return np.asarray((self.weights @ chosen.reshape(len(chosen), -1)).reshape(-1, *table.shape[1:]))

    @property
    def alive(self) -> Array:
        """Probability that the target is not reached, by number of functions."""
        return np.asarray(self.weights.sum(axis=1))


class DynamicProgramme:
    """Least time to the target by loss, functions and price of the budget.

    Args:
        spec: of the environment.
        margin: share of the expected cost that the schedule keeps.
    """

    def __init__(self, spec: EnvironmentSpec, *, margin: float = MARGIN) -> None:
        self.spec, self.margin = spec, margin
        self._env = env = Environment(spec, noisy=False)
        self.choices = choices(env)
        spread = spec.noise.loss_spread
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES if spread else 1)
        self._scatter, self._weights = spread * np.clip(nodes, -3.0, 3.0), weights / weights.sum()
        top = 1.02 * max(spec.curve.start, *spec.curve.knots)
        self._grid = np.linspace(math.log(spec.target_loss), math.log(top), LOSSES if spread else LOSSES_QUIET)
        self._costs()
        self._after = [self._losses_after(x) for x in self._grid]
        self._solve()

    def _costs(self) -> None:
        """Time and cost of epochs, starts and changes, by choice."""
        env, ahead = self._env, self.spec.ahead
        slow = np.array([env.mean_slowest[e.workers] for e in self.choices])
        self._seconds = np.array([e.seconds for e in self.choices]) * slow
        self._usd = np.array([e.cost_usd for e in self.choices]) * slow
        starts = np.array([change(None, e, ahead=ahead) for e in self.choices])
        self._start_s, self._start_usd = starts[:, 0], starts[:, 1]
        changes = np.array([[(0.0, 0.0) if a is b else change(a, b, ahead=ahead) for b in self.choices] for a in self.choices])
        self._change_s, self._change_usd = changes[:, :, 0], changes[:, :, 1]
        scale = float(np.median(self._seconds) / np.median(self._usd))
        self.prices = np.concatenate([[0.0], scale * np.geomspace(3e-3, 3e2, PRICES - 1)])
        self._epoch = self._seconds + self.prices[:, None] * self._usd
        self._change = self._change_s + self.prices[:, None, None] * self._change_usd
        self._counts, self._count_of = np.unique([e.workers for e in self.choices], return_inverse=True)

    def _losses_after(self, x: float) -> _After:
        """Where losses lie after an epoch that begins at loss e^x."""
        means = np.log([self._env.transitions.after(math.exp(x), w) for w in self._counts.tolist()])
        losses = means[:, None] + self._scatter
        last, step = len(self._grid) - 1, self._grid[1] - self._grid[0]
        place = np.clip((losses - self._grid[0]) / step, 0.0, last)
        low = np.minimum(place.astype(np.int64), last - 1)
        weight, part = np.where(losses <= self._grid[0], 0.0, self._weights), place - low
        columns, index = np.unique(np.concatenate([low, low + 1], axis=1), return_inverse=True)
        weights = np.zeros((len(means), len(columns)))
        rows = np.arange(len(means))[:, None]
        np.add.at(weights, (rows, index.reshape(len(means), -1)), np.concatenate([weight * (1 - part), weight * part], axis=1))
        return _After(columns, weights)

    def _totals(self, after: _After, value: Array) -> Array:
        """Mean `time + λ · cost` behind an epoch, by price, its functions and those of the next one."""
        alive = after.alive[self._count_of][:, None]
        expected = after.expect(value)[self._count_of]
        return np.asarray(alive * self._change + expected.transpose(1, 0, 2))

    def _solve(self) -> None:
        """Fills the tables [loss, price, choice]: value, and cost and epochs of the best schedule."""
        shape = (len(self._grid), len(self.prices), len(self.choices))
        self._value, self._cost, self._left = (np.zeros(shape) for _ in range(3))
        best = np.zeros(shape, dtype=int)
        late = not self.spec.ahead
        settled = np.zeros(shape)  # not ahead: value after the best change
        for _ in range(SWEEPS):
            before = np.min(self._value, axis=2)
            for i in range(1, shape[0]):
                if late:
                    self._value[i] = self._epoch + _own(self._after[i].expect(settled), self._count_of)
                    changed = self._change + self._value[i][:, None, :]
                    best[i] = np.argmin(changed, axis=2)
                    settled[i] = np.min(changed, axis=2)
                else:
                    totals = self._totals(self._after[i], self._value)
                    best[i] = np.argmin(totals, axis=2)
                    self._value[i] = self._epoch + np.min(totals, axis=2)
            now = np.min(self._value, axis=2)
            if np.max(np.abs(now - before)[1:] / now[1:]) < ACCURACY:
                break
        self._evaluate(best)

    def _evaluate(self, best: NDArray[np.int64]) -> None:
        """Mean cost and epochs of the best schedules."""
        c = np.arange(len(self.choices))
        for table, own, changes in (
            (self._cost, self._usd, self._change_usd),
            (self._left, np.ones(len(self.choices)), np.zeros_like(self._change_usd)),
        ):
            then = np.zeros_like(table)
            for _ in range(SWEEPS):
                before = np.min(table, axis=2)
                for i in range(1, len(self._grid)):
                    after = self._after[i]
                    if self.spec.ahead:
                        expected = after.expect(table)[self._count_of].transpose(1, 0, 2)
                        moved = changes[c, best[i]] * after.alive[self._count_of]
                        table[i] = own + moved + np.take_along_axis(expected, best[i][:, :, None], axis=2)[:, :, 0]
                    else:
                        table[i] = own + _own(after.expect(then), self._count_of)
                        then[i] = changes[c, best[i]] + np.take_along_axis(table[i], best[i], axis=1)
                now = np.min(table, axis=2)
                if np.max(np.abs(now - before)[1:] / now[1:]) < ACCURACY:
                    break

    @property
    def bound_s(self) -> float:
        """Lower bound of the mean time of a run within the budget."""
        value = self._first(self._value, self._epoch)
        whole = self._start_s + self.prices[:, None] * self._start_usd + value
        return float(np.max(np.min(whole, axis=1) - self.prices * self.spec.budget_usd))

    def _first(self, table: Array, own: Array) -> Array:
        """Values of a run that begins with each choice, without its start. Where changes begin ahead, it keeps them for two epochs."""
        start = math.log(self.spec.curve.start)
        if self.spec.ahead:
            return np.asarray(own + _own(self._losses_after(start).expect(table), self._count_of))
        return self._at(table, start)

    def _at(self, table: Array, x: float) -> Array:
        """A table at loss e^x: [price, choice]."""
        step, last = self._grid[1] - self._grid[0], len(self._grid) - 1
        place = float(np.clip((x - self._grid[0]) / step, 0.0, last))
        low = min(int(place), last - 1)
        return np.asarray(table[low] * (1 - place + low) + table[low + 1] * (place - low))

    def choose(self, env: Environment) -> EpochCosts:
        """The choice that the next action makes."""
        left, epochs = self.spec.budget_usd - env.spent_usd, self.spec.epochs - len(env.history)
        value, cost, count = self._options(env)
        rows, best = np.arange(len(self.prices)), np.argmin(value, axis=1)
        costs, counts = cost[rows, best] * (1 + self.margin), count[rows, best]
        fits = np.flatnonzero((costs <= left) & (counts <= epochs))
        price = int(fits[0]) if fits.size else int(np.argmin(np.where(counts <= epochs, costs, np.inf)))
        return self.choices[int(best[price])]

    def _options(self, env: Environment) -> tuple[Array, Array, Array]:
        """Value, cost and epochs until the target, by price and choice."""
        pending = env.pending()
        if pending is None:
            value = self._start_s + self.prices[:, None] * self._start_usd + self._first(self._value, self._epoch)
            cost = self._start_usd + self._first(self._cost, self._usd)
            return value, cost, self._first(self._left, np.ones(len(self.choices)))
        now, x = self._nearest(pending), math.log(env.loss)
        if not self.spec.ahead:
            found = (self._at(t, x) for t in (self._value, self._cost, self._left))
            value, cost, count = found
            return value + self._change[:, now], cost + self._change_usd[now], count
        after = self._losses_after(x)
        group, alive = self._count_of[now], after.alive[self._count_of[now]]
        value, cost, count = (after.expect(t)[group] for t in (self._value, self._cost, self._left))
        return (
            self._epoch[:, now, None] + alive * self._change[:, now] + value,
            self._usd[now] + alive * self._change_usd[now] + cost,
            1 + count,
        )

    def _nearest(self, costs: EpochCosts) -> int:
        """The choice that is most like an epoch."""

        def apart(e: EpochCosts) -> float:
            return abs(math.log(e.workers / costs.workers)) + abs(math.log(e.memory_mb / costs.memory_mb))

        return min(range(len(self.choices)), key=lambda i: apart(self.choices[i]))


def _own(expected: Array, count_of: NDArray[np.int64]) -> Array:
    """Of [number of functions, price, choice], each choice with its own number: [price, choice]."""
    return np.asarray(expected[count_of, :, np.arange(len(count_of))].T)


def choices(env: Environment, sizes: int = MOST_QUOTAS) -> list[EpochCosts]:
    """Choices of a dynamic programme: for each number of functions, memory sizes that none of the others excels in time and cost.

    Args:
        env: the environment.
        sizes: memory sizes of each number of functions, at most; the fastest is among them.
    """
    wanted = np.unique(np.geomspace(env.workers[0], env.workers[-1], MOST_WORKERS).round().astype(int))
    found: list[EpochCosts] = []
    for w in wanted.tolist():
        rows = sorted((e for e in env.table.values() if e.workers == w), key=lambda e: (e.cost_usd, e.seconds))
        front: list[EpochCosts] = []
        for e in rows:
            if not front or e.seconds < front[-1].seconds * 0.999:
                front.append(e)
        take = np.unique(np.linspace(len(front) - 1, 0, min(len(front), sizes)).round().astype(int))
        found += [front[i] for i in take if front]
    return found
