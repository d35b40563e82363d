"""Trial of the model on the client: it is built, trained on one small batch and evaluated on another.

What fails here would fail on every function, after it has been paid for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ephemeron.errors import JobError, MissingExtra
from ephemeron.runs.metrics import EvaluationSums
from ephemeron.training.driver.launching.initial_weights import load_initial
from ephemeron.training.driver.launching.memory import Activations, measured
from ephemeron.training.driver.launching.training_data import TRIAL, TrainingData
from ephemeron.training.driver.records import TensorLayout
from ephemeron.training.job import Job, Target
from ephemeron.training.tensors import encode_state
from ephemeron.training.worker.decisions import DecisionState, decide
from ephemeron.training.worker.trainers.factory import rank_seed
from ephemeron.user_code import guarded, where_raised

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ephemeron.training.driver.launching.script_changes import Variable
    from ephemeron.training.task.task import Task
    from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer


_ROUNDING = 1e-3
"""Relative difference of two losses that rounding may explain."""


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
    optimizers: tuple[Target, ...] = ()
    """Class, learning rate and momentum of every parameter group."""
    takes_turns: bool = False
    """Whether each iteration steps one of several optimisers."""
    note: str = ""
    """Remarks on initial weights and on state that is not saved, for the reader of the run's output."""
    shares_evaluations: bool = False
    """Whether functions have to merge their evaluations."""
    undivided: str = ""
    """Why a batch that is divided among functions is not the batch as a whole; empty: nothing was found."""


