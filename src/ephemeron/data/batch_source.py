"""Source of a trainer's batches: arrays in memory, or a data flow that is read incrementally.

Batches are requested by iteration number, not by an index that advances, so that a function that starts in the middle
needs only its iteration to get the same bytes as its predecessor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from ephemeron.data.samples import Samples
from ephemeron.data.shuffle import Indices

EVALUATION_BATCH = 256


class TrainingBatch(NamedTuple):
    """A collated batch of samples."""

    inputs: Any
    """Input of the model: an array or a tensor whose first axis is the sample, or a tree of them."""
    targets: Any
    """Targets for the loss, besides the model's output."""
    samples: int
    """Number of samples; if it is 0, `inputs` and `targets` are None."""
    skipped: int = 0
    """Samples that failed and were skipped."""
    failure: str = ""
    """Reason of the last failure among them."""


class Positions(Protocol):
    """Positions in a share that belong to an iteration. See `ephemeron.data.iteration_samples.Sampler`."""

    def batch(self, iteration: int) -> Indices: ...


class BatchSource(Protocol):
    """The samples of one function."""

    @property
    def test_samples(self) -> int:
        """Samples in this function's slice of the test set."""

    def batch(self, positions: Positions, iteration: int) -> TrainingBatch:
        """The batch of an iteration. Always the same bytes for the same positions and iteration."""

    def tests(self) -> Iterator[TrainingBatch]:
        """This function's slice of the test set."""

    def close(self) -> None:
        """Ends loading ahead. Idempotent."""


class ArrayFeed:
    """A feed of arrays that are in memory.

    Args:
        train, test: this function's share of each.
    """

    def __init__(self, train: Samples, test: Samples) -> None:
        self._train, self._test = train, test

    @property
    def test_samples(self) -> int:
        return len(self._test)

    def batch(self, positions: Positions, iteration: int) -> TrainingBatch:
        return _of(self._train.take(positions.batch(iteration)))

    def tests(self) -> Iterator[TrainingBatch]:
        for start in range(0, len(self._test), EVALUATION_BATCH):
            yield _of(self._test.take(np.arange(start, min(start + EVALUATION_BATCH, len(self._test)))))

    def close(self) -> None:
        pass


def _of(samples: Samples) -> TrainingBatch:
    return (
        TrainingBatch(samples.inputs, samples.targets, len(samples)) if len(samples) else TrainingBatch(None, None, 0)
    )
