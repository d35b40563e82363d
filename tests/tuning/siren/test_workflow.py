"""Learned schedules of jobs: what is refused, which policies are reused, and how one is trained."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="the extra siren is not installed")

from click.testing import CliRunner
from siren_worlds import spec
from tests.tiny_job import CODE
from tests.tuning.siren.test_policy import saved

from ephemeron.cli.main import main
from ephemeron.config.typed import plain
from ephemeron.errors import JobError
from ephemeron.events import Measured, RunStarted
from ephemeron.training.job import DataSpec, EarlyStopping, Job, JobLimits, Target
from ephemeron.training.task.learned_schedule import ActionBounds
from ephemeron.tuning.siren import Environment, Noise
from ephemeron.tuning.siren.fitting import refined, world_sizes
from ephemeron.tuning.siren.policy import load_policy
from ephemeron.tuning.siren.workflow import allowed, check_policy, identity, learned_run, policy_path

JOB = Job(
    name="tiny",
    model=Target(target="tiny:mlp"),
    data=DataSpec(sampling="global"),
    epochs=6,
    code=(CODE,),
    optimizer=Target(target="SGD", options={"lr": 0.05}),
    limits=JobLimits(budget_usd=0.05, max_global_batch=64),
    early_stopping=EarlyStopping(threshold=0.3),
    run={"batch_size": 16, "platform": "simulated"},
)


def test_a_job_may_have_hsp_or_bsp() -> None:
    assert allowed(JOB, {}).sync == "hsp"
    assert allowed(dataclasses.replace(JOB, data=DataSpec()), {"sync": "bsp"}).sync == "bsp"
    assert allowed(dataclasses.replace(JOB, run={"workers": 4, "memory_mb": 900}), {}).aggregators == 2


@pytest.mark.parametrize(
    ("job", "flags", "problem"),
    [
        ({}, {"workers": 4}, "--workers and a learned schedule"),
        ({}, {"memory_mb": 900}, "--memory-mb and a learned schedule"),
        ({}, {"sync": "asp"}, "not possible with sync 'asp'"),
        ({}, {"sync": "bsp"}, "whose functions change within epochs"),
        ({}, {"pattern": "parameter-server"}, "pattern 'parameter-server'"),
        ({}, {"stages": {"count": 2}}, "a model on several functions"),
        ({}, {"exchange": {"local_steps": 4}}, "local steps"),
        ({}, {"exchange": {"compression": "int8"}}, "compression 'int8'"),
        ({}, {"resize": {"adapt": True}}, "another schedule"),
        ({"limits": JobLimits()}, {}, "needs a budget"),
        ({"early_stopping": None}, {}, "a loss at which the run ends"),
        ({"early_stopping": EarlyStopping(monitor="accuracy", mode="max", threshold=0.9)}, {}, "a loss at which"),
        ({"evaluate_every": "20 steps"}, {}, "an evaluation after every epoch"),
    ],
)
def test_what_excludes_it_is_said(job: dict[str, Any], flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        allowed(dataclasses.replace(JOB, **job), flags)


def test_a_policy_of_another_job_or_budget_is_refused() -> None:
    c = allowed(JOB, {})
    with pytest.raises(JobError, match="is of job 'net' as it was then, not of 'tiny' as it is now"):
        check_policy(saved(), JOB, c, where="p.json")
    own = spec(job=identity(JOB), target_loss=0.3, budget_usd=0.05, batch_size=16, epochs=6)
    check_policy(saved(environment=own), JOB, c, where="p.json")
    other = dataclasses.replace(own, budget_usd=0.1)
    with pytest.raises(JobError, match=r"trained for a budget of \$0.1, not 0.05"):
        check_policy(saved(environment=other), JOB, c, where="p.json")


def job_file(folder: Path) -> str:
    (folder / "job.toml").write_text(
        'name = "tiny"\nmodel = "tiny:mlp"\nearly_stopping = { threshold = 0.3 }\n'
        f"code = [{json.dumps(str(CODE))}]\n[limits]\nbudget_usd = 0.05\n[run]\nplatform = 'simulated'\n"
    )
    return str(folder / "job.toml")


def test_the_command_refuses_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))

    def said(*options: str) -> str:
        ran = CliRunner().invoke(main, ["train", job_file(tmp_path), *options])
        assert ran.exit_code == 2, ran.output
        return ran.stderr

    assert "neither one of plain, gpipe, 1f1b, nor learned" in said("--schedule", "learnt")
    assert "--workers and a learned schedule both choose" in said("--schedule", "learned", "--workers", "3")
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    assert "--plan and --schedule both say" in said("--schedule", "learned", "--plan", str(plan))
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    for name in [m for m in sys.modules if m.startswith("ephemeron.tuning.siren")]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install 'ephemeron[siren]'" in said("--schedule", "learned")


def test_numbers_of_functions_of_the_runs_that_are_fitted() -> None:
    assert world_sizes(1, 16) == ((1, 5, 16), (9,))
    assert world_sizes(1, 2) == ((1, 2), ())
    assert world_sizes(1, 1) == ((1,), ())


def test_real_runs_correct_the_environment() -> None:
    """A run whose epochs take twice as long and cost twice as much, and whose losses are those of the curve."""
    wanted = spec()
    env = Environment(wanted)
    epoch, losses = env.table[8, 1792], wanted.curve.losses([8] * 6)
    seen = [
        RunStarted(t=0.0, run_id="r", job="net", workers=8, aggregators=2, memory_mb=1792, iterations=10, epochs=6, samples=10),
        *(
            Measured(t=2 * epoch.seconds * i, rank=0, attempt=0, epoch=i, iteration=i, metrics={"loss": loss})
            for i, loss in enumerate(losses, 1)
        ),
    ]
    found = refined(wanted, [(seen, 2 * 6 * epoch.cost_usd)])
    assert found.seconds.factor == pytest.approx(2.0)
    assert found.cost.factor == pytest.approx(2.0)
    assert found.curve.rates == pytest.approx(wanted.curve.rates, rel=0.05)


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The training of policies, which imitates for a quarter of the time."""
    pytest.importorskip("stable_baselines3", reason="the extra siren is not installed")
    from ephemeron.tuning.siren import learning

    monkeypatch.setattr(learning, "ROUNDS", 3)
    monkeypatch.setattr(learning, "FITTING", 250)
    return learning