def layout_of(model: nn.Module) -> tuple[TensorLayout, ...]:
    """Parameters and buffers of a model in their order. Checkpoints fit models of the same layout."""
    return tuple(
        TensorLayout(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."), trained=t.requires_grad)
        for n, t in (*model.named_parameters(), *model.named_buffers())
    )


def trial_of(job: Job, data: TrainingData, smallest: tuple[int, str] = (TRIAL, ""), *, epoch_length: int = 1) -> Trial:
    """Tries a job's program on its data.

    Args:
        epoch_length: iterations of an epoch.
        smallest: the smallest batch of any function, and which function has it, for messages.

    Raises:
        JobError: it cannot be built, does not accept the data, or cannot be evaluated.
        MissingExtra: PyTorch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtra("PyTorch", "torch") from None
    from ephemeron.training.driver.launching.script_changes import attributes
    from ephemeron.training.task.program import program_of
    from ephemeron.training.task.task import Task
    from ephemeron.training.task.tensors import model_arrays
    from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer

    program = program_of(job, folders=job.code, epoch_length=epoch_length, epochs=job.epochs)
    model = program.model
    note = "" if job.init is None else f"init {load_initial(model, job.init)}"
    layout = layout_of(model)
    fresh, notes = model_arrays(model)
    trainer = TorchTrainer(program, feed=data.trial(), exchange="gradients", sampler=_First(), seed=rank_seed(job.seed, 0))
    activations = Activations()
    doing = "does not accept the data"
    try:
        batch = trainer.feed.batch(trainer.sampler, 0)
        before = attributes(program.task, model)
        for turn in range(len(program.optimizers) if program.takes_turns else 1):
            with guarded(), measured(model, max(1, batch.samples), activations):
                step = trainer.compute(turn)
            with guarded():
                trainer.apply(step.vector.copy())
        unsaved = _unsaved(program.task, before, attributes(program.task, model))
        with guarded():
            doing = "trains, but cannot be evaluated"
            evaluation = trainer.evaluate()
            doing = "trains, but its state cannot be saved"
            trainer.state()
    except JobError as e:
        raise JobError(f"{_name(job)} {doing}: {e.problem}", remedy=e.remedy) from e
    except Exception as e:
        raise JobError(
            f"{_name(job)} {doing}: {data.described()} raised {where_raised(e, job.code)}",
            remedy="check the model's input size, the loss and the labels",
        ) from e
    overrides = type(program.task).evaluation_end is not Task.evaluation_end
    decides = job.options.decides or any(s.monitor is not None for s in program.schedulers)
    if evaluation.samples:
        _check_monitors(job, trainer, evaluation)
    elif decides:
        raise JobError(
            "early_stopping, keep_best and schedulers with a monitor need evaluation data, and there is none",
            remedy="give evaluation data, or data.test_fraction above 0",
        )
    if smallest[0] == 1:
        _try_one(trainer, data, job, smallest[1])
    undivided = "" if job.options.compile else _undivided(trainer, data)
    states = [s for o in program.optimizers for s in o.state.values()]
    held = sum(t.numel() for s in states for t in s.values() if isinstance(t, torch.Tensor))
    copies = round(held / max(1, trainer.size))
    return Trial(
        initial=encode_state(fresh, notes),
        model_bytes=trainer.size * trainer.dtype.itemsize,
        optimizer_copies=copies,
        layout=layout,
        note="; ".join(filter(None, (note, unsaved))),
        activations=activations,
        state_bytes=sum(a.nbytes for a in fresh.values()),
        optimizers=tuple(described_optimizer(o, group) for o in program.optimizers for group in o.param_groups),
        takes_turns=program.takes_turns,
        shares_evaluations=decides or overrides or bool(evaluation.states),
        undivided=undivided,
    )


def described_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Target:
    """Learning rate without the factor of its scheduler, and momentum."""
    options = {"lr": group.get("initial_lr", group.get("lr", 0.0)), "momentum": group.get("momentum", 0.0)}
    return Target(target=type(optimizer).__name__, options={k: float(v) for k, v in options.items()})


def _name(job: Job) -> str:
    return f"{'model' if job.task is None else 'task'} {job.program.target}"


def _check_monitors(job: Job, trainer: TorchTrainer, evaluation: EvaluationSums) -> None:
    """Refuses names of metrics that the program does not report."""
    metrics = trainer.metrics([evaluation])
    trainer.take_metrics(metrics)
    decide(job.options, DecisionState(), metrics, 0)


class _First:
    """Positions of the trial batch."""

    def batch(self, iteration: int) -> np.ndarray:
        return np.arange(TRIAL)


def _unsaved(task: Task, before: Mapping[str, Variable], after: Mapping[str, Variable]) -> str:
    """A remark on what changes on a task while it trains, and is in no checkpoint."""
    from ephemeron.training.driver.launching.script_changes import changed, described
    from ephemeron.training.task.task import StatefulTask

    names = (
        []
        if isinstance(task, StatefulTask) or type(task).__module__.startswith("ephemeron.")
        else [name for name in before if any(name in kind for kind in changed(before, after))]
    )
    if not names:
        return ""
    one = len(names) == 1
    return (
        f"{described(names, after)} change{'s' if one else ''} while the task trains, and a replaced function begins with the first "
        f"value{'' if one else 's'}: give the task state_dict() and load_state_dict() if {'it matters' if one else 'they matter'}"
    )


def _undivided(trainer: TorchTrainer, data: TrainingData) -> str:
    """What is wrong with the loss of the trial batch, if its halves do not make up the whole."""
    from ephemeron.training.task.part_report import merged_loss

    batch = data.trial().batch(_First(), 0)
    found = None if batch.samples < 2 else merged_loss(trainer.program.task, trainer.model, trainer.tensors(batch.data), batch.samples)
    if found is None or math.isclose(*found, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        return ""
    return (
        f"the loss of {batch.samples} samples is {found[0]:.6g}, and of its halves together {found[1]:.6g}: a batch that is divided "
        "(workers, accumulate) trains otherwise than as a whole; let training_step return {'loss': mean, 'weight': number of its "
        "terms} or {'loss': sum, 'reduction': 'sum'}"
    )


def _try_one(trainer: TorchTrainer, data: TrainingData, job: Job, where: str) -> None:
    """Tries a batch of one sample, which models with batch statistics may not accept."""
    trainer.feed = data.trial(1)
    try:
        with guarded():
            trainer.compute(0)
    except Exception as e:
        raise JobError(
            f"{_name(job)} does not accept a batch of one sample, and {where}: {where_raised(e, job.code)}",
            remedy='set last_batch = "drop" or "merge" in [data], or choose other batches or workers',
        ) from e
