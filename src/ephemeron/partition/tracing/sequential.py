"""Forward and backward pass through all stages in one process; stages exchange named values only.

Tensors are detached from autograd's graph at every stage boundary, as if they were sent, and their gradients are returned by name. So a split
that works here works between processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ephemeron.partition.tracing.split import ModelSplit


class SequentialPass:
    """Forward pass: the model's result, and the values that `backward` needs.

    Attributes:
        result: as the original's; its tensors are leaves of autograd's graph, so a loss of it can be differentiated.
    """

    def __init__(self, split: ModelSplit, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.split = split
        traced = split.traced
        given = traced.named_inputs(tuple(args), kwargs)
        store: dict[str, object] = {**given, **split.numbers(given)}
        self._entered: list[dict[str, torch.Tensor]] = []
        self._left: list[dict[str, object]] = []
        for stage in split.stages:
            own = {p.name: leaf(store[p.name], p.needs_gradient and p.name not in given) for p in stage.spec.inputs}
            made = stage(own)
            self._entered.append({n: t for n, t in own.items() if isinstance(t, torch.Tensor)})
            self._left.append(made)
            store |= made
        ends = {n: t for made in self._left for n, t in made.items()}
        self._ends = {n: leaf(t, t.requires_grad) for n, t in ends.items() if isinstance(t, torch.Tensor)}
        self.result = _result(split, {**store, **self._ends})

    def backward(self) -> None:
        """Backward pass through all stages, last first, after `backward` of a loss of the result; then sums gradients of shared parameters."""
        gradients: dict[str, torch.Tensor] = {n: t.grad for n, t in self._ends.items() if t.grad is not None}
        for entered, left in zip(reversed(self._entered), reversed(self._left), strict=True):
            ready = [(t, gradients[n]) for n, t in left.items() if n in gradients and isinstance(t, torch.Tensor) and t.requires_grad]
            if ready:
                torch.autograd.backward([t for t, _ in ready], [g for _, g in ready])
            for name, t in entered.items():
                if t.requires_grad and t.grad is not None:
                    gradients[name] = gradients[name] + t.grad if name in gradients else t.grad
        self.split.sum_shared_gradients()


def train_step(split: ModelSplit, args: Sequence[Any], kwargs: Mapping[str, Any] | None, loss: Any) -> tuple[Any, torch.Tensor]:
    """One forward and backward pass; gradients are added to those of the stages' parameters.

    Args:
        split: the stages, in training mode.
        args, kwargs: a batch.
        loss: of the result.

    Returns:
        The result and the loss.
    """
    done = SequentialPass(split, args, kwargs or {})
    value = loss(done.result)
    if any(t.requires_grad for t in tree_leaves(done.result) if isinstance(t, torch.Tensor)):
        value.backward()
    done.backward()
    return done.result, value


def leaf(value: Any, needs_gradient: bool) -> Any:
    """Received value: detached from autograd's graph, and with a gradient if `needs_gradient`.

    All dtypes that autograd differentiates can have one, including complex ones; integers and booleans cannot.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(needs_gradient and (value.is_floating_point() or value.is_complex()))


def _result(split: ModelSplit, values: Mapping[str, Any]) -> Any:
    return split.traced.result(values)
