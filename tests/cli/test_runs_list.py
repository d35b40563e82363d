"""The table of runs: how far they are, what they have cost until now, and their own metric."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from ephemeron.cli.main import main
from ephemeron.cli.progress import Display
from ephemeron.events import Ended, Invoked, Measured, Progress, RunStarted, to_json
from ephemeron.prices import Prices
from ephemeron.runs.folders import PROGRESS_FILE, RunFolder
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.runs.lock import driving

PRICES = Prices(name="test", as_of="2026-01-01", gb_second_usd=1e-4, invocation_usd=2e-5)
START = RunStarted(t=0.0, run_id="r", job="job", workers=2, aggregators=1, memory_mb=1024, iterations=300, epochs=1, samples=100)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    return tmp_path


def make(home, events, *, name, kind):
    folder = RunFolder(home / "runs" / name)
    folder.path.mkdir(parents=True)
    write_header(folder, RunHeader(run_id=name, kind=kind, name=name, platform="local", prices=PRICES, started_at=time.time() - 60))
    folder.events.write_text("".join(to_json(event) + "\n" for event in events))
    return folder


def listed(*arguments):
    done = CliRunner().invoke(main, ["runs", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_running_run_shows_iterations_cost_and_the_metric_of_its_program(home):
    calls = [Invoked(t=0.0, rank=rank, attempt=0, invocation=f"i{rank}") for rank in (0, 1)]
    steps = [
        Progress(t=1.0 + i, rank=rank, attempt=0, iteration=i, version=i, samples=10, epoch=0, loss=2.0, metrics={"ppl": 25.0 - i})
        for i in range(12)
        for rank in (0, 1)
    ]
    folder = make(home, [START, *calls, *steps], kind="training", name="lm")
    with driving(folder):
        table, (line,) = listed(), listed("--json").splitlines()
    row = json.loads(line)
    assert (row["status"], row["iterations"], row["iterations_planned"]) == ("running", 12, 300)
    assert (row["metrics"], row["loss"], row["invocations"]) == ({"ppl": 14.0}, 2.0, 2)
    assert row["cost_usd"] > 2 * 60 * 1e-4, "of functions that still run, until now"
    assert "12/300" in table
    assert "ppl 14.0000" in table
    assert "e-0" not in table
    assert json.loads(listed("--json"))["cost_usd"] is None, "interrupted: no client knows"


def test_metrics_that_functions_have_merged_are_those_of_the_run(home):
    merged = Measured(t=5.0, rank=0, attempt=0, iteration=3, epoch=1, metrics={"loss": 0.25, "f1": 0.75})
    folder = make(home, [START, merged], kind="training", name="f")
    with driving(folder):
        assert "f1 0.7500" in listed()


def test_what_was_before_a_resume_counts_and_is_not_shown():
    lines, begun = io.StringIO(), replace(START, wall_time=1000.0)
    display = Display(Console(file=lines, width=200), after=5.0)
    measured = [
        Measured(t=t, rank=0, attempt=0, iteration=i, epoch=1, metrics={"f1": f1}) for t, i, f1 in ((5.0, 3, 0.25), (1005.0, 9, 0.75))
    ]
    for event in (begun, measured[0], replace(begun, t=1001.0, wall_time=2001.0), measured[1]):
        display.on_event(event)
    assert lines.getvalue().count("run r") == 1
    assert "run r resumed" in lines.getvalue()
    assert "0.75" in lines.getvalue()
    assert "0.25" not in lines.getvalue()


def test_a_running_executor_shows_its_tasks(home):
    ended = Ended(t=2.0, rank=0, attempt=0, invocation="x", status="ok", gb_seconds=2.0, memory_mb=1024)
    folder = make(home, [Invoked(t=0.0, rank=0, attempt=0, invocation="x"), ended], kind="tasks", name="map")
    folder.write(PROGRESS_FILE, {"tasks": 141, "of": 5000})
    with driving(folder):
        table, row = listed(), json.loads(listed("--json"))
    assert "141/5,000 tasks" in table
    assert (row["tasks"], row["tasks_planned"]) == (141, 5000)
    assert row["cost_usd"] == pytest.approx(2e-4 + 2e-5)
