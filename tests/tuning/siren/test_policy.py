"""Saved policies, and what functions do with them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra siren is not installed")

from siren_worlds import spec

from ephemeron.config.typed import plain
from ephemeron.errors import JobError
from ephemeron.training.job.generation import Resize
from ephemeron.training.task.learned_schedule import STATE, LearnedSchedule, PolicyNetwork
from ephemeron.training.task.learned_schedule import Layer as DenseLayer
from ephemeron.training.task.schedule import EpochMeasurements
from ephemeron.tuning.siren import Environment
from ephemeron.tuning.siren.policy import Comparison, SavedPolicy, Training, load_policy

COMPARISON = Comparison(
    static_workers=6, static_memory_mb=1024, static_s=200.0, learned_s=150.0, learned_reached=1.0, programme_s=140.0,
    programme_reached=1.0, bound_s=135.0, seeds=20,
)  # fmt: skip


def by_loss(high: tuple[float, float], low: tuple[float, float]) -> PolicyNetwork:
    """A network whose action is one at the start, and another at the target."""
    (a, b), (c, d) = high, low
    weights = [[0.0] * len(STATE) for _ in range(2)]
    weights[0][0], weights[1][0] = a - c, b - d
    return PolicyNetwork(layers=(DenseLayer(weights=tuple(map(tuple, weights)), bias=(c, d)),))


def saved(**changes: Any) -> SavedPolicy:
    found = SavedPolicy(
        environment=spec(), network=by_loss((0.0, 1.0), (1.0, -1.0)), comparison=COMPARISON,
        training=Training(seed=0, steps=0, imitated=0, seconds=0.0),
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


def measured(**changes: Any) -> EpochMeasurements:
    values: dict[str, Any] = {
        "epoch": 1, "epochs": 10, "iteration": 10, "run_s": 20.0, "epoch_s": 10.0, "iteration_s": 1.0, "spent_usd": 0.01, "loss": 9.0,
        "metrics": {"loss": 2.3}, "workers": 4, "memory_mb": 1792, "aggregators": 2, "batch_size": 32, "nonaggregator_batch_size": 32,
    }  # fmt: skip
    return EpochMeasurements(**{**values, **changes})


def test_a_schedule_asks_for_what_the_policy_chooses() -> None:
    schedule = LearnedSchedule(json.loads(json.dumps(plain(saved().exported()))))
    assert schedule.decide(measured()) is None
    assert schedule.decide(measured(metrics={"loss": 0.3})) == Resize(workers=16, memory_mb=512, aggregators=2)
    assert schedule.decide(measured(metrics={}, loss=0.3)) == Resize(workers=16, memory_mb=512, aggregators=2)
    assert schedule.decide(measured(workers=1, aggregators=1)) == Resize(workers=4, memory_mb=1792, aggregators=2)


def test_a_function_chooses_what_the_environment_does() -> None:
    policy = saved()
    exported, env = policy.exported(), Environment(policy.environment)
    env.reset(seed=0)
    over = False
    while not over:
        observation = env.scales.observation(env.state)
        action = policy.network.act(observation)
        assert exported.decide(env.state) == policy.environment.bounds.configuration(action)
        over = env.step(action)[2]


def test_a_network_has_tanh_between_its_layers() -> None:
    network = PolicyNetwork(
        layers=(
            DenseLayer(weights=((1.0, 0.0), (0.0, 2.0)), bias=(0.0, 1.0)),
            DenseLayer(weights=((1.0, -3.0),), bias=(0.5,)),
        )
    )
    inner = np.tanh([0.3, 1.8])
    assert network.act(np.array([0.3, 0.4])) == pytest.approx(max(-1.0, inner[0] - 3 * inner[1] + 0.5))


def test_a_saved_policy_is_read_again(tmp_path) -> None:
    saved().save(tmp_path / "a" / "policy.json")
    assert load_policy(tmp_path / "a" / "policy.json") == saved()


def test_other_files_are_refused(tmp_path) -> None:
    with pytest.raises(JobError, match="cannot be read"):
        load_policy(tmp_path / "none.json")
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"a": 1}')
    for name in ("a", "b"):
        with pytest.raises(JobError, match="is not a saved policy"):
            load_policy(tmp_path / f"{name}.json")
    (tmp_path / "c.json").write_text(json.dumps({**plain(saved()), "version": 0}))
    with pytest.raises(JobError, match="of another release"):
        load_policy(tmp_path / "c.json")


def test_a_policy_that_is_no_better_is_not_used() -> None:
    assert COMPARISON.learned_is_better
    slow, unsure = (
        dataclasses.replace(COMPARISON, learned_s=201.0),
        dataclasses.replace(COMPARISON, learned_reached=0.95),
    )
    assert "is not faster, so the static configuration is used" in slow.sentence()
    assert "reached the target in 95% of 20 tries, so the static configuration is used" in unsure.sentence()
    assert not slow.learned_is_better
    assert not unsure.learned_is_better
