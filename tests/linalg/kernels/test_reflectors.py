"""Blocks of reflectors for tiles of several blocks: Q is orthogonal and gives the matrix again, from both sides, for all dtypes and shapes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.linalg import norm

from ephemeron.linalg.kernels import orthogonal


def random(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(shape)
    return (made + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else made).astype(dtype)


@pytest.fixture(params=["float32", "float64", "complex64", "complex128"])
def dtype(request):
    return request.param


def near(a, b, dtype):
    return norm(a - b) <= 20 * max(a.shape) * np.finfo(dtype).eps * max(1.0, norm(b))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(1, 1), (8, 5), (300, 300), (310, 140), (140, 310), (128, 128), (129, 300)])
def test_a_tile(dtype, shape, order):
    (m, n), k = shape, min(shape)
    a = random(shape, dtype).astype(dtype, order=order)
    a[:, n // 2] = 0  # a column without a direction
    v, t, r = orthogonal.reflectors(a)
    assert np.array_equal(v, np.tril(v))
    assert np.array_equal(v.diagonal(), np.ones(k))
    assert np.array_equal(r, np.triu(r))
    assert t.shape == (min(orthogonal.BLOCK, k), k)
    padded = np.concatenate([r, np.zeros((m - k, n), dtype)])
    q = orthogonal.reflected(v, t, np.eye(m, dtype=dtype))
    assert near(q.conj().T @ q, np.eye(m), dtype)
    assert near(orthogonal.reflected(v, t, padded), a, dtype)
    assert near(orthogonal.reflected(v, t, a, adjoint=True), padded, dtype)
    assert near(orthogonal.first_columns(v, t), q[:, :k], dtype)
    beside = random((17, m), dtype, 1)
    assert near(orthogonal.reflected(v, t, beside, right=True), beside @ q, dtype)
    assert near(orthogonal.reflected(v, t, beside, right=True, adjoint=True), beside @ q.conj().T, dtype)


@pytest.mark.parametrize("trapezoid", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (300, 300), (140, 300), (1, 200), (310, 140)])
def test_a_triangle_above_a_tile(dtype, shape, trapezoid):
    m, n = shape
    if trapezoid and m > n:
        pytest.skip("a trapezoid has no more rows than columns")
    above, below = np.triu(random((n, n), dtype)), random(shape, dtype, 1)
    if trapezoid:
        below = np.triu(below)
    top, v, t = orthogonal.pair_reflectors(above, below, trapezoid=trapezoid)
    assert np.array_equal(top, np.triu(top))
    if trapezoid:
        assert np.array_equal(v, np.triu(v))
    both, of = np.concatenate([above, below]), {"trapezoid": trapezoid}
    zeros = np.zeros((m, n), dtype)
    assert near(np.concatenate(orthogonal.pair_reflected(v, t, top, zeros, **of)), both, dtype)
    turned, gone = orthogonal.pair_reflected(v, t, above, below, adjoint=True, **of)
    assert near(turned, top, dtype)
    assert norm(gone) <= 20 * (m + n) * np.finfo(dtype).eps * norm(both)
    identity = np.eye(m + n, dtype=dtype)
    q = np.concatenate(orthogonal.pair_reflected(v, t, identity[:n], identity[n:], **of))
    assert near(q.conj().T @ q, identity, dtype)
    assert near(np.concatenate(orthogonal.first_pair_columns(v, t, **of)), q[:, :n], dtype)
    left, right = random((9, n), dtype, 2), random((9, m), dtype, 3)
    made = orthogonal.pair_reflected(v, t, left, right, right=True, **of)
    assert near(np.concatenate(made, axis=1), np.concatenate([left, right], axis=1) @ q, dtype)
