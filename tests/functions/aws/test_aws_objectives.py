"""Studies of functions on the local Lambda service, through an object store: driven by a client, and by functions there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")
pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")

from aws_world import KEYS, deployed

from ephemeron.cli.main import main
from ephemeron.events import Ended
from ephemeron.runs import detached, folders
from ephemeron.runs.verbs import attach, resume
from ephemeron.testing.lambda_service import LambdaService
from ephemeron.testing.training_world import driver_function
from ephemeron.tuning.folder import StudyStatus, folder_of
from running import until

pytestmark = pytest.mark.slow

OBJECTIVES = """
import os, signal, sys, time
from pathlib import Path

PLACE = Path({place!r})

def fit(lr, trial):
    '''Trial 1 kills its first execution environment.'''
    with (PLACE / "begun").open("a") as file:
        file.write(f"{{trial.number}}\\n")
    if trial.number == 1 and (PLACE / "begun").read_text().split().count("1") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(4):
        time.sleep({step_s})
        trial.report(step, lr / (step + 1))
    return {{"loss": lr, "heavy": "torch" in sys.modules or "optuna" in sys.modules}}
"""


@pytest.fixture(scope="module")
def service(s3_server: Any) -> Iterator[tuple[LambdaService, list[str]]]:
    """The service, and the options that name its function and the store."""
    with pytest.MonkeyPatch.context() as patch:
        s3 = {"AWS_ENDPOINT_URL_S3": s3_server.env["AWS_ENDPOINT_URL"]}
        for name, value in {**KEYS, **s3}.items():
            patch.setenv(name, value)
        with LambdaService(concurrency=8, environment=s3) as service:
            deployed(service, memory_mb=512, timeout_s=300)
            where = ["--platform", "aws", "--aws-region", "us-east-1", "--aws-endpoint", service.url, "--channel", s3_server.address]
            yield service, where


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module and a space."""
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(detached, "CLOUD_BEAT_S", detached.BEAT_S)
    place = tmp_path / "place"
    place.mkdir()
    (place / "space.toml").write_text("lr = { low = 0.01, high = 1.0 }\n")
    monkeypatch.chdir(place)
    return place


def command(place: Path, name: str, where: list[str], *, step_s: float) -> list[str]:
    module = f"goals_{name}"
    (place / f"{module}.py").write_text(OBJECTIVES.format(place=str(place), step_s=step_s))
    own = ["--space", "space.toml", "--name", name, "--trials", "4", "--metric", "loss", "--sampler", "random", "--max-workers", "2"]
    return ["tune", "--objective", f"{module}:fit", *own, *where]


def invoke(arguments: list[str]) -> str:
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 0, ran.output
    return ran.output


def status(name: str) -> StudyStatus:
    return folder_of(name).status()


def begun(place: Path) -> Counter[str]:
    return Counter((place / "begun").read_text().split())


def test_a_study_runs_there_though_a_function_dies(service: Any, place: Path) -> None:
    _, where = service
    document = json.loads(invoke([*command(place, "there", where, step_s=0.1), "--json"]).splitlines()[-1])
    assert document["trials"] == {"finished": 4, "pruned": 0, "failed": 0}
    found = status("there")
    assert {t.number: (t.evaluations, t.metrics) for t in found.trials} == {n: (4, {"heavy": 0}) for n in range(4)}
    assert begun(place) == {"0": 1, "1": 2, "2": 1, "3": 1}
    ends = [event for event in folders.events_of(folders.find("there")) if isinstance(event, Ended)]
    assert [event.status for event in ends].count("ok") >= 1
    assert found.spent_usd > 0
    assert json.loads((folders.find("there").path / "run.json").read_text())["memory_mb"] == 512


def test_functions_drive_it_there_though_the_driver_is_killed(service: Any, place: Path) -> None:
    _, where = service
    arguments = command(place, "driven", where, step_s=1.0)
    run = json.loads(invoke([*arguments, "--detach", "--json"]).splitlines()[-1])["run_id"]
    for path in place.glob("*.*"):
        path.unlink()  # its functions have all that they need
    until(lambda: (place / "begun").exists())
    function = driver_function(run)
    assert function is not None
    function.kill()
    result = attach(run)
    assert (result.summary.status, result.summary.trials) == ("finished", {"finished": 4})
    counts = begun(place)
    assert counts["1"] >= 2
    assert sum(counts.values()) <= 7, "a trial that had begun goes on in its function, whichever drives"
    values = {t.number: t.value for t in status(run).trials}
    assert values == {t.number: t.parameters["lr"] for t in status(run).trials}
    own = folders.RunFolder(result.folder.path / detached.FOLDER)
    assert "finished" in [event.outcome for event in folders.events_of(own) if isinstance(event, Ended) and event.status == "ok"]


def test_one_that_functions_drive_is_stopped_and_gone_on_with_by_a_client(service: Any, place: Path) -> None:
    _, where = service
    arguments = command(place, "stopped", where, step_s=1.5)
    run = json.loads(invoke([*arguments, "--detach", "--json"]).splitlines()[-1])["run_id"]
    until(lambda: (place / "begun").exists())
    invoke(["stop", run, "--no-wait"])
    stopped = attach(run, check=False)
    assert stopped.summary.status == "stopped"
    assert [t.state for t in status(run).trials].count("running") >= 1
    result = resume(run)
    assert (result.summary.status, result.summary.trials) == ("finished", {"finished": 4})
