"""A module and a callback of Lightning for the tests of loaders, in a file that is imported when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as lightning
from loader_kinds import ids, loss, model


class Fit(lightning.LightningModule):
    """Notes which samples it was given, epoch by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = []

    def on_train_epoch_start(self) -> None:
        self.trained.append([])

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if not self.trained:
            self.trained.append([])  # resumed in mid-epoch
        self.trained[-1] += ids(batch)
        return loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        self.validated[-1] += ids(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Save(lightning.Callback):
    """A checkpoint after so many steps, and no further ones."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True
