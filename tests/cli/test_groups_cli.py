"""`ephemeron fit-groups` and `ephemeron predict-groups`: what they print, what is refused, and killed clients that go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.runs import folders

pa = pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")
from pyarrow import parquet  # noqa: E402

MODULE = """
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

LOG = ""

class Mean:
    def __init__(self, value):
        self.value = value
    def predict(self, group):
        return np.full(len(group), self.value)

def fit(group: pa.Table, key):
    if key["store"] == "bad":
        raise ValueError("no mean of the bad")
    value = float(np.mean(group["y"].to_numpy()))
    return Mean(value), {"mean": value}

def slow(group: "pa.Table"):
    time.sleep(0.05)
    if LOG:
        with Path(LOG).open("a") as file:
            file.write(".")
    return Mean(float(np.mean(group["y"].to_numpy())))

def large(group: pa.Table):
    return np.full(10_000, float(np.mean(group["y"].to_numpy())))

def first(model, group: pa.Table):
    return np.full(len(group), model[0])

def twice(model, group: pa.Table):
    return {"twice": np.full(len(group), 2 * model.value)}
"""
SIMULATED = ["--platform", "simulated", "--max-workers", "2", "--retries", "0"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    (tmp_path / "grouped_means.py").write_text(MODULE)
    write_sales(tmp_path / "sales.parquet", ["a", "bad", None, "c/d", "日本"], 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("grouped_means", None)


def write_sales(path: Path, stores, rows: int) -> dict[str | None, float]:
    """Writes a table; returns the mean of each store."""
    rng = np.random.default_rng(0)
    store, y = [stores[n % len(stores)] for n in range(rows)], rng.standard_normal(rows)
    parquet.write_table(pa.table({"store": store, "sku": [7] * rows, "y": y}), path)
    return {name: float(np.mean([v for s, v in zip(store, y, strict=True) if s == name])) for name in stores}


def invoke(*arguments, code=0):
    ran = CliRunner().invoke(main, [*arguments, *SIMULATED])
    assert ran.exit_code == code, ran.output
    return ran


def fit(*arguments, code=0):
    return invoke("fit-groups", "sales.parquet", "--by", "store,sku", "--out", "models", *arguments, code=code)


def test_fit_and_predict_from_the_command_line(here):
    ran = fit("--fit", "grouped_means:fit", code=1)
    assert "40 rows of sales.parquet in 5 groups" in ran.stderr
    assert 'group ["bad",7]: ValueError: no mean of the bad' in ran.stderr
    assert "4 groups with models in models" in ran.stderr
    ran = fit("--fit", "grouped_means:fit", "--json", code=1)
    summary = json.loads(ran.stdout)
    assert (summary["items"], summary["written"], summary["computed"], summary["recorded"]) == (5, 4, 0, 5)
    ran = fit("--fit", "grouped_means:fit", code=1)
    assert "1 group failed before; --retry-failed computes them again" in ran.stderr
    ran = invoke("predict-groups", "models", "--data", "sales.parquet", "--out", "p.parquet", "--json")
    assert '8 rows are of groups without a model, whose predictions are null: ["bad",7]' in ran.stderr
    summary = json.loads(ran.stdout)
    assert (summary["items"], summary["rows"], summary["unknown_rows"], summary["columns"]) == (4, 40, 8, ["prediction"])
    means = write_sales(Path("again.parquet"), ["a", "bad", None, "c/d", "日本"], 40)
    found = parquet.read_table("p.parquet")
    for store, prediction in zip(found["store"].to_pylist(), found["prediction"].to_pylist(), strict=True):
        assert prediction == (None if store == "bad" else pytest.approx(means[store]))
    invoke("predict-groups", "models", "--data", "sales.parquet", "--out", "t.csv", "--predict", "grouped_means:twice")
    lines = Path("t.csv").read_text().splitlines()
    assert lines[0] == "store,sku,y,twice"
    assert lines[2].endswith(",")
    assert float(lines[1].rpartition(",")[2]) == pytest.approx(2 * means["a"])


def test_one_group_by_its_key():
    ran = fit("--fit", "grouped_means:fit", "--only", '["日本",7]', "--json", code=1)
    assert json.loads(ran.stdout)["computed"] == 1
    ran = fit("--fit", "grouped_means:fit", "--only", '["日本",8]', code=2)
    assert 'there is no group ["日本",8]; did you mean ["日本",7]' in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fit-groups", "sales.parquet", "--by", "stor", "--fit", "grouped_means:fit", "--out", "m"), "did you mean store?"),
        (("fit-groups", "sales.parquet", "--by", "store,", "--fit", "grouped_means:fit", "--out", "m"), "--by store, has an empty name"),
        (("fit-groups", "absent.parquet", "--by", "store", "--fit", "grouped_means:fit", "--out", "m"), "there is no file absent.parquet"),
        (
            ("fit-groups", "sales.parquet", "--by", "store", "--fit", "grouped_means:fut", "--out", "m"),
            "has no name 'fut'; did you mean fit?",
        ),
        (("fit-groups", "sales.parquet", "--by", "store", "--fit", "grouped_means", "--out", "m"), "is not of the form module:name"),
        (
            ("fit-groups", "sales.parquet", "--by", "store", "--fit", "grouped_means:fit", "--out", "m", "--as", "excel"),
            "cannot be given as 'excel'",
        ),
        (
            ("fit-groups", "sales.parquet", "--by", "store", "--fit", "grouped_means:fit", "--out", "m", "--memory-mb", "128"),
            "needs about 128 MB",
        ),
        (("predict-groups", "nowhere", "--data", "sales.parquet", "--out", "p.parquet"), "there are no models in nowhere"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_begins(here, monkeypatch, arguments, said):
    from ephemeron.maps.groups import fitting

    monkeypatch.setattr(fitting, "MEMORY_TIMES", 100)
    ran = invoke(*arguments, code=2)
    assert said in ran.stderr
    assert len(ran.stderr.strip().splitlines()) <= 2, "one line, beside that of the division"
    assert folders.all_runs() == []


def test_names_of_columns_with_commas(here):
    parquet.write_table(pa.table({"a,b": ["x", "y"], "y": [1.0, 2.0]}), "odd.parquet")
    ran = invoke("fit-groups", "odd.parquet", "--by", '"a,b"', "--fit", "grouped_means:slow", "--out", "odd", "--json")
    assert json.loads(ran.stdout)["items"] == 2


def test_a_dry_run_shows_time_price_and_memory(here):
    ran = fit("--fit", "grouped_means:slow", "--dry-run", "--json")
    found = json.loads(ran.stdout)
    assert found["seconds"] > 0
    assert found["cost_usd"] > 0
    assert found["memory_mb"] > 0
    assert folders.all_runs() == []
    ran = fit("--fit", "grouped_means:fit", "--dry-run", code=2)
    assert 'fit fails with group ["bad",7]: ValueError: no mean of the bad' in ran.stderr


def started(*arguments):
    program = "from ephemeron.cli.main import main; main()"
    command = [sys.executable, "-c", program, "fit-groups", "sales.parquet", "--by", "store,sku", "--out", "models", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_a_client_that_was_killed_goes_on_and_no_group_is_fitted_twice(here, tmp_path_factory):
    means = write_sales(here / "sales.parquet", [f"store {n}" for n in range(150)], 3000)
    log = tmp_path_factory.mktemp("log") / "calls.txt"  # a file beside the module that it names would be part of its version
    (here / "grouped_means.py").write_text(MODULE.replace('LOG = ""', f"LOG = {str(log)!r}"))
    process = started("--fit", "grouped_means:slow", "--max-workers", "2")
    ends_at = time.monotonic() + 120
    while not (log.exists() and len(log.read_text()) >= 40):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < ends_at
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(log.read_text()) < 150
    again = started("--fit", "grouped_means:slow", "--max-workers", "2")
    _, told = again.communicate(timeout=200)
    assert again.returncode == 0, told
    assert "150 groups with models in models" in told
    assert "divided in" not in told, "its groups are found"
    assert len(log.read_text()) <= 150 + 2, "at most what two functions were computing is computed again"
    from ephemeron.maps import GroupModels

    found = GroupModels.open("models")
    assert {key: found[(key, 7)].value for key in means} == pytest.approx(means)


@pytest.mark.slow
def test_tables_and_models_in_a_bucket(here, s3):
    from ephemeron.data.catalog.loop import run
    from ephemeron.data.catalog.open_files import open_files
    from ephemeron.maps import GroupModels

    means = write_sales(here / "sales.parquet", ["a", "b", "c"], 300)
    files = open_files(s3)
    for n in range(2):
        part = parquet.read_table("sales.parquet").slice(150 * n, 150)
        parquet.write_table(part, f"{n}.parquet")
        assert run(files.create(f"in/{n}.parquet", Path(f"{n}.parquet")))
    place = f"{s3}/models"
    arguments = ["fit-groups", f"{s3}/in/*.parquet", "--by", "store", "--fit", "grouped_means:fit", "--out", place, "--max-workers", "1"]
    ran = CliRunner().invoke(main, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["computed"] == 3
    found = GroupModels.open(place)
    assert {key: found[key].value for key in means} == pytest.approx(means)
    ran = CliRunner().invoke(main, [*arguments, "--json"])
    assert json.loads(ran.stdout)["computed"] == 0
    ran = CliRunner().invoke(main, ["predict-groups", place, "--data", f"{s3}/in/*.parquet", "--out", "p.csv", "--max-workers", "1"])
    assert ran.exit_code == 0, ran.output
    lines = Path("p.csv").read_text().splitlines()[1:]
    expected = [means["abc"[n % 3]] for n in range(300)]
    assert [float(line.split(",")[-1]) for line in lines] == pytest.approx(expected)
    large = ["fit-groups", "sales.parquet", "--by", "store", "--fit", "grouped_means:large", "--out", f"{s3}/large", "--max-workers", "1"]
    assert CliRunner().invoke(main, large).exit_code == 0
    where = ["--data", "sales.parquet", "--out", "l.parquet", "--results", f"{s3}/predicted", "--max-workers", "1"]
    ran = CliRunner().invoke(main, ["predict-groups", f"{s3}/large", "--predict", "grouped_means:first", *where])
    assert ran.exit_code == 0, ran.output
    assert parquet.read_table("l.parquet")["prediction"].to_pylist() == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.cold_start
def test_functions_drive_a_fit(here):
    from ephemeron.maps import GroupModels
    from ephemeron.runs.verbs import attach

    ran = CliRunner().invoke(
        main,
        [
            "fit-groups",
            "sales.parquet",
            "--by",
            "store",
            "--fit",
            "grouped_means:slow",
            "--out",
            "models",
            "--max-workers",
            "1",
            "--detach",
            "--json",
        ],
    )
    assert ran.exit_code == 0, ran.output
    run = json.loads(ran.stdout.splitlines()[-1])["run_id"]
    (here / "sales.parquet").unlink()
    (here / "grouped_means.py").unlink()
    result = attach(run)
    assert (result.summary.status, result.summary.tasks) == ("finished", 5)
    (here / "grouped_means.py").write_text(MODULE)
    assert len(GroupModels.open("models")) == 5


@pytest.mark.slow
@pytest.mark.cold_start
def test_functions_drive_predictions_that_are_stopped_and_resumed(here):
    from ephemeron.runs.verbs import attach

    fitted = ["fit-groups", "sales.parquet", "--by", "store", "--fit", "grouped_means:fit", "--out", "models", *SIMULATED]
    assert CliRunner().invoke(main, fitted).exit_code in (0, 1)
    (here / "slow_means.py").write_text(
        "import time\n\nimport numpy as np\n\n\ndef predict(model, group):\n    time.sleep(0.5)\n    return np.full(len(group), model.value)\n"
    )
    expected = CliRunner().invoke(main, ["predict-groups", "models", "--data", "sales.parquet", "--out", "here.parquet", *SIMULATED])
    assert expected.exit_code == 0, expected.output
    runs = []
    for out, more in (("one.parquet", []), ("two.parquet", ["--predict", "slow_means:predict", "--as", "arrow"])):
        arguments = ["predict-groups", "models", "--data", "sales.parquet", "--out", out, "--max-workers", "1", *more, "--detach", "--json"]
        ran = CliRunner().invoke(main, arguments)
        assert ran.exit_code == 0, ran.output
        runs.append(json.loads(ran.stdout.splitlines()[-1])["run_id"])
    stopped = CliRunner().invoke(main, ["stop", runs[1]])
    assert stopped.exit_code == 0, stopped.output
    for name in ("sales.parquet", "grouped_means.py", "slow_means.py"):
        (here / name).unlink()
    resumed = CliRunner().invoke(main, ["resume", runs[1], "--detach"])
    assert resumed.exit_code == 0, resumed.output
    for run, out in zip(runs, ("one.parquet", "two.parquet"), strict=True):
        assert attach(run).summary.status == "finished"
        assert parquet.read_table(out) == parquet.read_table("here.parquet")
    reported = CliRunner().invoke(main, ["report", runs[0]])
    assert reported.exit_code == 0, reported.output
