"""Studies of functions on processes of this machine: what dies, dies really. No PyTorch anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.dashboard.library import Library
from ephemeron.dashboard.studies import Studies
from ephemeron.events import Ended, TaskBegan
from ephemeron.runs import folders, verbs
from ephemeron.tuning.folder import StudyStatus, folder_of
from running import until

pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")
pytestmark = pytest.mark.slow

CLIENT = Path(sys.executable).with_name("ephemeron")
OBJECTIVES = """
import os, signal, sys, time
from pathlib import Path

PLACE = Path({place!r})

def mark(name, trial):
    with (PLACE / name).open("a") as file:
        file.write(f"{{trial.number}}\\n")

def wait():
    while not (PLACE / "go").exists():
        time.sleep(0.01)

def gated(lr, trial):
    '''Trial 1 kills its first function, trials from the third on wait.'''
    heavy = [name for name in ("torch", "optuna", "sqlalchemy") if name in sys.modules]
    mark("begun", trial)
    trial.report(0, 2 * lr)
    if trial.number == 1 and (PLACE / "begun").read_text().split().count("1") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if trial.number > 1:
        (PLACE / f"waits-{{trial.number}}-{{os.getpid()}}").touch()
        wait()
    mark("done", trial)
    return {{"loss": lr, "heavy": " ".join(heavy)}}

def endless(lr, trial):
    '''The first trial ends at once; another one reports until it is ended.'''
    if trial.number == 0:
        trial.report(0, 0.0)
        return 0.0
    try:
        for step in range(1_000_000):
            trial.report(step, 1.0 + lr)
            time.sleep(0.02)
    finally:
        mark("ended", trial)

def deaf(lr, trial):
    '''The same, but it never asks again.'''
    if trial.number == 0:
        trial.report(0, 0.0)
        return 0.0
    trial.report(0, 1.0 + lr)
    try:
        while True:
            time.sleep(0.02)
    finally:
        mark("ended", trial)
