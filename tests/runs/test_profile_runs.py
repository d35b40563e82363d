"""Profiles are runs of kind `profile`: listed, shown and stopped like others; they cannot be resumed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError, RunStopped, UserError
from ephemeron.events import Ended, Invoked, Note, RunEnded, RunStarted
from ephemeron.functions.jsonl import follow
from ephemeron.prices import load_prices
from ephemeron.runs import folders, verbs
from ephemeron.runs.client_run import ClientRun
from ephemeron.runs.profiles import keep, profiling

PROGRAM = [sys.executable, "-c", "from ephemeron.cli.main import main; main()"]
JOB = f"""
name = "measured"
epochs = 1
code = ["{Path(__file__).parents[1] / "training" / "code"}"]

[model]
target = "tiny:mlp"

[data]
source = "digits"

[limits]
max_global_batch = 64
"""


class Text:
    """A profile."""

    def save(self, path: Path) -> None:
        path.write_text("{}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def invoke(*arguments: str, code: int = 0) -> str:
    ran = CliRunner().invoke(main, list(arguments))
    assert ran.exit_code == code, ran.output
    return ran.output


def row() -> dict[str, Any]:
    [line] = invoke("runs", "--json").splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def measure(work: Any) -> None:
    async def measured() -> None:
        async with profiling("profile-1", "job", prices=load_prices("objects"), memory_mb=1769) as run:
            run.say("measuring")
            await work(run)

    asyncio.run(measured())


def test_a_profile_names_its_file_and_is_shown_by_all_verbs(home: Path) -> None:
    async def work(run: ClientRun) -> None:
        assert (row()["kind"], row()["status"], row()["job"]) == ("profile", "running", "job")
        run.emit(Invoked(t=run.t, rank=0, attempt=1, invocation="a"))
        run.emit(Ended(t=run.t, rank=0, attempt=1, invocation="a", status="ok", billed_s=2.0, gb_seconds=3.0, memory_mb=1769))
        keep(run, Text(), home.parent / "out.json")

    measure(work)
    assert (row()["status"], row()["invocations"]) == ("finished", 1)
    assert row()["cost_usd"] == pytest.approx(load_prices("objects").functions_usd(3.0, 1), abs=1e-9)
    folder = folders.find("profile-1")
    assert folder.read("result.json")["profile"] == str(home.parent / "out.json")  # type: ignore[index]
    assert (folder.path / "profile.json").read_text() == (home.parent / "out.json").read_text() == "{}"
    seen: list[Any] = []
    verbs.attach("profile-1", on_event=seen.append)
    assert [type(event) for event in seen] == [RunStarted, Note, Invoked, Ended, RunEnded]
    assert "finished" in invoke("attach", "profile-1")
    assert "client | measuring" in invoke("logs", "profile-1")
    assert "wrote" in invoke("report", "profile-1")
    assert "1 invocation" in (folder.path / "report.html").read_text()
    with pytest.raises(UserError, match="nothing to resume"):
        verbs.resume("profile-1")
    with pytest.raises(UserError, match="is not running"):
        verbs.stop("profile-1")


def test_a_profile_that_is_asked_to_stop_says_so(home: Path) -> None:
    async def work(run: ClientRun) -> None:
        assert verbs.stop("profile-1", now=True, wait=False) == "profile-1"
        await asyncio.Event().wait()

    with pytest.raises(RunStopped, match="profile-1 was stopped"):
        measure(work)
    assert row()["status"] == "stopped"
    assert "cannot be resumed" in invoke("resume", "profile-1", code=2)


def test_a_profile_that_fails_says_why(home: Path) -> None:
    async def work(run: ClientRun) -> None:
        (run.folder.path / "objects").mkdir()
        keep(run, Text(), home.parent / "absent" / "out.json")

    with pytest.raises(JobError, match=r"cannot be written to .*out.json"):
        measure(work)
    assert row()["status"] == "failed"
    assert "cannot be written" in invoke("attach", "profile-1", code=1)
    assert not folders.find("profile-1").objects.exists()


def begin(home: Path) -> tuple[subprocess.Popen[str], str]:
    """`ephemeron profile`, and its run, of which a function has begun."""
    (home.parent / "job.toml").write_text(JOB)
    process = subprocess.Popen(
        [*PROGRAM, "profile", str(home.parent / "job.toml"), "--out", str(home.parent / "out.json")], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("profiling: ")
    [folder] = folders.all_runs()

    async def invoked() -> None:
        async for event in follow(folder.events):
            if isinstance(event, Invoked):
                return

    asyncio.run(asyncio.wait_for(invoked(), 240))
    return process, folder.run_id


@pytest.mark.slow
def test_a_profile_is_stopped_by_the_command_with_its_functions(home: Path) -> None:
    process, name = begin(home)
    seen: list[Any] = []
    watching = threading.Thread(target=lambda: seen.append(verbs.attach(name, check=False)))
    watching.start()
    assert "stopped" in invoke("stop", name)
    _, said = process.communicate(timeout=240)
    watching.join(240)
    assert seen[0].summary.status == row()["status"] == "stopped"
    assert f"run {name} was stopped" in said
    assert process.returncode not in (0, 2)
    events = list(folders.events_of(folders.find(name)))
    assert sum(isinstance(event, Invoked) for event in events) == sum(isinstance(event, Ended) for event in events)
    assert not (home.parent / "out.json").exists()


@pytest.mark.slow
def test_a_profile_whose_client_was_killed_is_interrupted(home: Path) -> None:
    process, name = begin(home)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=240)
    with pytest.raises(UserError, match=r"interrupted.*ephemeron profile"):
        verbs.attach(name)
    invoke("report", name)
