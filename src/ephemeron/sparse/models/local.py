"""Tables of a sparse model in this process, changed by the optimisers of the store: for tests, and to try a model without functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ephemeron.sparse.models.base import Batch, Floats, Indices, SparseModel
from ephemeron.sparse.store.optimizers import Optimizer, Sum


class LocalTables:
    """All tables of a model.

    Args:
        model: whose tables they are.
        optimizer: changes rows by gradients, but for tables to which is added.
        seed: of initial values.
    """

    def __init__(self, model: SparseModel, optimizer: Optimizer, *, seed: int = 0) -> None:
        self.model, self.optimizer, self.iteration = model, optimizer, 0
        dice = np.random.default_rng(seed)
        self.weights: dict[str, Floats] = {}
        self._slots: dict[str, dict[str, Floats]] = {}
        for name, table in model.tables.items():
            shape = table.rows, table.width
            noise = table.std * dice.standard_normal(shape, np.float32) if table.std else np.zeros(shape, np.float32)
            self.weights[name] = np.float32(table.value) + noise.astype(np.float32)
            self._slots[name] = {slot: np.zeros(shape, np.float32) for slot in self._optimizer(name).slots}

    def _optimizer(self, table: str) -> Optimizer:
        return Sum() if self.model.tables[table].adds else self.optimizer

    def values(self, rows: Mapping[str, Indices]) -> dict[str, Floats]:
        """Values of rows, by table."""
        return {name: self.weights[name][indices] for name, indices in rows.items()}

    def step(self, batch: Batch) -> float:
        """One step of the optimiser. Returns the mean loss before it."""
        rows = self.model.rows(batch)
        found = self.model.step(batch, rows, self.values(rows), self.iteration)
        self.iteration += 1
        for name, gradient in found.gradients.items():
            self._optimizer(name).apply(self.weights[name], self._slots[name], rows[name], gradient)
        return found.loss

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Metrics over all samples of some batches."""
        sums: dict[str, tuple[float, float]] = {}
        for batch in batches:
            rows = self.model.rows(batch)
            for name, (total, count) in self.model.evaluate(batch, rows, self.values(rows)).items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + count
        return {name: total / max(count, 1.0) for name, (total, count) in sums.items()}
