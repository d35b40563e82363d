"""Losses by name, the weights of their means, and the count of right answers for losses of classification.

A loss that is a mean is merged by what it is a mean over: samples, elements, labels that are not ignored, or their class weights.
That weight follows from the targets alone, so that every function of a pipeline that reads targets knows it.

Accuracy is a number only where outputs are scores of classes and targets are class numbers. PyTorch's own losses of
classification have their classes in dimension 1: (N, C) and (N, C, d1, …). A user's function is taken for one
only where outputs are (N, C) and targets (N): (N, T, V) is ambiguous. All other losses have no accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ephemeron.errors import JobError
from ephemeron.runs.metrics import EvaluationSums
from ephemeron.training.job import Target
from ephemeron.training.task.evaluation import Evaluator, report_of

_OF_CLASSES = frozenset({"cross_entropy", "nll_loss", "multi_margin_loss"})
"""Losses of `torch.nn.functional` whose targets are class numbers."""
_OVER = {
    "binary_cross_entropy": "elements",
    "binary_cross_entropy_with_logits": "elements",
    "cross_entropy": "labels",
    "gaussian_nll_loss": "elements",
    "hinge_embedding_loss": "elements",
    "huber_loss": "elements",
    "kl_div": "elements",
    "l1_loss": "elements",
    "mse_loss": "elements",
    "multi_margin_loss": "samples",
    "multilabel_margin_loss": "samples",
    "multilabel_soft_margin_loss": "samples",
    "nll_loss": "labels",
    "poisson_nll_loss": "elements",
    "smooth_l1_loss": "elements",
    "soft_margin_loss": "elements",
}
"""Losses of `torch.nn.functional` of an output and targets, and what they are a mean over: `labels` are those that are not ignored,
each with its class weight."""


class AnswerCounts(NamedTuple):
    """Number of right answers of a model."""

    correct: int
    counted: int
    """Number of answers. Targets below 0 are not counted: losses ignore them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`loss(output, target)`, a mean or a sum over the batch, with its options bound."""

    function: Callable[..., torch.Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """Name in `torch.nn.functional`; empty: the user's function."""

    def __call__(self, output: Any, target: Any) -> Any:
        """The loss. A built-in mean over nothing, which PyTorch gives as NaN, is zero, and so is its gradient.

        Raises:
            JobError: elements of outputs and targets do not correspond.
        """
        options = self._bound(output)
        if _OVER.get(self.name) == "elements" and output.ndim != target.ndim:
            raise JobError(
                f"loss {self.name}: outputs of shape {list(output.shape)} and targets of shape {list(target.shape)} do not "
                "correspond, and would be broadcast across samples",
                remedy="give both the same number of dimensions, such as [samples, 1]",
            )
        if not self.summed and self.weight(target) == 0:
            options["reduction"] = "sum"
        return self.function(output, target, **options)

    def _bound(self, output: Any) -> dict[str, Any]:
        """Options for an output: lists of a built-in loss are tensors of its dtype, on its device."""
        if not self.name or not any(isinstance(value, (list, tuple)) for value in self.options.values()):
            return dict(self.options)
        kept = output.dtype in (torch.float32, torch.float64) or not torch.is_autocast_enabled(output.device.type)
        dtype = output.dtype if kept else torch.float32
        return {
            name: torch.tensor(value, dtype=dtype, device=output.device) if isinstance(value, (list, tuple)) else value
            for name, value in self.options.items()
        }

    @property
    def summed(self) -> bool:
        """Whether it is a sum over the batch, so that losses of parts add up to that of the whole."""
        return bool(self.name) and self.options.get("reduction") == "sum"

    def weight(self, targets: Any) -> float | None:
        """Weight of a batch's loss in a mean over several batches; None: not known of a user's function."""
        over = _OVER.get(self.name)
        if over is None:
            return None
        if over == "samples" or self.options.get("reduction") == "batchmean":
            return float(len(targets))
        if over == "elements":
            return float(targets.numel())
        if targets.is_floating_point():  # probabilities of classes, in dimension 1
            return float(targets.numel() / targets.shape[min(1, targets.ndim - 1)])
        counted = targets[targets != self.options.get("ignore_index", -100)]
        weights = self.options.get("weight")
        if weights is None:
            return float(counted.numel())
        of_class = torch.as_tensor(weights, dtype=torch.float64, device=targets.device)
        return float(of_class[counted.long()].sum())

    def report(self, output: Any, targets: Any) -> dict[str, Any]:
        """Loss of a batch as a step of a task reports it: with its weight, or as a sum."""
        found = self(output, targets)
        if self.summed:
            return {"loss": found, "reduction": "sum"}
        weight = self.weight(targets)
        return report_of(found, f"loss {self.name or 'function'}") | ({} if weight is None else {"weight": weight})

    def answers(self, output: Any, targets: Any) -> AnswerCounts | None:
        """Right answers of a batch; None where outputs are not scores of classes.

        Args:
            output: (N, C) or, for PyTorch's own losses, (N, C, d1, …), floating.
            targets: (N) or (N, d1, …), whole numbers below C.
        """
        if self.name and self.name not in _OF_CLASSES:
            return None
        if not (isinstance(output, torch.Tensor) and isinstance(targets, torch.Tensor)):
            return None
        if targets.dtype not in _WHOLE or not output.is_floating_point() or output.ndim < 2:
            return None
        classes = output.shape[1]
        if classes < 2 or (*output.shape[:1], *output.shape[2:]) != tuple(targets.shape):
            return None
        if output.ndim > 2 and not self.name:
            return None
        if targets.numel() and int(targets.max()) >= classes:
            return None
        valid = (targets >= 0) & (targets != self.options.get("ignore_index", -100))
        return AnswerCounts(int(((output.argmax(dim=1) == targets) & valid).sum()), int(valid.sum()))


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def evaluated(loss: Callable[..., torch.Tensor], output: Any, targets: Any, samples: int) -> EvaluationSums:
    """Sums over one part of a test set. A loss that is not a `Loss` has no accuracy."""
    found = Evaluator()
    if isinstance(loss, Loss):
        found.add({**loss.report(output, targets), "accuracy": loss.answers(output, targets)}, samples)
    else:
        found.add({"loss": loss(output, targets), "accuracy": None}, samples)
    return found.result()


def make_loss(target: Target, resolve: Callable[[str], Any]) -> Loss:
    """The loss of a target: a name in `torch.nn.functional`, or `module:function`, with its options bound.

    Raises:
        JobError: no such loss of an output and targets, or one that gives no single number.
    """
    if ":" in target.target:
        return Loss(function=resolve(target.target), options=target.options)
    function = getattr(nn.functional, target.target, None)
    if function is None or target.target not in _OVER:
        where = "is not in torch.nn.functional" if function is None else "is no loss of an output and targets"
        raise JobError(f"loss {target.target!r} {where}", remedy=f"name one of {', '.join(_OVER)}; or module:function")
    for name in ("size_average", "reduce"):
        if name in target.options:
            raise JobError(f"loss {target.target}: {name} is out of use in PyTorch", remedy="give reduction instead")
    reduction = target.options.get("reduction", "mean")
    known = ("mean", "sum", "batchmean") if target.target == "kl_div" else ("mean", "sum")
    if reduction not in known:
        raise JobError(
            f"loss {target.target}: reduction = {reduction!r} gives no single number to train on", remedy=f"give one of {', '.join(known)}"
        )
    return Loss(function=function, options=target.options, name=target.target)
