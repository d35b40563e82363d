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
from torch.optim import lr_scheduler

from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError
from ephemeron.training.job import SchedulerSpec, Target, TrainingOptions
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.losses import Loss, make_loss
from ephemeron.training.task.optimizers import Scheduled, check_kind, optimizers_of
from ephemeron.training.task.task import Task, task_of
from ephemeron.training.task.tensors import seed_torch
from ephemeron.user_code import guarded, line_of


class JobTask(Task):
    """`loss(model(inputs), targets)`, with accuracy where the loss is one of classification.

    Args:
        make: builds the model.
        loss: a mean or a sum over the batch.
        optimizer: a name in `torch.optim` and its options.
    """

    def __init__(self, make: Callable[[], nn.Module], loss: Loss, optimizer: Target) -> None:
        self._make, self.loss, self._optimizer = make, loss, optimizer

    def model(self) -> nn.Module:
        return self._make()

    def training_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return self.loss.report(model(inputs), targets)

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        output = model(inputs)
        return {**self.loss.report(output, targets), "accuracy": self.loss.answers(output, targets)}

    def optimizers(self, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_over(self._optimizer, [p for p in model.parameters() if p.requires_grad])


def optimizer_over(target: Target, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimiser of `torch.optim` with its options.

    Raises:
        JobError: no such optimiser, options it refuses, or one that needs a closure.
    """
    cls = getattr(torch.optim, target.target, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        names = sorted(n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer))
        raise JobError(f"optimizer {target.target!r} is not in torch.optim", remedy=f"use one of {', '.join(names)}")
    check_kind(cls)
    make: Callable[..., torch.optim.Optimizer] = cls
    try:
        with eager_optimizers():
            return make(parameters, **target.options)
    except (TypeError, ValueError) as e:
        raise JobError(f"optimizer {target.target} refuses its options: {e}") from None


_LENGTHS = ("T_max", "total_steps", "total_iters")
"""Options that say how long a schedule is."""


def scheduler_for(
    spec: SchedulerSpec, optimizer: torch.optim.Optimizer, number: int, *, resolve: Callable[[str], Any], steps: int, epochs: int
) -> Scheduled:
    """The scheduler of an optimiser.

    Args:
        spec: of the job.
        number: of the optimiser.
        resolve: finds `module:function`.
        steps, epochs: of the whole run.

    Raises:
        JobError: no such scheduler, options that it refuses, or warm-up with interval `epoch`.
    """
    if ":" in spec.target:
        make = resolve(spec.target)
    else:
        make = getattr(lr_scheduler, spec.target, None)
        known = [n for n, c in vars(lr_scheduler).items() if isinstance(c, type) and issubclass(c, lr_scheduler.LRScheduler)]
        if make is None or spec.target not in known:
            names = sorted(n for n in known if not n.startswith("_") and n != "LRScheduler")
            raise JobError(f"scheduler {spec.target!r} is not in torch.optim.lr_scheduler", remedy=f"use one of {', '.join(names)}")
    options = dict(spec.options)
    length = steps if spec.interval == "step" else epochs
    for name in _LENGTHS:
        if name not in options and name in _parameters(make):
            options[name] = max(1, length - spec.warmup_steps)
    try:
        made = make(optimizer, **options)
        if spec.warmup_steps:
            made = _warmed(made, optimizer, spec)
    except (TypeError, ValueError) as e:
        raise JobError(f"scheduler {spec.target} refuses its options: {e}") from None
    plateau = isinstance(made, lr_scheduler.ReduceLROnPlateau)
    monitor = spec.monitor or ("loss" if plateau else None)
    return Scheduled(scheduler=made, optimizer=number, interval=spec.interval, monitor=monitor if plateau else None)


def _warmed(main: Any, optimizer: torch.optim.Optimizer, spec: SchedulerSpec) -> Any:
    if spec.interval != "step":
        raise JobError(f"warmup_steps = {spec.warmup_steps} with interval 'epoch'", remedy='say interval = "step"')
    if isinstance(main, lr_scheduler.ReduceLROnPlateau):
        raise JobError("warmup_steps cannot precede ReduceLROnPlateau", remedy="leave warmup_steps out")
    start = 1 / (spec.warmup_steps + 1)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=start, total_iters=spec.warmup_steps)
    return lr_scheduler.SequentialLR(optimizer, [warmup, main], milestones=[spec.warmup_steps])


def _parameters(make: Any) -> set[str]:
    try:
        return set(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return set()


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
    source: ProgramSource,
    *,
    folders: Sequence[Path],
    epoch_length: int,
    epochs: int,
    learning_rate_factor: float = 1.0,
    is_main: bool = True,
) -> Program:
    """Builds everything that a function computes with.

    Args:
        source: names the program.
        folders: of the user's code.
        epoch_length: optimiser steps of an epoch.
        epochs: of the run.
        learning_rate_factor: factor of all learning rates (linear scaling rule).
        is_main: whether this is worker 0.

    Raises:
        JobError: the model, loss, optimiser or scheduler cannot be made.
    """
    task = task_from(source, folders)
    task.total_steps, task.total_epochs = epoch_length * epochs, epochs
    task.is_main = is_main
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
