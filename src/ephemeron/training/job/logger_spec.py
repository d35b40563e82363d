"""Which loggers record a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, cast, get_args
from urllib.parse import urlsplit

from ephemeron.config.typed import Typed
from ephemeron.errors import JobError

LoggerName = Literal["csv", "tensorboard", "mlflow", "wandb"]
LOGGERS: tuple[str, ...] = get_args(LoggerName)

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "csv": ("folder",),
    "tensorboard": ("folder",),
    "mlflow": ("tracking_uri", "experiment"),
    "wandb": ("project", "entity", "mode", "folder"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerSpec(Typed):
    """A program that records the run. A text is short for a table that has its name only."""

    SHORTHAND: ClassVar[str] = "name"

    name: LoggerName
    """`csv`, `tensorboard`, `mlflow` or `wandb`."""
    folder: Path | None = None
    """csv, tensorboard, wandb: folder in which a folder for the run is made. By default files are in the run's own folder."""
    tracking_uri: str | None = None
    """mlflow: tracking server or database, such as `http://host:5000` or `sqlite:///mlflow.db`. By default MLFLOW_TRACKING_URI."""
    experiment: str | None = None
    """mlflow: experiment to which the run belongs. By default the job's name."""
    project: str | None = None
    """wandb: project to which the run belongs. By default WANDB_PROJECT, or the job's name."""
    entity: str | None = None
    """wandb: user or team."""
    mode: Literal["online", "offline"] | None = None
    """wandb: `offline` writes files, which `wandb sync` uploads. By default WANDB_MODE, or online."""

    def __post_init__(self) -> None:
        Typed.__post_init__(self)
        for f in dataclasses.fields(self):
            if f.name != "name" and getattr(self, f.name) is not None and f.name not in _OPTIONS[self.name]:
                of = " and ".join(logger for logger, options in _OPTIONS.items() if f.name in options)
                raise JobError(
                    f"logger {self.name} has no option {f.name}, which is of {of}",
                    remedy=f"{self.name} has {', '.join(_OPTIONS[self.name])}",
                )
        if self.tracking_uri is not None and urlsplit(self.tracking_uri).password is not None:
            raise JobError(
                "tracking_uri has a password, which would be stored with the run",
                remedy="leave tracking_uri out and set MLFLOW_TRACKING_URI in the environment",
            )

    @classmethod
    def of(cls, name: str) -> LoggerSpec:
        """A logger without options."""
        return cls(name=cast(LoggerName, name))
