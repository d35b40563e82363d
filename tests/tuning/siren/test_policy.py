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
from ephemeron.training.task.decision_table import DecisionTable
from ephemeron.training.task.learned_schedule import STATE, LearnedSchedule, PolicyNetwork
from ephemeron.training.task.learned_schedule import Layer as DenseLayer
from ephemeron.training.task.schedule import EpochMeasurements
from ephemeron.tuning.siren import Environment
from ephemeron.tuning.siren.policy import SCHEDULE, Candidate, Comparison, SavedPolicy, Training, load_policy

COMPARISON = Comparison(
    static_workers=6,
    static_memory_mb=1024,
    bound_s=120.0,
    least_s=135.0,
    seeds=200,
    candidates=(
        Candidate(name="static", seconds=200.0, reached=1.0),
        Candidate(name="network", seconds=150.0, reached=1.0),
        Candidate(name="programme", seconds=140.0, reached=0.97),
        Candidate(name="list", seconds=210.0, reached=1.0),
    ),
)
TABLE = DecisionTable.of(
    np.array([[[0, 1], [1, 1]], [[0, 0], [1, 0]], [[0, 0], [0, 1]]], dtype=np.uint8),
    [(4, 1792), (16, 512)],
    first=(4, 1792),
    lowest_loss=0.1,
    highest_loss=10.0,
)
"""Indices [loss 0.1, 1 or 10, budget all spent or all left, functions of the next epoch]."""


def by_loss(high: tuple[float, float], low: tuple[float, float]) -> PolicyNetwork:
    """A network whose action is one at the start, and another at the target."""
    (a, b), (c, d) = high, low
    weights = [[0.0] * len(STATE) for _ in range(2)]
    weights[0][0], weights[1][0] = a - c, b - d
    return PolicyNetwork(layers=(DenseLayer(weights=tuple(map(tuple, weights)), bias=(c, d)),))


def saved(**changes: Any) -> SavedPolicy:
    found = SavedPolicy(
        environment=spec(),
        network=by_loss((0.0, 1.0), (1.0, -1.0)),
        comparison=COMPARISON,
        table=TABLE,
        fixed=((4, 1792), (4, 1792), (16, 512)),
        training=Training(seed=0, steps=0, imitated=0, seconds=0.0),
    )
    return dataclasses.replace(found, **changes)


def measured(**changes: Any) -> EpochMeasurements:
    values: dict[str, Any] = {
        "epoch": 1,
        "epochs": 10,
        "iteration": 10,
        "run_s": 20.0,
        "epoch_s": 10.0,
        "iteration_s": 1.0,
        "spent_usd": 0.01,
        "loss": 9.0,
        "metrics": {"loss": 2.3},
        "workers": 4,
        "memory_mb": 1792,
        "aggregators": 2,
        "batch_size": 32,
        "nonaggregator_batch_size": 32,
    }
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
        layers=(DenseLayer(weights=((1.0, 0.0), (0.0, 2.0)), bias=(0.0, 1.0)), DenseLayer(weights=((1.0, -3.0),), bias=(0.5,)))
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
    document = plain(saved())
    (tmp_path / "c.json").write_text(json.dumps({**document, "version": 0}))
    with pytest.raises(JobError, match="of another release"):
        load_policy(tmp_path / "c.json")
    for packed in (
        "!",
        TABLE.packed[:-8],
        DecisionTable.of(np.full((3, 2, 2), 7, np.uint8), [(1, 1)] * 2, first=(1, 1), lowest_loss=1.0, highest_loss=2.0).packed,
    ):
        (tmp_path / "d.json").write_text(json.dumps({**document, "table": {**document["table"], "packed": packed}}))
        with pytest.raises(JobError, match="choices of a learned schedule are damaged"):
            load_policy(tmp_path / "d.json")


def test_a_table_tells_losses_budgets_and_functions_apart() -> None:
    schedule = LearnedSchedule(json.loads(json.dumps(plain(saved().exported("programme")))))
    many = Resize(workers=16, memory_mb=512, aggregators=2)

    def chosen(loss: float, spent_usd: float = 0.0, **functions: int) -> Resize | None:
        return schedule.decide(measured(metrics={"loss": loss}, spent_usd=spent_usd, **functions))

    assert chosen(0.1) == many
    assert chosen(0.4) == many
    assert chosen(3.0) == many
    assert chosen(3.3) is None
    assert chosen(float("nan")) is None
    assert chosen(0.1, spent_usd=0.001) is None  # what is left is rounded down
    assert chosen(1.0, spent_usd=0.04) is None
    assert TABLE.choose(1.0, 1.0, 16, 512) == (4, 1792)
    assert TABLE.choose(10.0, 1.0, 15, 600) == (16, 512)
    assert TABLE.choose(10.0, 1.0, 0, 0) == (4, 1792)


def test_options_of_a_run_are_those_of_the_schedule() -> None:
    policy = saved()
    assert policy.options("static") == {"workers": 6, "memory_mb": 1024, "aggregators": 2}
    change = {"workers": 16, "memory_mb": 512, "aggregators": 2, "from_epoch": 2}
    assert policy.options("list") == {"workers": 4, "memory_mb": 1792, "aggregators": 2, "resize": {"schedule": [change]}}
    by_table, by_network = policy.options("programme"), policy.options("network")
    assert by_table["resize"]["policy"].target == by_network["resize"]["policy"].target == SCHEDULE
    assert by_table["resize"]["policy"].options["policy"]["table"] == plain(TABLE)
    assert by_table["workers"] == 4


def test_the_fastest_reliable_schedule_is_used() -> None:
    assert COMPARISON.used.name == "network"
    assert "the dynamic programme's schedule 140 s, with the target reached in 97% of 200 tries" in COMPARISON.sentence()
    assert COMPARISON.sentence().endswith("no schedule takes less than 135 s. Used is the learned policy")
    static, network, programme, fixed = COMPARISON.candidates
    slow = dataclasses.replace(COMPARISON, candidates=(static, dataclasses.replace(network, seconds=201.0), programme))
    assert slow.used.name == "static"
    assert slow.sentence().endswith("None of the others is faster and reaches the target often enough, so the static configuration is used")
    better = dataclasses.replace(programme, reached=0.99)
    assert dataclasses.replace(COMPARISON, candidates=(static, network, better, fixed)).used is better
