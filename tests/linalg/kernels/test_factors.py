"""Triangular equations and factors of tiles of several blocks: both sides, all dtypes and orders in memory, LAPACK's bounds."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.linalg import norm

from ephemeron.linalg.kernels import factors


def random(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(shape)
    return (made + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else made).astype(dtype)


@pytest.fixture(params=["float32", "float64", "complex64", "complex128"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("n", [1, 64, 65, 200, 333])
@pytest.mark.parametrize("condition", [10.0, 1e12])
def test_triangular_equations(dtype, n, order, condition):
    scale, eps = np.geomspace(1, 1 / condition, n)[:, None], np.finfo(dtype).eps
    whole = random((n, n), dtype) / n
    for lower in (True, False):
        t = (scale * ((np.tril(whole, -1) if lower else np.triu(whole, 1)) + np.eye(n))).astype(dtype, order=order)
        of, other = t.copy(order=order), whole + np.eye(n)
        t[np.triu_indices(n, 1) if lower else np.tril_indices(n, -1)] = np.nan  # the other triangle is not read
        for adjoint in (False, True):
            for right in (False, True):
                b = random((40, n) if right else (n, 40), dtype, 1).astype(dtype, order=order)
                x = factors.triangular_solution(t, b, right=right, lower=lower, adjoint=adjoint)
                op = of.conj().T if adjoint else of
                left = x @ op - b if right else op @ x - b
                # Higham 2002, theorem 8.5: the residual of each equation is small whatever the condition is
                size = np.abs(x) @ np.abs(op) if right else np.abs(op) @ np.abs(x)
                assert np.all(np.abs(left) <= 20 * n * eps * size)
        unit = factors.triangular_solution(other.astype(dtype), b, right=True, lower=lower, adjoint=True, unit=True)
        triangle = (np.tril(other, -1) if lower else np.triu(other, 1)) + np.eye(n)
        assert np.all(np.abs(unit @ triangle.conj().T - b) <= 20 * n * eps * (np.abs(unit) @ np.abs(triangle.T)))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("n", [1, 64, 200])
def test_cholesky_factor_and_difference(dtype, n, order):
    a, eps = random((n, n + 5), dtype).astype(dtype, order=order), np.finfo(dtype).eps
    gram = (a @ a.conj().T + n * np.eye(n)).astype(dtype, order=order)
    gram[np.triu_indices(n, 1)] = np.nan  # only the lower triangle is read
    lower, info = factors.cholesky_triangle(gram)
    assert info == 0
    assert np.array_equal(lower, np.tril(lower))
    whole = np.tril(np.nan_to_num(gram)) + np.tril(np.nan_to_num(gram), -1).conj().T
    assert norm(lower @ lower.conj().T - whole) <= 20 * n * eps * norm(whole)
    made = np.tril(factors.rank_k_difference(np.nan_to_num(gram), a))
    assert norm(made - n * np.eye(n)) <= 20 * n * eps * norm(whole)
