"""Optimisers and schedulers of a task, in any of the forms in which it may return them (those of Lightning's `configure_optimizers`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ephemeron.errors import JobError

_FORMS = "return an optimiser, a list of them, a pair (optimisers, schedulers), or mappings with 'optimizer' and 'lr_scheduler'"


@dataclass(slots=True, kw_only=True)
class Scheduled:
    """A scheduler and when it advances."""

    scheduler: Any
    """An `LRScheduler`, or `ReduceLROnPlateau`."""
    optimizer: int
    """Number of its optimiser."""
    interval: str = "epoch"
    """`step` or `epoch`."""
    frequency: int = 1
    """Steps or epochs between two advances."""
    monitor: str | None = None
    """Metric that it is given; it then advances after evaluations."""


def check_kind(cls: type[torch.optim.Optimizer]) -> None:
    """Refuses optimisers that cannot step with exchanged gradients.

    Raises:
        JobError: it evaluates the loss several times a step, or takes sparse gradients only.
    """
    if issubclass(cls, torch.optim.LBFGS):
        raise JobError("optimizer 'LBFGS' evaluates the loss several times a step", remedy="use a first-order optimiser")
    if issubclass(cls, torch.optim.SparseAdam):
        raise JobError(
            "optimizer 'SparseAdam' takes sparse gradients only, and merged gradients are dense",
            remedy="use Adam, or a sparse model with the store's Adam (docs/sparse.md)",
        )


def optimizers_of(returned: Any, where: str) -> tuple[list[torch.optim.Optimizer], list[Scheduled]]:
    """Optimisers and schedulers from what a task's `optimizers` returned.

    Raises:
        JobError: none of the known forms; an optimiser evaluates the loss several times a step.
    """
    pairs = _pairs(returned, where)
    found: list[torch.optim.Optimizer] = []
    schedulers: list[Scheduled] = []
    for optimizer, scheduler in pairs:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(f"{where} returned a {type(optimizer).__name__} as an optimiser", remedy=_FORMS)
        check_kind(type(optimizer))
        if scheduler is not None:
            schedulers.append(_scheduled(scheduler, len(found), where))
        found.append(optimizer)
    if not found:
        raise JobError(f"{where} returned no optimiser", remedy=_FORMS)
    return found, schedulers


def _pairs(returned: Any, where: str) -> list[tuple[Any, Any]]:
    if isinstance(returned, torch.optim.Optimizer):
        return [(returned, None)]
    if isinstance(returned, Mapping):
        if "optimizer" not in returned:
            raise JobError(f"{where} returned a mapping without 'optimizer'", remedy=_FORMS)
        return [(returned["optimizer"], returned.get("lr_scheduler"))]
    if not isinstance(returned, (tuple, list)):
        raise JobError(f"{where} returned {type(returned).__name__}", remedy=_FORMS)
    if returned and all(isinstance(r, Mapping) for r in returned):
        return [pair for each in returned for pair in _pairs(each, where)]
    if len(returned) == 2 and not isinstance(returned[1], torch.optim.Optimizer):
        optimizers, schedulers = (list(r) if isinstance(r, (tuple, list)) else [r] for r in returned)
        return _matched(optimizers, schedulers, where)
    return [(optimizer, None) for optimizer in returned]


def _matched(optimizers: list[Any], schedulers: list[Any], where: str) -> list[tuple[Any, Any]]:
    """Each optimiser with its scheduler, found by the optimiser that the scheduler holds."""
    pairs: list[tuple[Any, Any]] = [(optimizer, None) for optimizer in optimizers]
    for each in schedulers:
        inner = each["scheduler"] if isinstance(each, Mapping) and "scheduler" in each else each
        owner = getattr(inner, "optimizer", None)
        place = next((i for i, (o, s) in enumerate(pairs) if o is owner and s is None), None)
        if place is None:
            raise JobError(
                f"{where} returned a {type(inner).__name__} that belongs to none of its optimisers, or two for one",
                remedy="chain schedulers of one optimiser with torch.optim.lr_scheduler.ChainedScheduler",
            )
        pairs[place] = (pairs[place][0], each)
    return pairs


def _scheduled(given: Any, optimizer: int, where: str) -> Scheduled:
    options = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = options.pop("scheduler", None)
    known = {name: options.pop(name) for name in ("interval", "frequency", "monitor") if name in options}
    options.pop("strict", None)
    options.pop("name", None)
    options.pop("reduce_on_plateau", None)
    if options:
        raise JobError(f"{where}: a scheduler has no option {', '.join(map(repr, options))}", remedy=_FORMS)
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
        raise JobError(f"{where} returned a {type(scheduler).__name__} as a scheduler", remedy=_FORMS)
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    made = Scheduled(scheduler=scheduler, optimizer=optimizer, **known)
    if plateau and made.monitor is None:
        made.monitor = "loss"
    if not plateau:
        made.monitor = None
    if made.interval not in ("step", "epoch") or not isinstance(made.frequency, int) or made.frequency < 1:
        raise JobError(
            f"{where}: interval {made.interval!r} with frequency {made.frequency!r}",
            remedy="use interval 'step' or 'epoch' and a frequency of at least 1",
        )
    return made
