"""`ephemeron train` on jobs with a table [sparse]: what a run leaves, kills, stops, resumes, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from click.testing import CliRunner
from sparse_jobs import sparse_job

from ephemeron.cli.main import main
from ephemeron.errors import JobError, RunFailed, UserError
from ephemeron.events import Ended, Evaluated, Invoked, Measured, Progress, RunEnded, RunStarted
from ephemeron.prices import load_prices
from ephemeron.runs import folders, verbs
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import api
from ephemeron.training.job import load_job
from running import command_of
from servers import wait_until
from sparse_data import prepared

pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files: pip install 'ephemeron[preparation]'")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def events(folder, kind):
    return [event for event in events_of(folder) if isinstance(event, kind)]


def samples_of(folder):
    """Samples that count, by the last report of each step."""
    return sum({(event.rank, event.iteration): event.samples for event in events(folder, Progress)}.values())


def shards():
    """Processes of the shards of runs that this process drives."""
    return [process for process in psutil.Process().children() if "sparse.store.processes" in command_of(process)]


@pytest.mark.slow
def test_a_run_leaves_weights_events_a_bill_and_a_report(home, tmp_path):
    path = sparse_job(tmp_path, epochs=3)
    result = CliRunner().invoke(main, ["train", str(path), "--json", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert value["status"] == "finished"
    assert value["metrics"]["loss"] < 0.5 < 0.7 < value["metrics"]["accuracy"]
    assert set(value["step_us"]) == {"load", "download", "compute", "upload", "wait"}
    assert value["cost_usd"] > 0
    assert value["billed"]["gb_seconds"] > 0
    traffic = value["traffic"]
    assert min(traffic["puts"], traffic["gets"], traffic["polls"], traffic["bytes_up"]) > 0
    objects = load_prices("objects")
    assert value["billed"]["storage_usd"] > objects.put_usd * traffic["puts"] + objects.get_usd * traffic["gets"] > 0
    assert "epoch 3/3" in result.stderr
    assert "logistic in a sparse store of 2 shards" in result.stderr

    folder = folders.find("last")
    assert {"run.json", "job.json", "events.jsonl", "result.json", "weights.safetensors", "report.html"} <= {
        file.name for file in folder.path.iterdir()
    }
    assert (tmp_path / "out" / "weights.safetensors").exists()
    assert samples_of(folder) == 3 * 3000
    assert [event.epoch for event in events(folder, Measured)] == [1, 2, 3]
    assert len(events(folder, Evaluated)) == 3
    assert [event.status for event in events(folder, Ended)] == ["ok", "ok"]
    assert not list((folder.objects / folder.run_id).glob("store/*"))

    listed = json.loads(CliRunner().invoke(main, ["runs", "--json"]).stdout.splitlines()[0])
    assert (listed["status"], listed["metrics"]["loss"]) == ("finished", value["metrics"]["loss"])
    again = CliRunner().invoke(main, ["report", "last", "--out", str(tmp_path / "report")])
    assert again.exit_code == 0, again.output
    attached = verbs.attach("last")
    assert attached.finished
    assert attached.summary.metrics == value["metrics"]
    model = attached.model()
    assert model.evaluate(tmp_path / "data" / "test")["loss"] == pytest.approx(value["metrics"]["loss"])
    with pytest.raises(UserError, match="nothing to resume"):
        verbs.resume("last")


@pytest.mark.slow
def test_functions_and_shards_that_are_killed_lose_nothing(home, tmp_path):
    job, killed, seen, attached = load_job(sparse_job(tmp_path, epochs=6)), [], [], []

    def watch():
        attached.append(verbs.attach("last", on_event=seen.append))

    watcher = threading.Thread(target=watch)

    def kill(event):
        if isinstance(event, Progress) and not watcher.ident:
            watcher.start()
        if isinstance(event, Progress) and event.iteration > 100 and "function" not in killed:
            killed.append("function")
            held = shards()
            for process in held:  # while the function is looked for, which may not end
                process.suspend()
            os.kill(_function_of(folders.find("last")), signal.SIGKILL)
            for process in held:
                process.resume()
        elif isinstance(event, Progress) and event.iteration > 250 and "shard" not in killed:
            killed.append("shard")
            shards()[0].kill()

    result = api.train(job, on_event=kill)
    watcher.join()
    assert [(one.finished, one.summary.metrics) for one in attached] == [(True, result.summary.metrics)]
    assert seen == list(events_of(result.folder))  # another client that attaches sees all of it
    assert killed == ["function", "shard"]
    assert result.finished
    assert samples_of(result.folder) == 6 * 3000
    assert [event.reason for event in events(result.folder, Invoked)] == ["start", "start", "replacement"]
    assert result.summary.metrics["loss"] < 0.5


def _function_of(folder):
    """Process of one of the run's functions that computes now."""
    found = [process for process in psutil.process_iter() if _run_of(process) == str(folder.path)]
    return max(found, key=lambda process: sum(process.cpu_times()[:2])).pid


def _run_of(process):
    try:
        return process.cwd().partition("/scratch/")[0] if "/scratch/" in process.cwd() else ""
    except psutil.Error:
        return ""


