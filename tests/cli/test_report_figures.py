"""`ephemeron report --json`: the figures of a run of any kind as one document, and nothing is written."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
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
