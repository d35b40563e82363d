"""Each logger against its own backend: what was logged is read back from files or a database, also after a second session."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from stored import Stored, of_csv, of_mlflow, of_tensorboard, of_wandb, same

from ephemeron.errors import JobError, MissingExtra, UserError
from ephemeron.training.job import LOGGERS, LoggerSpec
from ephemeron.training.loggers import LoggedRun, make_logger

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc000000301010018dd8db0"
    "0000000049454e44ae426082"
)
PARAMS = {"optimizer.lr": 0.1, "model.target": "tiny:mlp", "epochs": 3, "compile": False}


@dataclass
class Backend:
    """A logger and the way to read what it has stored."""

    name: str
    spec: LoggerSpec
    read: Callable[[str], Stored]
    """From what `start` returned."""


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow's, whose creation takes seconds."""
    mlflow = pytest.importorskip("mlflow", reason="pip install 'ephemeron[mlflow]'")
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.slow) if n in ("mlflow", "wandb") else n for n in LOGGERS])
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    name: str = request.param
    if name != "csv":
        pytest.importorskip(name, reason=f"pip install 'ephemeron[{name}]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    match name:
        case "csv":
            return Backend(name, LoggerSpec(name="csv", folder=tmp_path / "logs"), lambda at: of_csv(Path(at)))
        case "tensorboard":
            spec = LoggerSpec(name="tensorboard", folder=tmp_path / "logs")
            return Backend(name, spec, lambda at: of_tensorboard(Path(at)))
        case "mlflow":
            shutil.copy(request.getfixturevalue("empty_database"), tmp_path / "mlflow.db")
            return Backend(name, LoggerSpec(name="mlflow", tracking_uri=uri), lambda at: of_mlflow(uri, at))
        case _:
            spec = LoggerSpec(name="wandb", folder=tmp_path / "logs", project="tests")
            return Backend(name, spec, lambda at: of_wandb(tmp_path / "logs", at))


def run(folder: Path, logged_as: str | None = None) -> LoggedRun:
    return LoggedRun(run_id="tiny-1", job="tiny", folder=folder, logged_as=logged_as)


def test_what_is_logged_is_stored(backend: Backend, tmp_path: Path) -> None:
    files = {"report.png": PNG, "result.json": json.dumps({"cost_usd": 0.5}).encode(), "report.html": b"<p>report</p>"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    logger = make_logger(backend.spec)
    at = logger.start(run(tmp_path))
    logger.log_params(PARAMS)
    logger.log_metrics({"train/loss": 2.5, "epoch": 0.5}, 1)
    logger.log_metrics({"train/loss": math.nan, "epoch": 1.0}, 2)
    logger.log_metrics({"evaluation/loss": 1.5, "evaluation/accuracy": 0.75}, 2)
    logger.save()
    for name in files:
        logger.log_artifact(tmp_path / name)
    logger.finish("finished")

    stored = backend.read(at)
    assert same(stored.metrics["train/loss"], [(1, 2.5), (2, math.nan)])
    assert same(stored.metrics["epoch"], [(1, 0.5), (2, 1.0)])
    assert stored.metrics["evaluation/accuracy"] == [(2, 0.75)]
    assert stored.params == {name: str(value) for name, value in PARAMS.items()}
    wanted = {"csv": set(), "tensorboard": {"report.png", "result.json"}}.get(backend.name, set(files))
    assert stored.artifacts == wanted
    assert stored.status == {"mlflow": "FINISHED", "wandb": "0"}.get(backend.name, "")


def test_a_second_session_continues_the_run(backend: Backend, tmp_path: Path) -> None:
    first = make_logger(backend.spec)
    at = first.start(run(tmp_path))
    first.log_params(PARAMS)
    first.log_metrics({"train/loss": 3.0}, 1)
    first.save()
    first.finish("stopped")

    second = make_logger(backend.spec)
    assert second.start(run(tmp_path, logged_as=at)) == at
    second.log_metrics({"train/loss": 2.0, "train/perplexity": 8.0}, 2)
    second.save()
    second.finish("finished")

    stored = backend.read(at)
    assert stored.metrics["train/loss"] == [(1, 3.0), (2, 2.0)]
    assert stored.metrics["train/perplexity"] == [(2, 8.0)]
    assert stored.params == {name: str(value) for name, value in PARAMS.items()}
    assert stored.status == {"mlflow": "FINISHED", "wandb": "0"}.get(backend.name, "")


def test_csv_keeps_what_a_killed_client_wrote_without_the_line_that_was_cut_off(tmp_path: Path) -> None:
    first = make_logger("csv")
    first.start(run(tmp_path))
    first.log_params(PARAMS)
    first.log_metrics({"a": 1.0, "b": 2.0}, 1)
    first.save()
    with (tmp_path / "metrics.csv").open("a") as lines:
        lines.write("2,5.0,6")
    second = make_logger("csv")
    second.start(run(tmp_path, logged_as=str(tmp_path)))
    second.log_metrics({"a": 5.0, "c": 7.0}, 2)
    second.finish("finished")
    assert of_csv(tmp_path).metrics == {"a": [(1, 1.0), (2, 5.0)], "b": [(1, 2.0)], "c": [(2, 7.0)]}


@pytest.mark.slow
def test_wandb_mode_counts_though_wandb_was_used_before_it_was_set(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'ephemeron[wandb]'")
    script = f"""
import os, wandb
wandb.setup()
os.environ["WANDB_MODE"] = "offline"
from pathlib import Path
from ephemeron.training.loggers import LoggedRun, make_logger
logger = make_logger("wandb")
print(logger.start(LoggedRun(run_id="tiny-1", job="tiny", folder=Path({str(tmp_path)!r}), logged_as=None)))
logger.finish("finished")
"""
    without = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=without, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "tiny-1" in ended.stdout


@pytest.mark.slow
def test_mlflow_takes_more_than_a_request_holds_and_names_of_any_kind(empty_database: Path, tmp_path: Path) -> None:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    logger = make_logger(LoggerSpec(name="mlflow", tracking_uri=uri, experiment="mine"))
    at = logger.start(run(tmp_path))
    logger.log_params({f"option.{i}": i for i in range(150)} | {"long": "x" * 300})
    for step in range(1500):
        logger.log_metrics({"train/recall@5": step / 2}, step)
    logger.save()
    logger.finish("failed")
    stored = of_mlflow(uri, at)
    assert stored.metrics == {"train/recall_5": [(step, step / 2) for step in range(1500)]}
    assert stored.params["option.149"] == "149"
    assert stored.params["long"] == "x" * 300
    assert stored.status == "FAILED"


def test_wandb_without_a_key_says_what_to_do_and_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'ephemeron[wandb]'")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="run `wandb login`, or set mode"):
        make_logger(LoggerSpec(name="wandb", folder=tmp_path)).start(run(tmp_path))


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_package_that_is_not_installed_is_named_with_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the package's name, which the backend itself makes beside a job, is not taken for it."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    with pytest.raises(MissingExtra, match=rf"pip install 'ephemeron\[{name}\]'"):
        make_logger(name)


def test_unknown_loggers_options_and_passwords_are_refused() -> None:
    with pytest.raises(JobError, match="logger 'tensorbord' is not known; use one of csv, tensorboard, mlflow, wandb"):
        make_logger("tensorbord")
    with pytest.raises(JobError, match="logger csv has no option tracking_uri, which is of mlflow; csv has folder"):
        LoggerSpec(name="csv", tracking_uri="http://host")
    for scheme in ("https", "postgresql+psycopg2"):
        with pytest.raises(JobError, match="set MLFLOW_TRACKING_URI in the environment"):
            LoggerSpec(name="mlflow", tracking_uri=f"{scheme}://me:sec+ret@host/db")
