"""What users build or write by hand is checked where they do it."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated

import pytest

import ephemeron
from ephemeron.config import typed
from ephemeron.config.typed import Count, MoreThan, Within
from ephemeron.errors import JobError
from ephemeron.training.job import Configuration, DataSpec, Job, JobLimits, Simulation, Target, load_job
from ephemeron.training.job.job_file import parse_job


def build():
    """No module:function."""


def test_strings_stand_for_what_they_name():
    job = Job(name="j", model="m:build", data=DataSpec(source="npz", path="x.npz"), code=["."])
    assert job.model == Target(target="m:build")
    assert job.data.path == Path("x.npz")
    assert job.code == (Path("."),)
    assert JobLimits(deadline_s=3).deadline_s == 3.0


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Job(name="j", model=build), "Job: model is the object build; name it: .module:function"),
        (lambda: Job(name="j", model="m:b", epochs="3"), "Job: epochs = '3' should be a whole number"),
        (lambda: Job(name="j", model="m:b", epochs=10**30), "Job: epochs is a number of 31 digits"),
        (lambda: Job(name="j", model="m:b", code="."), "Job: code = '.' should be a list"),
        (lambda: Job(name="j", model="m:b", data="digits"), "Job: data: expected a table, got 'digits'"),
        (lambda: JobLimits(budget_usd=math.nan), "JobLimits: budget_usd = nan is not a number"),
        (lambda: Simulation(compute={"a": "x"}), "Simulation: compute.a = 'x' should be a number"),
    ],
)
def test_python_values(make, told):
    with pytest.raises(JobError, match=told):
        make()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"workers": "4"}, "configuration: workers = '4' should be a whole number"),
        ({"batch_size": 16.5}, "configuration: batch_size = 16.5 should be a whole number"),
        ({"function_timeout_s": math.nan}, "configuration: function_timeout_s = nan is not a number"),
        ({"function_timeout_s": math.inf}, "configuration: function_timeout_s = inf should be at least 0"),
        ({"wrokers": 3}, "unknown option 'wrokers'; did you mean 'workers'?"),
        ({"pattern": "kreduce"}, "configuration: pattern = 'kreduce' is not known; use one of k-reduce"),
    ],
)
def test_configure(values, told):
    with pytest.raises(JobError, match=told.replace("?", r"\?")):
        ephemeron.configure(Job(name="j", model="m:b"), **values)


def test_a_table_built_in_python_is_checked_too():
    with pytest.raises(JobError, match=r"Job: run\.workers = '4' should be a whole number"):
        Job(name="j", model="m:b", run={"workers": "4"})


def test_train_takes_a_path_and_says_what_is_wrong_with_it(tmp_path):
    with pytest.raises(JobError, match=r"job file .*absent.toml does not exist"):
        ephemeron.train(tmp_path / "absent.toml")
    with pytest.raises(JobError, match=r"job file absent.toml does not exist"):
        ephemeron.train("absent.toml")


def test_other_things_than_jobs_and_configurations_are_refused_by_name(tmp_path):
    job = Job(name="j", model="m:b")
    for refused in (lambda: ephemeron.train({"model": "m:b"}), lambda: ephemeron.configure({"model": "m:b"})):
        with pytest.raises(JobError, match="job is a dict; give a Job, a Task, module:Class, or the path of a job file"):
            refused()
    with pytest.raises(JobError, match=r"configuration is a dict; give what configure\(job, …\) returns"):
        ephemeron.train(job, {"workers": 4})
    with pytest.raises(JobError, match="Configuration: workers = '4' should be a whole number"):
        Configuration(workers="4")
    file = tmp_path / "job.toml"
    file.write_text('model = "m:b"\n[run]\nworkers = 3')
    assert ephemeron.configure(file).workers == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = " + "[" * 200_000, "brackets are nested too deep"),
        ("epochs = " + "9" * 5000, "Exceeds the limit"),
        ('model = "m:b"\nepochs = ' + "9" * 4000, "epochs is a number of 4000 digits"),
    ],
    ids=["brackets", "digits", "large"],
)
def test_absurd_files_are_one_line(tmp_path, text, told):
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(JobError, match=told) as caught:
        load_job(file)
    assert len(str(caught.value)) < 300


def test_replacing_keeps_checking():
    job = Job(name="j", model="m:b")
    with pytest.raises(JobError, match="Job: seed = 'x'"):
        dataclasses.replace(job, seed="x")
    assert Configuration(workers=3).resolved().workers == 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    count: Count = 1
    share: Annotated[float, Within(0, 1)] = 1.0
    rate: Annotated[float, MoreThan(0, infinite=True)] | None = None
    shape: tuple[int, str] = (1, "a")
    by_rank: dict[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    either: int | str = 0


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"count": 0}, "at: count = 0 should be at least 1"),
        ({"share": 1.5}, "at: share = 1.5 should be from 0 to 1"),
        ({"share": math.inf}, "at: share = inf should be from 0 to 1"),
        ({"rate": 0}, "at: rate = 0.0 should be more than 0"),
        ({"shape": [1]}, r"at: shape = \[1\] should have 2 values"),
        ({"shape": [1, 2]}, r"at: shape\[1\] = 2 should be text"),
        ({"by_rank": {"x": []}}, "at: by_rank: key 'x' should be a whole number"),
        ({"by_rank": {"1": ["y"]}}, r"at: by_rank.1\[0\] = 'y' should be a number"),
        ({"either": 1.5}, "at: either = 1.5 should be a whole number or text"),
    ],
)
def test_bounds_and_nested_types(raw, told):
    with pytest.raises(JobError, match=told):
        typed.build(Bounded, raw, where="at")


def test_plain_is_the_inverse_of_build():
    made = typed.build(Bounded, {"by_rank": {"1": [2]}, "rate": math.inf, "either": "x"}, where="at")
    assert made == Bounded(by_rank={1: (2.0,)}, rate=math.inf, either="x")
    assert typed.build(Bounded, json.loads(json.dumps(typed.plain(made))), where="at") == made


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"workers": 2}, r"j: unknown key workers; write it in \[run\]"),
        ({"deadline_s": 2}, r"j: unknown key deadline_s; write it in \[limits\]"),
        (
            {"optimizer": {"target": "m:o", "lr": 1}},
            "j: optimizer: unknown key lr; known keys: target, options; those of the target are in options",
        ),
    ],
)
def test_a_key_at_another_place_is_told_where_it_belongs(change, told):
    with pytest.raises(JobError, match=told):
        parse_job({"name": "j", "model": "m:b", **change}, folder=Path(), where="j")
