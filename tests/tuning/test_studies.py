"""Studies of simulated jobs: real trials, files, a killed client. What the engine decides when is in `test_engine`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tuning_worlds import MakeStudy, trial_runs, write_study

from ephemeron import load_job
from ephemeron.errors import JobError, UserError
from ephemeron.training.driver.result import result_of
from ephemeron.tuning import Study
from ephemeron.tuning.folder import TrialRecord
from ephemeron.tuning.study import StudyResult

optuna = pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")


def ended(result: StudyResult) -> list[tuple[Any, ...]]:
    return [(t.number, t.state, tuple(t.parameters.values()), t.value, t.cost_usd) for t in result.status.trials]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Study, StudyResult, list[str]]]:
    """A grid with pruning that was run to its end; what a second client saw meanwhile."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(folder / "home"))
        space = {"optimizer.options.lr": [0.1, 1e-6], "seed": [0, 1]}
        pruner = {"name": "asha", "min_evaluations": 1}
        path = write_study(folder, sampler="grid", space=space, pruner=pruner, concurrency=2, seed=1)
        study, seen = Study.open(path, out=folder / "out"), list[str]()

        def on_trial(trial: TrialRecord) -> None:
            if trial.state == "finished" and not seen:
                with pytest.raises(UserError, match=r"run study-\w+ is already running as process \d+"):
                    study.run(resume=True)
                seen.append(study.status.state)

        yield study, study.run(on_trial=on_trial), seen


@pytest.mark.slow
def test_a_grid_is_run_to_its_end_and_its_best_values_are_a_job(finished: tuple[Study, StudyResult, list[str]]) -> None:
    study, result, _ = finished
    tried = {(t.parameters["optimizer.options.lr"], t.parameters["seed"]) for t in result.status.trials}
    assert tried == {(1e-6, 0), (1e-6, 1), (0.1, 0), (0.1, 1)}
    document = result.to_json()
    assert document["trials"] == {"finished": result.count("finished"), "pruned": result.count("pruned"), "failed": 0}
    assert result.count("finished") + result.count("pruned") == 4
    assert document["state"] == "finished"
    best = result.best
    assert best is not None
    assert best.value == max(t.value or 0.0 for t in result.status.trials)
    assert document["best"]["value"] == best.value
    runs = {folder.run_id: result_of(folder).summary for folder in trial_runs()}
    assert runs.keys() == {t.run for t in result.status.trials}
    assert document["cost_usd"] == pytest.approx(sum(s.cost_usd for s in runs.values()))
    assert runs[best.run].metrics["accuracy"] == best.value
    again = load_job(study.folder.path / "best.toml")
    assert again.optimizer.options["lr"] == best.parameters["optimizer.options.lr"]
    assert again.seed == best.parameters["seed"]
    assert (study.folder.path / "trials" / "0" / "events.jsonl").exists()
    for name in ("trials.csv", "parallel-coordinates.svg", "importances.svg"):
        assert (study.folder.path / name).stat().st_size


@pytest.mark.slow
def test_optunas_own_tools_open_the_study(finished: tuple[Study, StudyResult, list[str]]) -> None:
    study, result, _ = finished
    stored = optuna.load_study(study_name="study", storage=f"sqlite:///{study.folder.database}")
    assert stored.best_value == result.to_json()["best"]["value"]
    assert stored.best_params == result.to_json()["best"]["parameters"]
    assert [t.state.name for t in stored.trials].count("PRUNED") == result.count("pruned")
    assert [t.user_attrs["cost_usd"] for t in stored.trials] == [t.cost_usd for t in result.status.trials]
    assert study.to_optuna().trials == stored.trials


@pytest.mark.slow
def test_a_pruned_trial_ends_its_functions_at_once(finished: tuple[Study, StudyResult, list[str]]) -> None:
    """After one evaluation of four, and so for less than a finished one costs."""
    _, result, _ = finished
    assert result.best is not None
    pruned = [t for t in result.status.trials if t.state == "pruned"]
    assert any(t.parameters["optimizer.options.lr"] == 1e-6 for t in pruned)
    for trial in pruned:
        assert (trial.evaluations, trial.reason) == (1, "pruned at evaluation 1")
        assert trial.cost_usd < 0.6 * result.best.cost_usd
        assert next(result_of(f).summary.status for f in trial_runs() if f.run_id == trial.run) == "stopped"


@pytest.mark.slow
def test_status_is_json_that_names_every_trial(finished: tuple[Study, StudyResult, list[str]]) -> None:
    study, _, _ = finished
    raw = json.loads((study.folder.path / "study.json").read_text())
    assert raw["state"] == "finished"
    assert [t["number"] for t in raw["trials"]] == [0, 1, 2, 3]
    assert study.table()[0]["accuracy"] == max(t["value"] for t in raw["trials"])
    with pytest.raises(UserError, match=r"trial 0 of the study in .* does not run"):
        study.end_trial(0)


@pytest.mark.slow
def test_a_second_client_is_refused_and_may_watch(finished: tuple[Study, StudyResult, list[str]]) -> None:
    study, result, seen = finished
    assert seen == ["running"]
    assert ended(study.attach()) == ended(result)


