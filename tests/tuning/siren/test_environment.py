"""The environment of a learned schedule: its interface, and an epoch by hand."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra siren is not installed")

from siren_worlds import CURVE, QUIET, spec

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.training.task.learned_schedule import STATE, ActionBounds
from ephemeron.tuning.siren import Environment, EnvironmentSpec, Noise


def test_gymnasium_accepts_it() -> None:
    from gymnasium.utils.env_checker import check_env

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*render.*")
        warnings.filterwarnings("ignore", message=".*not within the.*spec.*")
        check_env(Environment(spec(noise=Noise())), skip_render_check=True)


@pytest.mark.slow
def test_stable_baselines_accepts_it() -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker", reason="the extra siren is not installed")
    checker.check_env(Environment(spec(noise=Noise())), warn=True)


def test_a_document_of_it_is_the_same_environment() -> None:
    wanted = spec(noise=Noise())
    read = build(EnvironmentSpec, plain(wanted), where="policy")
    assert read == wanted
    first, second = Environment(wanted), Environment(read)
    first.reset(seed=3), second.reset(seed=3)
    for _ in range(5):
        a, b = first.step(np.array([0.2, 0.4])), second.step(np.array([0.2, 0.4]))
        assert a[1:] == b[1:]
        assert (a[0] == b[0]).all()


def test_actions_are_rounded_on_logarithmic_scales() -> None:
    bounds = ActionBounds(most_workers=16, quotas_mb=(512, 1024, 1792))
    assert bounds.configuration(np.array([-1.0, -1.0])) == (1, 512)
    assert bounds.configuration(np.array([0.0, 0.1])) == (4, 1024)
    assert bounds.configuration(np.array([7.0, 7.0])) == (16, 1792)
    for workers in range(1, 17):
        for memory in bounds.quotas_mb:
            assert bounds.configuration(bounds.action(workers, memory)) == (workers, memory)


def test_an_epoch_costs_what_the_model_says() -> None:
    env = Environment(spec())
    env.reset(seed=0)
    epoch = env.table[4, 1792]
    observation, reward, over, _, info = env.step(env.description.bounds.action(4, 1792))
    begun = epoch.cold_s + epoch.begin_s
    assert info["seconds"] == pytest.approx(begun + epoch.seconds)
    assert info["cost_usd"] == pytest.approx(epoch.cost_usd + 4 * 1.75 * begun * env.description.profile.platform.price_gb_s)
    assert reward == pytest.approx(-info["seconds"] / 100)
    assert not over
    assert env.loss == pytest.approx(float(CURVE.after_epoch(2.3, 4)), rel=1e-3)
    said = dict(zip(STATE, observation.tolist(), strict=True))
    assert said["budget_left"] == pytest.approx(1 - info["cost_usd"] / 0.05, rel=1e-5)
    assert said["cpu_use"] == pytest.approx(epoch.compute_s / epoch.seconds, rel=1e-5)
    assert said["memory_use"] == pytest.approx(316 / 1792, rel=1e-5)
    assert 0 < said["loss"] < 1
    assert (said["workers"], said["memory"]) == pytest.approx(env.description.bounds.action(4, 1792), rel=1e-5)
    assert said["epochs_left"] == pytest.approx(1 - 1 / 60, rel=1e-5)


def test_the_end_has_a_bonus_or_a_penalty() -> None:
    def total(budget: float, epochs: int = 60) -> tuple[float, bool]:
        env = Environment(spec(budget_usd=budget, epochs=epochs))
        env.reset(seed=0)
        rewards, over, info = 0.0, False, {}
        while not over:
            _, reward, over, _, info = env.step(env.description.bounds.action(8, 1792))
            rewards += reward
        return rewards + info["seconds"] / 100, info["reached"]

    assert total(1.0) == (pytest.approx(1.0), True)
    assert total(0.02) == (pytest.approx(-1.0), False)
    assert total(1.0, epochs=3) == (pytest.approx(-1.0), False)


def test_an_action_takes_effect_after_the_next_epoch() -> None:
    env = Environment(spec())
    few, many = env.description.bounds.action(2, 1792), env.description.bounds.action(16, 1792)
    env.reset(seed=0)
    for action in (few, many, many, few):
        env.step(action)
    assert [e.workers for e in env.history] == [2, 2, 16, 16]


def test_the_state_has_the_functions_of_the_next_epoch() -> None:
    """As decisions of a run are made by the functions of the generation that begins."""
    env = Environment(spec())
    few, many = env.description.bounds.action(2, 1792), env.description.bounds.action(16, 1024)
    env.reset(seed=0)
    seen = []
    for action in (few, many, many, few):
        env.step(action)
        seen.append((env.state.workers, env.state.memory_mb))
    assert seen == [(2, 1792), (16, 1024), (16, 1024), (2, 1792)]


def test_a_change_waits_until_functions_have_started() -> None:
    slow = dataclasses.replace(spec().profile.platform, cold_start_s=60.0)
    env = Environment(spec(profile=dataclasses.replace(spec().profile, platform=slow), budget_usd=1.0, target_loss=0.2))
    few, many = env.description.bounds.action(4, 1792), env.description.bounds.action(16, 1792)
    epochs = int(60 // env.table[4, 1792].seconds) + 1
    env.reset(seed=0)
    for action in (few, *[many] * 20):
        if env.step(action)[2]:
            break
    assert [e.workers for e in env.history][: epochs + 1] == [4] * (epochs + 1)
    assert env.history[epochs + 1].workers == 16


def test_without_an_early_start_the_epoch_pays_for_it() -> None:
    env = Environment(spec(ahead=False))
    env.reset(seed=0)
    for workers in (2, 16, 4):
        env.step(env.description.bounds.action(workers, 1792))
    assert [e.workers for e in env.history] == [2, 16, 4]
    grown, shrunk = env.table[16, 1792], env.table[4, 1792]
    assert env.history[1].seconds == pytest.approx(grown.seconds + grown.cold_s + grown.begin_s)
    assert env.history[2].seconds == pytest.approx(shrunk.seconds + shrunk.begin_s)


def test_stragglers_slow_many_functions_more() -> None:
    noisy = spec(noise=dataclasses.replace(QUIET, straggler_share=0.1, straggler_factor=2.0))

    def slowed(workers: int) -> float:
        env = Environment(noisy)
        ratios = []
        for seed in range(30):
            env.reset(seed=seed)
            env.step(env.description.bounds.action(workers, 1792))
            ratios.append(env.state.epoch_s / env.table[workers, 1792].seconds)
        return float(np.mean(ratios))

    assert slowed(2) == pytest.approx(1 + 1 - 0.9**2, abs=0.2)
    assert slowed(16) == pytest.approx(1 + 1 - 0.9**16, abs=0.2)
    assert Environment(noisy).mean_slowest[16] == pytest.approx(1 + 1 - 0.9**16, abs=0.05)


def test_impossible_jobs_are_refused() -> None:
    with pytest.raises(JobError, match="a batch needs 316 MB"):
        Environment(spec(bounds=ActionBounds(most_workers=4, quotas_mb=(128, 256))))
    with pytest.raises(JobError, match="below the target 3"):
        Environment(spec(target_loss=3.0))
