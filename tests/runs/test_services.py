"""Services are runs of kind `service`: listed, shown, stopped, killed and started again like others."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.communication.direct.rendezvous import TOKEN_VARIABLE
from ephemeron.dashboard.library import Library
from ephemeron.errors import JobError, UserError
from ephemeron.events import Ended, Note, RunEnded, RunStarted
from ephemeron.runs import folders, verbs
from ephemeron.runs.header import open_header
from ephemeron.runs.lock import is_driven

PROGRAM = [sys.executable, "-c", "from ephemeron.cli.main import main; main()"]
SECRET = "the secret of this test"
RENDEZVOUS = ["serve", "rendezvous", "--listen", "127.0.0.1:0", "--json"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    return tmp_path / "home"


def invoke(*arguments: str, code: int = 0) -> str:
    ran = CliRunner().invoke(main, list(arguments))
    assert ran.exit_code == code, ran.output
    return ran.output


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A command that serves, and what it says when it is ready."""
    process = subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(120)
        process.stdout.close()


def row() -> dict[str, Any]:
    [line] = invoke("runs", "--json").splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.slow
def test_a_service_is_listed_followed_stopped_and_started_again_at_its_address(home: Path) -> None:
    with serving(*RENDEZVOUS) as (process, ready):
        name = ready["run_id"]
        assert {key: row()[key] for key in ("kind", "job", "status", "platform", "run_id")} == {
            "kind": "service",
            "job": "rendezvous",
            "status": "running",
            "platform": "local",
            "run_id": name,
        }
        folder = folders.find(name)
        header = open_header(folder)
        assert header.channel == ready["address"]
        assert SECRET not in "".join(path.read_text() for path in folder.path.rglob("*") if path.is_file())
        assert f"client | rendezvous service at {ready['address']}" in invoke("logs", name)
        seen: list[Any] = []
        watching = threading.Thread(target=lambda: seen.append(verbs.attach(name, on_event=seen.append, check=False)))
        watching.start()
        with pytest.raises(UserError, match="is already running"):
            verbs.resume(name)
        assert f"stopped {name}; continue with: ephemeron resume {name}" in invoke("stop", name)
        assert process.wait(120) == 0
        watching.join(120)
        assert [type(event) for event in seen[:-1]] == [RunStarted, Note, RunEnded]
        assert seen[-1].summary.status == "stopped"
        assert (row()["status"], row()["cost_usd"], row()["invocations"]) == ("stopped", 0, 0)
    with pytest.raises(UserError, match="is not running"):
        verbs.stop(name)
    assert "wrote" in invoke("report", name)
    assert "stopped" in invoke("attach", name, code=3)
    again = subprocess.Popen([*PROGRAM, "resume", name, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert again.stderr is not None
    assert any(f"rendezvous service at {ready['address']}" in line for line in again.stderr)
    assert "stopped" in invoke("stop", name)
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 3
    assert json.loads(out)["status"] == "stopped"
    assert sum(isinstance(event, RunStarted) for event in folders.events_of(folder)) == 2
    [shown] = Library([home]).rows()
    assert (shown["kind"], shown["status"]) == ("service", "stopped")


@pytest.mark.slow
def test_a_killed_service_is_interrupted_and_one_that_is_killed_by_the_command_stopped(home: Path) -> None:
    with serving(*RENDEZVOUS) as (process, ready):
        process.kill()
        process.wait(120)
    assert row()["status"] == "interrupted"
    with pytest.raises(UserError, match="ephemeron resume"):
        verbs.attach(ready["run_id"])
    invoke("report", ready["run_id"])
    invoke("runs", "clean", "--yes", ready["run_id"])
    with serving(*RENDEZVOUS) as (process, ready):
        assert "killed" in invoke("stop", "--now", ready["run_id"])
        assert process.wait(120) == -signal.SIGKILL
    found = next(each for each in map(json.loads, invoke("runs", "--json").splitlines()) if each["run_id"] == ready["run_id"])
    assert found["status"] == "stopped"
    assert "it was killed" in invoke("attach", ready["run_id"], code=3)


def test_a_service_that_is_refused_leaves_no_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = CliRunner().invoke(main, ["serve", "rendezvous", "--listen", "192.0.2.1:1", "--allow-remote"])
    assert ran.exit_code == 2
    assert "cannot listen" in ran.output
    assert folders.all_runs() == []
    assert not any((home / "runs").iterdir())


def test_a_service_that_cannot_be_started_again_is_refused_in_a_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.create("rendezvous-1")
    payload = {"host": "127.0.0.1", "port": 0}
    folder.write("run.json", {"run_id": "rendezvous-1", "kind": "service", "name": "rendezvous", "platform": "local", "payload": payload})
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(JobError, match="no token"):
        verbs.resume("rendezvous-1")
    folder = folders.create("weather-1")
    folder.write("run.json", {"run_id": "weather-1", "kind": "service", "name": "weather", "platform": "local", "payload": {}})
    with pytest.raises(JobError, match=r"no service 'weather'.*data, rendezvous, sparse"):
        verbs.resume("weather-1")


@pytest.mark.parametrize("text", ["{", "[]", '{"run_id": 1, "kind": "service"}', '{"run_id": "s", "kind": "service", "payload": 3}'])
def test_a_damaged_header_is_listed_and_refused_in_a_line(home: Path, text: str) -> None:
    folder = folders.create("broken-1")
    (folder.path / "run.json").write_text(text)
    assert row()["run_id"] == "broken-1"
    for verb in ("attach", "resume", "stop", "report"):
        ran = CliRunner().invoke(main, [verb, "broken-1"])
        assert ran.exit_code == 2, ran.output
        assert "run.json" in ran.output


@pytest.mark.slow
def test_shards_of_a_sparse_store_end_with_a_run_that_is_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_SPARSE_TOKEN", SECRET)
    store = (home.parent / "store").as_uri()
    with serving("serve", "sparse", "--shards", "2", "--listen", "127.0.0.1:0", "--store", store, "--json") as (_, ready):
        assert (row()["job"], row()["workers"]) == ("sparse", 2)
        folder = folders.find(ready["run_id"])
        assert open_header(folder).channel == ",".join(ready["addresses"])
        assert SECRET not in (folder.path / "run.json").read_text()
        invoke("stop", ready["run_id"])
    assert (row()["status"], folder.read("result.json")["counters"]["restarts"]) == ("stopped", 0)  # type: ignore[index]
    assert row()["cost_usd"] > 0, "two shards are two servers, and have written snapshots"


FLOW = """
import os, sys
from pathlib import Path
sys.path += [sys.argv[1], str(Path(sys.argv[1]).parents[1])]
from ephemeron.data.service import RemoteReader
from service_worlds import epochs_of, mixed
epochs_of(mixed(12).prepare_read(RemoteReader(sys.argv[2])), 1)
"""


@pytest.mark.slow
def test_a_data_service_has_the_events_logs_and_bill_of_its_loaders_and_ends_when_it_is_killed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPHEMERON_DATA_TOKEN", SECRET)
    state = home.parent / "state"
    with serving("serve", "data", "--loaders", "1", "--folder", str(state), "--json") as (process, ready):
        name = ready["run_id"]
        header = open_header(folders.find(name))
        assert (header.name, header.functions, header.memory_mb, header.payload["folder"]) == ("data", 1, 1769, str(state))
        worlds = Path(__file__).parents[1] / "data" / "service"
        subprocess.run([sys.executable, "-c", FLOW, str(worlds), ready["address"]], check=True, timeout=300)
        invoke("stop", name)
        process.wait(120)
    found = row()
    assert (found["status"], found["invocations"] >= 1, found["cost_usd"] > 0) == ("stopped", True, True)
    assert folders.find(name).read("result.json")["billed"]["gb_seconds"] > 0  # type: ignore[index]
    assert f"client | data service at {ready['address']}" in invoke("logs", name)
    ended = [event for event in folders.events_of(folders.find(name)) if isinstance(event, Ended)]
    assert len(ended) == found["invocations"]
    assert all(0 < event.t < found["seconds"] and event.memory_mb == 1769 for event in ended)
    assert {log.stem for log in (folders.find(name).path / "logs").glob("*.txt")} >= {event.invocation for event in ended}
    with serving("serve", "data", "--loaders", "1", "--folder", str(state), "--json") as (process, ready):
        assert ready["run_id"] != name
        process.kill()
        process.wait(120)
    assert (
        next(r for r in map(json.loads, invoke("runs", "--json").splitlines()) if r["run_id"] == ready["run_id"])["status"] == "interrupted"
    )
    with serving("serve", "data", "--loaders", "1", "--folder", str(state), "--json") as (process, ready):
        assert is_driven(folders.find(ready["run_id"])), "the coordinator of the killed one has made room"