@pytest.mark.slow
def test_a_client_that_is_killed_is_gone_on_for(home, tmp_path):
    path = sparse_job(tmp_path, epochs=12)
    code = f"from ephemeron.training.driver import api; api.train({str(path)!r})"
    command = [sys.executable, "-c", code]
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: folders.all_runs() and _reported(folders.all_runs()[0]) > 150, client, "a report of step 150", 180.0)
    client.kill()
    client.wait()
    folder = folders.find("last")
    with pytest.raises(UserError, match="ephemeron resume"):
        verbs.attach("last")
    result = verbs.resume("last")
    assert result.finished
    assert samples_of(folder) == 12 * 3000
    assert len(events(folder, RunStarted)) == 2
    assert "resume" in {event.reason for event in events(folder, Invoked)}
    assert [event.epoch for event in events(folder, Measured)] == list(range(1, 13))


def _reported(folder):
    return max((e.iteration for e in events(folder, Progress)), default=0) if folder.events.exists() else 0


@pytest.mark.slow
def test_a_run_that_is_stopped_keeps_what_it_has_learnt_and_goes_on(home, tmp_path):
    job, asked = load_job(sparse_job(tmp_path, epochs=20)), []

    def stop(event):
        if isinstance(event, Progress) and not asked:
            asked.append(threading.Thread(target=lambda: verbs.stop("last")))
            asked[0].start()

    result = api.train(job, on_event=stop)
    asked[0].join()
    assert result.summary.status == "stopped"
    assert result.model().weights["weights"].any()
    done = samples_of(result.folder)
    assert 0 < done < 20 * 3000
    again = verbs.resume(result.folder.run_id)
    assert again.finished
    assert samples_of(result.folder) == 20 * 3000


@pytest.mark.slow
def test_the_budget_stops_a_run_which_cannot_go_on_without_its_store(home, tmp_path):
    result = api.train(sparse_job(tmp_path, epochs=200, limits={"budget_usd": 1e-3}))
    assert result.summary.status == "stopped"
    assert result.summary.cost_usd >= 1e-3
    assert result.model().weights["weights"].any()
    (ended,) = events(result.folder, RunEnded)
    assert ended.status == "stopped"
    assert any("budget" in event.text for event in events_of(result.folder) if event.kind == "note")
    cleaned = CliRunner().invoke(main, ["runs", "clean", "last", "--yes"])
    assert cleaned.exit_code == 0, cleaned.output
    with pytest.raises(RunFailed, match="was deleted, and what it has learnt with it"):
        verbs.resume("last")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparse": {"model": "logit"}}, "sparse.model.target = 'logit' is not known; use one of logistic, softmax"),
        ({"sparse": {"model": {"target": "softmax"}}}, "sparse.model softmax: missing key classes"),
        ({"sparse": {"model": {"target": "logistic", "options": {"l3": 1}}}}, "unknown key l3"),
        ({"sparse": {"model": {"target": "logistic", "options": {"features": 50}}}}, "has 60 features"),
        ({"sparse": {"model": "logistic", "optimizer": "adam"}}, "sparse.optimizer: missing key learning_rate"),
        ({"sparse": {"model": "logistic", "shard": 2}}, "unknown key shard; did you mean shards?"),
        ({"sparse": {"model": "logistic", "store": ["127.0.0.1:1"]}}, "EPHEMERON_SPARSE_TOKEN is not set"),
        ({"data": {"source": "prepared", "path": "nothing"}}, "nothing does not exist"),
        ({"data": {"source": "prepared", "path": "."}}, "it is no prepared dataset"),
        ({"data": {"source": "digits"}}, "a sparse model trains on a prepared dataset"),
        ({"run": {"workers": 4, "batch_size": 3000}}, "3 minibatches of 3000, fewer than 4 functions"),
        ({"run": {"sync": "hap"}}, "run.sync is not for a sparse job"),
        ({"run": {"platform": "simulated"}}, "a sparse job cannot be simulated"),
        ({"clip_norm": 1.0}, "clip_norm is not for a sparse job"),
        ({"optimizer": "Adam"}, "optimizer is not for a sparse job; say it in [sparse]"),
        ({"model": "model:build"}, "both model and sparse are given"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_the_start(home, tmp_path, monkeypatch, changes, said):
    monkeypatch.delenv("EPHEMERON_SPARSE_TOKEN", raising=False)
    result = CliRunner().invoke(main, ["train", str(sparse_job(tmp_path, **changes))])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert said in line
    assert not list((home / "runs").glob("*")) if (home / "runs").exists() else True


def test_labels_that_are_not_binary_are_named(home, tmp_path):
    prepared(tmp_path / "data", positive=2)
    with pytest.raises(JobError, match=re.escape("which is not binary; use labels 0 and 1, or softmax")):
        api.train(sparse_job(tmp_path))


def test_options_of_other_jobs_are_refused(home, tmp_path):
    path = str(sparse_job(tmp_path))
    for arguments, said in (
        (["--fault", "kill:rank=1,iteration=2"], "faults cannot be injected into a sparse job"),
        (["--plan", "plan.json"], "--plan is not for a sparse job"),
        (["--aggregators", "2", "--pattern", "all-reduce"], "aggregators"),
    ):
        result = CliRunner().invoke(main, ["train", path, *arguments])
        assert result.exit_code == 2
        assert said in result.stderr
