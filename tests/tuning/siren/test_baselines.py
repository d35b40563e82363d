"""Static configurations and the dynamic programme, compared with exhaustive enumeration."""

from __future__ import annotations

import itertools
import math

import pytest

pytest.importorskip("gymnasium", reason="the extra siren is not installed")

from siren_worlds import QUIET, spec

from ephemeron.errors import PlanInfeasible
from ephemeron.training.task.learned_schedule import ActionBounds
from ephemeron.tuning.siren import Environment, Noise
from ephemeron.tuning.siren.baselines import grid_search, outcome_of, static_plan, static_seconds
from ephemeron.tuning.siren.dynamic_programme import DynamicProgramme

SMALL = ActionBounds(most_workers=6, quotas_mb=(1792,))


def test_the_static_plan_is_the_best_of_all() -> None:
    found = static_plan(spec(budget_usd=0.08), seeds=(1,))
    env = Environment(spec(budget_usd=0.08))
    best = min(env.table.values(), key=lambda e: static_seconds(env, e)[0])
    assert (found.workers, found.memory_mb) == (best.workers, best.memory_mb)
    assert found.outcome.seconds == pytest.approx(static_seconds(env, best)[0])
    assert found.evaluated == len(env.table)


def test_a_grid_is_no_better_than_all() -> None:
    everything, grid = static_plan(spec(budget_usd=0.08), seeds=(1,)), grid_search(spec(budget_usd=0.08), seeds=(1,))
    assert grid is not None
    assert grid.workers in (1, 2, 4, 8, 16)
    assert grid.outcome.seconds >= everything.outcome.seconds


def test_a_static_plan_keeps_the_budget_in_every_noisy_run() -> None:
    found = static_plan(spec(budget_usd=0.06, noise=Noise()))
    assert found.outcome.reached == 1
    assert len(found.outcome.runs) == 20


def test_a_budget_that_is_too_small_is_said() -> None:
    with pytest.raises(PlanInfeasible, match=r"a loss of 0.3 for \$0.001"):
        static_plan(spec(budget_usd=0.001))
    with pytest.raises(PlanInfeasible, match=r"a loss of 0.3 in 2 epochs: the lowest that is expected is"):
        static_plan(spec(budget_usd=1.0, epochs=2))


@pytest.mark.parametrize("budget", [0.042, 0.1])
def test_the_bound_is_below_every_schedule_and_the_schedule_near_it(budget: float) -> None:
    """Schedules of three parts, each with its own number of functions: 1, 2, 4 or 6."""
    wanted = spec(budget_usd=budget, bounds=SMALL, target_loss=0.5, ahead=False)
    programme = DynamicProgramme(wanted, margin=0.0)
    env = Environment(wanted)
    best = math.inf
    for counts in itertools.product((1, 2, 4, 6), repeat=3):
        for first, second in itertools.product((1, 2, 4, 6), (1, 3, 5)):
            env.reset(seed=0)
            over, info = False, {"reached": False}
            while not over:
                done = len(env.history)
                part = 0 if done < first else 1 if done < first + second else 2
                _, _, over, _, info = env.advance(env.table[counts[part], 1792])
            if info["reached"]:
                best = min(best, env.seconds)
    assert programme.bound_s <= best * 1.002  # losses are interpolated
    reached = outcome_of(wanted, programme.choose, seeds=(1,))
    assert reached.reached == 1
    assert reached.seconds <= best * 1.03
    assert reached.seconds <= programme.bound_s * 1.1


@pytest.mark.slow
def test_an_unlimited_budget_leaves_only_time() -> None:
    wanted = spec(budget_usd=100.0, noise=QUIET)
    programme = DynamicProgramme(wanted)
    assert (
        outcome_of(wanted, programme.choose, seeds=(1,)).seconds
        <= static_plan(wanted, seeds=(1,)).outcome.seconds * 1.01
    )


@pytest.mark.parametrize("ahead", [True, False])
def test_with_scatter_the_schedule_needs_hardly_more_than_the_bound(ahead: bool) -> None:
    noise = Noise(spread=0.0, straggler_share=0.0, loss_spread=0.03)
    wanted = spec(budget_usd=0.07, bounds=SMALL, noise=noise, target_loss=0.4, ahead=ahead)
    programme = DynamicProgramme(wanted, margin=0.0)
    found = outcome_of(wanted, programme.choose, seeds=range(40))
    assert found.reached > 0.8
    assert found.seconds == pytest.approx(programme.bound_s, rel=0.05)
