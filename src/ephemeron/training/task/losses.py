"""Losses by name, and the count of right answers for losses of classification.

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
from ephemeron.training.job import Target
from ephemeron.training.metrics import EvaluationSums

_OF_CLASSES = frozenset({"cross_entropy", "nll_loss", "multi_margin_loss"})
"""Losses of `torch.nn.functional` whose targets are class numbers."""


class AnswerCounts(NamedTuple):
    """Number of right answers of a model."""

    correct: int
    counted: int
    """Number of answers. Targets below 0 are not counted: losses ignore them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`loss(output, target)`, a mean over the batch, with its options bound."""

    function: Callable[..., torch.Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """Name in `torch.nn.functional`; empty: the user's function."""

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        return self.function(output, target, **self.options)

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
    answers = loss.answers(output, targets) if isinstance(loss, Loss) else None
    accuracy = None if answers is None else (float(answers.correct), float(answers.counted))
    return EvaluationSums(samples, {"loss": (float(loss(output, targets)) * samples, samples), "accuracy": accuracy})


def make_loss(target: Target, resolve: Callable[[str], Any]) -> Loss:
    """The loss of a target: a name in `torch.nn.functional`, or `module:function`, with its options bound.

    Raises:
        JobError: no such loss.
    """
    if ":" in target.target:
        return Loss(function=resolve(target.target), options=target.options)
    function = getattr(nn.functional, target.target, None)
    if function is None:
        raise JobError(f"loss {target.target!r} is not in torch.nn.functional", remedy="name one, or module:function")
    return Loss(function=function, options=target.options, name=target.target)
