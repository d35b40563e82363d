"""MLflow, through its client: no global run, so that runs of one process do not mix."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ephemeron.training.loggers.logger import LoggedRun, Logger, Param, Status

if TYPE_CHECKING:
    from mlflow.entities import Metric

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
