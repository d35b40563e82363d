"""The engine with trials of an objective: what they report is decided on, failures in a row stop it, nothing is lost with its client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")

from objective_worlds import STEPS, USD, ValueObjective

from ephemeron.tuning.engine import Engine

GRID: dict[str, Any] = {"sampler": "grid", "max_workers": 1}


@pytest.fixture
def made(home: Path, tmp_path: Path) -> Any:
    """Makes a study that has not begun; `name` is that of its folder."""
    return lambda name="a", **values: ValueObjective(tmp_path / name, **values)


def test_values_are_reported_and_the_result_is_the_value(made: Any) -> None:
    study = made(**GRID)
    assert study.run() == "finished"
    assert {t.parameters["lr"]: (t.state, t.value, t.evaluations, t.seconds) for t in study.trials} == {
        rate: ("finished", rate, STEPS, STEPS) for rate in (0.1, 0.2, 0.4, 0.8)
    }
    assert study.seconds == 4 * STEPS


def test_the_first_decision_follows_from_what_the_first_trial_has_reported(made: Any) -> None:
    """It reports nine values: the others are compared after three, the square root of nine."""
    study = made(pruner="asha", **GRID)
    study.run()
    first, *others = study.trials
    assert (first.state, first.evaluations) == ("finished", STEPS)
    worse = [t for t in others if t.parameters["lr"] > first.parameters["lr"]]
    assert worse
    for trial in worse:
        assert (trial.state, trial.evaluations, trial.reason, trial.cost_usd) == ("pruned", 3, "pruned at evaluation 3", 3 * USD)


def test_a_first_decision_that_is_given_needs_no_trial_before(made: Any) -> None:
    space = {"lr": [0.1, 5.0]}
    study = made(pruner={"name": "asha", "min_evaluations": 1}, space=space, sampler="grid", max_workers=2)
    study.run()
    by_rate = {t.parameters["lr"]: t for t in study.trials}
    assert by_rate[0.1].state == "finished"
    assert by_rate[5.0].evaluations in (1, STEPS), "the first of two that report at once has none to be compared with"


@pytest.mark.parametrize("pruner", ["none", "hyperband"])
def test_equal_seeds_give_equal_studies(made: Any, pruner: str) -> None:
    space = {"lr": {"low": 0.01, "high": 1.0, "log": True}}
    values = {"sampler": "tpe", "pruner": pruner, "space": space, "max_workers": 2, "trials": 8}
    studies = [made(name, seed=seed, **values) for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    for study in studies:
        study.run()
    first, same, other = (study.ended for study in studies)
    assert first == same
    assert first != other


def test_a_study_stops_when_trials_fail_in_a_row(made: Any) -> None:
    space = {"lr": {"low": 0.01, "high": 1.0}}
    study = made(space=space, trials=20, max_workers=1, max_failures=3, fails=lambda number, values: number not in (0, 3))
    assert study.run() == "stopped"
    assert [t.state for t in study.trials] == ["finished", "failed", "failed", "finished", "failed", "failed", "failed"]
    assert study.engine.reason == "3 trials in a row have failed, the last one: ValueError: it had to"
    assert study.run() == "stopped", "three more may fail when it goes on"
    assert len(study.trials) == 10


def test_by_default_five_failures_in_a_row_stop_it(made: Any) -> None:
    study = made(space={"lr": {"low": 0.01, "high": 1.0}}, trials=20, max_workers=1, fails=lambda number, values: True)
    assert study.run() == "stopped"
    assert len(study.trials) == 5


class Killed(Exception):
    """Stands for the end of the client."""


def test_a_client_killed_at_any_moment_computes_no_finished_trial_again(made: Any) -> None:
    """With one trial at a time the study ends as one that was not interrupted, whenever its client was killed."""
    values: dict[str, Any] = {"pruner": "asha", "space": {"lr": {"low": 0.01, "high": 1.0}}, "trials": 4, "max_workers": 1}
    moments: list[object] = []
    whole = made("whole", **values)
    whole.run(moments.append, lambda: moments.append(None))
    assert {t.state for t in whole.trials} == {"finished", "pruned"}
    for moment in range(len(moments)):
        study = made(f"killed-{moment}", **values)
        left = [moment]

        def kill(_: object = None, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise Killed

        with pytest.raises(Killed):
            study.run(kill, kill)
        over = {t.number for t in study.trials if t.state in ("finished", "pruned")}
        before = len(study.trials_taken.begun)
        assert study.run() == "finished"
        assert study.ended == whole.ended, moment
        assert not over.intersection(study.trials_taken.begun[before:]), moment


def test_an_interrupt_is_told_and_the_study_goes_on(made: Any) -> None:
    whole, study = made("whole", **GRID), made("study", **GRID)
    whole.run()
    told = []

    def on_change() -> None:
        engine: Engine = study.engine
        if any(t.evaluations == 2 for t in engine.unfinished):
            engine.interrupt()

    assert study.run(lambda trial: told.append((trial.state, trial.reason)), on_change) == "stopped"
    assert told[-1] == ("running", "stopped: it begins anew")
    assert study.run() == "finished"
    assert study.ended == whole.ended
