"""`stop` returns when a run has stopped, so that it can be resumed at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ephemeron.errors import UserError
from ephemeron.runs import verbs
from ephemeron.runs.kinds import find_kind
from ephemeron.training.driver import lifecycle

PROGRAM = str(Path(sys.executable).parent / "ephemeron")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """A run that is told to stop, and in which nothing else happens."""
    told: list[bool] = []

    class Folder:
        run_id = "r-1"

    class Record:
        platform, kind, detached = "local", "training", False

    async def stop(folder: object, run: object, *, now: bool) -> None:
        told.append(now)

    monkeypatch.setattr(verbs, "open_run", lambda run_id: (Folder(), Record(), find_kind("training")))
    monkeypatch.setattr(lifecycle, "stop", stop)
    monkeypatch.setattr(verbs, "_STOPPED_EVERY_S", 0.001)
    return told


def test_it_waits_until_the_run_has_stopped(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["running", "running", "stopped"]
    monkeypatch.setattr(verbs, "status_of", lambda folder: found.pop(0))
    assert verbs.stop("r") == "r-1"
    assert asked == [False]
    assert not found


def test_it_need_not_wait(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "status_of", lambda folder: pytest.fail("it has waited"))
    assert verbs.stop("r", now=True, wait=False) == "r-1"
    assert asked == [True]


def test_it_does_not_wait_for_ever(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "status_of", lambda folder: "running")
    with pytest.raises(UserError, match=r"asked to stop 0\.01 s ago and has not reached a checkpoint yet; .*ephemeron attach r-1"):
        verbs.stop("r", wait_s=0.01)


def test_in_a_cloud_where_nobody_watches_it_sees_the_end_itself(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(verbs, "status_of", lambda folder: "on aws")
    monkeypatch.setattr(verbs, "attach", lambda run_id, **how: seen.append(run_id))
    verbs.stop("r")
    assert seen == ["r-1"]


@pytest.mark.slow
def test_what_was_stopped_can_be_resumed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming said that the run is already running."""
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    root = Path(__file__).parents[2]
    run = subprocess.Popen([PROGRAM, "train", "examples/digits/job.toml", "--epochs", "200"], cwd=root, text=True, stderr=subprocess.PIPE)
    assert run.stderr is not None
    next(line for line in run.stderr if line.startswith("epoch"))
    try:
        stopped = subprocess.run([PROGRAM, "stop", "last"], text=True, capture_output=True, cwd=root, timeout=120, check=True)
        assert stopped.stdout.startswith("stopped ")
        assert run.wait(120) == 3
        again = subprocess.Popen([PROGRAM, "resume", "last"], cwd=root, text=True, stderr=subprocess.PIPE)
        assert again.stderr is not None
        assert any(line.startswith("epoch") for line in again.stderr)
        subprocess.run([PROGRAM, "stop", "last"], cwd=root, timeout=120, check=True)
        again.stderr.read()
        assert again.wait(120) == 3
    finally:
        run.stderr.close()
        run.kill()
