"""Linear classifiers: logistic regression, and softmax regression for several classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