@pytest.mark.slow
def test_a_trial_that_is_predicted_over_budget_never_starts(make_study: MakeStudy) -> None:
    values: dict[str, Any] = {"sampler": "grid", "space": {"epochs": [2, 200]}, "predict": True, "concurrency": 2}
    expected, _ = make_study("unlimited", **values).subject.predict(lambda text: None)
    assert expected.cheapest is not None
    study = make_study(**values, budget_usd=2 * expected.cheapest[1].cost_usd)
    result = study.run()
    small, large = sorted(result.status.trials, key=lambda t: t.parameters["epochs"])  # type: ignore[arg-type, return-value]
    assert (small.state, large.state, large.started) == ("finished", "pruned", False)
    assert large.reason.startswith("not started: predicted to cost $")
    assert [folder.run_id for folder in trial_runs()] == [small.run]
    assert small.predicted_usd == pytest.approx(small.cost_usd, rel=0.3)
    assert result.to_json()["not_started"] == 1
    assert study.to_optuna().trials[large.number].state.name == "PRUNED"


@pytest.mark.slow
def test_a_run_that_fails_is_a_failed_trial_with_its_reason(make_study: MakeStudy) -> None:
    job = {"model": "tiny:nan_after"}
    result = make_study(sampler="grid", space={"model.options.passes": [9, 10_000]}, job=job).run()
    by_passes = {t.parameters["model.options.passes"]: t for t in result.status.trials}
    assert by_passes[10_000].state == "finished"
    assert by_passes[9].state == "failed"
    assert "not finite" in by_passes[9].reason or "nan" in by_passes[9].reason.lower()


@pytest.mark.slow
def test_the_budget_ends_the_study(make_study: MakeStudy) -> None:
    result = make_study(job={"epochs": 400}, concurrency=2, budget_usd=0.002).run()
    assert result.status.state == "budget"
    assert 0.002 <= result.status.spent_usd < 0.004
    assert {t.reason for t in result.status.trials} == {"the budget of the study is spent"}


@pytest.mark.slow
def test_a_trial_is_ended_by_request(make_study: MakeStudy) -> None:
    study = make_study(sampler="grid", space={"epochs": [1, 40]}, concurrency=2)

    def on_trial(trial: TrialRecord) -> None:
        if trial.state == "finished":
            (other,) = [t for t in study.trials if t.state == "running" and t.number != trial.number]
            study.end_trial(other.number)

    result = study.run(on_trial=on_trial)
    short, long = sorted(result.status.trials, key=lambda t: t.parameters["epochs"])  # type: ignore[arg-type, return-value]
    assert (short.state, long.state, long.reason) == ("finished", "pruned", "ended by request")
    assert long.evaluations < 10


def test_a_study_that_has_changed_is_refused(make_study: MakeStudy, tmp_path: Path) -> None:
    make_study(trials=1).run()
    for changed in ({"trials": 2}, {"trials": 1, "job": {"epochs": 5}}):
        path = write_study(tmp_path / "a", **changed)
        with pytest.raises(JobError, match=r"has changed since the study in .* began; restore the files, or begin another"):
            Study.open(path, out=tmp_path / "a" / "out")
    path = write_study(tmp_path / "a", trials=1)
    study = Study.open(path, out=tmp_path / "a" / "out")
    with pytest.raises(UserError, match="has ended"):
        study.run()
    assert study.run(resume=True).count("finished") == 1  # nothing is run again


CLIENT = """
import os, signal, sys
from ephemeron.tuning import Study

ended = 0

def on_trial(trial):
    global ended
    ended += trial.state in ("finished", "pruned", "failed")
    if ended == 2:
        os.kill(os.getpid(), signal.SIGKILL)

Study.open(sys.argv[1], out=sys.argv[2]).run(on_trial=on_trial)
"""


@pytest.mark.slow
def test_a_killed_client_loses_nothing_and_nothing_is_counted_twice(make_study: MakeStudy) -> None:
    """With one trial at a time the study ends as one that was not interrupted. One that watches goes on with it."""
    values: dict[str, Any] = {"pruner": "asha", "concurrency": 1, "trials": 4}
    whole = make_study("a", **values).run()
    study = make_study("b", **values)
    file = study.folder.path.parent / "study.toml"
    done = subprocess.run([sys.executable, "-c", CLIENT, str(file), str(study.folder.path)], env=dict(os.environ), check=False)
    assert done.returncode == -signal.SIGKILL
    before = {t.number: t.run for t in study.trials}
    with pytest.raises(UserError, match="has begun; go on with it: --resume"):
        study.run()
    result = study.attach()
    assert ended(result) == ended(whole)
    assert result.status.spent_usd == pytest.approx(whole.status.spent_usd)
    kept = {t.number: t.run for t in result.status.trials}
    assert [kept[n] for n in (0, 1)] == [before[n] for n in (0, 1)]
    assert len(study.to_optuna().trials) == 4


def test_options_stand_before_the_files_and_stay_with_a_study_that_has_begun(home: Path, tmp_path: Path) -> None:
    job = {"run": {"platform": "local", "workers": 1, "batch_size": 480, "memory_mb": 1769}}
    path = write_study(tmp_path / "given", job=job, trials=2, concurrency=9, budget_usd=9.0)
    options = {"platform": "simulated", "max_workers": 1, "budget_usd": 0.5}
    study = Study.open(path, options=options)
    assert (study.platform, study.file.spec.concurrency, study.file.spec.budget_usd) == ("simulated", 1, 0.5)
    assert study.run().status.budget_usd == 0.5
    again = Study.open(path)
    assert (again.platform, again.file.options) == ("simulated", options)
    with pytest.raises(JobError, match=r"has begun with budget_usd = 0\.5; leave the option out"):
        Study.open(path, options={"budget_usd": 2.0})
