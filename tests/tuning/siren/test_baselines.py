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
from ephemeron.tuning.siren.baselines import RELIABLE, SEEDS, grid_search, outcome_of, static_plan, static_seconds
from ephemeron.tuning.siren.budget_programme import BudgetProgramme
from ephemeron.tuning.siren.dynamic_programme import DynamicProgramme
from ephemeron.tuning.siren.schedules import asked, listed

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
    assert found.outcome.reached >= RELIABLE
    assert len(found.outcome.runs) == len(SEEDS)


def test_the_order_of_static_configurations_is_that_of_noisy_runs() -> None:
    """With scatter, runs that end just below the target on average often need another epoch."""
    noise = Noise(spread=0.0, straggler_share=0.0, loss_spread=0.1)
    wanted, seeds = spec(budget_usd=1.0, noise=noise, bounds=SMALL, target_loss=0.6), range(30)
    found, env = static_plan(wanted, seeds), Environment(wanted)
    tried = [outcome_of(wanted, lambda _, e=e: e, seeds) for e in env.table.values()]  # type: ignore[misc]
    assert found.outcome.seconds == min(t.seconds for t in tried if t.reached >= RELIABLE)


def test_a_budget_that_is_too_small_is_said() -> None:
    with pytest.raises(PlanInfeasible, match=r"a loss of 0.3 for \$0.001"):
        static_plan(spec(budget_usd=0.001))
    with pytest.raises(PlanInfeasible, match=r"a loss of 0.3 in 2 epochs: the lowest that is expected is"):
        static_plan(spec(budget_usd=1.0, epochs=2))


@pytest.mark.slow
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
    assert outcome_of(wanted, programme.choose, seeds=(1,)).seconds <= static_plan(wanted, seeds=(1,)).outcome.seconds * 1.01


@pytest.mark.parametrize("ahead", [True, False])
def test_with_scatter_the_schedule_needs_hardly_more_than_the_bound(ahead: bool) -> None:
    noise = Noise(spread=0.0, straggler_share=0.0, loss_spread=0.03)
    wanted = spec(budget_usd=0.07, bounds=SMALL, noise=noise, target_loss=0.4, ahead=ahead)
    programme = DynamicProgramme(wanted, margin=0.0)
    found = outcome_of(wanted, programme.choose, seeds=range(40))
    assert found.reached > 0.8
    assert found.seconds == pytest.approx(programme.bound_s, rel=0.05)


@pytest.mark.parametrize("ahead", [True, False])
def test_knowing_the_budget_the_schedule_needs_what_is_predicted(ahead: bool) -> None:
    """Runs by the table take the programme's own mean, less than the best static configuration and hardly more than the bound."""
    noise = Noise(spread=0.0, straggler_share=0.0, loss_spread=0.03)
    wanted = spec(budget_usd=0.065, bounds=SMALL, noise=noise, target_loss=0.4, ahead=ahead)
    static = static_plan(wanted).outcome
    programme = BudgetProgramme(wanted, penalty=4 * static.seconds)
    found = outcome_of(wanted, asked(programme.table()))
    assert found.reached == 1
    assert found.seconds == pytest.approx(programme.value, rel=0.01)
    assert found.seconds <= 0.95 * static.seconds
    assert found.seconds <= 1.05 * DynamicProgramme(wanted).bound_s


def test_without_scatter_the_schedule_is_as_good_as_all_of_three_parts() -> None:
    wanted = spec(budget_usd=0.06, bounds=SMALL, target_loss=0.5, ahead=False)
    programme, env = BudgetProgramme(wanted, penalty=1000.0), Environment(wanted)
    best = math.inf
    for counts in itertools.product((1, 2, 4, 6), repeat=3):
        for first, second in itertools.product((1, 2, 4, 6), (1, 3, 5)):
            sizes = tuple((counts[0 if i < first else 1 if i < first + second else 2], 1792) for i in range(first + second + 1))
            env.reset(seed=0)
            over, info, choose = False, {"reached": False}, listed(wanted, sizes)
            while not over:
                _, _, over, _, info = env.advance(choose(env))
            best = min(best, env.seconds if info["reached"] else math.inf)
    found = outcome_of(wanted, asked(programme.table()), seeds=(1,))
    assert found.reached == 1
    assert found.seconds <= 1.02 * best


def test_a_list_of_changes_takes_effect_when_it_says() -> None:
    wanted = spec(budget_usd=1.0)
    env, choose = Environment(wanted), listed(wanted, ((2, 1792), (2, 1792), (8, 1792), (4, 1792)))
    env.reset(seed=0)
    for _ in range(6):
        env.advance(choose(env))
    assert [e.workers for e in env.history] == [2, 2, 8, 4, 4, 4]
