"""Studies of functions from the command line and from Python: what is refused before anything is started, and what is in the results."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import ephemeron
from ephemeron.cli.main import main
from ephemeron.config.toml import toml_text
from ephemeron.errors import JobError, PlatformError, UserError
from ephemeron.events import Ended, Invoked, TaskBegan
from ephemeron.runs import folders, verbs
from ephemeron.runs.folders import all_runs
from ephemeron.tuning import Study, Trial
from ephemeron.tuning.api import study_of
from ephemeron.tuning.study_file import load_study

pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")

SPACE = {"lr": {"low": 0.01, "high": 1.0, "log": True}, "depth": [1, 2, 3]}
OBJECTIVES = """
def fit(lr, depth):
    return {"loss": lr * depth, "depths": depth}

def reports(lr, depth, trial):
    for step in range(3):
        trial.report(step, lr / (step + 1))
    return lr

def quiet(lr, depth, trial):
    return lr

def fails(lr, depth):
    raise ValueError(f"depth {depth} is no good")

def other(rate):
    return rate

async def coroutine(lr, depth):
    return lr

unit = 3
"""


@pytest.fixture
def place(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of objectives and a space."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "goals.py").write_text(OBJECTIVES)
    (place / "space.toml").write_text(toml_text({"space": SPACE}))
    monkeypatch.chdir(place)
    return place


def tune(*more: str, objective: str = "goals:fit", space: str = "space.toml") -> Result:
    return CliRunner().invoke(main, ["tune", "--objective", objective, "--space", space, *more])


SIMULATED = ("--platform", "simulated", "--max-workers", "2", "--trials", "4", "--sampler", "random")
"""Functions of the virtual clock, which are called in this process."""


def test_a_study_has_the_results_of_a_study(place: Path, home: Path) -> None:
    done = tune(*SIMULATED, "--metric", "loss", "--out", "out", "--name", "goals", "--label", "team=a", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["trials"] == {"finished": 4, "pruned": 0, "failed": 0}
    best = document["best"]["parameters"]
    assert document["best"]["value"] == best["lr"] * best["depth"]
    assert tomllib.loads((place / "out" / "best.toml").read_text()) == best
    rows = (place / "out" / "trials.csv").read_text().splitlines()
    assert rows[0].startswith("trial,state,loss,depths,lr,depth,evaluations,cost_usd,seconds")
    assert len(rows) == 5
    assert "best: loss" in tune(*SIMULATED, "--metric", "loss", "--out", "out", "--name", "goals", "--attach").output
    [run] = all_runs()
    header = json.loads((run.path / "run.json").read_text())
    assert {k: header[k] for k in ("kind", "name", "platform", "functions", "labels", "payload")} == {
        "kind": "study",
        "name": "goals",
        "platform": "simulated",
        "functions": 2,
        "labels": {"team": "a"},
        "payload": {"file": str(place / "out" / "study.toml")},
    }
    events = list(folders.events_of(run))
    assert sum(isinstance(e, TaskBegan) for e in events) == 4
    assert sum(isinstance(e, Invoked) for e in events) == sum(isinstance(e, Ended) for e in events) == 2
    result = verbs.attach(run.run_id)
    assert (result.summary.status, result.summary.invocations, result.summary.trials) == ("finished", 2, {"finished": 4})
    assert result.summary.cost_usd == pytest.approx(document["cost_usd"], abs=1e-9)
    assert result.summary.billed.gb_seconds > 0
    assert "objective" not in Study.open(place / "out" / "study.toml", out=place / "out").to_optuna().best_params


def test_a_study_file_names_its_objective(place: Path) -> None:
    path = place / "study.toml"
    objective = {"function": "goals:fit", "platform": "simulated", "memory_mb": 1024, "timeout_s": 60, "retries": 0}
    path.write_text(toml_text({"metric": "loss", "trials": 2, "objective": objective, "space": SPACE}))
    result = Study.open(path).run()
    assert (result.status.state, result.status.job, result.status.is_of_objective) == ("finished", "goals:fit", True)
    assert Study.open(path).platform == "simulated"
    short = place / "short.toml"
    short.write_text('objective = "goals:fit"\nmetric = "loss"\ntrials = 1\n[space]\nlr = [0.5]\ndepth = [2]\n')
    done = CliRunner().invoke(main, ["tune", str(short), "--platform", "simulated", "--max-workers", "1"])
    assert done.exit_code == 0, done.output
    assert "best: loss 1 with lr = 0.5, depth = 2 (trial 0)" in done.output
    refused = CliRunner().invoke(main, ["tune", str(short), "--platform", "local", "--resume"])
    assert "has begun with platform = simulated; leave the option out" in refused.output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"objective": "goals"}, "objective 'goals' is not of the form module:function; write such as 'models:fit'"),
        ({"objective": "absent:fit"}, "objective absent:fit: there is no module 'absent' in"),
        ({"objective": "goals:fitt"}, "objective goals:fitt: goals has no name 'fitt'"),
        ({"objective": "goals:unit"}, "the objective is 3, which cannot be called"),
        ({"objective": "goals:coroutine"}, "objective goals.coroutine is a coroutine function"),
        ({"objective": "goals:other"}, "objective goals.other(rate) takes none of the parameters of the space (lr, depth)"),
        ({"space": "absent.toml"}, "--space absent.toml does not exist"),
        ({"more": ["--pruner", "asha"]}, "pruner asha needs values before the end, and objective goals.fit has no argument trial"),
        ({"more": ["--trials", "0"]}, "--trials = 0 should be at least 1"),
        ({"more": ["--memory-mb", "20"]}, "memory_mb = 20 is outside"),
        ({"more": ["--platform", "nowhere"]}, "platform 'nowhere' is not known"),
        ({"more": ["--channel", "foo://x"]}, "channel 'foo://x' is of no known kind"),
        ({"more": ["--sampler", "grid"]}, "space.lr is a range of numbers, of which a grid needs to know which"),
        ({"more": ["--retries", "-1"]}, "--retries = -1 should be at least 0"),
        ({"more": ["--resume"]}, "there is no study in"),
        ({"more": ["--detach", "--channel", "ps://localhost:1"]}, "the parameter server is a process of the client"),
        ({"more": ["--dry-run", "--profile"]}, "--profile is for studies of a job"),
        ({"more": ["--code-include", "*.absent"]}, "code_include has '*.absent', and no file in"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_and_leaves_nothing(place: Path, home: Path, more: dict[str, Any], message: str) -> None:
    done = tune("--trials", "3", *more.pop("more", ()), **more)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert done.output.count("\n") == 1
    assert not all_runs()
    assert not [path for path in home.glob("runs/*") if more]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("", "space is empty; name what to search, such as lr = [0.01, 0.1]"),
        ("lr = []", "space.lr has no values"),
        ("lr = 3", "space.lr = 3 is no domain"),
        ("lr = { low = 2, high = 1 }", "space.lr: low = 2 is not below high = 1"),
        ("lr = { low = -1, high = 1, log = true }", "space.lr: low = -1 has no logarithm"),
        ("lr = [0.1]\nwidth = [1]", "the space has width, and objective goals.fit(lr, depth) takes no argument of that name"),
        ("lr = [0.1]", "objective goals.fit(lr, depth) needs depth, which the space does not have"),
    ],
)
def test_a_space_that_does_not_fit_is_refused(place: Path, space: str, message: str) -> None:
    (place / "odd.toml").write_text(space)
    done = tune("--trials", "3", space="odd.toml")
    assert done.exit_code == 2, done.output
    assert message in done.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trials = 3", "missing key job; name the job file whose keys are searched, or a Python function"),
        ('job = "job.toml"\nobjective = "goals:fit"\ntrials = 3', "job and objective exclude each other"),
        ('objective = "goals:fit"\ntrials = 3\ndata_service = 2', "data_service is for studies of a job"),
        ('objective = "goals"\ntrials = 3', "use module:function"),
        ('objective = { function = "goals:fit", memory = 3 }\ntrials = 3', "memory"),
        ('objective = "goals:fit"', "missing key trials"),
    ],
)
def test_a_study_file_that_is_wrong_is_refused(place: Path, text: str, message: str) -> None:
    (place / "study.toml").write_text(f"{text}\n[space]\nlr = {{ low = 0.1, high = 1.0 }}\n")
    with pytest.raises(JobError, match=message):
        load_study(place / "study.toml")


def test_a_module_that_is_missing_is_named_with_its_remedy(place: Path) -> None:
    (place / "lacking.py").write_text("import no_such_package\n\ndef fit(lr):\n    return lr\n")
    done = tune(*SIMULATED, objective="lacking:fit")
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert "put no-such-package into a file of requirements, and give --requirements FILE" in done.output.replace("_", "-")


def test_options_of_an_objective_are_not_for_a_file(place: Path) -> None:
    for arguments, message in (
        (["study.toml", "--trials", "3"], "--trials belongs to --objective: set trials in study.toml"),
        (["study.toml", "--objective", "goals:fit"], "study.toml and --objective exclude each other"),
        (["--objective", "goals:fit"], "--objective needs --space FILE"),
        ([], "give a STUDY file, or --objective MODULE:FUNCTION with --space FILE"),
    ):
        done = CliRunner().invoke(main, ["tune", *arguments])
        assert (done.exit_code, message in done.output) == (2, True), done.output


def test_a_study_that_was_begun_with_other_values_is_not_gone_on_with(place: Path) -> None:
    assert tune(*SIMULATED, "--metric", "loss").exit_code == 0
    again = tune(*SIMULATED, "--metric", "loss", "--seed", "1")
    assert again.exit_code == 2
    assert "there is a study in" in again.output
    assert "another name or in another folder (--name, --out)" in again.output
    assert "has ended (finished); begin another one" in tune(*SIMULATED, "--metric", "loss").output


def test_failures_are_told_with_the_users_own_traceback_and_stop_the_study(place: Path) -> None:
    done = tune(*SIMULATED, "--max-failures", "3", "--max-workers", "1", objective="goals:fails")
    assert done.exit_code == 3
    reasons = {t.reason for t in Study.open(all_runs()[0].path / "study.toml", out=all_runs()[0].path).trials if t.state == "failed"}
    assert done.output.count("Traceback (most recent call last)") == len(reasons), "each once"
    assert "ValueError: depth" in done.output
    assert "study fails was stopped: 0 finished, 0 pruned, 3 failed" in done.output
    assert "3 trials in a row have failed, the last one: ValueError: depth" in done.output
    assert "go on with it: ephemeron resume fails" in done.output
    assert folders.find("fails").read("result.json")["causes"][0].startswith("3 trials in a row have failed")  # type: ignore[index]


def test_a_pruner_without_reports_is_noticed(place: Path) -> None:
    done = tune(*SIMULATED, "--pruner", "asha", objective="goals:reports")
    assert done.exit_code == 0, done.output
    assert "no trial has reported" not in done.output
    quiet = tune(*SIMULATED, "--pruner", "asha", objective="goals:quiet")
    assert "no trial has reported a value, so pruner asha has ended none: call trial.report(step, value)" in quiet.output


# -- from Python ------------------------------------------------------------------------------------------------


SLOPE = 3.0
CALLS: list[float] = []


def counted(x: float) -> float:
    """A function of a module, which platform `simulated` calls in this process."""
    CALLS.append(x)
    return x


HERE: dict[str, Any] = {"platform": "simulated", "max_workers": 2, "sampler": "random"}


def test_a_closure_of_a_program_is_searched(home: Path) -> None:
    def objective(params: dict[str, Any], trial: Trial) -> dict[str, Any]:
        return {"gain": SLOPE * params["x"], "square": params["x"] ** 2}

    told: list[tuple[int, str]] = []
    space = {"x": np.linspace(0.0, 1.0, 3)}
    result = ephemeron.tune(
        objective, space, metric="gain", mode="max", on_trial=lambda t: told.append((t.number, t.state)), **{**HERE, "sampler": "grid"}
    )
    assert result.best is not None
    assert (result.best.value, result.best.parameters, result.best.metrics) == (3.0, {"x": 1.0}, {"square": 1.0})
    assert sorted(told) == sorted((n, state) for n in range(3) for state in ("running", "finished"))
    with pytest.raises(UserError, match="has ended"):
        ephemeron.tune(objective, space, metric="gain", mode="max", **{**HERE, "sampler": "grid"})
    run = all_runs()[0]
    assert verbs.attach(run.run_id).summary.status == "finished"
    (run.path / "result.json").unlink()
    with pytest.raises(UserError, match="is a study of a program, and no file"):
        verbs.attach(run.run_id)


def test_equal_seeds_give_equal_studies(home: Path) -> None:
    def objective(x: float, y: float) -> float:
        return (x - 0.3) ** 2 + y

    space = {"x": {"low": 0.0, "high": 1.0}, "y": {"low": 0.0, "high": 1.0}}
    options: dict[str, Any] = {"platform": "simulated", "max_workers": 1, "trials": 12}
    found = [ephemeron.tune(objective, space, seed=seed, name=name, **options).status for seed, name in ((1, "a"), (1, "b"), (2, "c"))]
    first, same, other = ([(t.parameters, t.value) for t in status.trials] for status in found)
    assert first == same
    assert first != other


def test_finished_trials_are_not_called_again_when_it_goes_on(home: Path) -> None:
    CALLS.clear()

    class Ends(Exception):
        pass

    def ends(trial: Any) -> None:
        if trial.state == "finished" and trial.number == 1:
            raise Ends

    options: dict[str, Any] = {"platform": "simulated", "max_workers": 1, "trials": 5}
    space = {"x": {"low": 0.0, "high": 1.0}}
    with pytest.raises(Ends):
        ephemeron.tune(counted, space, name="begun", on_trial=ends, **options)
    begun = len(CALLS)
    with pytest.raises(UserError, match="has begun; go on with it"):
        ephemeron.tune(counted, space, name="begun", **options)
    result = ephemeron.tune(counted, space, name="begun", resume=True, **options)
    assert result.count("finished") == 5
    assert begun == 2
    assert len(CALLS) == len(set(CALLS)) == 5
    whole = ephemeron.tune(counted, space, name="whole", **options)
    assert [(t.parameters, t.value) for t in result.status.trials] == [(t.parameters, t.value) for t in whole.status.trials]
    assert result.status.spent_usd > whole.status.spent_usd / 2


@pytest.mark.parametrize("value", [math.nan, math.inf, "high", None])
def test_a_value_that_is_none_is_a_failed_trial(home: Path, value: Any) -> None:
    result = ephemeron.tune(lambda x: value, {"x": [1, 2]}, max_failures=9, **{**HERE, "sampler": "grid"})
    assert [t.state for t in result.status.trials] == ["failed", "failed"]
    assert result.best is None
    assert "its result is" in result.status.trials[0].reason


def test_the_budget_ends_the_study(home: Path) -> None:
    result = ephemeron.tune(lambda x: x, {"x": {"low": 0.0, "high": 1.0}}, trials=500, budget_usd=0.0005, **HERE)
    assert result.status.state == "budget"
    assert 0.0005 <= result.status.spent_usd < 0.002
    assert result.count("finished") < 500


def test_a_store_that_fails_stops_the_study_and_no_trial_has_failed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ephemeron.executor.session import Session

    async def live(self: Session, place: Any, **how: Any) -> None:
        raise PlatformError("functions cannot be started")

    options: dict[str, Any] = {**HERE, "trials": 3, "name": "broken"}
    with monkeypatch.context() as patch:
        patch.setattr(Session, "live", live)
        with pytest.raises(PlatformError, match="functions cannot be started"):
            ephemeron.tune(lambda x: x, {"x": {"low": 0.0, "high": 1.0}}, **options)
    study = study_of(lambda x: x, {"x": {"low": 0.0, "high": 1.0}}, **options)
    assert (study.status.state, study.status.reason) == ("stopped", "PlatformError: functions cannot be started")
    assert {t.state for t in study.trials} == {"running"}
    assert study.run(resume=True).count("finished") == 3


def test_what_cannot_be_sent_or_detached_is_refused(home: Path, tmp_path: Path) -> None:
    lock = (tmp_path / "file").open("w")
    with lock, pytest.raises(JobError, match="cannot be sent to a function"):
        ephemeron.tune(lambda x: lock.write(str(x)), {"x": [1]}, sampler="grid")
    with pytest.raises(JobError, match="which is a function of a program; put it into a module"):
        study_of(lambda x: x, {"x": [1]}, sampler="grid").detach()
    with pytest.raises(JobError, match="the study cannot be written to a file"):
        ephemeron.tune(lambda x: x, {"x": [object()]}, sampler="grid")
    with pytest.raises(JobError, match=r"study: pruner.name = 'median' is not known"):
        ephemeron.tune(lambda x: x, {"x": [1]}, sampler="grid", pruner="median")
    with pytest.raises(JobError, match="memory"):
        ephemeron.tune(lambda x: x, {"x": [1]}, sampler="grid", memory=3)
    assert not all_runs()


# -- before the start -------------------------------------------------------------------------------------------


def test_a_dry_run_tries_trials_here_and_starts_nothing(place: Path) -> None:
    done = tune("--trials", "40", "--metric", "loss", "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.splitlines()[-1])
    assert {k: document[k] for k in ("kind", "name", "platform", "trials")} == {
        "kind": "study",
        "name": "fit",
        "platform": "local",
        "trials": 40,
    }
    assert document["seconds"] > 0 < document["cost_usd"]
    assert 0 < document["memory_mb"] < document["quota_mb"]
    assert len(document["tried"]) == 8
    assert not all_runs()
    shown = tune("--trials", "40", "--metric", "loss", "--dry-run", "--budget-usd", "1e-9")
    for words in (
        "study        fit on local",
        "objective    goals.fit",
        "trials       40, tpe",
        "\na trial ",
        "more than the budget",
        "nothing was started",
    ):
        assert words in shown.output, shown.output


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("goals:fails", 'ValueError: depth 3 is no good\n  File "goals.py", line 14, in fails'),
        ("goals:fit", "its result has no 'value', which is the metric of the study; it has loss, depths"),
    ],
)
def test_a_dry_run_tells_what_fails(place: Path, objective: str, message: str) -> None:
    done = tune("--trials", "3", "--dry-run", objective=objective)
    assert done.exit_code == 2
    assert "fails with trial 1: " in done.output
    assert message.replace("depth 3", "depth") in done.output.replace("depth 3", "depth").replace("depth 1", "depth").replace(
        "depth 2", "depth"
    )


def test_the_example_is_searched(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    study = Path(__file__).parents[2] / "examples" / "objective" / "study.toml"
    path = tmp_path / "study.toml"
    path.write_text(
        study.read_text()
        .replace("trials = 30", "trials = 3")
        .replace('"digits:fit"', f'{{ function = "digits:fit", code = ["{study.parent}"] }}')
    )
    result = Study.open(path, options={"platform": "simulated", "max_workers": 2}).run()
    assert result.best is not None
    assert 0.5 < (result.best.value or 0.0) <= 1.0
    assert {t.evaluations for t in result.status.trials if t.state == "finished"} == {20}
