"""`Task`: a training program in PyTorch's terms. Every hook has a default, which is what a job file does.

    class Classifier(ephemeron.Task):
        def model(self):
            return Net()

        def training_step(self, model, batch):
            inputs, labels = batch
            return torch.nn.functional.cross_entropy(model(inputs), labels)

        def optimizers(self, model):
            return torch.optim.AdamW(model.parameters(), lr=1e-3)

        def train_data(self):
            return MyDataset()

The class must be importable on a function, or be defined in a notebook or script. It is constructed once on the client and
once on every function: keep hooks deterministic, and data that functions cannot reach out of `train_data`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ephemeron.errors import JobError
from ephemeron.training.task.outputs import OutputDir, Outputs
from ephemeron.user_code import guarded, line_of

if TYPE_CHECKING:
    import torch
    from torch import nn


class Task:
    """A training program. Derive from it and override what differs from the defaults."""

    settings: Mapping[str, object] = {}
    """Keys of a job file that this task brings along, such as `{"epochs": 3, "clip_norm": 1.0, "run": {"workers": 4}}`."""
    cast_inputs: bool = True
    """Whether floating-point tensors of a batch are cast to the dtype of the parameters."""
    total_steps: int = 0
    """Optimiser steps of the whole run. Known before `optimizers` is called."""
    total_epochs: int = 0
    """Epochs of the whole run. Known before `optimizers` is called."""
    output_dir = OutputDir()
    """Folder for files that the program writes for its user, such as pictures or logs, 64 MiB at most. Each function has its own,
    which is in its checkpoints; that of worker 0 is `outputs` in the run's folder at the end."""
    is_main: bool = True
    """Whether this is worker 0, which alone does what should be done once, such as to print. Known before `model` is called."""
    global_step: int = 0
    """Optimiser steps before the present one. Known in every hook that is called while training."""

    def model(self) -> nn.Module:
        """The model with its initial weights. Random initialisation draws from the job's seed.

        Parameters whose `requires_grad` is False are neither trained nor exchanged.
        """
        raise JobError(f"task {type(self).__name__} has no model", remedy="define model(self) that returns a torch.nn.Module")

    def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor | Mapping[str, Any]:
        """Loss of a batch.

        Several optimisers take turns, one in each iteration, if this method has a parameter `optimizer_index`; otherwise all
        of them step together.

        Args:
            model: in training mode.
            batch: what the collate function made, on the device: tensors in any nesting. `(inputs, targets)` for arrays.

        Returns:
            The loss, a mean over the batch; or a mapping with `loss`, optionally `weight` (the number of things that loss and numbers
            are means over; by default the samples, or the labels of PyTorch's own `cross_entropy`) or `reduction` ("sum", if
            the loss is the sum over the batch), and further numbers, which are reported.
        """
        inputs, targets = batch
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(inputs), targets)

    def evaluation_step(self, model: nn.Module, batch: Any) -> torch.Tensor | Mapping[str, Any]:
        """Metrics of a batch of the evaluation data. By default those of `training_step`.

        Args:
            model: in evaluation mode, without gradients.
            batch: as in `training_step`.

        Returns:
            The loss, or a mapping of metrics. A number is a mean over the batch (over `weight` things if that is among them); a pair
            `(total, count)` is a sum and the number of its terms; a `torchmetrics.Metric` has been updated with the batch.
        """
        return self.training_step(model, batch)

    def on_step_end(self, model: nn.Module) -> None:
        """Called on every function after each step of the optimisers and schedulers; `global_step` counts it.

        Override it to change the model in other ways, such as to clip weights or to move a target network.

        Args:
            model: with the new weights.
        """

    def on_end(self, model: nn.Module) -> None:
        """Called on worker 0 when the run has ended, also where it ends early; after the last evaluation.

        Args:
            model: with the trained weights.
        """

    def evaluation_end(self, metrics: dict[str, float]) -> Mapping[str, float]:
        """Metrics of the whole evaluation data, from the merged ones. Override it to add those that are no means.

        Args:
            metrics: by name; NaN, of data whose weights sum to 0. Those whose names begin with an underscore are for this hook alone.

        Returns:
            All metrics, such as `{**metrics, "perplexity": math.exp(metrics["loss"])}`.
        """
        return metrics

    def optimizers(self, model: nn.Module) -> Any:
        """Optimisers and learning-rate schedulers.

        Returns:
            An optimiser; a list of them; a pair (optimisers, schedulers); or a mapping with `optimizer` and `lr_scheduler`, or a
            list of such mappings. A scheduler is one of `torch.optim.lr_scheduler`, or a mapping with `scheduler` and
            optionally `interval` (`step` or `epoch`), `frequency` and `monitor`.
        """
        import torch

        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def train_data(self) -> Any:
        """Samples to train on.

        Returns:
            A pair of arrays (inputs, targets), or of a table and a column, of which every function is sent its share; a map-style
            Dataset, a table, files (docs/flows.md) or an `ephemeron.data.Flow`, which functions read themselves; or None: the job's data.
        """
        return None

    def evaluation_data(self) -> Any:
        """Samples to evaluate on, in the same forms; None: a part of the training data is held out (`data.test_fraction`)."""
        return None

    collate: Any = None
    """Method that makes a batch of a list of samples of a dataset; None: `torch.utils.data.default_collate`."""


@runtime_checkable
class StatefulTask(Protocol):
    """A task that changes while it trains: its state travels with checkpoints, beside those of model and optimisers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def task_of(found: Any, target: str) -> Task:
    """A task from what a target names: a class, a function that returns a task, or a task.

    Raises:
        JobError: it is none of these, or raises.
    """
    # Several functions may take turns in a process: each has a task of its own, which counts its own steps.
    made = copy.copy(found) if isinstance(found, Task) else found
    if isinstance(made, Task):
        made.__dict__["_outputs"] = Outputs()
    if not isinstance(found, Task) and callable(found):
        try:
            with guarded():
                made = found()
        except Exception as e:
            raise JobError(f"task {target} raised {line_of(e)}") from e
    if not isinstance(made, Task):
        raise JobError(f"task {target} is a {type(made).__name__}", remedy="name a class that derives from ephemeron.Task")
    return made
