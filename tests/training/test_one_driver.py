"""A run has one driver: others are refused, watch, and take over when it dies; what has finished stays finished."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from training_runs import make_job, synthetic

from ephemeron.communication.keys import Keys
from ephemeron.config.typed import plain
from ephemeron.errors import RunAlreadyDriven, RunFailed, UserError
from ephemeron.events import Invoked, Progress, RunEnded, RunStarted
from ephemeron.functions import passed_on
from ephemeron.functions.local import LOCK_FILE as LOCAL_LOCK
from ephemeron.functions.local import is_hosted
from ephemeron.prices import load_prices
from ephemeron.runs import folders as homes
from ephemeron.runs import run_platform
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import events_of
from ephemeron.runs.lock import LOCK_FILE, driving, is_driven
from ephemeron.runs.status import status_of
from ephemeron.runs.summary import write_summary
from ephemeron.runs.verbs import attach, resume
from ephemeron.testing.training_world import PEER_TIMEOUT_S
from ephemeron.training.driver import configure, records, train
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.result import Result, conclude, summarize
from ephemeron.training.driver.run_driver import RunOutcome
from ephemeron.training.job import Configuration, Target, parse_fault
from ephemeron.training.worker.spec import RunSpec

CLIENT = """
import sys
sys.path[:0] = {paths!r}
import test_one_driver
test_one_driver.light()
test_one_driver.start({slow})
"""


def light() -> None:
    """Functions of this process's runs start without PyTorch, and train synthetic weights."""
    os.environ["EPHEMERON_PRELOAD"] = "ephemeron.training.worker.loop"
    passed_on.PASSED_ON = (*passed_on.PASSED_ON, "EPHEMERON_PRELOAD")  # type: ignore[assignment]


