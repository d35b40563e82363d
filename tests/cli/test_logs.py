"""What functions print, warn of and raise: once and short on the terminal, in full in the logs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.events import Ended, Invoked, Note, RunStarted, to_json
from ephemeron.prices import load_prices
from ephemeron.runs import folders as homes
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.training.driver.failures import in_short
from ephemeron.training.report.run_summary import RunSummary

MODEL = """import warnings
from torch import nn

class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(64, 10), 0

    def forward(self, x):
        self.calls += 1
        print("call", self.calls, flush=True)
        warnings.warn("beware of [brackets]")
        if self.calls > 5:
            raise ValueError("no luck\\nwith [this]")
        return self.inner(x.flatten(1))
"""
JOB = """
name = "talkative"
model = "model:Failing"
loss = "cross_entropy"
optimizer = { target = "SGD", options = { lr = 0.1 } }
epochs = 1
[data]
source = "digits"
[run]
workers = 2
aggregators = 1
batch_size = 64
memory_mb = 704
"""


def run(*arguments: object):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.slow
def test_an_error_of_the_user_s_code(home: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.toml").write_text(JOB)
    done = run("train", tmp_path / "job.toml")
    assert done.exit_code == 1
    said = done.stderr.splitlines()
    assert len(said) < 15, done.stderr
    causes = [line for line in said if "ValueError" in line]
    assert len(causes) == 1, done.stderr
    assert re.search(
        r", iteration (\d+): ValueError: no luck with \[this\] \(in iteration \1: epoch 0, batch \1 of 12: 64 training samples "
        r"\d.*\) \(model\.py, line 14\)",
        causes[0],
    )
    assert len([line for line in said if line == "warning UserWarning: beware of [brackets] (model.py, line 12)"]) == 1
    assert "Traceback" not in done.stderr
    rank = int(causes[0].partition("rank ")[2].partition(",")[0])
    logs = run("logs", "last", "--rank", rank, "--follow")
    assert logs.exit_code == 0
    printed = logs.stdout.splitlines()
    assert printed[0] == f"rank {rank} | call 1"
    assert f"rank {rank} | Traceback (most recent call last):" in printed
    assert f"rank {rank} | with [this]" in printed
    assert any("UserWarning: beware of [brackets]" in line for line in printed)
    sources = {line.partition(" | ")[0].partition(",")[0] for line in run("logs", "last").stdout.splitlines()}
    assert sources >= {"rank 0", "rank 1"}  # of whichever attempt


def test_a_run_that_printed_nothing_says_so(home: Path) -> None:
    folder = homes.create("quiet")
    write_header(folder, RunHeader(run_id=folder.run_id, kind="training", platform="local", prices=load_prices("objects")))
    assert "have printed nothing" in run("logs", "quiet").stderr


def test_attempts_are_told_apart_and_starts_come_first(home: Path) -> None:
    folder = homes.create("two")
    write_header(folder, RunHeader(run_id=folder.run_id, kind="training", platform="local", prices=load_prices("objects")))
    calls = [Invoked(t=float(n), rank=0, attempt=n, invocation=f"i{n}") for n in range(2)]
    folder.events.write_text("".join(to_json(e) + "\n" for e in calls))
    (folder.path / "logs").mkdir()
    for name, text in (("1", "loading"), ("i0", "first"), ("i1", "half a line")):
        (folder.path / "logs" / f"{name}.txt").write_text(text)
    expected = ["start of process 1 | loading", "rank 0 | first", "rank 0, attempt 1 | half a line"]
    assert run("logs", "two").stdout.splitlines() == expected
    assert run("logs", "two", "--rank", "0").stdout.splitlines() == expected[1:]
    assert run("logs", "two", "--rank", "1").stdout == ""


def test_logs_of_a_cloud_name_the_command_for_the_rest(home: Path) -> None:
    folder = homes.create("far")
    where = {"gateway": "http://here:8080", "function": "f"}
    write_header(folder, RunHeader(run_id="far", kind="training", platform="openfaas", prices=load_prices("objects"), settings=where))
    assert "faas-cli logs f --gateway http://here:8080" in run("logs", "far").stderr


@pytest.mark.parametrize(
    ("error", "short"),
    [
        ("ValueError: a", "ValueError: a"),
        (
            'ValueError: a\n  File "/x/site-packages/torch/nn.py", line 3, in f\n  File "/r/scratch/1/code/0/pkg/m.py", '
            'line 8, in g\n  File "/x/site-packages/torch/nn.py", line 4, in f\n',
            "ValueError: a (pkg/m.py, line 8)",
        ),
        ('E\n  File "/home/me/train.py", line 2, in f\n  File "/x/lib/python3.11/json.py", line 9', "E (train.py, line 2)"),
        ('E: b\n  File "/x/ephemeron/training/worker/loop.py", line 2, in f\n', "E: b"),
        ("", ""),
    ],
)
def test_an_error_in_one_line(error: str, short: str) -> None:
    assert in_short(error) == short


def test_the_report_shows_a_warning_of_all_functions_once() -> None:
    started = RunStarted(t=0, run_id="r", job="j", workers=2, aggregators=1, memory_mb=1, iterations=1, epochs=1, samples=1)
    notes = [Note(t=float(n), level="warning", text=f"w{n % 2}") for n in range(4)]
    ended = Ended(t=5, rank=0, attempt=0, invocation="i", status="ok")
    story = RunSummary.from_events([started, *notes, ended], load_prices("objects"))
    assert story.notes == tuple(notes[:2])