@pytest.mark.slow
@pytest.mark.usefixtures("learning")
def test_a_policy_is_trained_stored_reused_and_not_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ephemeron.training.job import ComputeModel, Simulation

    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    job = dataclasses.replace(
        JOB,
        epochs=10,
        optimizer=Target(target="SGD", options={"lr": 0.05, "momentum": 0.9}),
        early_stopping=EarlyStopping(threshold=0.5),
        simulation=Simulation(compute=ComputeModel(a=200.0, b=2.0, m=0.0)),
        limits=dataclasses.replace(JOB.limits, budget_usd=0.5),
    )
    lines: list[str] = []
    found = learned_run(job, "learned", {}, steps=256, on_progress=lines.append)
    compared, path = found.policy.comparison, policy_path(job, allowed(job, {}))
    assert path.exists()
    assert path.with_suffix(".zip").exists()
    assert any("mean error" in line for line in lines)
    used = compared.used
    assert used.reached >= 0.99
    assert used.seconds <= compared.candidates[0].seconds
    assert {c.name for c in compared.candidates} == {"static", "network", "programme", "list"}
    assert found.options == {"sync": "hsp", "batch_size": 16} | found.policy.options(used.name)
    assert used.words in found.note
    again = learned_run(job, str(path), {})
    assert again.options == found.options
    assert not list((tmp_path / "runs").iterdir()) if (tmp_path / "runs").exists() else True


@pytest.mark.slow
def test_a_training_is_reproducible_and_goes_on_from_its_file(tmp_path: Path, learning: ModuleType) -> None:
    learn = learning.learn

    wanted = spec(budget_usd=0.08, noise=Noise(), bounds=ActionBounds(most_workers=6, quotas_mb=(1792,)))
    (first, model), (second, _) = learn(wanted, steps=256, seed=3), learn(wanted, steps=256, seed=3)
    assert first.network == second.network
    static, network = first.comparison.candidates[0], first.comparison.of("network")
    assert network.reached > 0.5
    assert network.seconds <= 1.15 * static.seconds
    assert first.comparison.of("programme").seconds <= 1.05 * first.comparison.least_s
    assert first.comparison.used is not static
    first.save(tmp_path / "p.json")
    model.save(tmp_path / "p.zip")
    assert plain(load_policy(tmp_path / "p.json")) == plain(first)
    going_on, _ = learn(wanted, steps=256, imitate=False, start=tmp_path / "p.zip")
    assert going_on.training.imitated == 0
    assert going_on.comparison.of("network").seconds <= 1.15 * static.seconds
