"""The port between trainer and data: batches from arrays in memory, or from a data flow.

A batch source gets iteration numbers, not indices that advance, so that a function that starts in the middle needs only its
iteration to get the bytes that its predecessor got.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from ephemeron.data.samples import Samples
from ephemeron.data.shuffle import Indices

EVALUATION_BATCH = 256


class TrainingBatch(NamedTuple):
    """A batch of samples."""

    data: Any
    """Arrays or tensors in any nesting, as the collate function has made it; `(inputs, targets)` for arrays in memory and for
    jobs that name a model and a loss. None in an empty batch."""
    samples: int
    skipped: int = 0
    """Samples that failed and were skipped."""
    failure: str = ""
    """Error of the last sample that was skipped."""


class Positions(Protocol):
    """The samples of a share that belong to an iteration. See `ephemeron.data.iteration_samples.Sampler`."""

    def batch(self, iteration: int) -> Indices: ...


class BatchSource(Protocol):
    """The samples of one function."""

    @property
    def test_samples(self) -> int:
        """Samples in this function's slice of the test set."""

    def batch(self, positions: Positions, iteration: int) -> TrainingBatch:
        """The batch of an iteration: the same bytes for the same positions and iteration."""

    def tests(self) -> Iterator[TrainingBatch]:
        """This function's slice of the test set, in batches."""

    def close(self) -> None:
        """Ends loading ahead. Idempotent."""


class ArrayBatchSource:
    """A batch source of arrays in memory.

    Args:
        train, test: this function's share of each.
    """

    def __init__(self, train: Samples, test: Samples) -> None:
        self._train, self._test = train, test

    @property
    def test_samples(self) -> int:
        return len(self._test)

    def batch(self, positions: Positions, iteration: int) -> TrainingBatch:
        return _batch(self._train.take(positions.batch(iteration)))

    def tests(self) -> Iterator[TrainingBatch]:
        for start in range(0, len(self._test), EVALUATION_BATCH):
            yield _batch(self._test.take(np.arange(start, min(start + EVALUATION_BATCH, len(self._test)))))

    def close(self) -> None:
        pass


def _batch(samples: Samples) -> TrainingBatch:
    return TrainingBatch((samples.inputs, samples.targets) if len(samples) else None, len(samples))
