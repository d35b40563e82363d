"""Predictions and labels of the whole evaluation data, for a `compute_metrics` of `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torchmetrics
import transformers


class Predictions(torchmetrics.Metric):
    """Collects batches, and computes the user's metrics from all of them.

    Args:
        function: from an `EvalPrediction` with arrays to numbers by name.
    """

    full_state_update = False

    def __init__(self, function: Callable[[Any], Mapping[str, float]]) -> None:
        super().__init__()
        self._function = function
        for name in ("predictions", "labels"):
            for i in range(_MOST):
                self.add_state(f"{name}{i}", default=[], dist_reduce_fx=None)

    def update(self, predictions: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
        """Adds a batch: outputs of the model beside the loss, and its labels."""
        for name, values in (("predictions", predictions), ("labels", labels)):
            for i, value in enumerate(values[:_MOST]):
                getattr(self, f"{name}{i}").append(value.detach())

    def compute(self) -> dict[str, float]:
        """The user's numbers."""
        found = transformers.EvalPrediction(predictions=self._arrays("predictions"), label_ids=self._arrays("labels"))
        return {name: float(value) for name, value in self._function(found).items()}

    def _arrays(self, name: str) -> Any:
        held = [values for i in range(_MOST) if (values := getattr(self, f"{name}{i}"))]
        arrays = [_joined(values).float().numpy() if values[0].is_floating_point() else _joined(values).numpy() for values in held]
        return arrays[0] if len(arrays) == 1 else tuple(arrays)


_MOST = 8
"""Tensors of one kind."""


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    """Batches one after the other; of sequences, padded with -100 to the longest, as `transformers.Trainer` does."""
    if values[0].ndim < 2 or len({v.shape[1:] for v in values}) == 1:
        return torch.cat([v.reshape(1) if v.ndim == 0 else v for v in values])
    length = max(v.shape[1] for v in values)
    padded = [torch.nn.functional.pad(v, [0, 0] * (v.ndim - 2) + [0, length - v.shape[1]], value=-100) for v in values]
    return torch.cat(padded)
