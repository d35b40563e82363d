"""The port to the model: gradients out, merged updates in, and the whole state in named arrays.

The training loop does not depend on PyTorch: it moves vectors. Every trainer keeps its own random state, so that several can
take turns in one process, and a replacement draws the same numbers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from ephemeron.runs.metrics import EvaluationSums, Metrics
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
    weight: float | None = None
    """Weight of the vector in the merged mean; None: the samples. Vectors whose weights are all 0 are added up."""
    metrics: Mapping[str, float] = {}
    """Further numbers that the program reports, means over the batch."""
    terms: float | None = None
    """Number of things that loss and metrics are means over; None: the samples."""


class Trainer(Protocol):
    """A model, its optimiser and its samples."""

    size: int
    """Elements of the vectors it exchanges."""
    dtype: np.dtype[np.generic]

    def compute(self, iteration: int) -> TrainingStep:
        """Forward and backward over this rank's batch of the iteration."""

    def apply(self, mean: np.ndarray) -> None:
        """Applies one merged version: an optimiser step, or new parameters."""

    @property
    def initial_first(self) -> bool:
        """Whether a state is loaded over the initial weights, because it does not hold all of them."""

    def evaluate(self) -> EvaluationSums:
        """Evaluates this rank's slice of the test set."""

    def metrics(self, parts: Sequence[EvaluationSums]) -> Metrics:
        """Metrics of the whole test set, from the evaluations of all ranks in their order."""

    def take_metrics(self, metrics: Metrics) -> None:
        """Metrics of an evaluation, alike on all ranks, for schedulers that depend on them."""

    def parameters(self) -> np.ndarray:
        """The parameters as one vector (a copy)."""

    def set_parameters(self, vector: np.ndarray) -> None:
        """Replaces the parameters by those of a vector as `parameters` returns it; the optimiser's state stays."""

    def weights(self) -> tuple[Arrays, Mapping[str, object]]:
        """The result: the model's `state_dict()` by its names, and `bf16`, the names of tensors of that dtype, if any."""

    def state(self) -> tuple[Arrays, Mapping[str, object]]:
        """Parameters, buffers, optimiser and random states: arrays, and plain values for JSON."""

    def load(self, arrays: Arrays, meta: Mapping[str, object], *, shared: bool = False) -> None:
        """Restores what `state` returned; also accepts all initial parameters and buffers, for a fresh start.

        Args:
            arrays, meta: the state.
            shared: it is another rank's state: what only that rank has, such as random states, is not taken over.
        """

    def private_state(self) -> tuple[Arrays, Mapping[str, object]]:
        """The part of `state` that no other rank has, where all ranks apply all versions: random states, buffers, and the like.

        Another rank's state before the same iteration, loaded as `shared`, and then this part are this rank's state, bit for bit.
        """

    @property
    def private_nbytes(self) -> int:
        """About the most bytes of `private_state`; alike on all ranks of a run."""

    def load_private(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        """Restores what `private_state` returned, after `load` of another rank's state as `shared`."""

    @property
    def shares_after_compute(self) -> bool:
        """Whether `compute` changes only private state, and `apply` only what is no private state.

        Then, until the update is applied, `state` still has for other ranks what it had before `compute`, and the private state
        is that before the next iteration.
        """

    def close(self) -> None:
        """Ends the loading of samples. Idempotent."""


@runtime_checkable
class WritesFiles(Protocol):
    """A trainer whose program may write files for its user."""

    def files(self) -> Arrays:
        """Content of each file at the end of the run, by `task.outputs.PREFIX` and its path."""


@runtime_checkable
class SkipsIterations(Protocol):
    """A trainer that can begin in the middle of a run."""

    def skip(self, iterations: int) -> None:
        """Counts iterations without computing them: learning rates are those after so many."""
