"""Evaluation of a model traced in training.

PyTorch's operators take a flag, so the same steps serve both modes: dropout is off, and batch statistics are the running ones. Other
behaviour of the model's code in evaluation is not in a training trace; `check` compares both and reports differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ephemeron.partition.tracing.program import Ref, State, TracedStep, leaves

_FLAGS = {"train": False, "training": False, "dropout_p": 0.0}
_COUNTERS = ("num_batches_tracked",)


def evaluated(steps: Sequence[TracedStep]) -> list[TracedStep]:
    """Steps in evaluation mode."""
    counters: set[str] = set()
    made = []
    for step in steps:
        if _counts(step, counters):
            counters.add(step.name)
        else:
            made.append(_evaluated(step))
    return made


def _counts(step: TracedStep, counters: set[str]) -> bool:
    """Whether a step only counts batches."""
    if not (isinstance(step.target, torch._ops.OpOverload) and step.target._schema.is_mutable):
        return False
    changed = next(leaves(step.args[:1]), None)
    if isinstance(changed, State):
        return changed.name.rpartition(".")[2] in _COUNTERS
    return isinstance(changed, Ref) and changed.name in counters


def _evaluated(step: TracedStep) -> TracedStep:
    target = step.target
    if not isinstance(target, torch._ops.OpOverload):
        return step
    args, kwargs = list(step.args), dict(step.kwargs)
    for i, a in enumerate(target._schema.arguments):
        if a.name in _FLAGS:
            if a.name in kwargs:
                kwargs[a.name] = _FLAGS[a.name]
            elif i < len(args):
                args[i] = _FLAGS[a.name]
    if (tuple(args), kwargs) == (step.args, dict(step.kwargs)):
        return step
    return _with(step, tuple(args), kwargs)


def _with(step: TracedStep, args: tuple[Any, ...], kwargs: dict[str, object]) -> TracedStep:
    return TracedStep(name=step.name, target=step.target, args=args, kwargs=kwargs, module=step.module, origin=step.origin)
