"""Studies in virtual time: what is tried, when a trial begins and ends, what is counted, and what a killed client loses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tuning_worlds import MakeStudy, write_study

from ephemeron import load_job
from ephemeron.errors import JobError, UserError
from ephemeron.training.driver.result import result_of
from ephemeron.training.driver.run_dir import all_runs
from ephemeron.tuning import Study
from ephemeron.tuning.folder import TrialRecord
from ephemeron.tuning.study import StudyResult

optuna = pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")


def ended(result: StudyResult) -> list[tuple[Any, ...]]:
    return [(t.number, t.state, tuple(t.parameters.values()), t.value, t.cost_usd) for t in result.status.trials]


@pytest.mark.slow
def test_a_grid_is_run_to_its_end_and_its_best_values_are_a_job(make_study: MakeStudy, home: Path) -> None:
    space = {"optimizer.options.lr": [0.001, 0.1], "run.workers": [1, 2]}
    study = make_study(sampler="grid", space=space, concurrency=2)
    result = study.run()
    tried = {(t.parameters["optimizer.options.lr"], t.parameters["run.workers"]) for t in result.status.trials}
    assert tried == {(0.001, 1), (0.001, 2), (0.1, 1), (0.1, 2)}
    document = result.to_json()
    assert document["trials"] == {"finished": 4, "pruned": 0, "failed": 0}
    assert document["state"] == "finished"
    best = result.best
    assert best is not None
    assert best.value == max(t.value or 0.0 for t in result.status.trials)
    assert document["best"]["value"] == best.value
    runs = {folder.run_id: result_of(folder).summary for folder in all_runs()}
    assert runs.keys() == {t.run for t in result.status.trials}
    assert document["cost_usd"] == pytest.approx(sum(s.cost_usd for s in runs.values()))
    assert runs[best.run].metrics["accuracy"] == best.value
    again = load_job(study.folder.path / "best.toml")
    assert again.optimizer.options["lr"] == best.parameters["optimizer.options.lr"]
    assert again.run["workers"] == best.parameters["run.workers"]
    assert (study.folder.path / "trials" / "0" / "events.jsonl").exists()
    for name in ("trials.csv", "parallel-coordinates.svg", "importances.svg"):
        assert (study.folder.path / name).stat().st_size


@pytest.mark.slow
def test_optunas_own_tools_open_the_study(make_study: MakeStudy) -> None:
    study = make_study(pruner="asha", concurrency=2)
    result = study.run()
    stored = optuna.load_study(study_name="study", storage=f"sqlite:///{study.folder.database}")
    assert stored.best_value == result.to_json()["best"]["value"]
    assert stored.best_params == result.to_json()["best"]["parameters"]
    states = [t.state.name for t in stored.trials]
    assert states.count("PRUNED") == result.count("pruned") > 0
    assert [t.user_attrs["cost_usd"] for t in stored.trials] == [t.cost_usd for t in result.status.trials]
    assert study.to_optuna().trials == stored.trials


@pytest.mark.slow
def test_a_pruned_trial_ends_its_functions_at_once(make_study: MakeStudy) -> None:
    """The first trial finishes, later ones that are worse than it after an evaluation cost about a quarter."""
    space = {"optimizer.options.lr": [0.1, 1e-6]}
    for name, pruner, counts in (("a", "none", (2, 0)), ("b", {"name": "asha", "min_evaluations": 1}, (1, 1))):
        result = make_study(name, sampler="grid", space=space, pruner=pruner, concurrency=1, seed=1).run()
        assert (result.count("finished"), result.count("pruned")) == counts
        bad = next(t for t in result.status.trials if t.parameters["optimizer.options.lr"] == 1e-6)
        if pruner == "none":
            whole = bad
            assert bad.evaluations == 4
        elif bad.state == "pruned":
            assert (bad.evaluations, bad.reason) == (1, "pruned at evaluation 1")
            assert bad.cost_usd < 0.6 * whole.cost_usd
            summary = next(result_of(f).summary for f in all_runs() if f.run_id == bad.run)
            assert summary.status == "stopped"


@pytest.mark.slow
def test_equal_seeds_give_equal_studies(make_study: MakeStudy) -> None:
    first, same, other = (
        make_study(name, sampler="tpe", pruner="hyperband", concurrency=2, seed=seed).run()
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert ended(first) == ended(same)
    assert ended(first) != ended(other)


@pytest.mark.slow
def test_a_gang_begins_when_all_its_functions_have_places(make_study: MakeStudy) -> None:
    running: dict[int, int] = {}
    most = []

    def on_trial(trial: TrialRecord) -> None:
        running[trial.number] = trial.workers if trial.state == "running" else 0
        most.append(sum(running.values()))

    study = make_study(sampler="grid", space={"run.workers": [1, 2, 3, 4]}, concurrency=3)
    result = study.run(on_trial=on_trial)
    assert max(most) == 3
    assert result.count("finished") == 3
    (refused,) = [t for t in result.status.trials if t.state != "finished"]
    assert refused.reason == "not started: it needs 4 functions at once, and all trials together may have 3"
    assert not refused.started


@pytest.mark.slow
def test_a_trial_that_is_predicted_over_budget_never_starts(make_study: MakeStudy) -> None:
    values: dict[str, Any] = {"sampler": "grid", "space": {"epochs": [2, 200]}, "predict": True, "concurrency": 2}
    expected, _ = make_study("unlimited", **values).predict()
    assert expected.cheapest is not None
    study = make_study(**values, budget_usd=2 * expected.cheapest[1].cost_usd)
    result = study.run()
    small, large = sorted(result.status.trials, key=lambda t: t.parameters["epochs"])  # type: ignore[arg-type, return-value]
    assert (small.state, large.state, large.started) == ("finished", "pruned", False)
    assert large.reason.startswith("not started: predicted to cost $")
    assert [folder.run_id for folder in all_runs()] == [small.run]
    assert small.predicted_usd == pytest.approx(small.cost_usd, rel=0.3)
    assert result.to_json()["not_started"] == 1
    assert study.to_optuna().trials[large.number].state.name == "PRUNED"


@pytest.mark.slow
def test_combinations_that_contradict_themselves_are_not_started(make_study: MakeStudy) -> None:
    space = {"run.workers": [1, 2], "run.aggregators": [1, 2]}
    result = make_study(sampler="grid", space=space).run()
    (refused,) = [t for t in result.status.trials if t.state == "pruned"]
    assert refused.reason.startswith("not started: aggregators = 2 is more than workers = 1")
    assert result.count("finished") == 3


@pytest.mark.slow
def test_a_run_that_fails_is_a_failed_trial_with_its_reason(make_study: MakeStudy) -> None:
    job = {"model": "tiny:nan_after"}
    result = make_study(sampler="grid", space={"model.options.passes": [9, 10_000]}, job=job).run()
    by_passes = {t.parameters["model.options.passes"]: t for t in result.status.trials}
    assert by_passes[10_000].state == "finished"
    assert by_passes[9].state == "failed"
    assert "not finite" in by_passes[9].reason or "nan" in by_passes[9].reason.lower()


@pytest.mark.slow
def test_the_deadline_ends_the_study(make_study: MakeStudy) -> None:
    result = make_study(job={"epochs": 400}, concurrency=2, deadline_s=30.0).run()
    assert result.status.state == "deadline"
    assert result.status.seconds == pytest.approx(30.0, abs=2.0)
    assert {t.reason for t in result.status.trials} == {"the deadline of the study is reached"}
    assert result.best is None


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
    with pytest.raises(UserError, match=r"trial 0 of the study in .* does not run"):
        study.end_trial(0)


def test_a_study_that_has_changed_is_refused(make_study: MakeStudy, tmp_path: Path) -> None:
    make_study(trials=1).run()
    for changed in ({"trials": 2}, {"trials": 1, "job": {"epochs": 5}}):
        path = write_study(tmp_path / "a", **changed)
        with pytest.raises(
            JobError, match=r"has changed since the study in .* began; restore the files, or begin another"
        ):
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
    if ended == 3:
        os.kill(os.getpid(), signal.SIGKILL)

Study.open(sys.argv[1], out=sys.argv[2]).run(on_trial=on_trial)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["resume", "attach"])
def test_a_killed_client_loses_nothing_and_nothing_is_counted_twice(make_study: MakeStudy, how: str) -> None:
    """With one trial at a time the study ends as one that was not interrupted."""
    values: dict[str, Any] = {"pruner": "asha", "concurrency": 1, "trials": 7}
    whole = make_study("a", **values).run()
    study = make_study("b", **values)
    file = study.folder.path.parent / "study.toml"
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(file), str(study.folder.path)], env=dict(os.environ), check=False
    )
    assert done.returncode == -signal.SIGKILL
    before = {t.number: t.run for t in study.trials}
    with pytest.raises(UserError, match="has begun; go on with it: --resume"):
        study.run()
    result = study.run(resume=True) if how == "resume" else study.attach()
    assert ended(result) == ended(whole)
    assert result.status.spent_usd == pytest.approx(whole.status.spent_usd)
    kept = {t.number: t.run for t in result.status.trials}
    assert [kept[n] for n in (0, 1, 2)] == [before[n] for n in (0, 1, 2)]
    assert len(study.to_optuna().trials) == 7


@pytest.mark.slow
def test_a_second_client_is_refused_and_may_watch(make_study: MakeStudy) -> None:
    study = make_study(trials=2)
    second: list[str] = []

    def on_trial(trial: TrialRecord) -> None:
        if trial.state == "finished" and not second:
            with pytest.raises(UserError, match="another client drives the study"):
                study.run(resume=True)
            second.append(study.status.state)

    study.run(on_trial=on_trial)
    assert second == ["running"]
    assert study.attach().count("finished") == 2


@pytest.mark.slow
def test_status_is_json_that_names_every_trial(make_study: MakeStudy) -> None:
    study = make_study(trials=2)
    study.run()
    raw = json.loads((study.folder.path / "study.json").read_text())
    assert raw["state"] == "finished"
    assert [t["number"] for t in raw["trials"]] == [0, 1]
    assert study.table()[0]["accuracy"] == max(t["value"] for t in raw["trials"])
