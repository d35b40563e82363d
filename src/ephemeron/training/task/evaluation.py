"""Sums of an evaluation, from what a task reports for each batch.

A number is a mean over the batch and counts with the batch's weight; a pair `(total, count)` is a sum. Metrics of torchmetrics
have been updated by the task: their states are merged over functions as they say themselves (sum, concatenation, …).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ephemeron.errors import JobError
from ephemeron.training.metrics import EvaluationSums, MetricSum, means


def report_of(output: Any, where: str) -> dict[str, Any]:
    """What a step returned, as a mapping: a plain loss is its only entry.

    Raises:
        JobError: it is neither a number nor a mapping with names.
    """
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, (torch.Tensor, int, float)):
        return {"loss": output}
    raise JobError(
        f"{where} returned {type(output).__name__}",
        remedy="return the loss, or a mapping with 'loss' and further numbers",
    )


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
        weight = number_of(report.pop("weight", samples), "weight", "evaluation_step")
        batch: dict[str, MetricSum] = {}
        for name, value in report.items():
            if is_metric(value):
                self.metrics[name] = value
            elif value is None:
                batch[name] = None
            elif isinstance(value, (tuple, list)) and len(value) == 2:
                total, count = (number_of(v, name, "evaluation_step") for v in value)
                batch[name] = (total, count)
            else:
                batch[name] = (number_of(value, name, "evaluation_step") * weight, weight)
        whole = EvaluationSums(self._samples, self._sums).plus(EvaluationSums(samples, batch))
        self._samples, self._sums = whole.samples, dict(whole.sums)

    def result(self) -> EvaluationSums:
        """Sums and states of the slice."""
        states: dict[str, np.ndarray] = {}
        for name, metric in self.metrics.items():
            for state, value in metric.metric_state.items():
                for i, tensor in enumerate(value if isinstance(value, list) else [value]):
                    states[f"{name}/{state}/{i}"] = tensor.detach().cpu().numpy().copy()
        return EvaluationSums(self._samples, self._sums, states)


def is_metric(value: Any) -> bool:
    """Whether a value is a metric of torchmetrics, without importing it."""
    return any(cls.__module__.startswith("torchmetrics") and cls.__name__ == "Metric" for cls in type(value).__mro__)


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
    """Value of one metric over all slices; a mapping, such as that of detection metrics, is one metric each."""
    import copy

    whole = copy.deepcopy(metric)
    whole.reset()
    held = [part for part in parts if any(key.startswith(f"{name}/") for key in part.states)]
    if not held:
        return {name: None}
    for state, reduce in whole._reductions.items():
        values = [
            torch.from_numpy(np.array(part.states[key])).to(whole.device)
            for part in held
            for key in sorted(
                (k for k in part.states if k.startswith(f"{name}/{state}/")), key=lambda k: int(k.rpartition("/")[2])
            )
        ]
        if isinstance(getattr(whole, state), list):
            setattr(whole, state, values)
        elif reduce is None or not callable(reduce):
            raise JobError(f"metric {name} says no way to merge its state {state!r}", remedy="give dist_reduce_fx")
        else:
            setattr(whole, state, reduce(torch.stack(values)))
    whole._update_count = 1
    whole._computed = None
    value = whole.compute()
    if isinstance(value, Mapping):
        return {f"{name}_{key}": _single(v) for key, v in value.items() if _single(v) is not None}
    return {name: _single(value)}


def _single(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and bool(torch.isfinite(value)) else None
    return float(value) if isinstance(value, (int, float)) else None
