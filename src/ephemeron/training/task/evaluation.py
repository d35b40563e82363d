"""Sums of an evaluation, from what a task reports for each batch.

A number is a mean over the batch and counts with the batch's weight; a pair `(total, count)` is a sum. Metrics of torchmetrics
have been updated by the task: their states are merged over functions as they say themselves (sum, concatenation, …).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from ephemeron.errors import JobError
from ephemeron.runs.metrics import EvaluationSums, MetricSum, counted, means


def report_of(output: Any, where: str) -> dict[str, Any]:
    """What a step returned, as a mapping: a plain loss is its only entry.

    Raises:
        JobError: it is neither a number nor a mapping with names.
    """
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, (torch.Tensor, int, float)):
        return {"loss": output}
    raise JobError(f"{where} returned {type(output).__name__}", remedy="return the loss, or a mapping with 'loss' and further numbers")


def number_of(value: Any, name: str, where: str) -> float:
    """A number from a scalar tensor, array or number.

    Raises:
        JobError: it is no single number.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, (bool, int, float, np.number)) or (isinstance(value, np.ndarray) and value.size == 1):
        return float(value)
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise JobError(f"{where} reports {name} as {what}", remedy="report one number for the batch, or (total, count)")


def weight_of(value: Any, where: str) -> float:
    """A weight that a step reports.

    Raises:
        JobError: it is no number from 0.
    """
    weight = number_of(value, "weight", where)
    if not 0 <= weight < math.inf:
        raise JobError(f"{where} reports weight {weight:g}", remedy="report how many terms the mean has, 0 or more")
    return weight


def is_sum(report: dict[str, Any], where: str) -> bool:
    """Whether the loss of a report is a sum over the batch; takes `reduction` out of the report.

    It is one if the report says so, or if it is the plain result of a loss of PyTorch's with `reduction="sum"`.

    Raises:
        JobError: the reduction is no word for it.
    """
    said = report.pop("reduction", None)
    if said not in (None, "mean", "sum"):
        raise JobError(f"{where} reports reduction {said!r}", remedy="report 'mean' or 'sum'")
    return said == "sum" or (said is None and "weight" not in report and is_plain_sum(report.get("loss")))


def is_plain_sum(loss: Any) -> bool:
    """Whether a loss comes straight from a loss of PyTorch's with `reduction="sum"`."""
    return getattr(getattr(loss, "grad_fn", None), "_saved_reduction", None) == _SUM


def own_weight(loss: torch.Tensor) -> float | None:
    """Weight of a loss that comes straight from `cross_entropy` or `nll_loss`: its labels, or their class weights.

    PyTorch keeps it for the backward pass. None: another loss, or one without a graph.
    """
    function: Any = loss.grad_fn
    if getattr(function, "_saved_reduction", None) != _MEAN or not hasattr(function, "_saved_total_weight"):
        return None
    return float(function._saved_total_weight)


def _own_labels(loss: torch.Tensor) -> int:
    """Labels of a loss that has an `own_weight`: numbers beside it are means over them, without its class weights."""
    function: Any = loss.grad_fn
    ignored = int(function._saved_ignore_index)
    return int((function._saved_target != (ignored if ignored < 2**63 else ignored - 2**64)).sum())


_MEAN, _SUM = 1, 2
"""Numbers of reductions in PyTorch's graphs."""


@contextmanager
def recorded_after(model: nn.Module) -> Iterator[None]:
    """What is computed from the outputs of a model or of its modules is recorded by autograd, and what they do is not.

    So a loss says how it was reduced (`own_weight`), and no more memory is used than without a graph, but for outputs: they are
    copied, because a program may change an output of its model in place, and not what autograd takes for a leaf.
    """
    inside = 0

    def before(*_: Any) -> None:
        nonlocal inside
        inside += 1
        torch.set_grad_enabled(False)

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        nonlocal inside
        inside -= 1
        if inside:
            return output
        torch.set_grad_enabled(True)
        return tree_map(
            lambda v: v.detach().requires_grad_().clone() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, output
        )

    hooks = [
        hook
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for hook in (module.register_forward_pre_hook(before), module.register_forward_hook(after))
    ]
    try:
        with torch.enable_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()


