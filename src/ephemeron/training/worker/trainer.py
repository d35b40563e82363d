"""The port to the model: gradients out, merged updates in, and the whole state in named arrays.

A worker knows nothing of PyTorch: it moves vectors. Every trainer keeps its own random state, so that many can
take turns in one process and a replaced one draws the same numbers again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from ephemeron.training.tensors import Arrays


class TrainingStep(NamedTuple):
    """What one batch brought."""

    vector: np.ndarray
    """1-D: the sum over the batch of gradients (or parameters × samples). Valid until the next `compute`."""
    samples: int
    loss: float
    """Mean over the batch; 0 for an empty one."""
    skipped: int = 0
    """Samples that could not be loaded and were passed over."""
    failure: str = ""
    """Why the last of these could not."""


class EvaluationSums(NamedTuple):
    """Sums over a slice of the test set."""

    loss_sum: float
    """Mean loss times samples."""
    correct: int | None
    """Right answers; None where outputs and targets are no classes."""
    samples: int
    counted: int | None = None
    """Answers that could be right, such as the positions of sequences; None: one of each sample."""

    def plus(self, other: EvaluationSums) -> EvaluationSums:
        """The sums over both slices. An empty slice changes nothing."""
        if not (self.samples and other.samples):
            return self if self.samples else other
        correct = None if self.correct is None or other.correct is None else self.correct + other.correct
        counted = sum(e.samples if e.counted is None else e.counted for e in (self, other))
        return EvaluationSums(self.loss_sum + other.loss_sum, correct, self.samples + other.samples, counted)


class Trainer(Protocol):
    """A model, its optimiser and its data slice."""

    size: int
    """Elements of the vectors it exchanges."""
    dtype: np.dtype[np.generic]

    def compute(self, iteration: int) -> TrainingStep:
        """Forward and backward over this rank's batch of the iteration."""

    def apply(self, mean: np.ndarray) -> None:
        """Takes one merged version: an optimiser step, or new parameters."""

    def evaluate(self) -> EvaluationSums:
        """Over this rank's slice of the test set."""

    def parameters(self) -> np.ndarray:
        """The parameters as one vector (a copy)."""

    def weights(self) -> tuple[Arrays, dict[str, Any]]:
        """The result: exactly what the model's `state_dict()` holds, by its names, and notes on dtypes that NumPy lacks."""

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Everything needed to go on exactly here: parameters, buffers, optimiser, random states."""

    def load(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """The inverse of `state`; also accepts all initial parameters and buffers, for a fresh start."""

    def close(self) -> None:
        """Ends what loads samples. Idempotent."""