def start(slow: bool, **options: Any) -> Result:
    """Trains through the front door what only tests train."""

    def prepared(job, configuration, *, run_id, faults, peer_timeout_s, **rest):
        spec = RunSpec(
            run_id=run_id,
            model=Target(target="none"),
            loss=Target(target="none"),
            optimizer=Target(target="none"),
            configuration=configuration,
            epochs=6,
            seed=1,
            dtype="float32",
            samples=128,
            prices=load_prices("objects"),
            faults=tuple(map(str, faults)),
            trainer="synthetic",
            trainer_options={"elements": 64},
            peer_timeout_s=peer_timeout_s,
            cold_start_s=0.2,
        )
        objects = {Keys(run_id).spec: [spec.to_bytes()]}
        return Prepared(job=job, spec=spec, objects=objects, model_bytes=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ephemeron.training.driver.launching.launch.prepare", prepared)
        configuration = Configuration(
            platform="local",
            channel="folder",
            workers=2,
            aggregators=1,
            memory_mb=1769,
            function_timeout_s=600.0,
            batch_size=8,
            checkpoint_every=5,
        ).resolved()
        faults = [parse_fault("delay:rank=0,factor=1,seconds=0.1")] if slow else []
        return train(make_job(), configuration, faults=faults, peer_timeout_s=PEER_TIMEOUT_S, **options)


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder of a run that another process drives, slowly."""
    monkeypatch.setenv("EPHEMERON_PRELOAD", "")
    monkeypatch.setattr(passed_on, "PASSED_ON", passed_on.PASSED_ON)
    light()
    here = Path(__file__).parent
    code = CLIENT.format(paths=[str(here), str(here.parent)], slow=True)
    client = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "EPHEMERON_HOME": str(home)})
    try:
        end = time.monotonic() + 180
        while not (found := [p for p in home.glob("runs/*/events.jsonl") if '"kind":"progress"' in p.read_text()]):
            assert client.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        yield client, found[0].parent
    finally:
        client.kill()
        client.wait()


@pytest.mark.slow
def test_another_client_is_refused_watches_and_takes_over(folder):
    client, path = folder
    with pytest.raises(RunAlreadyDriven, match=rf"already running as process {client.pid}; .*attach {path.name}"):
        resume(path.name)
    events = []

    def watch(event):
        events.append(event)
        if isinstance(event, Progress) and event.rank == 1 and event.iteration == 8:
            client.kill()

    result = attach(path.name, on_event=watch)
    assert client.wait() == -signal.SIGKILL
    assert result.summary.status == "finished"
    assert len([e for e in events if isinstance(e, Invoked)]) == result.summary.invocations == 2
    assert [type(e) for e in events if isinstance(e, RunStarted | RunEnded)] == [RunStarted, RunEnded]
    with pytest.raises(UserError, match="has finished"):
        resume(path.name)
    again = attach(path.name)
    assert again.summary.weights_sha256 == result.summary.weights_sha256
    assert len([e for e in events_of(result.folder) if isinstance(e, RunEnded)]) == 1


@pytest.mark.slow
def test_who_watches_gets_the_driver_s_result(folder, tmp_path):
    client, path = folder
    seen = []
    result = attach(path.name, on_event=seen.append, out=tmp_path / "out")
    assert client.wait(180) == 0
    assert plain(result.summary) == json.loads((path / "result.json").read_text())
    assert result.summary.status == "finished"
    assert isinstance(seen[-1], RunEnded)
    assert (tmp_path / "out" / "weights.safetensors").exists()
    assert len([e for e in events_of(result.folder) if isinstance(e, RunEnded)]) == 1


def test_a_run_whose_result_is_there_is_not_stopped_any_more():
    def until(trigger):
        publish = trigger.platform.store.publish

        def published(key, data):
            publish(key, data)
            if key == trigger.keys.result:
                trigger.interrupt()
                trigger.interrupt()

        trigger.platform.store.publish = published

    run = synthetic(workers=3, until=until)
    assert run.ending.status == "finished"
    assert run.sha == synthetic(workers=3).sha
    assert [e.status for e in run.of(RunEnded)] == ["finished"]


def test_a_finished_run_is_never_marked_otherwise(home):
    run = home_run("done")
    spec = synthetic(workers=3).trigger.spec
    first = summarize(CostMeter(spec.prices), spec, status="finished", final=None)
    write_summary(run, first)
    result = conclude(run, spec, CostMeter(spec.prices), RunOutcome("stopped", []), None)
    assert result.summary == first == records.read_result(run)
    assert result.finished


def home_run(name: str):
    run = homes.create(name)
    run.write("run.json", {"run_id": name, "platform": "local"})
    return run


def test_only_one_holds_the_lock_and_it_says_who(home):
    run = home_run("a")
    assert status_of(run) == "interrupted"
    with driving(run):
        assert is_driven(run)
        assert status_of(run) == "running"
        with pytest.raises(RunAlreadyDriven, match=f"process {os.getpid()}"), driving(run):
            pass
        assert is_driven(run)
    assert not is_driven(run)


def test_one_that_asks_is_taken_for_no_driver_and_no_host_by_another(home):
    """As two pages of the dashboard do at the same time."""
    run = home_run("a")
    with driving(run):
        (run.path / LOCAL_LOCK).touch()
    with (run.path / LOCK_FILE).open("rb") as one, (run.path / LOCAL_LOCK).open("rb") as other:
        fcntl.flock(one, fcntl.LOCK_SH)
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not is_driven(run)
        assert not is_hosted(run.path)
        assert status_of(run) == "interrupted"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError, UserError])
def test_a_run_that_never_began_leaves_no_folder(raised, home, monkeypatch):
    def fails(*_, **__):
        raise raised("before anything")

    monkeypatch.setattr("ephemeron.training.driver.lifecycle.run_platform.start", fails)
    job = make_job()
    with pytest.raises(raised):
        train(job, configuration_of(job))
    assert not list(home.glob("runs/*"))


def configuration_of(job, **how):
    return configure(job, **{"platform": "local", "workers": 2, "aggregators": 1, "batch_size": 24, **how})


def test_runs_that_never_began_are_passed_over_and_swept(home):
    begun = home_run("begun")
    begun.events.write_text("")
    killed = home_run("killed-before-it-began")
    with driving(killed):
        run_platform.sweep(home / "runs")
        assert killed.path.exists(), "its client lives"
    assert homes.find("last").run_id == "begun"
    run_platform.sweep(home / "runs")
    assert not killed.path.exists()
    assert begun.path.exists()


def test_a_failed_run_raises_with_its_result(home):
    job = make_job(model=Target(target="tiny:failing"))
    how = configuration_of(job, platform="simulated")
    with pytest.raises(RunFailed, match="no luck today") as caught:
        train(job, how)
    assert caught.value.result.summary.status == "failed"
    assert caught.value.result.folder.events.exists()
    assert train(job, how, check=False).summary.status == "failed"
