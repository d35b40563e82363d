"""Trial of the model on the client: it is built, trained on one small batch and evaluated on another.

What fails here would fail on every function, after it has been paid for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError, MissingExtra
from ephemeron.training.driver.memory import Activations, measured
from ephemeron.training.driver.records import TensorLayout
from ephemeron.training.driver.training_data import TRIAL, TrainingData
from ephemeron.training.job import Job
from ephemeron.training.tensors import encode_state
from ephemeron.training.worker.factory import rank_seed

if TYPE_CHECKING:
    from torch import nn

    from ephemeron.training.worker.torch_trainer import TorchTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Sizes of a model that has passed the trial."""

    initial: bytes
    """State of the model before the first step."""
    model_bytes: int
    """S_m: bytes of the exchanged vector."""
    optimizer_copies: int
    """Vectors of that size in the optimiser's state."""
    layout: tuple[TensorLayout, ...]
    """Parameters and buffers in their order."""
    activations: Activations
    state_bytes: int
    """Bytes of parameters and buffers."""


def layout_of(model: nn.Module) -> tuple[TensorLayout, ...]:
    """Parameters and buffers of a model in their order. Checkpoints fit models of the same layout."""
    return tuple(
        TensorLayout(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."), trained=t.requires_grad)
        for n, t in (*model.named_parameters(), *model.named_buffers())
    )


def trial_of(job: Job, data: TrainingData, smallest: tuple[int, str] = (TRIAL, "")) -> Trial:
    """Tries a job's model on its data.

    Args:
        smallest: the smallest batch of any function, and which function has it, for messages.

    Raises:
        JobError: it cannot be built, does not accept the data, or cannot be evaluated.
        MissingExtra: PyTorch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtra("PyTorch", "torch") from None
    from ephemeron.training.worker.losses import make_loss
    from ephemeron.training.worker.torch_state import model_arrays
    from ephemeron.training.worker.torch_trainer import TorchTrainer, make_model, make_optimizer

    find = partial(resolve, folders=job.code)
    model = make_model(job.model, find, seed=job.seed, dtype=job.dtype)
    layout = layout_of(model)
    fresh, notes = model_arrays(model)
    trainer = TorchTrainer(
        model=model, loss=make_loss(job.loss, find), optimizer=make_optimizer(job.optimizer, model),
        feed=data.trial(), exchange="gradients", sampler=_First(), seed=rank_seed(job.seed, 0),
    )  # fmt: skip
    activations = Activations()
    doing = "does not accept the data"
    try:
        batch = trainer.feed.batch(trainer.sampler, 0)
        with measured(model, max(1, batch.samples), activations):
            step = trainer.compute(0)
        trainer.apply(step.vector.copy())
        doing = "trains, but cannot be evaluated"
        trainer.evaluate()
    except Exception as e:
        raise JobError(
            f"model {job.model.target} {doing}: {data.described()} "
            f"raised {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}",
            remedy="check the model's input size, the loss and the labels",
        ) from e
    if smallest[0] == 1:
        _try_one(trainer, data, job, smallest[1])
    held = sum(t.numel() for s in trainer.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    copies = round(held / max(1, trainer.size))
    return Trial(
        initial=encode_state(fresh, notes), model_bytes=trainer.size * trainer.dtype.itemsize, optimizer_copies=copies,
        layout=layout, activations=activations, state_bytes=sum(a.nbytes for a in fresh.values()),
    )  # fmt: skip


class _First:
    """Positions of the trial batch."""

    def batch(self, iteration: int) -> np.ndarray:
        return np.arange(TRIAL)


def _try_one(trainer: TorchTrainer, data: TrainingData, job: Job, where: str) -> None:
    """Tries a batch of one sample, which models with batch statistics may not accept."""
    trainer.feed = data.trial(1)
    try:
        trainer.compute(0)
    except Exception as e:
        raise JobError(
            f"model {job.model.target} does not accept a batch of one sample, and {where}: "
            f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}",
            remedy='set last_batch = "drop" or "merge" in [data], or choose other batches or workers',
        ) from e
