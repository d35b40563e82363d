"""A training program as a function has it: the task with its model, optimisers and schedulers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError
from ephemeron.training.job import Target, TrainingOptions
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.job_task import JobTask
from ephemeron.training.task.losses import make_loss
from ephemeron.training.task.optimizers import Scheduled, optimizers_of
from ephemeron.training.task.schedulers import scheduler_for
from ephemeron.training.task.task import Task, task_of
from ephemeron.training.task.tensors import seed_torch
from ephemeron.user_code import guarded, line_of

Resolve = Callable[[str], Any]


class ProgramSource(Protocol):
    """What names a program: a job, or the specification of a run."""

    @property
    def task(self) -> Target | None: ...
    @property
    def script(self) -> object | None: ...
    @property
    def model(self) -> Target: ...
    @property
    def loss(self) -> Target: ...
    @property
    def optimizer(self) -> Target: ...
    @property
    def options(self) -> TrainingOptions: ...
    @property
    def seed(self) -> int: ...
    @property
    def dtype(self) -> str: ...


@dataclass(slots=True, kw_only=True)
class Program:
    """A program, ready to compute."""

    task: Task
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Scheduled] = ()
    options: TrainingOptions = field(default_factory=TrainingOptions)
    epoch_length: int = 0
    """Optimiser steps of an epoch; 0: epochs do not matter."""
    epoch_start: tuple[int, int] = (0, 0)
    """An epoch from which on epochs have this length, and the optimiser steps before it."""

    def ends_epoch(self, steps: int, every: int) -> bool:
        """Whether an epoch ends after so many optimiser steps, and the number of epochs is divisible by `every`."""
        if self.epoch_length == 0:
            return False
        epoch, before = self.epoch_start
        number, rest = divmod(steps - before, self.epoch_length)
        return rest == 0 and (epoch + number) % every == 0

    @property
    def takes_turns(self) -> bool:
        """Whether each iteration steps one of several optimisers."""
        return len(self.optimizers) > 1 and "optimizer_index" in inspect.signature(self.task.training_step).parameters


def task_from(source: ProgramSource, folders: Sequence[Path]) -> Task:
    """The task of a job or a specification.

    Raises:
        JobError: it cannot be imported, raises, or is no task.
    """
    if source.script is not None:
        raise JobError(
            "the model of a script is made by the script, and cannot be built without it",
            remedy="load result.state_dict(), or the weights file, into a model of your own",
        )
    find = partial(resolve, folders=folders)
    if source.task is None:
        make = partial(make_model, source.model, find, seed=source.seed, dtype=source.dtype)
        return JobTask(make, make_loss(source.loss, find), source.optimizer)
    found = find(source.task.target)
    return task_of(partial(found, **source.task.options) if source.task.options else found, source.task.target)


def model_of(task: Task, source: ProgramSource) -> nn.Module:
    """The task's model, initialised under the job's seed, in the job's dtype.

    Raises:
        JobError: it raises, returns no module, or has a complex parameter.
    """
    if isinstance(task, JobTask):
        return task.model()
    return built(task.model, f"of task {type(task).__name__}", seed=source.seed, dtype=source.dtype)


def program_of(
    source: ProgramSource, *, folders: Sequence[Path], epoch_length: int, epochs: int, learning_rate_factor: float = 1.0
) -> Program:
    """Builds everything that a function computes with.

    Args:
        source: names the program.
        folders: of the user's code.
        epoch_length: optimiser steps of an epoch.
        epochs: of the run.
        learning_rate_factor: factor of all learning rates (linear scaling rule).

    Raises:
        JobError: the model, loss, optimiser or scheduler cannot be made.
    """
    task = task_from(source, folders)
    task.total_steps, task.total_epochs = epoch_length * epochs, epochs
    model = model_of(task, source)
    return with_optimizers(
        task,
        model,
        source.options,
        find=partial(resolve, folders=folders),
        epoch_length=epoch_length,
        epochs=epochs,
        learning_rate_factor=learning_rate_factor,
    )


def with_optimizers(
    task: Task,
    model: nn.Module,
    options: TrainingOptions,
    *,
    find: Resolve,
    epoch_length: int,
    epochs: int,
    learning_rate_factor: float = 1.0,
) -> Program:
    """The program of a task whose model is built. See `program_of`."""
    trainable(model)
    with eager_optimizers():
        try:
            with guarded():
                returned = task.optimizers(model)
        except JobError:
            raise
        except Exception as e:
            raise JobError(f"optimizers of {type(task).__name__} raised {line_of(e)}") from e
        optimizers, schedulers = optimizers_of(returned, f"optimizers of {type(task).__name__}")
        _check_owners(model, optimizers)
        if learning_rate_factor != 1.0:
            if schedulers:
                raise JobError("scale_learning_rate with schedulers of the task's own", remedy="scale them in the task's optimizers")
            for group in (g for o in optimizers for g in o.param_groups):
                group["lr"] *= learning_rate_factor
        if options.scheduler is not None and not schedulers:
            schedulers = [
                scheduler_for(options.scheduler, o, i, resolve=find, steps=epoch_length * epochs, epochs=epochs)
                for i, o in enumerate(optimizers)
            ]
    return Program(task=task, model=model, optimizers=optimizers, schedulers=schedulers, options=options, epoch_length=epoch_length)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that are trained, by name; tied ones once.

    Raises:
        JobError: there are none.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise JobError("the model has no trainable parameter", remedy="leave requires_grad of some of them True")
    return named


def _check_owners(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuses optimisers of tensors that are no parameters of the model: they would not be exchanged."""
    own = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(id(p) not in own for p in group["params"]):
                raise JobError(
                    f"optimizer {type(optimizer).__name__} has a parameter that is not in the model",
                    remedy="make it an attribute of the module that model() returns, so that functions exchange it",
                )


def make_model(target: Target, resolve: Resolve, *, seed: int, dtype: str) -> nn.Module:
    """The user's module, initialised under the job's seed, in the job's dtype.

    Raises:
        JobError: the function does not return a module, or raises; or a parameter is complex.
    """
    function = resolve(target.target)
    return built(partial(function, **target.options), target.target, seed=seed, dtype=dtype)


def built(make: Callable[[], object], name: str, *, seed: int, dtype: str) -> nn.Module:
    """The module that a function returns, made under a seed, in a dtype. See `make_model`."""
    outside = torch.get_rng_state()
    seed_torch(seed % 2**64)  # any integer is a seed, as it is for the data
    try:
        with guarded():
            model = make()
    except JobError:
        raise
    except Exception as e:
        raise JobError(f"model {name} raised {line_of(e)}") from e
    finally:
        torch.set_rng_state(outside)
    if not isinstance(model, nn.Module):
        raise JobError(f"model {name} returned {type(model).__name__}", remedy="return a torch.nn.Module")
    for parameter, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise JobError(
                f"parameter {parameter} of {name} has no shape yet: its module is a lazy one, which learns it from its first batch",
                remedy="give the module its input size, or call the model once on an example before it is returned",
            )
        if p.is_complex():  # as part of a vector of real numbers it would lose its imaginary part
            raise JobError(
                f"parameter {parameter} of {name} is {p.dtype}, and functions exchange real numbers only",
                remedy="keep real and imaginary parts in one real parameter, and use torch.view_as_complex of it",
            )
    return model.double() if dtype == "float64" else model
