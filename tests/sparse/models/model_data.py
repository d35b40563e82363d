"""Data for tests of sparse models, from known models."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from ephemeron.sparse.models import Batch

FEATURES = 600


class Data(NamedTuple):
    matrix: Any
    labels: np.ndarray
    scores: np.ndarray


def _categories(samples: int, seed: int) -> Any:
    """Ten categories of 60 values each, some much more frequent than others."""
    dice = np.random.default_rng(seed)
    columns = np.minimum(dice.geometric(0.08, (samples, 10)) - 1, 59) + 60 * np.arange(10)
    indptr = np.arange(samples + 1) * 10
    return scipy.sparse.csr_array((np.ones(10 * samples, np.float32), columns.ravel(), indptr), shape=(samples, FEATURES))


def clicks(samples: int, *, seed: int, pairs: bool = False) -> Data:
    """Binary labels of a logistic model, or of a factorisation machine with two factors."""
    matrix, truth = _categories(samples, seed), np.random.default_rng(99)
    scores = matrix @ truth.normal(0, 0.8, FEATURES) - 0.5
    if pairs:
        factors = truth.normal(0, 0.5, (FEATURES, 2))
        scores = 0.3 * scores + 0.5 * ((matrix @ factors) ** 2 - matrix @ factors**2).sum(axis=1)
    labels = (np.random.default_rng(seed + 1000).random(samples) < 1 / (1 + np.exp(-scores))).astype(np.int8)
    return Data(matrix, labels, scores)


def classes(samples: int, *, seed: int) -> Data:
    """Five classes."""
    matrix = _categories(samples, seed)
    scores = matrix @ np.random.default_rng(98).normal(0, 1, (FEATURES, 5))
    noise = np.random.default_rng(seed + 1000).gumbel(size=scores.shape)
    return Data(matrix, (scores + noise).argmax(axis=1), scores)


def documents(count: int, *, seed: int, topics: int = 6, words: int = 300) -> Data:
    """Documents of about 60 words, from known topics."""
    dice, truth = np.random.default_rng(seed), np.random.default_rng(97)
    topic_words = truth.dirichlet(np.full(words, 0.05), topics)
    shares = dice.dirichlet(np.full(topics, 0.3), count)
    counts = np.stack([dice.multinomial(60, mean) for mean in shares @ topic_words])
    return Data(scipy.sparse.csr_array(counts.astype(np.float32)), np.zeros(count), shares)


def ratings(*, users: int, items: int, count: int) -> np.ndarray:
    """[count, 3]: user, item, rating, from three factors and biases."""
    dice = np.random.default_rng(96)
    p, q = dice.normal(0, 0.6, (users, 3)), dice.normal(0, 0.6, (items, 3))
    u, i = dice.integers(users, size=count), dice.integers(items, size=count)
    biases = dice.normal(0, 0.4, users)[u] + dice.normal(0, 0.4, items)[i]
    return np.stack([u, i, 3.5 + biases + (p[u] * q[i]).sum(axis=1) + dice.normal(0, 0.4, count)], axis=1)


def in_batches(data: Data, order: np.ndarray | None = None, size: int = 200):
    rows = np.arange(data.matrix.shape[0]) if order is None else order
    for at in range(0, len(rows), size):
        part = data.matrix[rows[at : at + size]]
        yield Batch(part.indptr.astype(np.int64), part.indices.astype(np.int64), part.data, data.labels[rows[at : at + size]])


def batches(data: Data, *, epochs: int, size: int = 200):
    dice = np.random.default_rng(0)
    for _ in range(epochs):
        yield from in_batches(data, dice.permutation(data.matrix.shape[0]), size)