class Evaluator:
    """Adds up the reports of the batches of one slice, in order."""

    def __init__(self) -> None:
        self._samples = 0
        self._sums: dict[str, MetricSum] = {}
        self.metrics: dict[str, Any] = {}
        """Metrics of torchmetrics by name."""

    def add(self, output: Any, samples: int) -> None:
        """Adds the report of one batch.

        Raises:
            JobError: a metric is no number, or is not reported for every batch.
        """
        report = report_of(output, "evaluation_step")
        loss, summed = report.get("loss"), is_sum(report, "evaluation_step")
        weight = others = weight_of(report.get("weight", samples), "evaluation_step")
        if isinstance(loss, torch.Tensor) and "weight" not in report and (own := own_weight(loss)) is not None:
            weight, others = own, _own_labels(loss)
        report.pop("weight", None)
        batch: dict[str, MetricSum] = {}
        for name, value in report.items():
            if is_metric(value):
                self.metrics[name] = value
            elif is_metric(value, "MetricCollection"):
                self.metrics |= {f"{name}_{key}": each for key, each in value.items()}
            elif value is None:
                batch[name] = None
            elif isinstance(value, (tuple, list)) and len(value) == 2:
                total, count = (number_of(v, name, "evaluation_step") for v in value)
                batch[name] = counted(total, count)
            elif name == "loss" and summed:
                batch[name] = (number_of(value, name, "evaluation_step"), samples)
            else:
                terms = weight if name == "loss" else others
                batch[name] = counted(number_of(value, name, "evaluation_step") * terms, terms)
        whole = EvaluationSums(self._samples, self._sums).plus(EvaluationSums(samples, batch))
        self._samples, self._sums = whole.samples, dict(whole.sums)

    def result(self) -> EvaluationSums:
        """Sums and states of the slice."""
        states: dict[str, np.ndarray] = {}
        for name, metric in self.metrics.items():
            for part, each in _parts(metric):
                states[_key(name, part, _COUNT)] = np.array(each.update_count)
                for state, value in each.metric_state.items():
                    for i, tensor in enumerate(value if isinstance(value, list) else [value]):
                        if not isinstance(tensor, torch.Tensor):
                            raise JobError(
                                f"metric {name} holds {type(tensor).__name__}s in its state {state!r}",
                                remedy="use a metric whose states are tensors or lists of tensors",
                            )
                        wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                        states[_key(name, part, state, i)] = wide.detach().cpu().numpy().copy()
        return EvaluationSums(self._samples, self._sums, states)


_COUNT = "_update_count"


def _key(name: str, part: str, state: str, number: int = 0) -> str:
    """Name of an array of a metric's state. Names of metrics may have slashes."""
    return f"{name}/{part}/{state}/{number}"


def _parts(metric: Any) -> list[tuple[str, Any]]:
    """A metric and those that it wraps, by name."""
    return [(name, each) for name, each in metric.named_modules() if is_metric(each)]


def is_metric(value: Any, kind: str = "Metric") -> bool:
    """Whether a value is a metric of torchmetrics, or a collection of them, without importing it."""
    return any(cls.__module__.startswith("torchmetrics") and cls.__name__ == kind for cls in type(value).__mro__)


def metrics_of(parts: Sequence[EvaluationSums], metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Metrics of all slices.

    Args:
        parts: by rank; sums and states are merged in this order.
        metrics: metrics of torchmetrics by name, of which states are among the parts.
    """
    found = means(parts)
    for name, metric in metrics.items():
        for key, value in _computed(name, metric, parts).items():
            found[key] = value
    return found


def _computed(name: str, metric: Any, parts: Sequence[EvaluationSums]) -> dict[str, float | None]:
    """Value of one metric over all slices; a mapping, such as that of detection metrics, is one metric each.

    The metric is left with the merged states.
    """
    held = [part.states for part in parts if _key(name, "", _COUNT) in part.states]
    if not held:
        return {name: None}
    metric.reset()
    for inner, each in _parts(metric):
        counts = [int(states[_key(name, inner, _COUNT)]) for states in held]
        for state, reduce in each._reductions.items():
            values = [_arrays(states, _key(name, inner, state).rpartition("/")[0], each.device) for states in held]
            if isinstance(getattr(each, state), list):
                setattr(each, state, [tensor for found in values for tensor in found])
            else:
                setattr(each, state, _reduced([found[0] for found in values], counts, reduce))
        each._update_count, each._computed = sum(counts), None
    value = metric.compute()
    if isinstance(value, Mapping):
        return {f"{name}_{key}": _single(v) for key, v in value.items() if _single(v) is not None}
    return {name: _single(value)}


def _arrays(states: Mapping[str, np.ndarray], prefix: str, device: Any) -> list[torch.Tensor]:
    """Tensors of a state, in order."""
    found: list[torch.Tensor] = []
    while (key := f"{prefix}/{len(found)}") in states:
        found.append(torch.from_numpy(np.array(states[key])).to(device))
    return found


def _reduced(values: list[torch.Tensor], counts: Sequence[int], reduce: Any) -> torch.Tensor:
    """A state over all slices, as its `dist_reduce_fx` says; a mean counts updates."""
    if len(values) == 1:
        return values[0]
    if getattr(reduce, "__name__", "") == "dim_zero_mean" and sum(counts):
        return sum((value * count for value, count in zip(values, counts, strict=True)), start=values[0] * 0) / sum(counts)
    stacked = torch.stack(values)
    return stacked if reduce is None else reduce(stacked)


def _single(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and bool(torch.isfinite(value)) else None
    return float(value) if isinstance(value, (int, float)) else None
