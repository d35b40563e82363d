"""`ephemeron profile`, `plan` and `train` of sparse jobs: what they measure, show and refuse."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from sparse_jobs import sparse_job

from ephemeron.cli.main import main
from ephemeron.runs import folders
from ephemeron.sparse.job import predictor as predictors
from ephemeron.sparse.job.prediction import load_sparse_profile
from ephemeron.training.job import load_job
from ephemeron.training.profiling.store import this_machine
from ephemeron.training.report.prediction import compare
from sparse_profiles import COSTS, profile_of

pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files: pip install 'ephemeron[preparation]'")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def known(path):
    """Stores a profile of a job as if it had been measured."""
    import dataclasses

    profile = dataclasses.replace(profile_of(COSTS), machine=this_machine())
    profile.save(predictors.profile_path(load_job(path)))


@pytest.mark.slow
def test_a_job_is_measured_once_then_planned_and_trained(tmp_path):
    path = sparse_job(tmp_path, run={"batch_size": 20, "memory_mb": 1024}, limits={"budget_usd": 0.05})
    measured = run("profile", path, "--out", tmp_path / "profile.json", "--json")
    assert measured.exit_code == 0, measured.output
    profile = load_sparse_profile(tmp_path / "profile.json")
    assert [(c.batch_size, c.shards) for c in profile.cells] == [(5, 1), (20, 1), (80, 1), (80, 2)]
    assert all(c.steps >= 200 and c.function_cpu_s > 0 and c.shard_cpu_s > 0 and c.rows <= 61 for c in profile.cells)
    assert profile.run.start_s > 0 < profile.run.evaluation_row_s
    assert not (tmp_path / "home" / "profiling").exists()
    [row] = map(json.loads, run("runs", "--json").stdout.splitlines())
    assert (row["kind"], row["status"], row["invocations"]) == ("profile", "finished", 4)
    result = folders.find(row["run_id"]).read("result.json")
    assert result["profile"] == str(tmp_path / "profile.json")
    assert result["billed"]["gb_seconds"] > 0 < row["cost_usd"]
    planned = run("plan", path, "--json")
    assert "measuring" not in planned.stderr
    plan = json.loads(planned.stdout.splitlines()[-1])
    trained = run("train", path, "--json")
    assert trained.exit_code == 0, trained.output
    result = json.loads(trained.stdout.splitlines()[-1])
    assert [(r.name, r.predicted is None, r.measured is None) for r in compare(folders.find("last").path, result).rows] == [
        (name, False, False) for name in ("time", "cost", "cost of functions", "cost of shards", "invocations")
    ]
    same = [c for c in plan["candidates"] if c["shards"] == 2]
    assert result["workers"] == min(same, key=lambda c: c["predicted"]["cost_usd"])["workers"]
    assert "samples a step, least cost" in trained.stderr


def test_train_shows_a_known_prediction_and_refuses_what_exceeds_its_budget(tmp_path):
    path = sparse_job(tmp_path, run={"batch_size": 20}, limits={"budget_usd": 1e-6})
    known(path)
    refused = run("train", path)
    assert refused.exit_code == 2
    assert "the budget of $1e-06 is too small: the cheapest is" in refused.stderr
    hurried = sparse_job(tmp_path, name="late.toml", run={"batch_size": 20}, limits={"deadline_s": 0.5})
    known(hurried)
    late = run("train", hurried)
    assert "the deadline of 0.5 s cannot be met: the nearest is" in late.stderr
    assert not folders.all_runs()
    shown = run("train", path, "--workers", 2, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("sparse ")
    assert "more than the budget of $1e-06, at which the run is stopped" in shown.stdout
    shown = run("train", path, "--workers", 2, "--dry-run", "--json")
    found = json.loads(shown.stdout.splitlines()[-1])
    assert found["invocations"] == found["predicted"]["invocations"] == 2


def test_what_cannot_be_planned_is_said_in_one_line(tmp_path):
    path = sparse_job(tmp_path)
    (tmp_path / "dense.json").write_text('{"workload": {}}')
    profile_of(COSTS).save(tmp_path / "sparse.json")
    for arguments, said in (
        (("plan", "--profile", tmp_path / "sparse.json"), "is the profile of a sparse job; give the job, too"),
        (("plan", path, "--platform", "aws"), "a sparse job cannot be profiled or predicted on platform aws"),
        (("plan", sparse_job(tmp_path, name="aws.toml", run={"platform": "aws"})), "or predicted on platform aws"),
        (("profile", path, "--platform", "simulated"), "cannot be profiled or predicted on platform simulated"),
        (("plan", path, "--pattern", "k-reduce"), "--pattern is not for a sparse job"),
        (("profile", path, "--confidence", "0.1"), "--confidence is not for a sparse job"),
        (("plan", path, "--profile", tmp_path / "dense.json"), "is no profile of a sparse job"),
        (("plan", sparse_job(tmp_path, name="none.toml", data={"source": "prepared", "path": "nothing"})), "nothing does not exist"),
        (("train", sparse_job(tmp_path, name="sync.toml", run={"sync": "hap"})), "run.sync is not for a sparse job"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.strip().splitlines()
        assert said in line
