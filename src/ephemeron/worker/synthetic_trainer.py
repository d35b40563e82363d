"""A trainer without a model: pseudo-gradients of any size from a seed, the iteration and the parameters.

For studies of time, cost and fault tolerance at scale, where gradients only have to be cheap, deterministic and
sensitive to every mistake: a lost, repeated or reordered update changes the final weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ephemeron.data import Split
from ephemeron.tensors import Arrays
from ephemeron.worker.trainer import Evaluation, Step


class SyntheticTrainer:
    """Momentum descent on pseudo-gradients. See `ephemeron.worker.trainer.Trainer`.

    Args:
        seed: of this rank.
        split: how many samples each iteration has.
        rank: this rank.
        elements: size of the vector.
    """

    def __init__(self, *, seed: int, split: Split, rank: int, elements: int = 64) -> None:
        self.size = elements
        self.dtype: np.dtype[np.generic] = np.dtype(np.float32)
        self._seed, self._split, self._rank = seed, split, rank
        self._theta = np.linspace(-1, 1, elements, dtype=np.float32)
        self._momentum = np.zeros(elements, dtype=np.float32)
        self._draws = 0

    def compute(self, iteration: int) -> Step:
        n = self._split.batch_at(self._rank, iteration % self._split.iterations)
        noise = np.float32(((self._seed ^ (iteration * 2654435761) ^ (self._draws * 40503)) % 1009) / 1009 - 0.5)
        self._draws += 1  # state like a random generator's: it has to survive a replacement
        return Step((self._theta * np.float32(0.1) + noise) * np.float32(n), n, float(abs(self._theta).mean()))

    def apply(self, mean: np.ndarray) -> None:
        self._momentum = np.float32(0.9) * self._momentum + mean
        self._theta = self._theta - np.float32(0.05) * self._momentum

    def evaluate(self) -> Evaluation:
        return Evaluation(0.0, 0, 0)

    def parameters(self) -> np.ndarray:
        return self._theta.copy()

    def weights(self) -> tuple[Arrays, dict[str, Any]]:
        return {"theta": self._theta.copy()}, {}

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        return {"theta": self._theta.copy(), "momentum": self._momentum.copy()}, {"draws": self._draws}

    def load(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        self._theta = arrays["theta"]
        self._momentum = arrays["momentum"]
        self._draws = meta["draws"]

    def close(self) -> None:
        pass
