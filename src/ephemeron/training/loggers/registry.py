"""Loggers by name."""

from __future__ import annotations

from importlib.util import find_spec

from ephemeron.errors import JobError, MissingExtra
from ephemeron.training.job import LOGGERS, LoggerSpec
from ephemeron.training.loggers.logger import Logger

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
            from ephemeron.training.loggers.csv_logs import CSVLogger

            return CSVLogger(spec.folder)
        case "tensorboard":
            from ephemeron.training.loggers.tensorboard import TensorBoardLogger

            return TensorBoardLogger(spec.folder)
        case "mlflow":
            from ephemeron.training.loggers.mlflow import MLFlowLogger

            return MLFlowLogger(tracking_uri=spec.tracking_uri, experiment=spec.experiment)
        case "wandb":
            from ephemeron.training.loggers.wandb import WandbLogger

            return WandbLogger(project=spec.project, entity=spec.entity, mode=spec.mode, folder=spec.folder)
