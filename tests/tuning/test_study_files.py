"""Study files: what is read, and what is refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tuning_worlds import MakeStudy, write_study

from ephemeron.config.toml import parse_toml, toml_text
from ephemeron.errors import JobError, MissingExtra
from ephemeron.tuning.study_file import PrunerSpec, load_study

pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"space": {}}, r"space is empty; name what to search"),
        ({"space": {"optimzer.options.lr": [1.0]}}, r"unknown key optimzer; did you mean optimizer\?"),
        ({"space": {"run.worker": [1]}}, r"unknown key worker; did you mean workers\?"),
        ({"space": {"run.workers": []}}, r"space.run.workers has no values"),
        ({"space": {"run.workers": [0]}}, r"run.workers = 0 should be at least 1"),
        ({"space": {"run.workers": ["two"]}}, r"run.workers = 'two' should be a whole number"),
        ({"space": {"run.workers": {"low": 4, "high": 1}}}, r"low = 4 is not below high = 1"),
        ({"space": {"seed": [1, 1]}}, r"space.seed lists a value twice"),
        ({"space": {"seed": 1}}, r"space.seed = 1 is no domain; give a list"),
        ({"space": {"seed": [[1]]}}, r"\[1\] is not a number, a text, true or false"),
        ({"space": {"optimizer.options.lr": {"low": 0.0, "high": 1.0, "log": True}}}, r"low = 0.0 has no logarithm"),
        ({"space": {"optimizer.options.lr": {"low": 0.1, "high": 1.0, "step": 2.0}}}, r"step = 2.0 should be above 0"),
        ({"space": {"run.platform": ["local", "simulated"]}}, r"space.run.platform is the same for all trials"),
        ({"sampler": "grid"}, r"is a range of numbers, of which a grid needs to know which; list values, or give step"),
        ({"trials": None}, r"missing key trials; say how many"),
        ({"trials": 0}, r"trials = 0 should be at least 1"),
        ({"sampler": "bayes"}, r"sampler = 'bayes' is not known; use one of grid, random, tpe"),
        ({"pruner": "median"}, r"pruner.name = 'median' is not known; use one of none, asha, hyperband"),
        ({"pruner": {"name": "asha", "reduction_factor": 1}}, r"reduction_factor = 1 should be at least 2"),
        ({"budget": 1.0}, r"unknown key budget; did you mean budget_usd\?"),
        ({"name": "a b"}, r"name = 'a b' is not known; use letters"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    path = write_study(tmp_path, **values)
    with pytest.raises(JobError, match=message) as caught:
        load_study(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"study file .*no.toml does not exist"):
        load_study(tmp_path / "no.toml")


def test_a_job_that_is_absent_is_named(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    (tmp_path / "job.toml").unlink()
    with pytest.raises(JobError, match=r"job.toml cannot be read; name it relative to the study's file"):
        load_study(path)


def test_keys_may_be_dotted_or_quoted_and_shorthands_become_tables(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    path.write_text(
        'job = "job.toml"\ntrials = 1\n[space]\noptimizer.options.lr = [0.1, 0.2]\n"model.options.dropout" = [0.0, 0.5]\n'
        "run.workers = { low = 1, high = 3 }\n"
    )
    study = load_study(path)
    assert [p.key for p in study.space] == ["optimizer.options.lr", "model.options.dropout", "run.workers"]
    job, configuration = study.template.configured({"model.options.dropout": 0.5, "run.workers": 3})
    assert (job.model.target, job.model.options, configuration.workers) == ("tiny:mlp", {"dropout": 0.5}, 3)


def test_the_example_is_read() -> None:
    study = load_study(Path(__file__).parents[2] / "examples" / "digits" / "study.toml")
    assert (study.trials, study.spec.pruner.name) == (12, "asha")


def test_options_of_a_script_are_parameters(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    (tmp_path / "job.toml").write_text('script = { file = "t.py", arguments = ["--lr", "1", "--size=3", "x"] }')
    (tmp_path / "study.toml").write_text(
        'job = "job.toml"\ntrials = 1\n[space]\nscript.arguments.lr = [0.1]\nscript.arguments.size = [4]\n'
    )
    study = load_study(tmp_path / "study.toml")
    job = study.template.job({"script.arguments.lr": 0.1, "script.arguments.size": 4})
    assert job.script is not None
    assert job.script.arguments == ("x", "--lr", "0.1", "--size", "4")


def test_grid_values_of_ranges_include_both_ends(tmp_path: Path) -> None:
    space = {"seed": {"low": 1, "high": 3}, "optimizer.options.lr": {"low": 0.1, "high": 0.3, "step": 0.1}}
    study = load_study(write_study(tmp_path, sampler="grid", space=space))
    values = {p.key: p.grid_values() for p in study.space}
    assert values["seed"] == (1, 2, 3)
    assert values["optimizer.options.lr"] == pytest.approx((0.1, 0.2, 0.3))
    assert study.trials == 9


def test_an_unknown_metric_is_refused_with_those_there_are(make_study: MakeStudy) -> None:
    study = make_study(metric="acuracy")
    with pytest.raises(JobError, match=r"metric = 'acuracy' is not reported by the job's evaluations; use one of loss, accuracy"):
        study.run()
    assert not study.folder.exists


def test_a_pruner_without_evaluations_is_refused(make_study: MakeStudy) -> None:
    with pytest.raises(JobError, match=r"pruner asha decides after 1 evaluations, and a trial has 1, the last one at its end"):
        make_study(pruner="asha", job={"epochs": 1}).run()


def test_a_job_without_evaluation_data_is_refused(make_study: MakeStudy) -> None:
    with pytest.raises(JobError, match=r"the job has no evaluation data, of which trials are judged"):
        make_study(job={"data": {"source": "digits", "test_fraction": 0.0}}).run()


def test_without_optuna_the_extra_is_named(make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ephemeron\[tuning\]'"):
        make_study()


def test_tables_as_text_are_read_as_they_were() -> None:
    table = {"a": 1, "b": -1.5e-7, "c": True, "d": 'quotes " and \\ and\nlines ü', "e": [1, [2.0, "x"]], "a b": {"x.y": {"z": []}, "n": {}}}
    assert parse_toml(toml_text(table), where="text") == table


@pytest.mark.parametrize(
    ("pruner", "decisions"),
    [
        (PrunerSpec(name="asha"), {1: 1, 2: 1, 4: 2, 9: 3, 30: 5, 100: 10}),
        (PrunerSpec(name="asha", min_evaluations=1), {9: 1}),
        (PrunerSpec(name="hyperband"), {9: 1, 100: 1}),
    ],
)
def test_the_first_decision_depends_on_the_evaluations_of_a_trial(pruner: PrunerSpec, decisions: dict[int, int]) -> None:
    assert {n: pruner.first_decision(n) for n in decisions} == decisions
