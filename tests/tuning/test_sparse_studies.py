"""Studies of sparse jobs: real trials on this machine, pruned after epochs, and what is refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.config.toml import toml_text
from ephemeron.errors import JobError
from ephemeron.runs import folders
from ephemeron.tuning import Study
from sparse_data import prepared
from sparse_profiles import COSTS, profile_of

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'ephemeron[tuning]'")
pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files: pip install 'ephemeron[preparation]'")


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Makes a study file of a small sparse job."""
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    prepared(tmp_path / "data" / "train", rows=1500)
    prepared(tmp_path / "data" / "test", rows=500, partitions=1, seed=1)
    job = {
        "epochs": 12,
        "sparse": {"model": "logistic", "optimizer": "adagrad"},
        "data": {"source": "prepared", "path": "data"},
        "run": {"workers": 1, "batch_size": 10, "memory_mb": 1024},
    }

    def made(**changes):
        (tmp_path / "job.toml").write_text(toml_text(job))
        profile_of(COSTS).save(tmp_path / "profile.json")
        document = {
            "job": "job.toml",
            "profile": "profile.json",
            "metric": "loss",
            "sampler": "grid",
            "concurrency": 2,
            "space": {"sparse.optimizer.options.learning_rate": [0.3, 1e-6]},
            **changes,
        }
        (tmp_path / "study.toml").write_text(toml_text(document))
        return tmp_path / "study.toml"

    return made


@pytest.mark.slow
def test_trials_train_sparse_jobs_and_are_pruned_after_epochs(study):
    path = study(
        pruner={"name": "asha", "reduction_factor": 2, "min_evaluations": 1},
        space={"sparse.optimizer.options.learning_rate": [0.3, 1e-6], "sparse.shards": [1, 2], "run.batch_size": [10]},
        concurrency=1,
        seed=3,  # two trials with the rate that learns come before the last one with the other
    )
    result = Study.open(path).run()
    assert result.status.state == "finished"
    assert result.best.parameters["sparse.optimizer.options.learning_rate"] == 0.3
    assert result.best.value < 0.55
    assert {t.state for t in result.status.trials} <= {"finished", "pruned"}
    rates = [t.parameters["sparse.optimizer.options.learning_rate"] for t in result.status.trials]
    assert rates == [1e-6, 0.3, 0.3, 1e-6]
    last = result.status.trials[-1]
    assert (last.state, last.reason) == ("pruned", "pruned at evaluation 1")
    assert all(t.cost_usd > 0 for t in result.status.trials if t.started)
    best = folders.find(result.best.run)
    assert (best.path / "weights.safetensors").exists()
    assert "learning_rate = 0.3" in (Study.open(path).folder.path / "best.toml").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metric": "rmse"}, "metric = 'rmse' is not reported by the job's evaluations; use loss or accuracy"),
        ({"space": {"sparse.shard": [1, 2]}}, "unknown key shard"),
        ({"space": {"sparse.optimizer.options.rate": [1.0]}}, "unknown key rate"),
        ({"pruner": {"name": "asha", "min_evaluations": 12}}, "pruner asha decides after 12 evaluations"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(study, changes, said):
    with pytest.raises(JobError) as refused:
        Study.open(study(**changes)).run()
    assert said in str(refused.value)


def test_trials_are_predicted_and_one_over_the_budget_never_starts(study):
    rate = "sparse.optimizer.options.learning_rate"
    space = {rate: [0.3], "run.workers": [1, 2], "run.batch_size": [10, 100], "sparse.shards": [1, 2]}
    path = study(space=space)
    dry = CliRunner().invoke(main, ["tune", str(path), "--dry-run", "--json"])
    assert dry.exit_code == 0, dry.output
    found = json.loads(dry.stdout.splitlines()[-1])
    assert (found["looked_at"], found["unpredicted"], found["notes"]) == (8, 0, [])
    assert found["cheapest"]["parameters"] == {rate: 0.3, "run.workers": 1, "run.batch_size": 100, "sparse.shards": 1}
    assert found["dearest"]["parameters"]["run.batch_size"] == 10
    assert found["dearest"]["cost_usd"] > found["cheapest"]["cost_usd"] > 0
    budget = 0.9 * found["cheapest"]["cost_usd"]
    result = Study.open(study(space=space, budget_usd=budget)).run()
    assert [(t.state, t.started, t.cost_usd) for t in result.status.trials] == [("pruned", False, 0.0)] * 8
    assert all(t.reason.startswith("not started: predicted to cost $") for t in result.status.trials)
    assert [folder.run_id for folder in folders.all_runs()] == ["study"]


def test_a_study_refuses_a_profile_of_another_kind(study):
    path = study()
    (path.parent / "profile.json").write_text('{"workload": {}}')
    with pytest.raises(JobError, match=r"profile\.json is no profile of a sparse job; make one with: ephemeron profile JOB"):
        Study.open(path).run()
