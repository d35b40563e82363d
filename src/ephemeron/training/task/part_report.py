"""Backward pass over a part of a batch, and what the program reports of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from ephemeron.errors import JobError
from ephemeron.training.task.evaluation import number_of, report_of
from ephemeron.training.task.task import Task


class PartReport(NamedTuple):
    """What a program reported for a part of a batch."""

    weight: float
    given: bool
    """Whether the program said the weight."""
    metrics: dict[str, float]


def backward(
    task: Task, model: nn.Module, part: Any, *, samples: int, whole: int, turn: int | None,
    autocast: AbstractContextManager[object], weighed: Callable[[float, bool, float], None] | None = None,
) -> PartReport:  # fmt: skip
    """Forward and backward pass over a part of a batch.

    Gradients of parts whose program gives weights are multiplied by them, so that a batch in parts is the batch as a whole.

    Args:
        samples, whole: in the part, and in the whole batch.
        turn: number of the optimiser whose turn it is; None: the program is not told.
        autocast: context of the forward pass.
        weighed: called before the backward pass with the weight, whether the program said it, and the loss.

    Raises:
        JobError: the program returned no scalar loss.
    """
    where = "training_step"
    more = {} if turn is None else {"optimizer_index": turn}
    with autocast:
        report = report_of(task.training_step(model, part, **more), where)
    loss = report.get("loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise JobError(
            f"the loss of {where} is {shape}", remedy="return a scalar tensor, such as a mean over the batch"
        )
    given = "weight" in report
    weight = number_of(report.pop("weight", samples), "weight", where)
    scaled = loss * weight if given else loss / (whole / samples)
    if weighed is not None:
        weighed(weight, given, number_of(loss, "loss", where))
    torch.autograd.backward(loss if samples == whole else scaled)
    return PartReport(weight, given, {name: number_of(value, name, where) for name, value in report.items()})


def averaged(reports: Sequence[PartReport], weight: float) -> dict[str, float]:
    """Means over the parts of a batch by their weights."""
    if len(reports) == 1:
        return reports[0].metrics
    names = [name for name in reports[0].metrics if all(name in report.metrics for report in reports)]
    return {name: sum(r.weight * r.metrics[name] for r in reports) / (weight or 1.0) for name in names}
