"""Factorisation machines (Rendle 2010, equation 1) and matrix factorisation with biases (Koren 2009) for collaborative filtering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ephemeron.errors import JobError
from ephemeron.sparse.models.base import Batch, Floats, Indices, LocatedRows, SparseModel, Step, Table, labels_of, local, located
from ephemeron.sparse.models.linear import binary_sums, sigmoid

FACTORS = "factors"


class _Scored(NamedTuple):
    scores: NDArray[np.float64]
    matrix: Any
    weights: Floats
    factors: Floats
    sums: Floats
    """[samples, factors]: for each factor, Σ v x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorisationMachine(SparseModel):
    """Linear terms, and a term for each pair of features: the product of their factors.

    Row of a feature: its weight, then its factors. The last row holds the intercept, in its first value.
    """

    features: int
    factors: int = 8
    task: str = "classification"
    """`classification` (labels 0 and 1, logistic loss) or `regression` (squared loss, halved)."""
    l2: float = 0.0
    """Penalty l2/2·‖·‖², in each step of the rows that the batch needs; none of the intercept."""
    std: float = 0.01
    """Standard deviation of initial values."""

    def __post_init__(self) -> None:
        if self.task not in ("classification", "regression"):
            raise JobError(f"task = {self.task!r} is not known", remedy="use classification or regression")

    @property
    def tables(self) -> Mapping[str, Table]:
        return {FACTORS: Table(self.features + 1, 1 + self.factors, std=self.std)}

    def rows(self, batch: Batch) -> Mapping[str, Indices]:
        found = local(batch, self.features)
        return LocatedRows({FACTORS: np.append(found.features, self.features)}, found)

    def _scored(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> _Scored:
        matrix, table = located(batch, rows, self.features).matrix, values[FACTORS]
        weights, factors = table[:-1, 0], table[:-1, 1:]
        squares = matrix.copy()
        squares.data = squares.data**2
        sums = matrix @ factors
        pairs = 0.5 * (sums**2 - squares @ factors**2).sum(axis=1)
        scores = np.asarray(matrix @ weights + pairs, np.float64) + float(table[-1, 0])
        return _Scored(scores, matrix, weights, factors, sums)

    def step(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats], iteration: int = 0) -> Step:
        found, labels, n = (self._scored(batch, rows, values), labels_of(batch, "a factorisation machine"), max(1, batch.samples))
        if self.task == "regression":
            residual = found.scores - labels
            loss, errors = 0.5 * float(residual @ residual) / n, residual / n
        else:
            loss = binary_sums(found.scores, labels)["loss"][0] / n
            errors = (sigmoid(found.scores) - (labels == 1)) / n
        back, by = errors.astype(np.float32), found.matrix.T
        squares = by.copy()
        squares.data = squares.data**2
        gradient = np.zeros_like(values[FACTORS])
        gradient[:-1, 0] = by @ back
        gradient[:-1, 1:] = by @ (back[:, None] * found.sums) - (squares @ back)[:, None] * found.factors
        if self.l2:
            gradient[:-1] += np.float32(self.l2) * values[FACTORS][:-1]
        gradient[-1, 0] = errors.sum()
        return Step(loss, {FACTORS: gradient})

    def predict(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> NDArray[np.float64]:
        """float64[samples]: probability of label 1, or the value."""
        scores = self._scored(batch, rows, values).scores
        return scores if self.task == "regression" else sigmoid(scores)

    def evaluate(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> Mapping[str, tuple[float, float]]:
        scores, labels = self._scored(batch, rows, values).scores, labels_of(batch, "a factorisation machine")
        if self.task == "classification":
            return binary_sums(scores, labels)
        return {"squared_error": (float(((scores - labels) ** 2).sum()), batch.samples)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFactorisation(SparseModel):
    """Ratings of items by users: mean + bias of the user + bias of the item + product of their factors.

    A sample has two features: the user, and `users` + the item; its label is the rating. Row of each: its bias, then its factors.
    """

    users: int
    items: int
    factors: int = 16
    mean: float = 0.0
    """Mean of all ratings."""
    l2: float = 0.02
    """Penalty l2/2·‖·‖² of the rows of a sample, for each sample: frequent users and items are penalised more often (Koren 2009)."""
    std: float = 0.1
    """Standard deviation of initial values."""

    @property
    def tables(self) -> Mapping[str, Table]:
        return {FACTORS: Table(self.users + self.items, 1 + self.factors, std=self.std / max(1, self.factors) ** 0.5)}

    def rows(self, batch: Batch) -> Mapping[str, Indices]:
        self._pairs(batch)
        return {FACTORS: np.unique(batch.indices)}

    def _pairs(self, batch: Batch) -> tuple[Indices, Indices]:
        """User and item of each sample, as rows."""
        users, rows = self.users, self.users + self.items
        wrong = np.diff(batch.indptr) != 2
        if not wrong.any():
            pairs = batch.indices.reshape(-1, 2)
            wrong = (pairs[:, 0] < 0) | (pairs[:, 0] >= users) | (pairs[:, 1] < users) | (pairs[:, 1] >= rows)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise JobError(
                f"sample {at} of a batch has features {batch.indices[batch.indptr[at] : batch.indptr[at + 1]].tolist()}, not a user "
                f"below {users} and an item from {users} to {rows - 1}",
                remedy="give each sample two features: the user, and the number of users plus the item",
            )
        return pairs[:, 0], pairs[:, 1]

    def _predicted(
        self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]
    ) -> tuple[NDArray[np.float64], Indices, Indices]:
        """Ratings, and places of users and items among the rows."""
        users, items = (np.searchsorted(rows[FACTORS], part) for part in self._pairs(batch))
        table = values[FACTORS]
        u, v = table[users], table[items]
        ratings = np.einsum("ij,ij->i", u[:, 1:], v[:, 1:]) + u[:, 0] + v[:, 0]
        return ratings.astype(np.float64) + self.mean, users, items

    def step(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats], iteration: int = 0) -> Step:
        ratings, users, items = self._predicted(batch, rows, values)
        residual, n = ratings - labels_of(batch, "matrix factorisation"), max(1, batch.samples)
        back, table = (residual / n).astype(np.float32)[:, None], values[FACTORS]
        u, v = table[users], table[items]
        decay = np.float32(self.l2 / n)
        for_users, for_items = back * v + decay * u, back * u + decay * v
        for_users[:, 0], for_items[:, 0] = back[:, 0] + decay * u[:, 0], back[:, 0] + decay * v[:, 0]
        gradient = np.zeros_like(table)
        np.add.at(gradient, users, for_users)
        np.add.at(gradient, items, for_items)
        return Step(0.5 * float(residual @ residual) / n, {FACTORS: gradient})

    def predict(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> NDArray[np.float64]:
        """float64[samples]: ratings."""
        return self._predicted(batch, rows, values)[0]

    def evaluate(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> Mapping[str, tuple[float, float]]:
        residual = self._predicted(batch, rows, values)[0] - labels_of(batch, "matrix factorisation")
        return {"squared_error": (float(residual @ residual), batch.samples)}
