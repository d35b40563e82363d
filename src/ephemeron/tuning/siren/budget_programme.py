"""A dynamic programme over epochs that knows what is left of the budget: the schedule that reaches the target soonest without overdrawing.

A state is the loss before an epoch, the budget that is left, and the functions of that epoch; a choice is the functions of the next one. An
overdraft ends the run and costs `penalty` seconds, so the value of a state is the least mean of `time + penalty · [overdrawn]` (SIREN's reward,
section 2.3 of the survey, with C a parameter). Every epoch costs something, so states with less budget are known first and one pass
solves it. It leaves out that starts may take longer than an epoch, and the limit of epochs. Near-exact: numbers of functions and
memory sizes are thinned, losses and budgets interpolated, scatter is a quadrature, and epochs cost their mean.

For every schedule that overdraws with probability δ at most, the mean time is at least `value − penalty · δ`, whatever the penalty: a bound that
is tighter than that of `dynamic_programme`, whose budget is kept in the mean only.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from ephemeron.training.task.decision_table import DecisionTable
from ephemeron.tuning.siren.dynamic_programme import choices
from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, change

Array: TypeAlias = NDArray[np.float64]

LOSSES = 128
"""Points of the grid of losses."""
NODES = 61
"""Points of the quadrature over the scatter of losses, of equal weight."""
LEAST_BUDGETS, MOST_BUDGETS = 160, 320
"""Points of the grid of budgets, between which there are four for the cheapest epoch where that is possible."""
MEMORY_SIZES = 2
"""Memory sizes of each number of functions."""


class BudgetProgramme:
    """Least time to the target by loss, budget and functions.

    Args:
        spec: of the environment.
        penalty: seconds that an overdraft counts.
        reserve: share by which epochs count as dearer than their mean, for slow functions.
    """

    def __init__(self, spec: EnvironmentSpec, *, penalty: float, reserve: float = 0.0) -> None:
        self.spec, self.penalty, self.reserve = spec, penalty, reserve
        self._env = env = Environment(spec, noisy=False)
        self.choices = choices(env, MEMORY_SIZES)
        slow = np.array([env.mean_slowest[e.workers] for e in self.choices])
        self._seconds = np.array([e.seconds for e in self.choices]) * slow
        usd = np.array([e.cost_usd for e in self.choices]) * slow * (1 + reserve)
        self._points = int(np.clip(math.ceil(4 * spec.budget_usd / usd.min()), LEAST_BUDGETS, MOST_BUDGETS))
        self._step = spec.budget_usd / (self._points - 1)
        self._usd = np.maximum(usd, self._step)  # dearer than they are, where budgets are a multitude of epochs
        moves = np.array([[(0.0, 0.0) if a is b else change(a, b, ahead=spec.ahead) for b in self.choices] for a in self.choices])
        self._change_s, self._change_usd = moves[:, :, 0], moves[:, :, 1]
        top = 1.02 * max(spec.curve.start, *spec.curve.knots)
        self._grid = np.linspace(math.log(spec.target_loss), math.log(top), LOSSES)
        self._transitions()
        self._solve()

    def _transitions(self) -> None:
        """Probabilities of losses after an epoch by number of functions: [loss, loss after]; what is missing to 1 reaches the target."""
        spread = self.spec.noise.loss_spread
        draws = spread * np.clip(ndtri((np.arange(NODES) + 0.5) / NODES), -3.0, 3.0) if spread else np.zeros(1)
        self._after: dict[int, Array] = {}
        for w in {e.workers for e in self.choices}:
            means = np.log([self._env.transitions.after(math.exp(x), w) for x in self._grid])
            self._after[w] = np.stack([self._spread(m + draws) for m in means])

    def _spread(self, losses: Array) -> Array:
        """Weights on the grid of equally probable losses, as logarithms: [loss]."""
        low, part = _place(losses, self._grid[0], self._grid[1] - self._grid[0], len(self._grid))
        weight = np.where(losses <= self._grid[0], 0.0, 1.0 / len(losses))
        found = np.zeros(len(self._grid))
        np.add.at(found, low, weight * (1 - part))
        np.add.at(found, low + 1, weight * part)
        return found

    def _value(self, table: Array, budgets: Array, choice: int | slice) -> Array:
        """A table [loss, budget, choice] at budgets; below 0, that of an epoch that overdraws.

        Args:
            table: values.
            budgets: US dollars, [budget] or [budget, choice].
            choice: of the table's last axis; a slice: all, as budgets have them.
        """
        low, part = _place(budgets, 0.0, self._step, self._points)
        columns = np.arange(len(self.choices)) if isinstance(choice, slice) else choice
        found = table[:, low, columns] * (1 - part) + table[:, low + 1, columns] * part
        return np.where(budgets < 0, self.penalty + self._seconds[choice], found)

    def _solve(self) -> None:
        """Fills the tables: value and best choice by [loss, budget, choice], blocks of budgets in ascending order."""
        shape = (len(self._grid), self._points, len(self.choices))
        self._values = np.broadcast_to(self.penalty + self._seconds, shape).copy()
        self._best = np.zeros(shape, dtype=np.uint8)
        settled = self._values.copy()  # not ahead: value after the best change
        width = max(1, int(self._usd.min() / self._step))
        for first in range(0, self._points, width):
            block = np.arange(first, min(first + width, self._points))
            budgets = block * self._step
            for c, epoch in enumerate(self.choices):
                left = budgets - self._usd[c]
                if self.spec.ahead:
                    then = self._value(self._values, left[:, None] - self._change_usd[c], slice(None))
                    totals = np.tensordot(self._after[epoch.workers], then + self._change_s[c], axes=1)
                    self._best[:, block, c] = np.argmin(totals, axis=2)
                    behind = np.min(totals, axis=2)
                else:
                    behind = self._after[epoch.workers] @ self._value(settled, left, c)
                self._values[:, block, c] = self._seconds[c] + np.where(left < 0, self.penalty, behind)
            if not self.spec.ahead:
                for c in range(len(self.choices)):
                    totals = self._change_s[c] + self._value(self._values, budgets[:, None] - self._change_usd[c], slice(None))
                    self._best[:, block, c] = np.argmin(totals, axis=2)
                    settled[:, block, c] = np.min(totals, axis=2)

    def _starts(self) -> Array:
        """Mean `time + penalty · [overdrawn]` of a run that begins with each choice. Where changes begin ahead, it keeps them for two epochs."""
        found, start = [], math.log(self.spec.curve.start)
        low, part = _place(np.array([start]), self._grid[0], self._grid[1] - self._grid[0], len(self._grid))
        for c, epoch in enumerate(self.choices):
            seconds, usd = change(None, epoch, ahead=self.spec.ahead)
            left = self.spec.budget_usd - usd
            if self.spec.ahead:
                seconds, left = seconds + self._seconds[c], left - self._usd[c]
                values = self._value(self._values, np.array([left]), c)[:, 0]
                row = self._after[epoch.workers][low[0]] * (1 - part[0])
                behind = (row + self._after[epoch.workers][low[0] + 1] * part[0]) @ values
                found.append(seconds + (behind if left >= 0 else self.penalty))
            else:
                values = self._value(self._values, np.array([left]), c)[:, 0]
                found.append(seconds + values[low[0]] * (1 - part[0]) + values[low[0] + 1] * part[0])
        return np.asarray(found)

    @property
    def value(self) -> float:
        """Least mean of `time + penalty · [overdrawn]` of a run."""
        return float(self._starts().min())

    def table(self) -> DecisionTable:
        """The schedule, for functions."""
        named = [(e.workers, e.memory_mb) for e in self.choices]
        return DecisionTable.of(
            self._best,
            named,
            first=named[int(np.argmin(self._starts()))],
            lowest_loss=math.exp(self._grid[0]),
            highest_loss=math.exp(self._grid[-1]),
        )


def _place(x: Array, first: float, step: float, points: int) -> tuple[NDArray[np.int64], Array]:
    """Points of a grid below, and parts of the way to the next ones; values outside are at its ends."""
    place = np.clip((x - first) / step, 0.0, points - 1)
    low = np.minimum(place.astype(np.int64), points - 2)
    return low, place - low
