"""Schedules of a dynamic programme that runs can follow: as a table that is asked after each epoch, and as a fixed list of changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ephemeron.training.task.decision_table import DecisionTable
from ephemeron.tuning.siren.baselines import RELIABLE, StaticPlan, outcome_of
from ephemeron.tuning.siren.budget_programme import BudgetProgramme
from ephemeron.tuning.siren.dynamic_programme import DynamicProgramme
from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec
from ephemeron.tuning.siren.epoch_model import EpochCosts

CHOSEN_BY = tuple(range(2000, 2200))
"""Noisy runs by which schedules are chosen; others judge them."""
PENALTIES = (1.0, 4.0, 16.0, 64.0)
"""Seconds that an overdraft counts, divided by the time of the best static configuration."""
BOUND_PENALTY = 4.0
"""The largest of them that the bound rests on: errors of the probability of an overdraft are multiplied by it."""
RESERVES = (0.0, 0.03, 0.08)
"""Shares by which epochs count as dearer; a larger one is tried where no schedule is reliable with those before."""

Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Programmed:
    """What the dynamic programmes say of an environment."""

    table: DecisionTable
    """The schedule, asked again after each epoch."""
    fixed: Sizes
    """Number and memory of functions of each epoch, of a mean run of it; the last ones stay."""
    bound_s: float
    """Lower bound of the mean time with a budget that is kept in the mean."""
    least_s: float
    """Near-exact lower bound of the mean time of schedules that reach the target within the budget in `RELIABLE` of their runs."""


def programmed(spec: EnvironmentSpec, static: StaticPlan) -> Programmed:
    """Schedule and bounds of the dynamic programmes.

    The schedule is the fastest of those that reach the target in `RELIABLE` of the runs of `CHOSEN_BY`; the most reliable one, where none does.

    Args:
        spec: of the environment.
        static: its best static configuration.
    """
    again_s = static.outcome.seconds
    judged: list[tuple[bool, float, DecisionTable]] = []
    bound_s = DynamicProgramme(spec).bound_s
    least_s = bound_s
    for reserve in RESERVES:
        for factor in PENALTIES:
            programme = BudgetProgramme(spec, penalty=factor * again_s, reserve=reserve)
            if reserve == 0 and factor <= BOUND_PENALTY:
                least_s = max(least_s, programme.value - programme.penalty * (1 - RELIABLE))
            table = programme.table()
            found = outcome_of(spec, asked(table), CHOSEN_BY)
            good = found.reached >= RELIABLE
            judged.append((good, -found.counted_s(again_s) if good else found.reached, table))
        if any(j[0] for j in judged):
            break
    table = max(judged, key=lambda j: j[:2])[2]
    return Programmed(table=table, fixed=fixed_sizes(spec, table), bound_s=bound_s, least_s=least_s)


def asked(table: DecisionTable) -> Callable[[Environment], EpochCosts]:
    """The choices of a table."""

    def choose(env: Environment) -> EpochCosts:
        state = env.state
        return env.chosen(*table.choose(state.loss, state.budget_left, state.workers, state.memory_mb))

    return choose


def fixed_sizes(spec: EnvironmentSpec, table: DecisionTable) -> Sizes:
    """Functions of each epoch of a mean run by a table, until the last change."""
    env, choose, over = Environment(spec, noisy=False), asked(table), False
    while not over:
        over = env.advance(choose(env))[2]
    found = [(e.workers, e.memory_mb) for e in env.history]
    while len(found) > 1 and found[-1] == found[-2]:
        found.pop()
    return tuple(found)


def listed(spec: EnvironmentSpec, sizes: Sizes) -> Callable[[Environment], EpochCosts]:
    """The choices of a fixed list: where changes begin ahead, those that bring each epoch its functions, as far as starts allow it."""
    ahead = 1 if spec.ahead else 0

    def choose(env: Environment) -> EpochCosts:
        epoch = len(env.history)
        return env.chosen(*sizes[min(len(sizes) - 1, epoch + ahead if epoch else 0)])

    return choose
