"""Loggers by name, one class for each program that records runs; its package is imported when it is used."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, cast

from ephemeron.errors import JobError, MissingExtra, UserError
from ephemeron.training.job import LOGGERS, LoggerSpec
from ephemeron.training.loggers.logger import LoggedRun, Logger, Param, Status

if TYPE_CHECKING:
    from mlflow.entities import Metric


Mode = Literal["online", "offline", "disabled", "shared"]
STEP = "iteration"
"""Name of the metric that is the axis of all others: metrics may then arrive in any order."""


class WandbLogger(Logger):
    """A run of a project. Offline, it is a folder that `wandb sync` uploads.

    Args:
        project: to which the run belongs; None: WANDB_PROJECT, or the job's name.
        entity: user or team; None: the default one.
        mode: None: WANDB_MODE, or online.
        folder: in which files are written; None: WANDB_DIR, or the run's own folder.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._project, self._entity, self._mode, self._folder = project, entity, mode, folder

    def start(self, run: LoggedRun) -> str:
        import wandb

        mode = self._mode or cast(Mode, os.environ.get("WANDB_MODE") or "online")  # W&B itself reads it only once
        if mode == "online" and not wandb.login(prompt=False):
            raise UserError('there is no API key: run `wandb login`, or set mode = "offline"')
        folder = self._folder or Path(os.environ.get("WANDB_DIR") or run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project or os.environ.get("WANDB_PROJECT") or run.job,
            entity=self._entity,
            mode=mode,
            name=run.run_id,
            id=run.logged_as or run.run_id,
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        return str(self._run.id)

    def log_params(self, params: Mapping[str, Param]) -> None:
        self._run.config.update(dict(params), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, STEP: step})

    def log_artifact(self, path: Path) -> None:
        import wandb

        if path.suffix == ".png":
            self._run.log({path.stem: wandb.Image(str(path))})
        else:
            copied = shutil.copy2(path, self._run.dir)  # where W&B looks for files of the run
            self._run.save(copied, base_path=self._run.dir, policy="now")

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class TensorBoardLogger(Logger):
    """Scalars, parameters (for the HPARAMS page), the report's picture, and the plan and the bill as text.

    Args:
        folder: in which a folder for the run is made; None: `tensorboard` in the run's own folder.
    """

    name = "tensorboard"

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._step = 0

    def start(self, run: LoggedRun) -> str:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" if self._folder is None else self._folder / run.run_id
        place = str(folder) if run.logged_as is None else run.logged_as
        self._writer = SummaryWriter(place)
        return place

    def log_params(self, params: Mapping[str, Param]) -> None:
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(dict(params), {"evaluation/loss": 0.0}):
            self._writer.file_writer.add_summary(summary)
        escaped = {name: str(value).replace("|", "\\|").replace("\n", " ") for name, value in params.items()}
        table = "\n".join(f"| {name} | {value} |" for name, value in escaped.items())
        self._writer.add_text("parameters", f"| name | value |\n|---|---|\n{table}")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._step = max(self._step, step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_artifact(self, path: Path) -> None:
        if path.suffix == ".png":
            import numpy as np
            from PIL import Image

            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self._writer.add_image(path.stem, pixels, self._step, dataformats="HWC")
        elif path.suffix == ".json":
            text = "".join(f"    {line}\n" for line in path.read_text().splitlines())  # Markdown shows it as it is
            self._writer.add_text(path.stem, text, self._step)

    def save(self) -> None:
        self._writer.flush()

    def finish(self, status: Status) -> None:
        self._writer.close()


_METRICS_IN_A_REQUEST, _PARAMS_IN_A_REQUEST = 1000, 100
"""Limits of MLflow's interface."""
_REFUSED = re.compile(r"[^\w\-. :/]")
_STATUS: Mapping[Status, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLFlowLogger(Logger):
    """A run of an MLflow experiment. Metrics that arrive while a request is under way are sent together.

    Args:
        tracking_uri: tracking server or database; None: as MLflow is configured (MLFLOW_TRACKING_URI).
        experiment: to which the run belongs, made if it does not exist; None: the job's name.
    """

    name = "mlflow"

    def __init__(self, *, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        self._uri, self._experiment = tracking_uri, experiment
        self._metrics: list[Metric] = []

    def start(self, run: LoggedRun) -> str:
        from mlflow import MlflowClient

        self._client = MlflowClient(self._uri)
        if run.logged_as is not None:
            self._client.update_run(run.logged_as, status="RUNNING")
            self._run = run.logged_as
            return self._run
        name = self._experiment or run.job
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        made = self._client.create_run(experiment, run_name=run.run_id, tags={"ephemeron.run": run.run_id})
        self._run = str(made.info.run_id)
        return self._run

    def log_params(self, params: Mapping[str, Param]) -> None:
        from mlflow.entities import Param as MlflowParam

        made = [MlflowParam(_REFUSED.sub("_", name), str(value)) for name, value in params.items()]
        for i in range(0, len(made), _PARAMS_IN_A_REQUEST):
            self._client.log_batch(self._run, params=made[i : i + _PARAMS_IN_A_REQUEST])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._metrics += [Metric(_REFUSED.sub("_", name), value, now_ms, step) for name, value in metrics.items()]
        if len(self._metrics) >= _METRICS_IN_A_REQUEST:
            self.save()

    def log_artifact(self, path: Path) -> None:
        self._client.log_artifact(self._run, str(path))

    def save(self) -> None:
        while self._metrics:
            self._client.log_batch(self._run, metrics=self._metrics[:_METRICS_IN_A_REQUEST])
            del self._metrics[:_METRICS_IN_A_REQUEST]

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._run, _STATUS[status])


METRICS_FILE, PARAMS_FILE = "metrics.csv", "params.json"


class CSVLogger(Logger):
    """`metrics.csv` and `params.json`. A new column makes the file be written anew; columns that a line lacks are empty.

    Args:
        folder: in which a folder for the run is made; None: the run's own folder.
    """

    name = "csv"

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._columns: list[str] = ["step"]
        self._file: TextIO | None = None

    def start(self, run: LoggedRun) -> str:
        folder = run.folder if self._folder is None else self._folder / run.run_id
        self._place = folder if run.logged_as is None else Path(run.logged_as)
        self._place.mkdir(parents=True, exist_ok=True)
        self._rewrite(self._columns)
        return str(self._place)

    @property
    def _path(self) -> Path:
        return self._place / METRICS_FILE

    def _rewrite(self, columns: list[str]) -> None:
        """Writes what there is again, without lines that were cut off, with further columns."""
        rows: list[dict[str, str]] = []
        if self._path.exists():
            whole, _, _ = self._path.read_text().rpartition("\n")
            reader = csv.DictReader(io.StringIO(whole, newline=""))
            rows = list(reader)
            columns = list(dict.fromkeys([*(reader.fieldnames or ()), *columns]))
        self._columns = columns
        part = self._path.with_suffix(".part")
        self._close()
        self._file = part.open("w", newline="")
        writer = csv.DictWriter(self._file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        part.replace(self._path)

    def log_params(self, params: Mapping[str, Param]) -> None:
        (self._place / PARAMS_FILE).write_text(json.dumps(params, indent=2) + "\n")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        new = [name for name in metrics if name not in self._columns]
        if new:
            self.save()
            self._rewrite([*self._columns, *new])
        assert self._file is not None
        csv.DictWriter(self._file, self._columns, restval="", lineterminator="\n").writerow({"step": step, **metrics})

    def save(self) -> None:
        if self._file is not None:
            self._file.flush()

    def finish(self, status: Status) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_PACKAGES = {"tensorboard": ("TensorBoard", "tensorboard"), "mlflow": ("MLflow", "mlflow"), "wandb": ("Weights & Biases", "wandb")}
"""By name: what it is called, and the package that it needs, which is also the name of the extra."""


def make_logger(spec: LoggerSpec | str) -> Logger:
    """A logger, which has not started.

    Args:
        spec: its name and options, or its name.

    Raises:
        JobError: there is no such logger.
        MissingExtra: its package is not installed.
    """
    if isinstance(spec, str):
        if spec not in LOGGERS:
            raise JobError(f"logger {spec!r} is not known", remedy=f"use one of {', '.join(LOGGERS)}")
        spec = LoggerSpec.of(spec)
    if spec.name in _PACKAGES:
        what, package = _PACKAGES[spec.name]
        found = find_spec(package)
        if found is None or found.origin is None:  # a folder of that name, which loggers make, is no package
            raise MissingExtra(what, package)
    match spec.name:
        case "csv":
            return CSVLogger(spec.folder)
        case "tensorboard":
            return TensorBoardLogger(spec.folder)
        case "mlflow":
            return MLFlowLogger(tracking_uri=spec.tracking_uri, experiment=spec.experiment)
        case "wandb":
            return WandbLogger(project=spec.project, entity=spec.entity, mode=spec.mode, folder=spec.folder)
