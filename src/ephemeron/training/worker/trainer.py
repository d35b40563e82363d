"""The port to the model: gradients out, merged updates in, and the whole state in named arrays.

The training loop does not depend on PyTorch: it moves vectors. Every trainer keeps its own random state, so that several can
take turns in one process, and a replacement draws the same numbers again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ephemeron.training.tensors import Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNotes:
    """Plain values beside saved weights."""

    bf16: tuple[str, ...] = ()
    """Names of arrays that hold the bits of bfloat16, which NumPy lacks."""


class TrainingStep(NamedTuple):
    """Contribution of one batch."""

    vector: np.ndarray
    """1-D: the sum over the batch of gradients (or parameters × samples). Valid until the next `compute`."""
    samples: int
    loss: float
    """Mean over the batch; 0 for an empty one."""
    skipped: int = 0
    """Samples that were skipped because they could not be loaded."""
    failure: str = ""
    """Cause of the last of these."""


class EvaluationSums(NamedTuple):
    """Sums over a slice of the test set."""

    loss_sum: float
    """Mean loss times samples."""
    correct: int | None
    """Right answers; None where outputs are not scores of classes."""
    samples: int
    counted: int | None = None
    """Number of answers, such as the positions of sequences; None: one per sample."""

    def plus(self, other: EvaluationSums) -> EvaluationSums:
        """The sums over both slices. An empty slice changes nothing."""
        if not (self.samples and other.samples):
            return self if self.samples else other
        correct = None if self.correct is None or other.correct is None else self.correct + other.correct
        counted = sum(e.samples if e.counted is None else e.counted for e in (self, other))
        return EvaluationSums(self.loss_sum + other.loss_sum, correct, self.samples + other.samples, counted)


class Trainer(Protocol):
    """A model, its optimiser and its samples."""

    size: int
    """Elements of the vectors it exchanges."""
    dtype: np.dtype[np.generic]

    def compute(self, iteration: int) -> TrainingStep:
        """Forward and backward over this rank's batch of the iteration."""

    def apply(self, mean: np.ndarray) -> None:
        """Applies one merged version: an optimiser step, or new parameters."""

    def evaluate(self) -> EvaluationSums:
        """Evaluates this rank's slice of the test set."""

    def parameters(self) -> np.ndarray:
        """The parameters as one vector (a copy)."""

    def weights(self) -> tuple[Arrays, Mapping[str, object]]:
        """The result: the model's `state_dict()` by its names, and `bf16`, the names of tensors of that dtype, if any."""

    def state(self) -> tuple[Arrays, Mapping[str, object]]:
        """Parameters, buffers, optimiser and random states: arrays, and plain values for JSON."""

    def load(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        """Restores what `state` returned; also accepts all initial parameters and buffers, for a fresh start."""

    def close(self) -> None:
        """Ends the loading of samples. Idempotent."""
