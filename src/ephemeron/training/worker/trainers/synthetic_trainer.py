"""A trainer without a model: pseudo-gradients of any size from a seed, the iteration and the parameters.

For studies of time, cost and fault tolerance at scale, where gradients have to be cheap, deterministic and sensitive to every
error: a lost, repeated or reordered update changes the final weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.config.typed import build
from ephemeron.data import SampleSplit
from ephemeron.data.iteration_samples import Timeline
from ephemeron.runs.metrics import EvaluationSums, Metrics, means
from ephemeron.training.tensors import Arrays
from ephemeron.training.worker.trainers.trainer import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    draws: int


class _StudyTrainer:
    """Parts that trainers without a model have in common."""

    initial_first = False
    shares_after_compute = True

    def metrics(self, parts: Sequence[EvaluationSums]) -> Metrics:
        return means(parts)

    def take_metrics(self, metrics: Metrics) -> None:
        pass

    def close(self) -> None:
        pass


class SyntheticTrainer(_StudyTrainer):
    """Momentum descent on pseudo-gradients; with several local steps each rank descends alone, and the mean of the changes is applied
    with momentum. See `ephemeron.training.worker.trainers.trainer.Trainer`.

    Args:
        seed: of this rank.
        split: how many samples each iteration has; or the timeline of a generation.
        rank: this rank.
        elements: size of the vector.
        local_steps: steps of this rank between two exchanges; 0: gradients are exchanged.
    """

    def __init__(self, *, seed: int, split: SampleSplit | Timeline, rank: int, elements: int = 64, local_steps: int = 0) -> None:
        self.size = elements
        self.dtype: np.dtype[np.generic] = np.dtype(np.float32)
        timeline = Timeline(split=split) if isinstance(split, SampleSplit) else split
        self._seed, self._timeline, self._rank = seed, timeline, rank
        self._theta = np.linspace(-1, 1, elements, dtype=np.float32)
        self._momentum = np.zeros(elements, dtype=np.float32)
        self._local_steps, self._own = local_steps, np.zeros(elements, dtype=np.float32)
        self._draws = 0

    def compute(self, iteration: int) -> TrainingStep:
        n = self._timeline.batch(self._rank, iteration)
        noise = np.float32(((self._seed ^ (iteration * 2654435761) ^ (self._draws * 40503)) % 1009) / 1009 - 0.5)
        self._draws += 1  # state like a random generator's: it has to survive a replacement
        vector, theta = self._theta * np.float32(0.1) + noise, self._theta
        for _ in range(self._local_steps):
            self._own = np.float32(0.9) * self._own + theta * np.float32(0.1) + noise
            theta = theta - np.float32(0.05) * self._own
            vector = self._theta - theta
        return TrainingStep(vector * np.float32(n), n, float(abs(self._theta).mean()))

    def apply(self, mean: np.ndarray) -> None:
        self._momentum = np.float32(0.9) * self._momentum + mean
        self._theta = self._theta - np.float32(0.05) * self._momentum

    def evaluate(self) -> EvaluationSums:
        return EvaluationSums()

    def parameters(self) -> np.ndarray:
        return self._theta.copy()

    def set_parameters(self, vector: np.ndarray) -> None:
        self._theta = vector.copy()

    def weights(self) -> tuple[Arrays, dict[str, object]]:
        return {"theta": self._theta.copy()}, {}

    def state(self) -> tuple[Arrays, dict[str, object]]:
        arrays = {"theta": self._theta.copy(), "momentum": self._momentum.copy()}
        if self._local_steps:
            arrays["own"] = self._own.copy()
        return arrays, {"draws": self._draws}

    def load(self, arrays: Arrays, meta: Mapping[str, object], *, shared: bool = False) -> None:
        self._theta = arrays["theta"]
        self._momentum = arrays["momentum"]
        if self._local_steps:
            self._own = arrays["own"]
        if not shared:
            self._draws = build(_Draws, meta, where="state of the trainer").draws

    def private_state(self) -> tuple[Arrays, dict[str, object]]:
        return {"own": self._own.copy()} if self._local_steps else {}, {"draws": self._draws}

    @property
    def private_nbytes(self) -> int:
        return self._own.nbytes if self._local_steps else 0

    def load_private(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        if self._local_steps:
            self._own = arrays["own"]
        self._draws = build(_Draws, meta, where="private state of the trainer").draws


class CountingTrainer(_StudyTrainer):
    """Counts the uses of each contribution: rank r adds one at place r·T + t of the vector in iteration t.

    The vector holds one such table of W × T places for each aggregator, so that each shard is counted by itself.
    After the last version every place of every rank's copy is 1. See `ephemeron.training.worker.trainers.trainer.Trainer`.

    Args:
        rank: this rank.
        world: ranks that contribute.
        iterations: of the whole run.
        tables: K.
        weighted: whether merged vectors are means over one sample from each rank; else they are plain sums.
        replaces: whether merged vectors are the counts themselves.
    """

    def __init__(self, *, rank: int, world: int, iterations: int, tables: int, weighted: bool = False, replaces: bool = False) -> None:
        self.size = tables * world * iterations
        self.dtype: np.dtype[np.generic] = np.dtype(np.float32)
        self._rank, self._iterations, self._table = rank, iterations, world * iterations
        self._weight, self._replaces = world if weighted else 0, replaces
        self._counts: np.ndarray = np.zeros(self.size, dtype=np.float32)

    def compute(self, iteration: int) -> TrainingStep:
        vector = np.zeros(self.size, dtype=np.float32)
        vector[self._rank * self._iterations + iteration :: self._table] = 1
        return TrainingStep(vector, 1 if self._weight else 0, 0.0)

    def apply(self, mean: np.ndarray) -> None:
        self._counts = mean.copy() if self._replaces else self._counts + mean * np.float32(self._weight or 1)

    def evaluate(self) -> EvaluationSums:
        """Sum of the errors of all counts, as the loss."""
        return EvaluationSums(1, {"loss": (float(np.abs(self._counts - 1).sum()), 1)})

    def parameters(self) -> np.ndarray:
        return self._counts.copy()

    def set_parameters(self, vector: np.ndarray) -> None:
        self._counts = vector.copy()

    def weights(self) -> tuple[Arrays, dict[str, object]]:
        return {"counts": self._counts.copy()}, {}

    def state(self) -> tuple[Arrays, dict[str, object]]:
        return {"counts": self._counts.copy()}, {}

    def load(self, arrays: Arrays, meta: Mapping[str, object], *, shared: bool = False) -> None:
        self._counts = arrays["counts"]

    def private_state(self) -> tuple[Arrays, dict[str, object]]:
        return {}, {}

    private_nbytes = 0

    def load_private(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        pass
