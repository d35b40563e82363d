"""Job files: what they may say, and one legible line for every way to get one wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.training import configure, train
from ephemeron.training.job import ComputeModel, Configuration, Job, RegionOptions, Target, load_job, parse_job
from ephemeron.training.job.former_names import FORMER_NAMES

MODEL = 'model = "m:f"\n'


@pytest.fixture
def write(tmp_path: Path):
    def job_file(text: str, name: str = "job.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return job_file


def refusal(path: Path) -> str:
    with pytest.raises(JobError) as caught:
        load_job(path)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert str(path) in text
    return text


# -- what is accepted -------------------------------------------------------------------------------------


def test_a_model_is_enough(write, tmp_path):
    job = load_job(write(MODEL, "fancy.toml"))
    assert job == Job(name="fancy", model=Target(target="m:f"), code=(tmp_path,))


def test_the_examples_own_job_file_loads():
    job = load_job(Path(__file__).parents[3] / "examples/digits/job.toml")
    assert job.model == Target(target="model:build")
    assert job.optimizer.options == {"lr": 0.1, "momentum": 0.9}
    assert job.run == {"workers": 4, "aggregators": 2, "batch_size": 16}
    assert job.limits.max_global_batch == 256
    assert (job.code[0] / "model.py").exists()


def test_everything_at_once(write, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "train.npz").touch()
    job = load_job(
        write("""
        name = "all"
        model = { target = "m:f", options = { width = 3, deep = [1, { a = true }] } }
        loss = "mse_loss"
        optimizer = { target = "AdamW" }
        epochs = 3
        seed = -7
        dtype = "float64"
        code = ["src", "."]
        [data]
        source = "npz"
        path = "train.npz"
        test_fraction = 0
        [limits]
        deadline_s = 60
        budget_usd = 0.5
        [simulation]
        latency_s = 0
        compute = { a = 1, b = 2.5, m = 0 }
        [run]
        workers = 2
        sync = "ssp:3"
        function_timeout_s = 10
    """)
    )
    assert job.model.options == {"width": 3, "deep": [1, {"a": True}]}
    assert job.loss == Target(target="mse_loss")
    assert job.code == (tmp_path / "src", tmp_path)
    assert job.data.path == tmp_path / "train.npz"
    assert job.simulation.compute == ComputeModel(a=1.0, b=2.5, m=0.0)
    assert (job.limits.deadline_s, job.limits.budget_usd, job.limits.max_global_batch) == (60.0, 0.5, None)
    assert isinstance(job.limits.deadline_s, float)
    assert (job.seed, job.dtype, job.epochs) == (-7, "float64", 3)


def test_paths_are_relative_to_the_file_and_not_to_the_working_folder(write, tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = write(MODEL + 'code = ["src"]\n')
    monkeypatch.chdir(elsewhere)
    assert load_job(path).code == (tmp_path / "src",)
    assert load_job(Path("../job.toml")).code == (tmp_path / "src",)


def test_a_tilde_is_the_users_home(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "me/data").mkdir(parents=True)
    job = load_job(write(MODEL + 'code = ["~/data"]\n[data]\nsource = "idx"\npath = "~/data"\n'))
    assert job.code == (tmp_path / "me/data",)
    assert job.data.path == tmp_path / "me/data"


def test_a_mapping_serves_as_well_as_a_file(tmp_path):
    job = parse_job({"name": "x", "model": "m:f", "limits": {"budget_usd": None}}, folder=tmp_path)
    assert job.limits.budget_usd is None
    assert job.code == ()


# -- what is refused --------------------------------------------------------------------------------------

MISTAKES = {
    "unknown key, near": (MODEL + "epoch = 3", ["unknown key epoch", "did you mean epochs?"]),
    "unknown key, far": (MODEL + "zzz = 3", ["unknown key zzz", "known keys: name, model"]),
    "unknown key in a table": (MODEL + "[data]\nsourc = 'idx'", ["data: unknown key sourc", "did you mean source?"]),
    "unknown key in a target": ("model = { target = 'm:f', option = {} }", ["model: unknown key option", "options"]),
    "unknown key in run": (MODEL + "[run]\nworker = 3", ["run: unknown key worker", "did you mean workers?"]),
    "missing key": ("epochs = 3", ["missing key model"]),
    "missing key in a target": ("model = { options = { a = 1 } }", ["model: missing key target"]),
    "text for a number": (MODEL + "epochs = '3'", ["epochs = '3'", "a whole number"]),
    "fraction for a whole number": (MODEL + "epochs = 3.5", ["epochs = 3.5", "a whole number"]),
    "bool for a whole number": (MODEL + "epochs = true", ["epochs = True", "a whole number"]),
    "bool for a number": (MODEL + "[limits]\nbudget_usd = true", ["limits.budget_usd = True", "a number"]),
    "bool for an optional number": (MODEL + "[limits]\nmax_global_batch = false", ["max_global_batch = False"]),
    "number for text": (MODEL + "name = 3", ["name = 3", "text"]),
    "number for a table": (MODEL + "data = 3", ["data: expected a table", "3"]),
    "number for a target": ("model = 3", ["model: expected a table", "3"]),
    "number for options": ("model = { target = 'm:f', options = 3 }", ["options = 3", "a table"]),
    "number for a path": (MODEL + "[data]\npath = 3", ["data.path = 3", "a path"]),
    "text for a list": (MODEL + "code = '.'", ["code = '.'", "a list"]),
    "number in a list of paths": (MODEL + "code = [3]", ["code[0] = 3", "a path"]),
    "text in a table of numbers": (MODEL + "[simulation]\ncompute = { a = 'x', b = 1, m = 1 }", ["compute.a = 'x'"]),
    "run is no table": (MODEL + "run = 3", ["run = 3", "a table"]),
    "bad choice": (MODEL + "dtype = 'float16'", ["dtype = 'float16'", "use one of float32, float64"]),
    "bad choice in run": (MODEL + "[run]\npattern = 'ring'", ["run.pattern = 'ring'", "k-reduce", "scatter-reduce"]),
    "wrong type in run": (MODEL + "[run]\nworkers = 'four'", ["run.workers = 'four'", "a whole number"]),
    "bool in run": (MODEL + "[run]\nworkers = true", ["run.workers = True"]),
    "bad sync": (MODEL + "[run]\nsync = 'ssp'", ["sync = 'ssp'", "ssp:N"]),
    "no TOML": (MODEL + "epochs = \nseed = 3", ["not valid TOML", "line 2"]),
    "key twice": (MODEL + MODEL, ["not valid TOML"]),
    "folder of code absent": (MODEL + "code = ['nowhere']", ["code", "nowhere is not a folder"]),
    "code is a file": (MODEL + "code = ['job.toml']", ["code", "job.toml is not a folder"]),
    "data absent": (MODEL + "[data]\npath = 'no.npz'", ["data.path", "no.npz does not exist"]),
    "no epochs": (MODEL + "epochs = 0", ["epochs = 0", "at least 1"]),
    "negative epochs": (MODEL + "epochs = -1", ["epochs = -1", "at least 1"]),
    "negative budget": (MODEL + "[limits]\nbudget_usd = -0.5", ["limits.budget_usd = -0.5", "more than 0"]),
    "no deadline": (MODEL + "[limits]\ndeadline_s = 0", ["limits.deadline_s = 0.0", "more than 0"]),
    "negative batch": (MODEL + "[limits]\nmax_global_batch = -1", ["limits.max_global_batch = -1", "at least 1"]),
    "budget that is no number": (MODEL + "[limits]\nbudget_usd = nan", ["limits.budget_usd = nan"]),
    "all for testing": (MODEL + "[data]\ntest_fraction = 1.0", ["data.test_fraction = 1.0", "from 0 to below 1"]),
    "negative for testing": (MODEL + "[data]\ntest_fraction = -0.1", ["data.test_fraction = -0.1"]),
    "compute lacks a key": (MODEL + "[simulation]\ncompute = { a = 1, b = 1 }", ["simulation.compute: missing key m"]),
    "compute has one too many": (
        MODEL + "[simulation]\ncompute = { a = 1, b = 1, m = 1, x = 1 }",
        ["simulation.compute: unknown key x", "a, b, m"],
    ),
    "time goes backwards": (MODEL + "[simulation]\nlatency_s = -1.0", ["simulation.latency_s = -1.0"]),
    "no network": (MODEL + "[simulation]\nbandwidth_mb_s = 0", ["simulation.bandwidth_mb_s = 0.0", "more than 0"]),
    "negative work": (MODEL + "[simulation]\ncompute = { a = -1, b = 1, m = 1 }", ["simulation.compute.a = -1.0"]),
}


@pytest.mark.parametrize(("text", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_that_names_place_value_and_remedy(write, text, says):
    message = refusal(write(text))
    for part in says:
        assert part in message


def test_an_absent_file(tmp_path):
    assert "does not exist; give the path of a TOML or JSON file" in refusal(tmp_path / "none.toml")


def test_a_folder_is_no_job_file(tmp_path):
    assert "cannot be read" in refusal(tmp_path)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(path)


@pytest.mark.parametrize(("former", "name"), FORMER_NAMES.items())
def test_former_names_of_options_are_refused_with_those_of_today(write, former, name):
    written = f"[[run.{name}]]" if name == "regions.region" else name
    with pytest.raises(JobError, match=rf"job\.toml: run\.{former} is now {name}; write {re.escape(written)}$"):
        load_job(write(f"{MODEL}[run]\n{former} = 7"))
    for options in ({former: 7}, {former: "x"}):
        with pytest.raises(JobError, match=f"^configuration: {former} is now {name}; write {re.escape(written)}$"):
            configure(load_job(write(MODEL)), **options)
        with pytest.raises(JobError, match=f"^options: {former} is now {name}; write"):
            train(load_job(write(MODEL)), **options)
        with pytest.raises(JobError, match=rf"^Job: run\.{former} is now {name}; write"):
            Job(name="j", model="m:f", run=options)


@pytest.mark.parametrize(("former", "name"), [("schedule", "resize.schedule"), ("regions", "regions.region")])
def test_lists_are_in_tables(write, former, name):
    with pytest.raises(JobError, match=rf"job\.toml: run\.{former} is now {name}; write \[\[run\.{name}\]\]$"):
        load_job(write(f"{MODEL}[[run.{former}]]\nworkers = 7"))


TWO = '[[run.regions.region]]\nname = "near"\nworkers = 2\n\n[[run.regions.region]]\nname = "far"\nworkers = 1\n'


def test_regions_are_a_file_or_tables(write):
    path = write(MODEL + '[run.regions]\nstore = "s3://b/x"\n\n' + TWO)
    c = configure(load_job(path))
    assert [(region.name, region.workers) for region in c.regions.region] == [("near", 2), ("far", 1)]
    assert (c.workers, c.regions.store) == (3, "s3://b/x")
    other = path.parent / "regions.toml"
    other.write_text("".join(f'[[region]]\nname = "{name}"\nplatform = "local"\nworkers = 3\n' for name in ("east", "west")))
    given = configure(load_job(path), regions={"file": other})
    assert [region.name for region in given.regions.region] == ["east", "west"], "options precede [run]"
    for wrong, said in (
        ("3", "regions.region = 3 should be a list"),
        ('[{ name = "a" }]', r"region\[0\]: missing key workers"),
        ("[3]", r"region\[0\]"),
    ):
        with pytest.raises(JobError, match=said):
            configure(load_job(write(f"{MODEL}[run.regions]\nregion = {wrong}")))


def test_a_file_of_regions_that_was_not_read_is_refused(write):
    with pytest.raises(JobError, match=r"regions x\.toml was not read; make the configuration with configure"):
        train(load_job(write(MODEL)), Configuration(regions=RegionOptions(file="x.toml")))


def test_regions_are_relative_to_the_job(write):
    path = write(MODEL + '[run.regions]\nfile = "regions.toml"')
    (path.parent / "regions.toml").write_text("")
    assert str(load_job(path).run["regions"]["file"]) == str(path.parent / "regions.toml")


def test_an_address_in_place_of_a_folder_is_named_as_it_was_written(tmp_path: Path) -> None:
    """The error had a path of this machine with `s3:/bucket` in it."""
    path = tmp_path / "job.toml"
    path.write_text('name = "j"\nmodel = "m:f"\n[data]\nsource = "prepared"\npath = "s3://bucket/prepared/train"\n')
    with pytest.raises(JobError, match=r"data\.path = s3://bucket/prepared/train is an address"):
        load_job(path)


def test_paths_in_tables_of_regions_are_relative_to_the_job(write):
    """They were relative to the working folder, as nothing else in a job file is."""
    files = '{ name = "near", workers = 1, prices = "p.toml", certificate = "/c.pem", data = { source = "idx", path = "near" } }'
    path = write(f'{MODEL}[run.regions]\nauthority = "ca.pem"\nregion = [{files}, {{ name = "far", workers = 1 }}]')
    found, folder = load_job(path).run["regions"], path.parent
    near, far = found["region"]
    assert found["authority"] == folder / "ca.pem"
    assert (near.prices, near.certificate, near.data.path) == (folder / "p.toml", Path("/c.pem"), folder / "near")
    assert (far.prices, far.certificate_key, far.data) == (None, None, None)
