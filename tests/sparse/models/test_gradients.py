"""Gradients of sparse models against differences of their losses, and what they refuse."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import JobError
from ephemeron.sparse.models import Batch, FactorisationMachine, LatentDirichletAllocation, LogisticRegression, MatrixFactorisation, Softmax
from ephemeron.sparse.models.linear import sigmoid

MODELS = {
    "logistic": (LogisticRegression(features=20), 2),
    "logistic, penalty": (LogisticRegression(features=20, l2=0.3), 2),
    "softmax": (Softmax(features=20, classes=3, l2=0.1), 3),
    "machine": (FactorisationMachine(features=20, factors=3, l2=0.2), 2),
    "machine, regression": (FactorisationMachine(features=20, factors=3, task="regression"), 9),
    "ratings": (MatrixFactorisation(users=8, items=12, factors=3, mean=1.0, l2=0.1), 5),
}


def sample(seed: int, labels: int, *, pairs: bool = False) -> Batch:
    dice = np.random.default_rng(seed)
    n = int(dice.integers(1, 9))
    if pairs:
        rows = [np.array([dice.integers(8), 8 + dice.integers(12)]) for _ in range(n)]
    else:
        rows = [np.sort(dice.choice(20, dice.integers(0, 6), replace=False)) for _ in range(n)]
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)
    values = np.ones(len(indices)) if pairs else dice.normal(size=len(indices))
    return Batch(indptr, indices, values.astype(np.float32), dice.integers(0, labels, n))


def penalty(model, batch, values) -> float:
    if isinstance(model, MatrixFactorisation):
        rows = model.rows(batch)["factors"]
        used = np.searchsorted(rows, batch.indices)
        return model.l2 / 2 * float((values[used] ** 2).sum()) / batch.samples
    return model.l2 / 2 * float((values[:-1] ** 2).sum())


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000))
def test_gradients_are_those_of_the_loss(name, seed):
    model, labels = MODELS[name]
    batch = sample(seed, labels, pairs=name == "ratings")
    ((table, rows),) = model.rows(batch).items()
    dice = np.random.default_rng(seed)
    values = dice.normal(0, 0.5, (len(rows), model.tables[table].width))

    def objective(at):
        return model.step(batch, {table: rows}, {table: at}).loss + penalty(model, batch, at)

    gradient = model.step(batch, {table: rows}, {table: values}).gradients[table]
    assert gradient.shape == values.shape
    direction = dice.normal(size=values.shape)
    if isinstance(model, FactorisationMachine):
        direction[-1, 1:] = 0  # of the intercept's row only the first value is used
    step = 1e-4
    difference = (objective(values + step * direction) - objective(values - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(difference, rel=1e-3, abs=1e-4)


def test_only_rows_that_occur_are_read():
    batch = Batch(np.array([0, 2, 3]), np.array([3, 9, 9]), np.ones(3, np.float32), np.array([0, 1]))
    assert LogisticRegression(features=20).rows(batch)["weights"].tolist() == [3, 9, 20]
    assert LatentDirichletAllocation(features=20, tokens=9).rows(batch)["words"].tolist() == [3, 9]


def test_a_batch_without_entries():
    batch = Batch(np.zeros(3, np.int64), np.empty(0, np.int64), np.empty(0, np.float32), np.array([0, 1]))
    model = LogisticRegression(features=20)
    found = model.step(batch, model.rows(batch), {"weights": np.zeros((1, 1), np.float32)})
    assert found.loss == pytest.approx(np.log(2))
    assert found.gradients["weights"].tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("model", "labels", "said"),
    [
        (LogisticRegression(features=20), [0, 2], "sample 1 of a batch has label 2, which is not binary"),
        (LogisticRegression(features=20), None, "logistic regression needs labels"),
        (LogisticRegression(features=5), [0, 1], "sample 0 of a batch has feature 9, and the model has features 0 to 4"),
        (Softmax(features=20, classes=2), [0, 2], "sample 1 of a batch has label 2, and the model has classes 0 to 1"),
        (MatrixFactorisation(users=5, items=20), [1, 2], "sample 1 of a batch has features [9], not a user below 5"),
        (MatrixFactorisation(users=2, items=20), [1, 2], "sample 0 of a batch has features [3, 9], not a user below 2"),
    ],
)
def test_wrong_batches_are_refused(model, labels, said):
    samples = [[3, 9], [9]] if said.startswith("sample 1") or labels is None else [[3, 9], [1, 9]]
    indptr, indices = np.cumsum([0, *map(len, samples)]), np.concatenate(samples)
    batch = Batch(indptr, indices, np.ones(len(indices), np.float32), None if labels is None else np.array(labels))

    def step():
        rows = model.rows(batch)
        model.step(batch, rows, {name: np.zeros((len(r), model.tables[name].width)) for name, r in rows.items()})

    with pytest.raises(JobError, match=re.escape(said)):
        step()


@pytest.mark.parametrize("model", [LogisticRegression(features=3), FactorisationMachine(features=3, factors=2)])
def test_a_sample_of_score_zero_counts_as_the_class_that_is_predicted_for_it(model):
    """Weights that are exactly 0 are what l1 is for: accuracy is then the share of the class 0, not 0."""
    batch = Batch(np.arange(11), np.zeros(10, np.int64), np.ones(10, np.float32), np.array([0, 1, 0, 0, 1, 0, 0, 0, 1, 0]))
    rows = model.rows(batch)
    values = {name: np.zeros((len(rows[name]), table.width), np.float32) for name, table in model.tables.items()}
    predicted = model.predict(batch, rows, values) > 0.5
    assert model.evaluate(batch, rows, values)["accuracy"] == ((predicted == batch.labels).sum(), 10) == (7, 10)
    signs = batch._replace(labels=np.where(batch.labels == 1, 1, -1))
    assert model.evaluate(signs, rows, values)["accuracy"] == (7, 10)


def test_small_probabilities_are_not_zero():
    scores = np.array([-800.0, -744, -100, -37.5, -1, 0, 1, 40, 800])
    right = [0.0, *(1 / (1 + math.exp(-x)) if x > -700 else math.exp(x) for x in scores[1:-1]), 1.0]
    np.testing.assert_allclose(sigmoid(scores), right, rtol=1e-15)
    assert sigmoid(np.array([-744.0]))[0] > 0
