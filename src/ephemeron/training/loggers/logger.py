"""The port of loggers. Its methods have the names that Lightning, MLflow and Weights & Biases agree on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Param: TypeAlias = str | int | float | bool
Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The run that is to be logged."""

    run_id: str
    """Name of the run."""
    job: str
    """Name of the job."""
    folder: Path
    """Folder of the run."""
    logged_as: str | None = None
    """What `start` returned when this run was logged before, which is to be continued; None: it has not been logged."""


class Logger(ABC):
    """A program that records a run.

    All methods are called from one thread, which is not the one that drives the run, in this order: `start`, then any of
    `log_params`, `log_metrics`, `log_artifact` and `save`, then `finish`. They may raise and may be slow: the run goes on without
    a logger that raises, and does not wait for a slow one. A run that is resumed is logged by another object, whose
    `start` is told what the first one returned. What was logged before the last `save` is not logged again.
    """

    name: str = ""
    """Name in messages and in the run's record; by default that of the class."""

    def start(self, run: LoggedRun) -> str:
        """Begins to log a run, or continues with it.

        Returns:
            What finds the logged run again: an id or a path.
        """
        return run.run_id

    @abstractmethod
    def log_params(self, params: Mapping[str, Param]) -> None:
        """Records what was chosen for the run: job and configuration, by dotted name, such as `optimizer.lr`. Called once."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Records metrics by name, such as `train/loss`.

        Args:
            metrics: numbers, which may be NaN.
            step: iterations completed. It does not decrease for metrics of one name.
        """

    def log_artifact(self, path: Path) -> None:
        """Records a file of the run: its plan, its bill (`result.json`), its report as a page and as a picture."""

    def save(self) -> None:
        """Stores everything logged so far where a crash does not lose it. Called when nothing else is to be logged for now."""

    def finish(self, status: Status) -> None:
        """Ends logging. The run may be resumed if it was stopped or has failed."""
