"""The port of sparse models, and the batches that they are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ephemeron.errors import JobError, MissingExtra
from ephemeron.sparse.store.optimizers import Optimizer, Sum

Floats: TypeAlias = NDArray[np.float32]
Indices: TypeAlias = NDArray[np.int64]
_FEATURES_PER_ENTRY = 64
"""Up to so many features for each entry of a batch, marking those that occur is faster than sorting: 0.28 ms for 39,000 entries of 2^20
features, instead of 0.66."""


class Batch(NamedTuple):
    """Samples with sparse features, in compressed rows, and their labels."""

    indptr: Indices
    """int64[samples + 1]: sample i has the entries `indptr[i]` to `indptr[i + 1]`."""
    indices: Indices
    """int64[entries]: features, unique in a sample."""
    values: Floats
    """float32[entries]."""
    labels: NDArray[Any] | None = None
    """[samples]; None: there are none."""

    @property
    def samples(self) -> int:
        return len(self.indptr) - 1


@dataclass(frozen=True, slots=True)
class Table:
    """A table of parameters, as a store creates it."""

    rows: int
    width: int = 1
    """Values of a row."""
    value: float = 0.0
    """Initial value."""
    std: float = 0.0
    """Standard deviation of the normal noise of initial values."""
    adds: bool = False
    """Gradients are changes, which are added whatever the optimiser."""


@dataclass(frozen=True, slots=True)
class Step:
    """What came of a batch."""

    loss: float
    """Mean over the samples, without penalties."""
    gradients: Mapping[str, Floats]
    """By table, float32[rows that the batch needs, width]: gradient of the mean loss and of the penalties of these rows."""


class SparseModel(ABC):
    """A model whose parameters are rows of tables.

    For each minibatch: `rows` says what to read, `step` takes what was read and gives the gradient of these rows. Both are functions
    of their arguments alone.
    """

    @property
    @abstractmethod
    def tables(self) -> Mapping[str, Table]:
        """All tables, by name."""

    @abstractmethod
    def rows(self, batch: Batch) -> Mapping[str, Indices]:
        """Rows that a batch needs, by table: ascending and unique.

        Raises:
            JobError: a feature is not below the number of features.
        """

    @abstractmethod
    def step(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats], iteration: int = 0) -> Step:
        """Loss of a batch, and gradient of the rows.

        Args:
            batch: with labels, where the model needs them.
            rows: as `rows` returned them.
            values: of these rows, float32[rows, width] each.
            iteration: number of the step; some models weigh later ones more.

        Raises:
            JobError: labels are absent, or have other values than the model takes.
        """

    @abstractmethod
    def predict(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> NDArray[np.float64]:
        """Predictions for a batch; arguments as for `step`, labels are not looked at."""

    @abstractmethod
    def evaluate(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> Mapping[str, tuple[float, float]]:
        """Sums of metrics over a batch, and what to divide each by: add both up over batches."""


class Local(NamedTuple):
    """Features of a batch by their place among those that it has."""

    features: Indices
    """Those that occur, ascending."""
    matrix: Any
    """`scipy.sparse.csr_array` [samples, features that occur], float32."""


class LocatedRows(dict[str, Indices]):
    """Rows that a batch needs, with the places of its features among them, so that `step` need not look for them again.

    Args:
        rows: by table.
        found: features of the batch.
    """

    def __init__(self, rows: Mapping[str, Indices], found: Local) -> None:
        super().__init__(rows)
        self.found = found


def located(batch: Batch, rows: Mapping[str, Indices], features: int) -> Local:
    """The features of a batch, as they were found for its rows. Raises as `base` does."""
    return rows.found if isinstance(rows, LocatedRows) else local(batch, features)


def local(batch: Batch, features: int) -> Local:
    """The features of a batch.

    Raises:
        JobError: one is not below the number of features.
        MissingExtra: SciPy is not installed.
    """
    least, most = int(batch.indices.min(initial=0)), int(batch.indices.max(initial=-1))
    if least < 0 or most >= features:
        wrong = least if least < 0 else most
        at = int(np.searchsorted(batch.indptr, np.argmax(batch.indices == wrong), side="right")) - 1
        raise JobError(
            f"sample {at} of a batch has feature {wrong}, and the model has features 0 to {features - 1}",
            remedy="set the model's number of features to that of the dataset",
        )
    found, places = _distinct(batch.indices, features)
    matrix = scipy_sparse().csr_array((batch.values, places, batch.indptr.astype(np.int32)), shape=(batch.samples, len(found)))
    return Local(found, matrix)


def _distinct(indices: Indices, features: int) -> tuple[Indices, NDArray[np.int32]]:
    """Those that occur, ascending, and the place of each among them."""
    if features > _FEATURES_PER_ENTRY * indices.size:
        found, inverse = np.unique(indices, return_inverse=True)
        return found, inverse.ravel().astype(np.int32)
    marks, places = np.zeros(features, bool), np.empty(features, np.int32)
    marks[indices] = True
    found = np.flatnonzero(marks)
    places[found] = np.arange(found.size, dtype=np.int32)
    return found, places[indices]


def labels_of(batch: Batch, what: str) -> NDArray[Any]:
    """Labels of a batch.

    Raises:
        JobError: there are none.
    """
    if batch.labels is None:
        raise JobError(f"{what} needs labels, and the dataset has none", remedy="name the label column in the recipe")
    return batch.labels


def scipy_sparse() -> Any:
    """The module `scipy.sparse`.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import scipy.sparse
    except ModuleNotFoundError:
        raise MissingExtra("scipy", "sparse") from None
    return scipy.sparse


# -- tables of a sparse model in this process ---------------------------------------------------------------------


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
