"""Optimisers of the store against NumPy in float64 and PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from ephemeron.errors import JobError
from ephemeron.sparse.store.messages import Initial, TableSpec
from ephemeron.sparse.store.optimizers import FTRL, SGD, AdaGrad, Adam, Optimizer, Sum, document, optimizer
from ephemeron.sparse.store.state import Table, initial_weights

ROWS = 50


def table(choice: Optimizer, width: int = 1, *, value: float = 0.5) -> Table:
    spec = TableSpec(name="w", rows=ROWS, width=width, optimizer=document(choice), initial=Initial(value=value), first=0, stop=ROWS)
    return Table(spec)


def gradients(width: int, steps: int = 30) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(7)
    return [(np.sort(rng.choice(ROWS, 10, replace=False)), rng.standard_normal((10, width)).astype(np.float32)) for _ in range(steps)]


@pytest.mark.parametrize("width", [1, 3])
def test_sum_and_sgd(width: int) -> None:
    added, descended = table(Sum(), width), table(SGD(learning_rate=0.1, l2=0.01), width)
    sums = np.full((ROWS, width), 0.5)
    weights = sums.copy()
    for rows, gradient in gradients(width):
        added.apply(rows, gradient.reshape(-1))
        descended.apply(rows, gradient.reshape(-1))
        sums[rows] += gradient
        weights[rows] -= 0.1 * (gradient + 0.01 * weights[rows])
    np.testing.assert_allclose(added.weights, sums, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(descended.weights, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 3])
def test_adagrad(width: int) -> None:
    got = table(AdaGrad(learning_rate=0.1), width)
    weights, squares = np.full((ROWS, width), 0.5), np.zeros((ROWS, width))
    for rows, gradient in gradients(width):
        got.apply(rows, gradient.reshape(-1))
        squares[rows] += gradient.astype(float) ** 2
        weights[rows] -= 0.1 * gradient / (np.sqrt(squares[rows]) + 1e-8)
    np.testing.assert_allclose(got.weights, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_ftrl_is_algorithm_1_of_mcmahan_and_gives_zeros(width: int) -> None:
    alpha, beta, l1, l2 = 0.3, 1.0, 0.8, 0.1
    got = table(FTRL(alpha=alpha, beta=beta, l1=l1, l2=l2), width, value=0.0)
    z, n = np.zeros((ROWS, width)), np.zeros((ROWS, width))
    weights = np.zeros((ROWS, width))
    for rows, gradient in gradients(width):
        got.apply(rows, gradient.reshape(-1))
        for row, g in zip(rows, gradient.astype(float), strict=True):
            for j in range(width):
                sigma = (np.sqrt(n[row, j] + g[j] ** 2) - np.sqrt(n[row, j])) / alpha
                z[row, j] += g[j] - sigma * weights[row, j]
                n[row, j] += g[j] ** 2
                if abs(z[row, j]) <= l1:
                    weights[row, j] = 0
                else:
                    scale = (beta + np.sqrt(n[row, j])) / alpha + l2
                    weights[row, j] = -(z[row, j] - np.sign(z[row, j]) * l1) / scale
    np.testing.assert_allclose(got.weights, weights, rtol=1e-3, atol=1e-5)
    assert 0 < (got.weights == 0).sum() < got.weights.size


def test_adam_with_all_rows_is_adam_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the reference")
    got = table(Adam(learning_rate=0.01), 3)
    weights = torch.full((ROWS, 3), 0.5, requires_grad=True)
    reference = torch.optim.Adam([weights], lr=0.01)
    rng = np.random.default_rng(3)
    for _ in range(20):
        gradient = rng.standard_normal((ROWS, 3)).astype(np.float32)
        got.apply(np.arange(ROWS), gradient.reshape(-1))
        weights.grad = torch.from_numpy(gradient)
        reference.step()
    np.testing.assert_allclose(got.weights, weights.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_lazy_adam_leaves_other_rows_alone() -> None:
    got, alone = table(Adam(learning_rate=0.01)), table(Adam(learning_rate=0.01))
    for row, gradient in ((1, 1.0), (2, 0.5), (1, 1.0)):
        got.apply(np.array([row]), np.array([gradient], np.float32))
    for _ in range(2):
        alone.apply(np.array([1]), np.array([1.0], np.float32))
    assert got.weights[1] == alone.weights[1]
    assert got.weights[0] == 0.5


def test_initial_noise_does_not_depend_on_the_shards() -> None:
    noise = Initial(value=1.0, std=0.1, seed=5)
    whole = initial_weights(noise, 0, 10_000, 2)
    parts = [initial_weights(noise, first, 2_500, 2) for first in range(0, 10_000, 2_500)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert abs(whole.std() - 0.1) < 0.005


@pytest.mark.parametrize("choice", [Sum(), SGD(learning_rate=1), AdaGrad(learning_rate=1), FTRL(alpha=1), Adam(learning_rate=1)])
def test_documents(choice: Optimizer) -> None:
    assert optimizer(document(choice)) == choice


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"kind": "sdg", "learning_rate": 1}, "did you mean sgd"),
        ({"kind": "sgd", "rate": 1}, "unknown key rate"),
        ({"kind": "sgd", "learning_rate": -1}, "should be more than 0"),
        ({"kind": "sgd"}, "learning_rate"),
    ],
)
def test_wrong_settings(raw: dict[str, object], text: str) -> None:
    with pytest.raises(JobError, match=text):
        optimizer(raw)