"""


@pytest.fixture
def place(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of objectives and a space."""
    (tmp_path / "place").mkdir()
    (tmp_path / "objectives.py").write_text(OBJECTIVES.format(place=str(tmp_path / "place")))
    (tmp_path / "space.toml").write_text("lr = { low = 0.01, high = 1.0 }\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "place"


def command(function: str, name: str, *more: str) -> list[str]:
    own = ["--objective", f"objectives:{function}", "--space", "space.toml", "--name", name, "--max-workers", "2", "--memory-mb", "512"]
    return ["tune", *own, *more]


def invoke(*arguments: str, code: int = 0) -> str:
    ran = CliRunner().invoke(main, list(arguments))
    assert ran.exit_code == code, ran.output
    return ran.output


def status(name: str) -> StudyStatus:
    return folder_of(name).status()


def states(name: str) -> dict[int, str]:
    return {t.number: t.state for t in status(name).trials} if folder_of(name).exists else {}


def counted(path: Path) -> Counter[str]:
    return Counter(path.read_text().split()) if path.exists() else Counter()


def rows() -> dict[str, dict[str, Any]]:
    return {row["run_id"]: row for row in map(json.loads, invoke("runs", "--json").splitlines())}


@pytest.mark.parametrize("how", ["SIGKILL", "Ctrl-C", "stop"])
def test_a_study_goes_on_by_its_name_and_computes_no_finished_trial_again(how: str, place: Path) -> None:
    """A function dies, then the client ends; functions compute what they have begun while there is none."""
    arguments = command("gated", "gone", "--trials", "5", "--metric", "loss", "--sampler", "random", "--retries", "1")
    with subprocess.Popen([CLIENT, *arguments], env=dict(os.environ), stdout=subprocess.PIPE, text=True) as client:
        until(lambda: len(list(place.glob("waits-*"))) == 2 and states("gone").get(1) == "finished")
        pids = [int(path.name.rpartition("-")[2]) for path in place.glob("waits-*")]
        if how == "stop":
            invoke("stop", "gone")
        else:
            client.send_signal(signal.SIGKILL if how == "SIGKILL" else signal.SIGINT)
        output = client.communicate()[0]
    if how == "SIGKILL":
        assert rows()["gone"]["status"] == "interrupted"
        (place / "go").touch()
        until(lambda: len(counted(place / "done")) == 4)
    else:
        assert client.returncode == 3
        assert "stopped: it begins anew" in output
        assert (rows()["gone"]["status"], status("gone").state) == ("stopped", "stopped")
        assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        (place / "go").touch()
    invoke("resume", "gone")
    found = status("gone")
    assert (found.state, states("gone")) == ("finished", dict.fromkeys(range(5), "finished"))
    assert {t.number: t.metrics for t in found.trials} == {n: {"heavy": ""} for n in range(5)}, "neither PyTorch nor Optuna"
    again = {"2": 2, "3": 2} if how != "SIGKILL" else {}
    assert counted(place / "begun") == {"0": 1, "1": 2, "2": 1, "3": 1, "4": 1} | again
    assert counted(place / "done") == dict.fromkeys("01234", 1)
    run = folders.find("gone")
    assert sum(isinstance(event, TaskBegan) for event in folders.events_of(run)) == sum(counted(place / "begun").values())
    assert [e.status for e in folders.events_of(run) if isinstance(e, Ended)].count("lost") == 1
    assert rows()["gone"]["cost_usd"] == found.spent_usd >= sum(t.cost_usd for t in found.trials) > 0
    assert not (run.path / "objects").exists(), "nothing is left of its tasks"
    assert "has finished; there is nothing to resume" in invoke("resume", "gone", code=2)


@pytest.mark.parametrize("function", ["endless", "deaf"])
def test_a_pruned_trial_ends_where_it_computes(function: str, place: Path) -> None:
    """With the next report, or interrupted by its function; that goes on with the next trial."""
    file = place.parent / "study.toml"
    file.write_text(
        f'objective = "objectives:{function}"\ntrials = 3\nconcurrency = 1\npruner = {{ name = "asha", min_evaluations = 1 }}\n'
        "[space]\nlr = { low = 0.01, high = 1.0 }\n"
    )
    invoke("tune", str(file))
    assert states("study") == {0: "finished", 1: "pruned", 2: "pruned"}
    assert [t.reason for t in status("study").trials][1:] == ["pruned at evaluation 1"] * 2
    assert counted(place / "ended")["1"] == 1
    assert {event.rank for event in folders.events_of(folders.find("study")) if isinstance(event, TaskBegan)} == {0}


def test_a_running_study_is_watched_a_trial_of_it_ended_and_it_is_shown(place: Path, home: Path) -> None:
    arguments = command("gated", "watched", "--trials", "4", "--metric", "loss", "--label", "team=a")
    with subprocess.Popen([CLIENT, *arguments, "--json"], env=dict(os.environ), stdout=subprocess.PIPE, text=True) as client:
        until(lambda: len(list(place.glob("waits-*"))) == 2)
        seen: list[Any] = []
        watching = threading.Thread(target=lambda: seen.append(verbs.attach("watched", check=False)))
        watching.start()
        assert rows()["watched"]["status"] == "running"
        library = Library([home])
        [study] = library.studies()
        pages = Studies(library)
        until(lambda: pages.head(study)["counts"].get("running") == 2)
        assert pages.may_end(study, 2) is not None
        assert pages.may_end(study, 0) is None
        invoke(*command("gated", "watched", "--trials", "4", "--metric", "loss", "--end-trial", "2"))
        until(lambda: states("watched")[2] == "pruned")
        (place / "go").touch()
        document = json.loads(client.communicate()[0].splitlines()[-1])
    watching.join(240)
    assert seen[0].summary.status == "finished"
    assert document["trials"] == {"finished": 3, "pruned": 1, "failed": 0}
    assert document["best"]["value"] == document["best"]["parameters"]["lr"]
    assert rows()["watched"]["labels"] == {"team": "a"}
    head = pages.head(study)
    assert (head["is_of_objective"], head["state"], head["best"]) == (True, "finished", document["best"]["trial"])
    curves = {curve["trial"]: (curve["iteration"], curve["value"]) for curve in pages.curves(study)}
    assert curves.keys() == {0, 1, 2, 3}
    assert curves[0][0] == [0]
    assert curves[0][1][0] == pytest.approx(2 * head["trials"][0]["parameters"]["lr"], rel=1e-6)
    assert "parallel-coordinates.svg" in invoke("report", "watched")
    assert "loss" in (home / "runs" / "watched" / "parallel-coordinates.svg").read_text()
    invoke("runs", "clean", "watched", "--folder", "--yes")
    assert not rows()


@pytest.mark.cold_start  # its driver functions give commands of this environment
def test_it_is_driven_without_a_client(place: Path) -> None:
    arguments = command("gated", "driven", "--trials", "3", "--metric", "loss", "--detach", "--json")
    said = subprocess.run([CLIENT, *arguments], capture_output=True, text=True, check=True).stdout
    assert json.loads(said.splitlines()[-1]) == {"run_id": "driven", "detached": True}
    until(lambda: list(place.glob("waits-2-*")))
    assert rows()["driven"]["status"] == "running"
    (place / "go").touch()
    invoke("attach", "driven")
    assert states("driven") == dict.fromkeys(range(3), "finished")
    assert counted(place / "done") == dict.fromkeys("012", 1)


def test_it_goes_on_through_a_cache_too(place: Path, valkey_server: Any) -> None:
    """The client is killed; its functions compute what they have begun, and the next client finds that in the cache."""
    where = ("--channel", valkey_server.address, "--trials", "4", "--metric", "loss", "--sampler", "random")
    with subprocess.Popen([CLIENT, *command("gated", "cached", *where)], env=dict(os.environ), stderr=subprocess.DEVNULL) as client:
        until(lambda: len(list(place.glob("waits-*"))) == 2)
        client.kill()
    (place / "go").touch()
    until(lambda: len(counted(place / "done")) == 4)
    invoke("resume", "cached")
    assert states("cached") == dict.fromkeys(range(4), "finished")
    assert counted(place / "begun") == {"0": 1, "1": 2, "2": 1, "3": 1}
    assert json.loads(invoke("runs", "clean", "cached", "--dry-run", "--json"))["objects"] == 0
