"""The engine of studies with trials that are values: what is tried, when a trial begins and ends, what is counted, what is never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")

from value_trials import USD, ValueStudy, value_of

from ephemeron.errors import UserError
from ephemeron.runs.stop_requests import request_stop, withdraw_stop
from ephemeron.tuning.engine import Engine
from ephemeron.tuning.folder import TrialRecord

RATE = "optimizer.options.lr"


@pytest.fixture
def made(home: Path, tmp_path: Path) -> Any:
    """Makes a study that has not begun; `name` is that of its folder."""
    return lambda name="a", **values: ValueStudy(tmp_path / name, **values)


def test_a_grid_is_tried_whole_and_each_trial_has_its_value_time_and_cost(made) -> None:
    study = made(sampler="grid", space={RATE: [0.25, 0.5], "run.workers": [1, 2]}, concurrency=2)
    assert study.run() == "finished"
    by_values = {tuple(t.parameters.values()): t for t in study.trials}
    assert by_values.keys() == {(rate, workers) for rate in (0.25, 0.5) for workers in (1, 2)}
    for (rate, workers), trial in by_values.items():
        assert (trial.state, trial.started, trial.workers, trial.evaluations) == ("finished", True, workers, 4)
        assert (trial.value, trial.seconds) == (value_of(rate, 4), 4.0)
        assert trial.cost_usd == pytest.approx(USD * workers * 4)
    assert study.spent_usd == pytest.approx(24 * USD)
    assert 12.0 <= study.seconds <= 16.0, "two functions at once"


@pytest.mark.parametrize("pruner", ["none", {"name": "asha", "min_evaluations": 1}])
def test_a_pruned_trial_ends_its_functions_at_once(made, pruner) -> None:
    """The first trial finishes; the second, which is worse than it after an evaluation, costs a quarter."""
    study = made(sampler="grid", space={RATE: [0.1, 1e-6]}, pruner=pruner, concurrency=1, seed=1)
    study.run()
    good, bad = study.trials
    assert (good.state, good.parameters, bad.parameters) == ("finished", {RATE: 0.1}, {RATE: 1e-6})
    if pruner == "none":
        assert (bad.state, bad.evaluations, study.seconds) == ("finished", 4, 8.0)
    else:
        assert (bad.state, bad.evaluations, bad.reason) == ("pruned", 1, "pruned at evaluation 1")
        assert (bad.seconds, study.seconds) == (1.0, 5.0)
        assert bad.cost_usd == pytest.approx(good.cost_usd / 4)


def test_equal_seeds_give_equal_studies(made) -> None:
    studies = [
        made(name, sampler="tpe", pruner="hyperband", concurrency=2, seed=seed, trials=9) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    for study in studies:
        study.run()
    first, same, other = (study.ended for study in studies)
    assert first == same
    assert first != other


def test_a_gang_begins_when_all_its_functions_have_places(made) -> None:
    running: dict[int, int] = {}
    most = []

    def on_trial(trial: TrialRecord) -> None:
        running[trial.number] = trial.workers if trial.state == "running" else 0
        most.append(sum(running.values()))

    study = made(sampler="grid", space={"run.workers": [1, 2, 3, 4]}, concurrency=3)
    assert study.run(on_trial) == "finished"
    assert max(most) == 3
    (refused,) = [t for t in study.trials if t.state != "finished"]
    assert refused.reason == "not started: it needs 4 functions at once, and all trials together may have 3"
    assert not refused.started


def test_a_trial_that_is_predicted_over_budget_never_starts(made) -> None:
    study = made(sampler="grid", space={"epochs": [2, 200]}, concurrency=2, predicts=True, predict=True, budget_usd=4 * USD)
    assert study.run() == "finished"
    small, large = sorted(study.trials, key=lambda t: t.parameters["epochs"])
    assert (small.state, large.state, large.started) == ("finished", "pruned", False)
    assert large.reason.startswith("not started: predicted to cost $2, and $0.0")
    assert small.predicted_usd == pytest.approx(small.cost_usd)
    assert study.spent_usd == pytest.approx(2 * USD)


def test_a_trial_waits_while_what_runs_is_predicted_to_need_the_budget(made) -> None:
    """With 10 cents, and 6 each: the second one is within what is left until the first has cost 4."""
    reasons = []
    study = made(sampler="grid", space={RATE: [0.1, 0.2]}, predicts=True, budget_usd=10 * USD, job={"epochs": 6})
    assert study.run(on_change=lambda engine: reasons.extend(t.reason for t in engine.unfinished)) == "finished"
    assert "waits for places or budget" in reasons
    assert [(t.state, t.started) for t in study.trials] == [("finished", True), ("pruned", False)]
    assert study.trials[1].reason == "not started: predicted to cost $0.06, and $0.04 are left of the budget"


def test_a_trial_that_is_predicted_beyond_the_deadline_never_starts(made) -> None:
    study = made(sampler="grid", space={"epochs": [3, 30]}, concurrency=1, predicts=True, deadline_s=20.0)
    assert study.run() == "finished"
    (refused,) = [t for t in study.trials if t.state != "finished"]
    assert refused.parameters == {"epochs": 30}
    assert refused.reason.startswith("not started: predicted to take 30.0 s, and ")


def test_combinations_that_contradict_themselves_are_not_started(made) -> None:
    study = made(sampler="grid", space={"run.workers": [1, 2], "run.aggregators": [1, 2]})
    study.run()
    (refused,) = [t for t in study.trials if t.state == "pruned"]
    assert refused.reason.startswith("not started: aggregators = 2 is more than workers = 1")
    assert [t.state for t in study.trials].count("finished") == 3


def test_a_run_that_fails_is_a_failed_trial_with_its_reason(made) -> None:
    study = made(sampler="grid", space={"model.options.fails_after": [0, 2, 9]}, concurrency=1)
    assert study.run() == "finished"
    found = {t.parameters["model.options.fails_after"]: (t.state, t.evaluations, t.reason) for t in study.trials}
    assert found == {0: ("failed", 0, "rank 0: it had to"), 2: ("failed", 2, "rank 0: it had to"), 9: ("finished", 4, "")}


def test_the_deadline_ends_the_study(made) -> None:
    space = {"run.workers": [2], RATE: [0.1, 0.2]}
    study = made(job={"epochs": 400}, concurrency=3, deadline_s=30.0, space=space, sampler="grid")
    assert study.run() == "deadline"
    assert study.seconds == 30.0
    reason = "the deadline of the study is reached"
    assert [(t.state, t.reason) for t in study.trials] == [("pruned", reason), ("pruned", f"not started: {reason}")]


def test_the_budget_ends_the_study(made) -> None:
    study = made(job={"epochs": 400}, concurrency=2, budget_usd=20 * USD)
    assert study.run() == "budget"
    assert 20 * USD <= round(study.spent_usd, 9) <= 22 * USD
    assert {t.reason for t in study.trials} == {"the budget of the study is spent"}
    assert study.run() == "budget", "nothing begins again"


@pytest.mark.parametrize("simulated", [True, False])
def test_a_trial_is_ended_by_request(made, simulated) -> None:
    study = made(sampler="grid", space={"epochs": [1, 40]}, concurrency=2, simulated=simulated)

    def on_trial(trial: TrialRecord) -> None:
        if trial.state == "finished":
            study.folder.request_end(1 - trial.number)

    assert study.run(on_trial) == "finished"
    short, long = sorted(study.trials, key=lambda t: t.parameters["epochs"])
    assert (short.state, long.state, long.reason) == ("finished", "pruned", "ended by request")
    assert long.evaluations <= 2
    with pytest.raises(UserError, match=r"trial 2 of the study in .* has not begun"):
        study.folder.request_end(2)


@pytest.mark.parametrize("simulated", [True, False])
def test_an_interrupted_study_goes_on(made, simulated) -> None:
    values: dict[str, Any] = {"sampler": "grid", "space": {RATE: [0.1, 0.2]}, "concurrency": 2, "simulated": simulated}
    whole, study = made("whole", **values), made("study", **values)
    whole.run()
    states = []

    def interrupt(trial: TrialRecord) -> None:
        states.append((trial.state, trial.reason))

    def on_change(engine: Engine) -> None:
        if all(t.evaluations == 2 for t in engine.unfinished):
            engine.interrupt()

    assert study.run(interrupt, on_change) == "stopped"
    assert states[2:] == [("running", "stopped at a checkpoint")] * 2
    runs = [t.run for t in study.trials]
    assert study.run() == "finished"
    assert study.ended == whole.ended
    assert [t.run for t in study.trials] == runs


@pytest.mark.parametrize("simulated", [True, False])
def test_a_study_stops_when_another_process_asks_its_run_to(made, simulated) -> None:
    values: dict[str, Any] = {"sampler": "grid", "space": {RATE: [0.1, 0.2, 0.3]}, "concurrency": 1, "simulated": simulated}
    whole, study = made("whole", **values), made("study", **values)
    whole.run()

    def ask(trial: TrialRecord) -> None:
        if trial.state == "finished":
            request_stop(study.folder.run, now=False)

    with study.folder.driving():
        assert study.run(ask) == "stopped"
        assert [t.state for t in study.trials].count("finished") == 1
        withdraw_stop(study.folder.run)
        assert study.run() == "finished"
    assert study.ended == whole.ended


class Killed(Exception):
    """Stands for the end of the client."""


@pytest.mark.parametrize("simulated", [True, False])
def test_a_client_killed_at_any_moment_loses_nothing_and_nothing_is_counted_twice(made, simulated) -> None:
    """With one trial at a time the study ends as one that was not interrupted, whenever its client was killed."""
    values: dict[str, Any] = {"pruner": "asha", "concurrency": 1, "trials": 4, "simulated": simulated}
    moments: list[object] = []
    whole = made("whole", **values)
    whole.run(moments.append, moments.append)
    assert {t.state for t in whole.trials} == {"finished", "pruned"}
    for moment in range(len(moments)):
        study = made(f"killed-{moment}", **values)
        left = [moment]

        def kill(_: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise Killed

        with pytest.raises(Killed):
            study.run(kill, kill)
        before = {t.number: t.run for t in study.trials if t.state in ("finished", "pruned")}
        assert study.run() == "finished"
        assert study.ended == whole.ended, moment
        assert study.spent_usd == pytest.approx(whole.spent_usd), moment
        assert {t.number: t.run for t in study.trials if t.number in before} == before
