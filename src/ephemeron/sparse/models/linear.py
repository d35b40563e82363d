"""Linear classifiers: logistic regression, and softmax regression for several classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ephemeron.errors import JobError
from ephemeron.sparse.models.base import Batch, Floats, Indices, Local, LocatedRows, SparseModel, Step, Table, labels_of, local, located

WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear(SparseModel):
    """Scores of samples: features times weights, plus the intercept, which is the last row."""

    features: int
    """Number of features."""
    l2: float = 0.0
    """Penalty l2/2·‖w‖², in each step of the rows that the batch needs; none of the intercept."""

    @property
    def _width(self) -> int:
        raise AssertionError

    @property
    def tables(self) -> Mapping[str, Table]:
        return {WEIGHTS: Table(self.features + 1, self._width)}

    def rows(self, batch: Batch) -> Mapping[str, Indices]:
        found = local(batch, self.features)
        return LocatedRows({WEIGHTS: np.append(found.features, self.features)}, found)

    def _scores(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> tuple[Local, NDArray[np.float64]]:
        """float64[samples, width]."""
        found, weights = located(batch, rows, self.features), values[WEIGHTS]
        return found, np.asarray(found.matrix @ weights[:-1], np.float64) + weights[-1]

    def _gradients(self, found: Local, errors: NDArray[np.float64], values: Mapping[str, Floats]) -> Mapping[str, Floats]:
        """From the derivative of the mean loss by the scores."""
        gradient = np.empty_like(values[WEIGHTS])
        gradient[:-1] = found.matrix.T @ errors.astype(np.float32)
        if self.l2:
            gradient[:-1] += np.float32(self.l2) * values[WEIGHTS][:-1]
        gradient[-1] = errors.sum(axis=0)
        return {WEIGHTS: gradient}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticRegression(_Linear):
    """Logistic regression on labels 0 and 1 (or −1 and 1)."""

    @property
    def _width(self) -> int:
        return 1

    def step(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats], iteration: int = 0) -> Step:
        found, scores = self._scores(batch, rows, values)
        signs, margins = _margins(scores[:, 0], labels_of(batch, "logistic regression"))
        n = max(1, batch.samples)
        errors = -signs * sigmoid(-margins) / n
        return Step(float(np.logaddexp(0, -margins).sum()) / n, self._gradients(found, errors[:, None], values))

    def predict(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> NDArray[np.float64]:
        """float64[samples]: probability of label 1."""
        return sigmoid(self._scores(batch, rows, values)[1][:, 0])

    def evaluate(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> Mapping[str, tuple[float, float]]:
        scores = self._scores(batch, rows, values)[1][:, 0]
        return binary_sums(scores, labels_of(batch, "logistic regression"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax(_Linear):
    """Softmax regression on labels 0 to `classes` − 1."""

    classes: int

    @property
    def _width(self) -> int:
        return self.classes

    def step(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats], iteration: int = 0) -> Step:
        found, scores = self._scores(batch, rows, values)
        labels, n = self._labels(batch), max(1, batch.samples)
        logs = _log_softmax(scores)
        at = np.arange(batch.samples)
        errors = np.exp(logs)
        errors[at, labels] -= 1
        return Step(-float(logs[at, labels].sum()) / n, self._gradients(found, errors / n, values))

    def predict(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> NDArray[np.float64]:
        """float64[samples, classes]: probabilities."""
        return np.exp(_log_softmax(self._scores(batch, rows, values)[1]))

    def evaluate(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> Mapping[str, tuple[float, float]]:
        labels, logs = self._labels(batch), _log_softmax(self._scores(batch, rows, values)[1])
        right = float((logs.argmax(axis=1) == labels).sum()) if batch.samples else 0.0
        return {"loss": (-float(logs[np.arange(batch.samples), labels].sum()), batch.samples), "accuracy": (right, batch.samples)}

    def _labels(self, batch: Batch) -> NDArray[np.int64]:
        labels = labels_of(batch, "softmax regression")
        whole = labels.astype(np.int64)
        wrong = np.flatnonzero((whole != labels) | (whole < 0) | (whole >= self.classes))
        if wrong.size:
            raise JobError(
                f"sample {wrong[0]} of a batch has label {labels[wrong[0]]}, and the model has classes 0 to {self.classes - 1}",
                remedy="set classes to the number of classes, or map labels to 0, 1, 2, …",
            )
        return whole


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(−x)), to its last bits for all x: down to 5e-324 at x = −744."""
    with np.errstate(under="ignore"):
        small = np.exp(-np.abs(x))
        found: NDArray[np.float64] = np.where(x >= 0, 1.0, small) / (1 + small)
    return found


def binary_sums(scores: NDArray[np.float64], labels: NDArray[Any]) -> Mapping[str, tuple[float, float]]:
    """Sums of loss and accuracy of a binary classifier, which says 1 where its score is above 0, its probability above one half.

    Raises:
        JobError: a label is not binary.
    """
    signs, margins = _margins(scores, labels)
    n = len(scores)
    return {"loss": (float(np.logaddexp(0, -margins).sum()), n), "accuracy": (float(((scores > 0) == (signs > 0)).sum()), n)}


def _margins(scores: NDArray[np.float64], labels: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Signs of binary labels, and scores times these."""
    signs = np.where(labels == 1, 1.0, -1.0)
    wrong = np.flatnonzero((labels != 1) & (labels != 0) & (labels != -1))
    if wrong.size:
        raise JobError(
            f"sample {wrong[0]} of a batch has label {labels[wrong[0]]}, which is not binary",
            remedy="use labels 0 and 1, or softmax regression",
        )
    return signs, signs * scores


def _log_softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = scores - scores.max(axis=1, keepdims=True, initial=-np.inf) if len(scores) else scores
    logs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


# -- factorisation machines (Rendle 2010 --------------------------------------------------------------------------


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
