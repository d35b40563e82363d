"""Studies of sparse jobs: real trials on this machine, pruned after epochs, and what is refused."""

from __future__ import annotations

import pytest

from ephemeron.config.toml import toml_text
from ephemeron.errors import JobError
from ephemeron.training.driver import run_dir
from ephemeron.tuning import Study
from sparse_data import prepared

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'ephemeron[tuning]'")
pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files: pip install 'ephemeron[preparation]'")


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Makes a study file of a small sparse job."""
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    prepared(tmp_path / "data" / "train", rows=1500)
    prepared(tmp_path / "data" / "test", rows=500, partitions=1, seed=1)
    job = {
        "epochs": 12, "sparse": {"model": "logistic", "optimizer": "adagrad"}, "data": {"source": "prepared", "path": "data"},
        "run": {"workers": 1, "batch_size": 10, "memory_mb": 1024},
    }  # fmt: skip

    def made(**changes):
        (tmp_path / "job.toml").write_text(toml_text(job))
        document = {
            "job": "job.toml", "metric": "loss", "sampler": "grid", "concurrency": 2,
            "space": {"sparse.optimizer.options.learning_rate": [0.3, 1e-6]}, **changes,
        }  # fmt: skip
        (tmp_path / "study.toml").write_text(toml_text(document))
        return tmp_path / "study.toml"

    return made


@pytest.mark.slow
def test_trials_train_sparse_jobs_and_are_pruned_after_epochs(study):
    path = study(
        pruner={"name": "asha", "reduction_factor": 2, "min_evaluations": 1},
        space={"sparse.optimizer.options.learning_rate": [0.3, 1e-6], "sparse.shards": [1, 2], "run.batch_size": [10]},
        concurrency=1,
    )
    result = Study.open(path).run()
    assert result.status.state == "finished"
    assert result.best.parameters["sparse.optimizer.options.learning_rate"] == 0.3
    assert result.best.value < 0.55
    assert {t.state for t in result.status.trials} <= {"finished", "pruned"}
    slow = [t for t in result.status.trials if t.parameters["sparse.optimizer.options.learning_rate"] == 1e-6]
    assert any(t.state == "pruned" and t.reason.startswith("pruned at evaluation") for t in slow)
    assert all(t.cost_usd > 0 for t in result.status.trials if t.started)
    best = run_dir.find(result.best.run)
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
