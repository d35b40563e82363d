"""Backward pass over a part of a batch, and what the program reports of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from ephemeron.errors import JobError
from ephemeron.training.task.evaluation import is_sum, number_of, own_weight, recorded_after, report_of, weight_of
from ephemeron.training.task.task import Task
from ephemeron.training.task.tensors import parts_of


class PartReport(NamedTuple):
    """What a program reported for a part of a batch."""

    weight: float
    """Number of things that the loss is a mean over."""
    summed: bool
    """Whether the loss is a sum: gradients of parts are added, whatever their weights."""
    metrics: dict[str, float]
    """Means over the part; none of a part without weight."""


def backward(
    task: Task,
    model: nn.Module,
    part: Any,
    *,
    samples: int,
    whole: int,
    turn: int | None,
    autocast: AbstractContextManager[object],
    weighed: Callable[[float, bool, float], None] | None = None,
) -> PartReport:
    """Forward and backward pass over a part of a batch.

    Gradients of parts are multiplied by their weights over the samples of the batch, so that a batch in parts is the batch as
    a whole, once it is divided by the sum of these factors. A part of weight 0, whose loss may be NaN (0/0), adds zero to the
    gradients of the parameters that took part in it.

    Args:
        samples, whole: in the part, and in the whole batch.
        turn: number of the optimiser whose turn it is; None: the program is not told.
        autocast: context of the forward pass.
        weighed: called before the backward pass with the weight, whether the loss is a sum, and its value.

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
        raise JobError(f"the loss of {where} is {shape}", remedy="return a scalar tensor, such as a mean over the batch")
    summed, own = is_sum(report, where), own_weight(loss)
    given = weight_of(report.pop("weight", samples if own is None else own), where)
    weight = float(samples) if summed else given
    if weight == 0:
        if weighed is not None:
            weighed(weight, summed, 0.0)
        _take_part(loss, model)
        return PartReport(weight, summed, {})
    metrics = {name: number_of(value, name, where) for name, value in report.items()}
    if weighed is not None:
        weighed(weight, summed, metrics["loss"])
    torch.autograd.backward(loss if summed or samples == whole else loss / (whole / weight))
    if summed:
        metrics["loss"] /= samples
    return PartReport(weight, summed, metrics)


def _take_part(loss: torch.Tensor, model: nn.Module) -> None:
    """Adds zero to the gradients of the parameters that a loss depends on, whatever its own gradient is."""
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else []
    used = [(p * 0.0).sum() for p, grad in zip(trained, found, strict=False) if grad is not None]
    if used:
        torch.autograd.backward(used)


def merged_loss(task: Task, model: nn.Module, batch: Any, samples: int) -> tuple[float, float] | None:
    """Loss of a batch, and that of its halves merged by their weights: alike for what functions can divide among them.

    Dropout and statistics of batches are off. None: the loss is random, cannot be evaluated so, or is not finite.
    """

    def loss_of(part: Any, n: int) -> tuple[float, float, bool]:
        turn = {"optimizer_index": 0} if "optimizer_index" in inspect.signature(task.training_step).parameters else {}
        report = report_of(task.training_step(model, part, **turn), "training_step")
        loss = report["loss"]
        summed, own = is_sum(report, "training_step"), own_weight(loss)
        return float(loss.detach()), weight_of(report.get("weight", n if own is None else own), "training_step"), summed

    was, state = model.training, torch.get_rng_state()
    model.eval()
    try:
        with recorded_after(model):
            whole, _, summed = loss_of(batch, samples)
            torch.manual_seed(1)  # of a loss that draws numbers nothing can be said
            again, _, _ = loss_of(batch, samples)
            parts = [loss_of(part, n) for part, n in parts_of(batch, samples, 2)]
    except Exception:  # noqa: BLE001 - a program need not bear evaluation mode or halves, and trains without this check
        return None
    finally:
        model.train(was)
        torch.set_rng_state(state)
    some = [(value, weight) for value, weight, _ in parts if weight]
    if whole != again or not some or not all(map(math.isfinite, [whole, *(value for value, _ in some)])):
        return None
    if summed:
        return whole, sum(value for value, _ in some)
    return whole, sum(value * weight for value, weight in some) / sum(weight for _, weight in some)


def averaged(reports: Sequence[PartReport], weight: float) -> dict[str, float]:
    """Means over the parts of a batch by their weights; a loss of nothing is 0."""
    some = [report for report in reports if report.weight]
    if len(some) < 2:
        return dict(some[0].metrics) if some else {"loss": 0.0}
    names = [name for name in some[0].metrics if all(name in report.metrics for report in some)]
    return {name: sum(r.weight * r.metrics[name] for r in some) / weight for name in names}
