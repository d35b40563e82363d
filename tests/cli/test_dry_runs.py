"""`--dry-run`: one question, one table and one document for everything that runs functions, and nothing is started."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.prices import load_prices
from ephemeron.runs import folders
from ephemeron.runs.predictions import Basis, Prediction, invocations_for, price_basis

COMMON = {
    "kind",
    "name",
    "platform",
    "seconds",
    "seconds_range",
    "cost_usd",
    "cost_usd_range",
    "memory_mb",
    "quota_mb",
    "functions",
    "invocations",
    "rests_on",
    "notes",
}
MODULE = """
import pathlib, time

def waits(x):
    time.sleep(0.05)
    pathlib.Path("called").touch()
    return x

def no_two(x):
    if x == 2:
        raise ValueError("there is no two")
    return x

def large(x):
    return len(bytearray(400 * 2**20)) + time.sleep(1)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "predicted_items.py").write_text(MODULE)
    (tmp_path / "items.jsonl").write_text("".join(f"{n}\n" for n in range(40)))
    yield tmp_path
    sys.modules.pop("predicted_items", None)


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def document(*arguments):
    """What `--dry-run --json` prints; no run is there afterwards."""
    done = run(*arguments, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert not folders.all_runs()
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() > COMMON
    assert all(basis.keys() == {"source", "what", "as_of"} for basis in found["rests_on"])
    return found


def test_a_map_is_predicted_from_some_of_its_items(here):
    asked = ["map", "predicted_items:waits", "--items", "items.jsonl", "--max-workers", "2"]
    found = document(*asked)
    assert (found["items"], found["functions"], found["invocations"]) == (40, 2, 2)
    assert [tried["item"] for tried in found["tried"]] == [1, 7, 12, 18, 23, 29, 34, 40]
    assert found["item_s"] >= 0.05
    low, high = found["seconds_range"]
    assert low <= found["seconds"] <= high
    assert found["seconds"] >= 20 * 0.05
    assert 0 < found["memory_mb"] < found["quota_mb"]
    assert not (here / "called").exists()  # the items have a working folder of their own, as in a function
    dearer = document(*asked, "--memory-mb", "3538")
    assert dearer["cost_usd"] > found["cost_usd"]
    shown = run(*asked, "--dry-run", "--budget-usd", "1e-9").stdout
    assert shown.startswith("tasks ")
    assert "more than the budget of $1e-09" in shown
    assert shown.endswith("nothing was started or paid for\n")


@pytest.mark.slow
def test_a_map_takes_what_was_predicted(here):
    asked = ["map", "predicted_items:waits", "--items", "items.jsonl", "--max-workers", "2"]
    predicted = document(*asked)
    done = run(*asked, "--out", "out.jsonl", "--json")
    bill = json.loads(done.stdout)
    assert predicted["invocations"] == bill["invocations"]
    assert 0.3 < predicted["cost_usd"] / bill["cost_usd"] < 3


def test_an_item_that_fails_or_is_too_large_is_said_before_anything_starts():
    failed = run("map", "predicted_items:no_two", "--items", "items.jsonl", "--dry-run")
    assert failed.exit_code == 0, failed.output  # none of those that are tried
    (two := folders.home().parent / "two.jsonl").write_text("2\n")
    failed = run("map", "predicted_items:no_two", "--items", two, "--dry-run")
    assert failed.exit_code == 2
    assert "predicted_items.no_two fails with item 1: ValueError: there is no two" in failed.stderr
    assert "predicted_items.py" in failed.stderr
    large = run("map", "predicted_items:large", "--items", two, "--dry-run", "--memory-mb", "256")
    assert large.exit_code == 2
    assert "needs more than the 256 MB of a function" in large.stderr
    missing = run("map", "predicted_items:no_two", "--items", two)
    assert "Missing option '--out'" in missing.stderr
    assert not folders.all_runs()


def test_a_preparation_and_a_computation(here):
    pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")
    (here / "rows.csv").write_text("a,label\n" + "".join(f"{n},{n % 2}\n" for n in range(2000)))
    (here / "recipe.toml").write_text('source = "rows.csv"\nout = "prepared"\n[label]\ncolumn = "label"\n[[steps]]\nstep = "standardise"\n')
    found = document("prepare", "recipe.toml")
    assert (found["name"], found["tasks"], found["partitions"]) == ("prepare recipe", 3, 1)
    assert found["seconds"] > 0 < found["cost_usd"]
    assert not (here / "prepared").exists()
    np.save("A.npy", np.eye(300))
    computed = document("linalg", "cholesky", "A.npy", "--tile", "100")
    assert (computed["name"], computed["tasks"], computed["kind"]) == ("linalg cholesky", 10, "tasks")


REGIONS = """
name = "apart"
model = "tiny:mlp"
optimizer = { target = "SGD", options = { lr = 0.1 } }
epochs = 2
code = ["CODE"]
[run]
regions.region = [{ name = "a", workers = 2, aggregators = 1 }, { name = "b", workers = 1, aggregators = 1 }]
batch_size = 48
"""


@pytest.mark.slow
def test_regions_are_predicted_one_by_one(here):
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    from tiny_job import CODE

    (here / "job.toml").write_text(REGIONS.replace("CODE", str(CODE)))
    found = document("train", "job.toml")
    assert (found["kind"], found["functions"], [r["region"] for r in found["regions"]]) == ("regions", 3, ["a", "b"])
    a, b = found["regions"]
    assert found["seconds"] == max(a["seconds"], b["seconds"])
    assert found["cost_usd"] == pytest.approx(a["cost_usd"] + b["cost_usd"])
    assert "exchanges between regions (sma, every 10 iterations) are left out" in found["notes"]


@pytest.mark.slow
def test_a_job_with_a_profile_is_predicted_from_its_plan(here):
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    from tiny_job import CODE

    (here / "job.toml").write_text(f'name = "planned"\nmodel = "tiny:mlp"\nepochs = 1\ncode = ["{CODE}"]\n[run]\nplatform = "simulated"\n')
    unknown = run("train", "job.toml", "--dry-run")
    assert "train would plan workers, memory and batches; these are defaults" in unknown.stderr
    planned = run("plan", "job.toml", "--platform", "simulated", "--json")
    assert planned.exit_code == 0, planned.output
    plan = json.loads(planned.stdout.splitlines()[-1])
    found = document("train", "job.toml")
    assert (found["functions"], found["seconds"]) == (plan["workers"], plan["predicted"]["seconds"])
    assert found["seconds_range"] == plan["uncertainty"]["time_s"]
    assert [basis["source"] for basis in found["rests_on"]] == ["profile", "measured", "prices"]


def test_keys_of_all_kinds_stand_beside_those_of_one():
    p = Prediction(kind="mine", name="n", platform="local", seconds=9.0, cost_usd=2.0, details={"own": 1, "seconds": "?"})
    assert p.document().keys() == COMMON | {"own"}
    assert p.document()["seconds"] == 9.0
    assert p.within(budget_usd=3.0, deadline_s=10.0).notes == ()
    assert len(p.within(budget_usd=1.0, deadline_s=5.0).notes) == 2
    tight = Prediction(kind="mine", name="n", platform="local", memory_mb=200.0, quota_mb=128)
    assert tight.within().notes == ("a function may need more memory than it has: use a larger --memory-mb",)
    prices = load_prices("objects")
    assert price_basis(prices) == Basis(source="prices", what=f"list prices {prices.name}", as_of=prices.as_of)
    assert [invocations_for(3, s, 10.0) for s in (0.0, 10.0, 10.1)] == [3, 3, 6]
