"""`ephemeron report --json`: the figures of a run of any kind as one document, and nothing is written."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.dashboard.services import Tasks
from ephemeron.runs import folders
from tiny_job import CODE


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EPHEMERON_REPORT_PICTURE", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "figured_items.py").write_text("def same(x):\n    return x\n")
    (tmp_path / "items.jsonl").write_text("1\n2\n")
    yield tmp_path
    sys.modules.pop("figured_items", None)


def run(*arguments, code=0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done


def test_figures_of_tasks():
    asked = ["map", "figured_items:same", "--items", "items.jsonl", "--out", "o.jsonl", "--max-workers", "1", "--platform", "simulated"]
    run(*asked, "--label", "team=x")
    found = json.loads(run("report", "last", "--json").stdout)
    assert (found["kind"], found["status"], found["labels"]) == ("tasks", "finished", {"team": "x"})
    assert found["cost_usd"] == found["result"]["cost_usd"] > 0
    parts = [usd for name, usd in found["cost"].items() if name.endswith("_usd")]
    assert sum(parts) == pytest.approx(found["cost_usd"], rel=1e-3)
    assert found["invocations"]["total"] == sum(found["invocations"]["by_status"].values()) == 1
    assert found["predicted"] is None
    folder = folders.all_runs()[0].path
    assert not list(folder.glob("report*"))
    refused = run("report", "last", "--json", "--out", "there", code=2)
    assert "--json writes no page" in refused.stderr


def test_the_report_of_a_map_has_its_items_as_the_dashboard_has(here):
    (here / "items.jsonl").write_text("".join(f'{{"name": "item-{n}", "x": {n}}}\n' for n in range(20)))
    (here / "figured_items.py").write_text(
        "def odd(row):\n    if row['x'] % 2 == 0:\n        raise ValueError(f\"<{row['x']}> is even\")\n    return row['x']\n"
    )
    asked = [
        "map",
        "figured_items:odd",
        "--items",
        "items.jsonl",
        "--key",
        "name",
        "--out",
        "o.jsonl",
        "--platform",
        "simulated",
        "--retries",
        "0",
    ]
    run(*asked, code=1)
    items = json.loads(run("report", "last", "--json").stdout)["items"]
    assert (items["items"], items["computed"], items["failures"], len(items["failed"])) == (20, 20, 10, 10)
    assert {"key": "item-4", "error": "ValueError: <4> is even"} in items["failed"]
    seconds = [one["seconds"] for one in items["slowest"]]
    assert len(seconds) == 10
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < items["item_usd"] <= items["slowest"][0]["cost_usd"]
    run("report", "last", "--out", "there")
    page = (here / "there" / "report.html").read_text()
    for text in (
        "Failed items",
        "ValueError: &lt;4&gt; is even",
        "Slowest items",
        items["slowest"][0]["key"],
        "Cost per item",
        "Throughput",
        "o.jsonl.results",
    ):
        assert text in page
    assert "Training loss" not in page
    [shown] = Tasks([here / "home"]).document()
    assert shown["items"] == items


def test_figures_of_a_job(here):
    pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")
    (here / "job.toml").write_text(
        f'name = "figured"\nmodel = "tiny:mlp"\nepochs = 1\ncode = ["{CODE}"]\n[run]\nplatform = "simulated"\n'
        "workers = 2\naggregators = 1\nbatch_size = 48\n"
    )
    run("train", "job.toml")
    found = json.loads(run("report", "last", "--json").stdout)
    assert (found["iterations"], found["functions"]) == (found["planned_iterations"], 2)
    assert found["evaluations"][-1]["metrics"]["loss"] == pytest.approx(found["result"]["metrics"]["loss"])
    assert found["loss"] > 0
