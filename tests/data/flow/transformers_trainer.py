"""A trainer of Hugging Face for the tests of loaders, in a file that is imported when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from loader_kinds import loss, model


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss(self.net(x), y)}


class Trainer(transformers.Trainer):
    """Trains on a loader that it is given, and notes which samples that were."""

    def __init__(self, train: Any, test: Any, folder: Path, **options: Any) -> None:
        arguments = transformers.TrainingArguments(
            str(folder),
            **{"num_train_epochs": 3, "save_steps": 4, "learning_rate": 0.05, "lr_scheduler_type": "constant", **options},
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        super().__init__(model=Net(), args=arguments, eval_dataset=None if test is None else test.dataset)
        self.train_loader, self.test_loader = train, test
        self.trained: list[int] = []
        self.evaluated: list[int] = []
        self.saw = b""

    def get_train_dataloader(self) -> Any:
        return self.train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.test_loader

    def training_step(self, net: Any, inputs: Any, *_: Any) -> Any:
        self.trained += inputs[1].tolist()
        self.saw += inputs[0].numpy().tobytes()
        return super().training_step(net, {"x": inputs[0], "y": inputs[1]}, *_)

    def prediction_step(self, net: Any, inputs: Any, prediction_loss_only: bool, **_: Any) -> Any:
        self.evaluated += inputs[1].tolist()
        return super().prediction_step(net, {"x": inputs[0], "y": inputs[1]}, True)
