"""Loggers of runs: what they are told, that replaced functions and resumed runs are logged once, and that they cannot harm a run."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from training_runs import CODE, make_job

import ephemeron
from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.events import Evaluated, Event, Measured, Progress, RunStarted, from_json
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import read_header
from ephemeron.training.driver import run_logging
from ephemeron.training.driver.records import run_spec
from ephemeron.training.driver.step_metrics import StepMerger, StepMetrics
from ephemeron.training.job import LoggerSpec, Target, parse_fault, parse_job
from ephemeron.training.loggers import LoggedRun, Logger
from servers import wait_until

sys.path.insert(0, str(Path(__file__).parent / "loggers"))
from stored import of_csv, of_mlflow, of_tensorboard, of_wandb


class Recorder(Logger):
    """A logger that keeps what it is told."""

    name = "recorder"

    def __init__(self) -> None:
        self.run: LoggedRun | None = None
        self.params: list[Mapping[str, object]] = []
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.artifacts: list[str] = []
        self.status: list[str] = []
        self.saved = 0

    def start(self, run: LoggedRun) -> str:
        self.run = run
        return f"record of {run.run_id}"

    def log_params(self, params: Mapping[str, object]) -> None:
        self.params.append(params)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def log_artifact(self, path: Path) -> None:
        self.artifacts.append(path.name)

    def save(self) -> None:
        self.saved = len(self.rows)

    def finish(self, status: str) -> None:
        self.status.append(status)

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


class Broken(Recorder):
    """A logger that raises at its second row."""

    name = "broken"

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        super().log_metrics(metrics, step)
        if len(self.rows) == 2:
            raise ConnectionError("the server\nis gone")


class Stuck(Recorder):
    """A logger that never returns until it is let go."""

    name = "stuck"

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def log_params(self, params: Mapping[str, object]) -> None:
        self.go.wait()


def train(loggers: list[object], *, faults: tuple[str, ...] = (), **job: object) -> ephemeron.Result:
    wanted = make_job(**{"epochs": 2, **job})
    c = ephemeron.configure(wanted, platform="simulated", workers=3, batch_size=48, checkpoint_every=3)
    return ephemeron.train(wanted, c, loggers=loggers, faults=[parse_fault(f) for f in faults])


def losses(folder: RunFolder) -> dict[int, float]:
    """Mean losses by step, from the events of the highest attempts alone."""
    best: dict[tuple[int, int], Progress] = {}
    for line in folder.events.read_text().splitlines():
        event = from_json(line)
        if isinstance(event, Progress):
            best[event.iteration, event.rank] = event
    found = {}
    for i in {i for i, _ in best}:
        parts = [e for (j, _), e in best.items() if j == i]
        found[i + 1] = sum(e.loss * e.samples for e in parts) / sum(e.samples for e in parts)
    return found


@pytest.mark.usefixtures("home", "pictures")
def test_a_run_is_logged_with_parameters_metrics_bill_and_report() -> None:
    recorder = Recorder()
    result = train([recorder, "csv"])
    run, summary = result.folder, result.summary
    assert recorder.run is not None
    assert (recorder.run.run_id, recorder.run.logged_as) == (run.run_id, None)

    logged = recorder.points("train/loss")
    assert [step for step, _ in logged] == list(range(1, summary.iterations + 1))
    assert dict(logged) == pytest.approx(losses(run))
    evaluated = recorder.points("evaluation/accuracy")
    assert [step for step, _ in evaluated] == [summary.iterations // 2, summary.iterations]
    assert evaluated[-1][1] == pytest.approx(summary.metrics["accuracy"])
    assert [e for _, e in recorder.points("epoch")][-1] == 2.0
    costs = [cost for _, cost in recorder.points("run/cost_usd")]
    assert costs == sorted(costs)
    assert recorder.rows[-1] == (
        summary.iterations,
        {
            "run/time_s": summary.seconds,
            "run/cost_usd": summary.cost_usd,
            "run/gb_seconds": summary.billed.gb_seconds,
            "run/storage_usd": summary.billed.storage_usd,
            "run/invocations": 3.0,
        },
    )

    (params,) = recorder.params
    assert params["model.target"] == "tiny:mlp"
    assert params["optimizer.options.lr"] == 0.1
    assert params["configuration.workers"] == 3
    assert params["epochs"] == 2
    assert recorder.artifacts == ["result.json", "report.html", "report.png"]
    assert recorder.status == ["finished"]
    assert recorder.saved == len(recorder.rows)

    stored = of_csv(run.path)
    assert stored.metrics["train/loss"] == logged
    assert stored.metrics["evaluation/accuracy"] == evaluated
    assert json.loads((run.path / "loggers.json").read_text())["loggers"][1]["train"] == summary.iterations


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_what_a_replaced_function_repeats_is_logged_once() -> None:
    undisturbed, disturbed = Recorder(), Recorder()
    train([undisturbed])
    train([disturbed], faults=("kill:rank=1,iteration=8,phase=upload",))
    steps = [step for step, _ in disturbed.points("train/loss")]
    assert steps == list(range(1, steps[-1] + 1))
    assert disturbed.points("train/loss") == undisturbed.points("train/loss")
    assert disturbed.points("evaluation/loss") == undisturbed.points("evaluation/loss")


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_a_logger_that_raises_is_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    broken, fine = Broken(), Recorder()
    with caplog.at_level(logging.WARNING, logger="ephemeron"):
        result = train([broken, fine])
    assert result.finished
    warned = [r.getMessage() for r in caplog.records if "logger" in r.getMessage()]
    assert warned == ["logger broken failed, and this run is not logged by it any more: ConnectionError: the server is gone"]
    assert len(broken.rows) == 2
    assert dict(fine.points("train/loss")) == pytest.approx(losses(result.folder))
    assert result.summary.weights_sha256 == train([]).summary.weights_sha256


@pytest.mark.usefixtures("home")
def test_a_logger_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(run_logging, "FINISH_S", 0.01)
    stuck = Stuck()
    try:
        with caplog.at_level(logging.WARNING, logger="ephemeron"):
            assert train([stuck], epochs=1).finished
        assert "logger stuck has not finished 0.01 s after the run" in caplog.text
        assert not stuck.rows
    finally:
        stuck.go.set()


@pytest.mark.usefixtures("home")
def test_a_session_continues_where_the_last_one_has_saved() -> None:
    """The events of the first half, then all of them, as a client that resumes or attaches reads them."""
    first, second, whole = Recorder(), Recorder(), Recorder()
    done = train([whole])
    folder = done.folder
    (folder.path / "loggers.json").unlink()
    events = [from_json(line) for line in folder.events.read_text().splitlines()]
    spec = run_spec(read_header(folder))
    with run_logging.logged(folder, spec, run_logging.chosen([first]), lambda event: None) as log:
        for event in events[: len(events) // 2]:
            log.on_event(event)
    seen: list[Event] = []
    with run_logging.logged(folder, spec, run_logging.continued(folder, [second]), seen.append) as log:
        for event in events:
            log.on_event(event)
        log.conclude(done)
    assert seen == events
    assert first.status == ["failed"]
    assert second.status == ["finished"]
    assert second.run is not None
    assert second.run.logged_as == f"record of {folder.run_id}"
    assert len(first.params) == 1
    assert not second.params
    assert first.rows
    assert first.rows + second.rows == whole.rows
    assert run_logging.continued(folder, [Recorder()]) == [], "a finished run is not logged again"


CLIENT = """
import sys
sys.path.insert(0, {tests!r})
from training_runs import make_job
import ephemeron
from ephemeron.training.job import parse_fault
job = make_job(loggers={loggers!r})
c = ephemeron.configure(job, workers=3, batch_size=24, checkpoint_every=4)
ephemeron.train(job, c, faults=[parse_fault(f"delay:rank={{r}},factor=60") for r in range(3)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_every_backend_has_a_run_of_two_clients_whole(
    ends: signal.Signals, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client is interrupted or killed, and another one resumes the run or attaches to it."""
    for package in ("tensorboard", "mlflow", "wandb"):
        pytest.importorskip(package, reason=f"pip install 'ephemeron[{package}]'")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    loggers = ["csv", "tensorboard", {"name": "mlflow", "tracking_uri": uri}, {"name": "wandb", "mode": "offline"}]
    code = CLIENT.format(tests=str(Path(__file__).parent), loggers=loggers)
    own = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}  # a process of W&B that serves this test process
    client = subprocess.Popen([sys.executable, "-c", code], env={**own, "EPHEMERON_HOME": str(home)})
    wait_until(lambda: any(_logged(p) for p in home.glob("runs/*/loggers.json")), client, "the client")
    client.send_signal(ends)
    client.wait(180)
    (folder,) = (RunFolder(p) for p in (home / "runs").iterdir())
    again = ephemeron.resume if ends is signal.SIGINT else ephemeron.attach
    assert again(folder.run_id).finished

    expected = losses(folder)
    ids = {r["name"]: r["logged_as"] for r in json.loads((folder.path / "loggers.json").read_text())["loggers"]}
    stored = {
        "csv": of_csv(folder.path),
        "tensorboard": of_tensorboard(folder.path / "tensorboard"),
        "mlflow": of_mlflow(uri, ids["mlflow"]),
    }
    if ends is signal.SIGINT:  # W&B's own process, which dies with a killed client, keeps part of what it was told
        stored["wandb"] = of_wandb(folder.path, ids["wandb"])
    for name, found in stored.items():
        points = found.metrics["train/loss"]
        if ends is signal.SIGINT:  # what a killed client had not saved is logged again
            assert [step for step, _ in points] == list(range(1, 21)), name
        assert dict(points) == pytest.approx(expected, rel=1e-6), name
        assert found.metrics["evaluation/accuracy"], name
        assert found.params["configuration.workers"] == "3", name
    assert stored["mlflow"].status == "FINISHED"


def _logged(records: Path) -> bool:
    """Whether a logger has logged four steps, and MLflow has made its tables, which it cannot go on making after a kill."""
    steps = {r["name"]: r["train"] for r in json.loads(records.read_text())["loggers"]}
    return max(steps.values()) >= 4 and steps.get("mlflow", 0) > 0


@pytest.mark.usefixtures("home")
def test_a_logger_that_cannot_be_made_here_is_left_out_and_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run is resumed where the package of one of its loggers is not installed."""
    folder = train([], epochs=1).folder
    other = {"name": "mlflow", "spec": {"name": "mlflow"}, "logged_as": "abc", "train": 3}
    folder.write("loggers.json", {"loggers": [other]})
    monkeypatch.setattr("ephemeron.training.loggers.registry.find_spec", lambda name: None)
    spec = run_spec(read_header(folder))
    with caplog.at_level(logging.WARNING, logger="ephemeron"):
        chosen = run_logging.continued(folder, ["csv"])
    assert [record.name for _, record in chosen] == ["csv"]
    assert "the run is not logged by mlflow any more: MLflow is not installed" in caplog.text
    with run_logging.logged(folder, spec, chosen, lambda event: None):
        pass
    stored = json.loads((folder.path / "loggers.json").read_text())["loggers"]
    assert [(r["name"], r["logged_as"]) for r in stored] == [("mlflow", "abc"), ("csv", str(folder.path))]


def _started(workers: int = 2) -> RunStarted:
    return RunStarted(t=0.0, run_id="r", job="j", workers=workers, aggregators=1, memory_mb=1, iterations=10, epochs=2, samples=10)


def _progress(rank: int, iteration: int, loss: float, *, samples: int = 1, attempt: int = 0, **metrics: float) -> Progress:
    return Progress(
        t=iteration + rank / 10,
        rank=rank,
        attempt=attempt,
        iteration=iteration,
        epoch=0,
        samples=samples,
        loss=loss,
        version=iteration,
        metrics=metrics,
    )


def test_metrics_are_weighted_by_the_samples_of_the_ranks_that_report_them() -> None:
    merger = StepMerger()
    assert merger.feed(_started(3)) is None
    assert merger.feed(_progress(0, 0, 1.0, samples=3, hits=0.5)) is None
    assert merger.feed(_progress(1, 0, 5.0, samples=1)) is None
    assert merger.feed(_progress(2, 0, math.nan, samples=0)) == StepMetrics(
        step=1, epoch=0.2, t=0.2, split="train", metrics={"loss": 2.0, "hits": 0.5}
    )
    merger.feed(_progress(0, 1, math.nan))
    merger.feed(_progress(1, 1, 1.0))
    row = merger.feed(_progress(2, 1, 1.0))
    assert row is not None
    assert math.isnan(row.metrics["loss"])


def test_the_highest_attempt_counts_and_complete_rows_come_once_per_session() -> None:
    merger = StepMerger()
    merger.feed(_started())
    merger.feed(_progress(0, 0, 1.0))
    merger.feed(_progress(0, 0, 3.0, attempt=1))
    merger.feed(_progress(0, 0, 9.0))
    row = merger.feed(_progress(1, 0, 1.0))
    assert row is not None
    assert row.metrics == {"loss": 2.0}
    assert merger.feed(_progress(1, 0, 7.0, attempt=1)) is None
    assert merger.feed(_progress(0, 0, 7.0, attempt=2)) is None
    merger.feed(_started())
    merger.feed(_progress(0, 0, 4.0, attempt=3))
    again = merger.feed(_progress(1, 0, 6.0, attempt=3))
    assert again is not None
    assert again.metrics == {"loss": 5.0}


def test_evaluations_are_merged_from_sums_unless_functions_have_merged_them() -> None:
    def evaluated(rank: int, iteration: int) -> Evaluated:
        sums = {"loss": (2.0 + rank, 2.0), "accuracy": None if rank else (1.0, 2.0)}
        return Evaluated(t=1.0 + rank, rank=rank, attempt=0, epoch=1, iteration=iteration, samples=2, sums=sums)

    merger = StepMerger()
    merger.feed(_started())
    assert merger.feed(evaluated(0, 5)) is None
    assert merger.feed(evaluated(1, 5)) == StepMetrics(step=5, epoch=1.0, t=2.0, split="evaluation", metrics={"loss": 1.25})
    measured = Measured(t=3.0, rank=0, attempt=0, epoch=2, iteration=10, metrics={"loss": 1.0, "auc": 0.5, "f1": None})
    assert merger.feed(evaluated(0, 10)) is None
    assert merger.feed(measured) == StepMetrics(step=10, epoch=2.0, t=3.0, split="evaluation", metrics={"loss": 1.0, "auc": 0.5})
    assert merger.feed(measured) is None
    assert merger.feed(evaluated(1, 10)) is None


TASK = """
import math
import torch
import ephemeron

class Guess(ephemeron.Task):
    def model(self):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    def training_step(self, model, batch):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        return {"loss": loss, "largest": inputs.max()}

    def evaluation_end(self, metrics):
        return {**metrics, "perplexity": math.exp(metrics["loss"])}
"""


@pytest.mark.usefixtures("home")
def test_metrics_that_functions_merge_themselves_are_logged_once(tmp_path: Path) -> None:
    """They come after the sums of all ranks."""
    (tmp_path / "guess.py").write_text(TASK)
    job = ephemeron.Job(name="guess", task=Target(target="guess:Guess"), epochs=3, code=(tmp_path,))
    recorder = Recorder()
    c = ephemeron.configure(job, platform="simulated", workers=2, batch_size=200)
    result = ephemeron.train(job, c, loggers=[recorder])
    losses = recorder.points("evaluation/loss")
    steps = [result.summary.iterations * e // 3 for e in (1, 2, 3)]
    assert [step for step, _ in losses] == steps
    assert recorder.points("evaluation/perplexity") == [(step, pytest.approx(math.exp(loss))) for step, loss in losses]
    assert losses[-1][1] == pytest.approx(result.summary.metrics["loss"])
    assert recorder.points("train/largest")
    assert result.metrics.column("evaluation/perplexity") == recorder.points("evaluation/perplexity")
    assert result.metrics.column("train/largest") == recorder.points("train/largest")


def test_a_job_names_loggers_with_options(tmp_path: Path) -> None:
    raw = {"name": "x", "model": "m:f", "loggers": ["csv", {"name": "tensorboard", "folder": "logs"}]}
    assert parse_job(raw, folder=tmp_path).loggers == (LoggerSpec(name="csv"), LoggerSpec(name="tensorboard", folder=tmp_path / "logs"))
    with pytest.raises(JobError, match=r"loggers\[0\].name = 'tensorbord' is not known; use one of csv, tensorboard"):
        parse_job({**raw, "loggers": ["tensorbord"]}, folder=tmp_path)
    with pytest.raises(JobError, match="logger csv is given twice"):
        run_logging.chosen(["csv", LoggerSpec(name="csv")])
    with pytest.raises(JobError, match="a logger is a int; give a name, a LoggerSpec or a Logger"):
        run_logging.chosen([3])  # type: ignore[list-item]


@pytest.mark.slow
def test_flags_name_loggers_and_keep_the_options_of_the_job(home: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        'model = "tiny:mlp"\nepochs = 1\n'
        f"code = [{json.dumps(str(CODE))}]\n"
        'loggers = [{ name = "csv", folder = "logs" }, "tensorboard"]\n[data]\nsource = "digits"\n'
    )
    arguments = ["train", str(job), "--platform", "simulated", "--workers", "2", "--batch-size", "200", "--logger", "csv"]
    ended = CliRunner().invoke(main, arguments)
    assert ended.exit_code == 0, ended.output
    (run,) = (home / "runs").iterdir()
    assert of_csv(tmp_path / "logs" / run.name).metrics["train/loss"]
    assert not (run / "tensorboard").exists()
