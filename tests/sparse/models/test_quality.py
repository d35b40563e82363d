"""Sparse models trained by their own steps, beside scikit-learn's or a reference implementation's on the same data."""

from __future__ import annotations

import numpy as np
import pytest
from model_data import batches, classes, clicks, documents, in_batches, ratings

from ephemeron.sparse.models import (
    FactorisationMachine,
    LatentDirichletAllocation,
    LocalTables,
    LogisticRegression,
    MatrixFactorisation,
    Softmax,
)
from ephemeron.sparse.store.optimizers import SGD, AdaGrad, Adam

WITHIN = 1.01
"""One per cent."""


def test_logistic_regression_beside_scikit_learn():
    from sklearn.linear_model import LogisticRegression as Reference
    from sklearn.metrics import log_loss

    train, test = clicks(20_000, seed=1), clicks(5000, seed=2)
    reference = Reference(C=1.0, max_iter=300).fit(train.matrix, train.labels)
    theirs = log_loss(test.labels, reference.predict_proba(test.matrix)[:, 1])
    model = LogisticRegression(features=train.matrix.shape[1])
    tables = LocalTables(model, AdaGrad(learning_rate=0.3))
    for batch in batches(train, epochs=5):
        tables.step(batch)
    ours = tables.evaluate(in_batches(test))
    assert ours["loss"] < WITHIN * theirs
    assert ours["accuracy"] > reference.score(test.matrix, test.labels) / WITHIN


def test_softmax_beside_scikit_learn():
    from sklearn.linear_model import LogisticRegression as Reference

    train, test = classes(10_000, seed=1), classes(4000, seed=2)
    reference = Reference(C=1.0, max_iter=300).fit(train.matrix, train.labels)
    tables = LocalTables(Softmax(features=train.matrix.shape[1], classes=5), AdaGrad(learning_rate=0.3))
    for batch in batches(train, epochs=5):
        tables.step(batch)
    assert tables.evaluate(in_batches(test))["accuracy"] > reference.score(test.matrix, test.labels) / WITHIN


@pytest.mark.slow
def test_factorisation_machine_beside_the_best_possible():
    """Labels come from a machine with two factors: its own loss is the least possible, and a linear model's is far above."""
    train, test = clicks(20_000, seed=1, pairs=True), clicks(5000, seed=2, pairs=True)
    least = float(np.logaddexp(0, -np.where(test.labels == 1, 1, -1) * test.scores).mean())
    features = train.matrix.shape[1]
    losses = {}
    for name, model in {
        "linear": LogisticRegression(features=features),
        "pairs": FactorisationMachine(features=features, factors=2, l2=3e-4, std=0.1),
    }.items():
        tables = LocalTables(model, AdaGrad(learning_rate=0.1))
        for batch in batches(train, epochs=10):
            tables.step(batch)
        losses[name] = tables.evaluate(in_batches(test))["loss"]
    assert losses["pairs"] < least + 0.2 * (losses["linear"] - least)
    assert losses["pairs"] < WITHIN * torch_machine(train, test)


@pytest.mark.slow
def test_matrix_factorisation_beside_alternating_least_squares():
    data = ratings(users=300, items=200, count=30_000)
    train, test = data[:27_000], data[27_000:]
    theirs = least_squares(train, test, users=300, items=200, factors=4)
    mean = float(train[:, 2].mean())
    tables = LocalTables(MatrixFactorisation(users=300, items=200, factors=4, mean=mean, l2=0.05), SGD(learning_rate=5.0))
    for batch in rating_batches(train, 300, epochs=40):
        tables.step(batch)
    (whole,) = rating_batches(test, 300, epochs=1, size=len(test))
    assert tables.evaluate([whole])["squared_error"] ** 0.5 < WITHIN * theirs


