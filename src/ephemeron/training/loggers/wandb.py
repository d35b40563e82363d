"""Weights & Biases, through a run of its own that leaves the global one (`wandb.run`) alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from ephemeron.errors import UserError
from ephemeron.training.loggers.logger import LoggedRun, Logger, Param, Status

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
