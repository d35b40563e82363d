"""Execution of one stage: forward and backward pass of a micro-batch, with kept or recomputed activations.

Inputs are detached from autograd's graph, and their gradients are returned by name, as in `tracing.split`, which passes a whole
batch through all stages; here many micro-batches are in flight at one stage. The last stage computes the loss from its own results
without detaching them.

Recomputation repeats the forward pass from the inputs. Random steps draw the same numbers again, because they draw by name. Buffers
(running statistics) get their former values, and afterwards their current ones. All buffers are compared by value, because batch
norm changes its buffers without a version count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ephemeron.partition.runtime.boundaries import StageBoundary
from ephemeron.partition.runtime.micro_batches import Loss, Metrics, number_of
from ephemeron.partition.tracing.split import Stage, leaf
from ephemeron.partition.tracing.traced import Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """Loss and metrics of the model's result, computed by the last stage."""

    traced: Traced
    """Assembles the result."""
    results: tuple[str, ...]
    """Names of the values in the result."""
    loss: Loss
    metrics: Metrics | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """Loss, metrics and result of a micro-batch."""

    loss: float
    metrics: Mapping[str, float]
    results: Mapping[str, Any]
    """Values in the model's result."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    """State of a micro-batch between its passes."""

    values: dict[str, object]
    """Inputs; leaves that collect gradients."""
    made: dict[str, object]
    """Outputs with their graph; empty if they are recomputed."""
    loss: torch.Tensor | None = None
    """Times its weight."""
    buffers: dict[str, torch.Tensor]
    """Values before the forward pass; a buffer that has not changed is the same tensor in all micro-batches."""
    key: tuple[int, int]
    targets: Any
    weight: float


class StageRun:
    """A stage with its micro-batches in flight.

    Args:
        stage: in training mode, on its device.
        boundary: its received and sent values.
        changed_inputs: names of inputs that the stage changes in place.
        loss_spec: loss and metrics; None but for the last stage.
        seed: of random steps.
        recompute: whether only inputs are kept.
    """

    def __init__(
        self,
        stage: Stage,
        boundary: StageBoundary,
        *,
        changed_inputs: frozenset[str] = frozenset(),
        loss_spec: LossSpec | None,
        seed: int,
        recompute: bool,
    ) -> None:
        self.stage, self.boundary, self.loss_spec = stage, boundary, loss_spec
        self.seed, self.recompute, self.changed_inputs = seed, recompute, changed_inputs
        self._buffers = dict(stage.named_buffers()) if recompute else {}
        self._seen: dict[str, torch.Tensor] = {}
        self._kept: dict[int, _Kept] = {}
        self._own_sums: dict[nn.Parameter, torch.Tensor | None] = {}

    def sum_apart(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients of these parameters separately first: another stage of this device has them, too, and the order of summation has to
        stay the same."""
        self._own_sums = dict.fromkeys(parameters)

    @property
    def under_way(self) -> int:
        """Number of micro-batches in flight."""
        return len(self._kept)

    def forget(self) -> None:
        """Drop all micro-batches; a new iteration begins."""
        self._kept.clear()
        self._own_sums = dict.fromkeys(self._own_sums)

    def forward(
        self, iteration: int, micro_batch: int, values: Mapping[str, Any], *, targets: Any = None, weight: float = 1.0
    ) -> tuple[dict[str, object], MicroBatchLoss | None]:
        """Forward pass; keeps the values that the backward pass needs.

        Args:
            iteration, micro_batch: keys of random draws.
            values: inputs by name.
            targets: for the loss; last stage only.
            weight: of the micro-batch's loss.

        Returns:
            Outputs by name, detached; and loss and metrics, of the last stage.
        """
        kept = _Kept(
            values={n: self._make_leaf(n, v) for n, v in values.items()},
            made={},
            buffers=self._buffer_values(),
            key=(iteration, micro_batch),
            targets=targets,
            weight=weight,
        )
        self._kept[micro_batch] = kept
        if not self.recompute:
            made, loss, scored = self._run(kept, score=True)
            kept.made, kept.loss = made, loss
        else:
            with torch.no_grad():
                made, _, scored = self._run(kept, score=True)
        return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in made.items()}, scored

    def backward(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Backward pass; adds to the parameters' gradients.

        Args:
            micro_batch: one whose forward pass has ended; it is dropped.
            gradients: of outputs, by name.

        Returns:
            Gradients of inputs, by name.
        """
        kept = self._kept.pop(micro_batch)
        made, loss = kept.made, kept.loss
        if self.recompute:
            made, loss = self._recompute(kept)
        roots = [(t, gradients[n]) for n, t in made.items() if n in gradients and isinstance(t, torch.Tensor) and t.requires_grad]
        tensors, given = [t for t, _ in roots], [g for _, g in roots]
        if loss is not None and loss.requires_grad:
            tensors, given = [*tensors, loss], [*given, torch.ones_like(loss)]
        if tensors:
            before = {p: p.grad for p in self._own_sums}
            for p, total in self._own_sums.items():
                p.grad = total
            torch.autograd.backward(tensors, given)
            for p, grad in before.items():
                self._own_sums[p], p.grad = p.grad, grad
        found = {n: t.grad for n, t in kept.values.items() if isinstance(t, torch.Tensor) and t.requires_grad}
        return {n: g for n, g in found.items() if g is not None}

    def add_own_sums(self) -> None:
        """Add the separate sums to the parameters' gradients."""
        for p, total in self._own_sums.items():
            if total is not None:
                p.grad = total if p.grad is None else p.grad + total

    def _make_leaf(self, name: str, value: Any) -> Any:
        return leaf(value, name in self.boundary.differentiable)

    def _run(self, kept: _Kept, *, score: bool) -> tuple[dict[str, object], torch.Tensor | None, MicroBatchLoss | None]:
        iteration, micro_batch = kept.key
        self.stage.draw_from(self.seed, iteration=iteration, micro_batch=micro_batch)
        given = kept.values
        if self.recompute and self.changed_inputs:
            given = {n: v.clone() if n in self.changed_inputs and isinstance(v, torch.Tensor) else v for n, v in given.items()}
        made = self.stage(given)
        if self.loss_spec is None:
            return made, None, None
        loss_spec, ends = self.loss_spec, {**given, **made}
        result = loss_spec.traced.result(ends)
        value = number_of(loss_spec.loss(result, kept.targets), "loss")
        if not score:
            return made, value * kept.weight, None
        metrics: dict[str, float] = {}
        if loss_spec.metrics is not None:
            with torch.no_grad():
                metrics = {n: float(v) for n, v in loss_spec.metrics(result, kept.targets).items()}
        return (
            made,
            value * kept.weight,
            MicroBatchLoss(loss=value.item(), metrics=metrics, results={n: _detach(ends[n]) for n in loss_spec.results}),
        )

    def _recompute(self, kept: _Kept) -> tuple[dict[str, object], torch.Tensor | None]:
        now = self._buffer_values()
        self._set_buffers(kept.buffers)
        try:
            made, loss, _ = self._run(kept, score=False)
        finally:
            self._set_buffers(now)
        return made, loss

    def _buffer_values(self) -> dict[str, torch.Tensor]:
        """Values of all buffers; copied if they differ from the last call."""
        for name, b in self._buffers.items():
            if name not in self._seen or not torch.equal(self._seen[name], b):
                self._seen[name] = b.detach().clone()
        return dict(self._seen)

    def _set_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set buffers without a version count: other micro-batches may have saved them for backward passes, which do not read them."""
        for name, value in values.items():
            if not torch.equal(self._buffers[name], value):
                self._buffers[name].data.copy_(value)


def written_inputs(stage: Stage, traced: Traced) -> frozenset[str]:
    """Inputs that a stage changes in place."""
    seen = traced.observation
    effects = [seen.side_effects[step.name] for step, _ in stage._box.steps[True] if step.name in seen.side_effects]
    storages = {x for d in effects for x in d.changed}
    return frozenset(p.name for p in stage.spec.inputs if p.kind == "tensor" and seen.values[p.name].storage in storages)


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
