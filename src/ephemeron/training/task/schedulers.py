"""The learning-rate scheduler of a job file, with linear warm-up, for any optimiser."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from ephemeron.errors import JobError
from ephemeron.training.job import SchedulerSpec
from ephemeron.training.task.optimizers import Scheduled

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
