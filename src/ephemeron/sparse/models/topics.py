"""Latent Dirichlet allocation by stochastic variational inference (Hoffman 2013, algorithm 1), with additions only.

Stochastic inference averages the expected counts of words in topics over minibatches, and weighs later ones, which come from better
topics, more. An average needs a multiplication of the whole table in each step. Here each function instead adds the counts of its minibatch
times (t + 1)^growth, t the step, and divides by the sum of all that was added when it reads: the same average, of which only the rows of words that
occur are touched, and to which many functions may add at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ephemeron.errors import MissingExtra
from ephemeron.sparse.models.base import Batch, Floats, Indices, LocatedRows, SparseModel, Step, Table, local, located

WORDS, TOTALS = "words", "totals"


class _Inferred(NamedTuple):
    """Variational distributions of a batch, given the topics."""

    gamma: NDArray[np.float64]
    """[documents, topics]: Dirichlet parameters."""
    theta: NDArray[np.float64]
    """exp E[log θ] of them."""
    beta: NDArray[np.float64]
    """[words that occur, topics]: exp E[log β]."""
    matrix: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDirichletAllocation(SparseModel):
    """Topics of documents: samples are documents, features words, values counts. Labels are not used.

    Table `words` has for each word what was added for each topic, `totals` the sums over words.
    """

    features: int
    """Size of the vocabulary."""
    tokens: float
    """Number of words of all documents together, with repetitions."""
    topics: int = 10
    alpha: float = 0.0
    """Prior of topics in documents; 0: 1 / topics."""
    eta: float = 0.0
    """Prior of words in topics; 0: 1 / topics."""
    growth: float = 2.0
    """Exponent of the weight of later steps: with 0 all count alike, with 2 the last half of the steps makes seven eighths."""
    inner_steps: int = 100
    """Most steps of the inference for a batch."""
    tolerance: float = 1e-3
    """Mean change of the parameters of a document at which it ends."""
    start: float = 0.3
    """What each word and topic begins with, with noise: tells topics apart, and fades as counts are added."""

    @property
    def tables(self) -> Mapping[str, Table]:
        return {
            WORDS: Table(self.features, self.topics, value=self.start, std=0.3 * self.start, adds=True),
            TOTALS: Table(1, self.topics, value=self.start * self.features, adds=True),
        }

    def rows(self, batch: Batch) -> Mapping[str, Indices]:
        found = local(batch, self.features)
        return LocatedRows({WORDS: found.features, TOTALS: np.zeros(1, np.int64)}, found)

    def topic_words(self, words: NDArray[Any], totals: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Dirichlet parameters of topics.

        Args:
            words: rows of the table `words`, [words, topics].
            totals: the row of `totals`, [topics].

        Returns:
            Parameters of these words, [words, topics], and their sums over the vocabulary, [topics].
        """
        eta = self.eta or 1 / self.topics
        sums = np.maximum(totals.astype(np.float64), 1e-12)
        scale = self.tokens / sums.sum()
        return eta + scale * np.maximum(words.astype(np.float64), 0), eta * self.features + scale * sums

    def _inferred(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> _Inferred:
        digamma = _digamma()
        matrix = located(batch, rows, self.features).matrix.astype(np.float64)
        words, sums = self.topic_words(values[WORDS], values[TOTALS][0])
        beta = np.exp(digamma(words) - digamma(sums))
        alpha = self.alpha or 1 / self.topics
        of = np.repeat(np.arange(batch.samples), np.diff(matrix.indptr))
        beta_of = beta[matrix.indices]
        gamma = np.ones((batch.samples, self.topics))
        shares = matrix.copy()
        for _ in range(self.inner_steps):
            theta = np.exp(digamma(gamma) - digamma(gamma.sum(axis=1, keepdims=True)))
            shares.data = matrix.data / (np.einsum("ij,ij->i", theta[of], beta_of) + 1e-100)
            before, gamma = gamma, alpha + theta * (shares @ beta)
            if np.abs(gamma - before).mean() < self.tolerance:
                break
        theta = np.exp(digamma(gamma) - digamma(gamma.sum(axis=1, keepdims=True)))
        return _Inferred(gamma, theta, beta, matrix)

    def step(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats], iteration: int = 0) -> Step:
        """See `SparseModel.step`: the loss is minus the log likelihood per word, given the inferred topics of the batch."""
        found = self._inferred(batch, rows, values)
        likely = np.einsum("ij,ij->i", found.theta[_documents(found.matrix)], found.beta[found.matrix.indices]) + 1e-100
        shares = found.matrix.copy()
        shares.data = found.matrix.data / likely
        counts = found.beta * (shares.T @ found.theta) * float(iteration + 1) ** self.growth
        loss, tokens = self._loss(found, values)
        gradients = {WORDS: counts.astype(np.float32), TOTALS: counts.sum(axis=0, keepdims=True).astype(np.float32)}
        return Step(loss / max(1.0, tokens), gradients)

    def _loss(self, found: _Inferred, values: Mapping[str, Floats]) -> tuple[float, float]:
        """Minus the log likelihood of the words at the means of topics, and the number of words."""
        words, sums = self.topic_words(values[WORDS], values[TOTALS][0])
        share = found.gamma / found.gamma.sum(axis=1, keepdims=True)
        chance = np.einsum("ij,ij->i", share[_documents(found.matrix)], (words / sums)[found.matrix.indices])
        return -float(found.matrix.data @ np.log(chance + 1e-100)), float(found.matrix.data.sum())

    def predict(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> NDArray[np.float64]:
        """float64[documents, topics]: shares of topics."""
        gamma = self._inferred(batch, rows, values).gamma
        shares: NDArray[np.float64] = gamma / gamma.sum(axis=1, keepdims=True)
        return shares

    def evaluate(self, batch: Batch, rows: Mapping[str, Indices], values: Mapping[str, Floats]) -> Mapping[str, tuple[float, float]]:
        return {"loss": self._loss(self._inferred(batch, rows, values), values)}


def _documents(matrix: Any) -> NDArray[np.int64]:
    """Document of each entry."""
    return np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))


def _digamma() -> Any:
    try:
        from scipy.special import digamma
    except ModuleNotFoundError:
        raise MissingExtra("scipy", "sparse") from None
    return digamma