@pytest.mark.slow
def test_topics_beside_scikit_learn():
    from sklearn.decomposition import LatentDirichletAllocation as Reference

    train, test = documents(3000, seed=1), documents(500, seed=2)
    reference = Reference(6, learning_method="online", batch_size=100, max_iter=5, random_state=0).fit(train.matrix)
    tokens = float(train.matrix.sum())
    model = LatentDirichletAllocation(features=train.matrix.shape[1], tokens=tokens, topics=6)
    tables = LocalTables(model, Adam(learning_rate=1.0), seed=1)
    for batch in batches(train, epochs=5, size=100):
        tables.step(batch)
    theirs = reference.perplexity(test.matrix)
    ours, _ = model.topic_words(tables.weights["words"], tables.weights["totals"][0])
    ours = ours.astype(np.float32)
    reference.components_ = ours.T
    reference.exp_dirichlet_component_ = np.exp(log_means(ours.T)).astype(np.float32)
    assert reference.perplexity(test.matrix) < WITHIN * theirs


def torch_machine(train, test) -> float:
    """Loss of a factorisation machine of PyTorch, trained with its AdaGrad."""
    import torch

    torch.manual_seed(0)
    categories, labels = (
        [torch.from_numpy(d.matrix.indices.reshape(-1, 10).astype(np.int64)) for d in (train, test)],
        [torch.from_numpy(d.labels.astype(np.float32)) for d in (train, test)],
    )
    table = torch.nn.Embedding(train.matrix.shape[1], 3)
    torch.nn.init.normal_(table.weight, std=0.1)
    bias = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.Adagrad([*table.parameters(), bias], lr=0.1)

    def loss(of, rows):
        found = table(categories[of][rows])
        weights, factors = found[..., 0], found[..., 1:]
        pairs = 0.5 * (factors.sum(1) ** 2 - (factors**2).sum(1)).sum(1)
        scores = weights.sum(1) + pairs + bias
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, labels[of][rows]), found

    dice = np.random.default_rng(0)
    for _ in range(10):
        order = dice.permutation(len(labels[0]))
        for at in range(0, len(order), 200):
            optimizer.zero_grad()
            value, found = loss(0, order[at : at + 200])
            (value + 3e-4 / 2 * (found**2).sum() / 10).backward()
            optimizer.step()
    with torch.no_grad():
        return float(loss(1, np.arange(len(labels[1])))[0])


def log_means(parameters: np.ndarray) -> np.ndarray:
    """E[log x] under Dirichlet distributions, one per row."""
    from scipy.special import digamma

    return digamma(parameters) - digamma(parameters.sum(axis=1, keepdims=True))


def rating_batches(data: np.ndarray, users: int, *, epochs: int, size: int = 500):
    from ephemeron.sparse.models import Batch

    dice = np.random.default_rng(0)
    for _ in range(epochs):
        order = dice.permutation(len(data))
        for at in range(0, len(order), size):
            part = data[order[at : at + size]]
            pairs = np.stack([part[:, 0], part[:, 1] + users], axis=1).astype(np.int64)
            yield Batch(np.arange(len(part) + 1) * 2, pairs.ravel(), np.ones(2 * len(part), np.float32), part[:, 2])


def least_squares(train: np.ndarray, test: np.ndarray, *, users: int, items: int, factors: int) -> float:
    """RMSE of matrix factorisation by alternating least squares, with biases as factors of 1."""
    dice, mean = np.random.default_rng(0), train[:, 2].mean()
    p, q = (0.1 * dice.standard_normal((n, factors + 2)) for n in (users, items))
    p[:, 0], q[:, 1] = 1, 1
    u, i, r = train[:, 0].astype(int), train[:, 1].astype(int), train[:, 2] - mean
    for _ in range(20):
        for mine, other, of, by, fixed in ((p, q, u, i, 0), (q, p, i, u, 1)):
            free = [c for c in range(factors + 2) if c != fixed]
            for row in range(len(mine)):
                at = of == row
                x, y = other[by[at]][:, free], r[at] - other[by[at]][:, fixed] * mine[row, fixed]
                mine[row, free] = np.linalg.solve(x.T @ x + 0.05 * max(1, at.sum()) * np.eye(len(free)), x.T @ y)
    found = mean + (p[test[:, 0].astype(int)] * q[test[:, 1].astype(int)]).sum(axis=1)
    return float(((found - test[:, 2]) ** 2).mean() ** 0.5)
