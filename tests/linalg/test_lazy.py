"""Expressions of matrices, and NumPy's functions of them: lazy, checked when written, computed once, nothing left over."""

from __future__ import annotations

import numpy as np
import pytest

from ephemeron import FunctionExecutor, linalg
from ephemeron.errors import JobError
from ephemeron.linalg.matrices import big_matrix

A, B = (np.random.default_rng(seed).standard_normal((20, 20)) for seed in (0, 1))


@pytest.fixture
def matrices(tmp_path):
    store = (tmp_path / "matrices").as_uri()
    return [linalg.BigMatrix.from_numpy(a, tile=16, store=store) for a in (A, B)]


def files(tmp_path):
    return {p.parent.name for p in (tmp_path / "matrices").rglob("*") if p.is_file()}


def test_nothing_is_computed_before_it_is_read(matrices, tmp_path):
    a, b = matrices
    expression = 2.0 * (a @ b - a).T + np.conjugate(b)
    assert (expression.shape, expression.dtype, expression.tile, len(expression)) == ((20, 20), "float64", (16, 16), 20)
    assert expression.report is None
    assert "20 x 20, float64, not computed" in repr(expression)
    assert len(files(tmp_path)) == 2
    assert np.shape(expression) == (20, 20)
    assert np.size(expression) == 400
    assert np.ndim(a) == 2
    assert (np.transpose(a).to_numpy() == A.T).all()
    assert isinstance(np.matmul(a, b), linalg.BigMatrix)
    assert isinstance(A @ b, linalg.BigMatrix)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda a, b: a @ b[:16, :], "20 x 20 and 16 x 20 cannot be multiplied"),
        (lambda a, b: a + b[:16, :], "20 x 20 and 16 x 20 cannot be added"),
        (lambda a, b: a * "3", "a matrix times str; multiply by a number, or use @"),
        (lambda a, b: a * 1j, "a matrix of float64 times 1j"),
        (lambda a, b: a + np.ones(19), r"20 x 20 and an array of shape \(19,\) cannot be added"),
        (lambda a, b: a @ A.astype("complex64"), "a product of float64 and complex128"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_is_written(matrices, write, says):
    with pytest.raises(JobError, match=says):
        write(*matrices)


def test_what_numpy_would_read_whole_is_refused(matrices, monkeypatch):
    a, _ = matrices
    for call in (lambda: np.median(a), lambda: np.exp(a), lambda: np.linalg.svd(a[:16, :]), lambda: np.add.reduce(a)):
        with pytest.raises(TypeError):
            call()
    monkeypatch.setattr(big_matrix, "IMPLICIT_BYTES", 100)
    with pytest.raises(JobError, match=r"NumPy would read 0.0 GiB of a 20 x 20 matrix .* call to_numpy\(\)"):
        np.asarray(a)
    assert (a.to_numpy() == A).all()


@pytest.mark.slow
def test_expressions_are_computed_once(matrices, tmp_path):
    a, b = matrices
    with FunctionExecutor("local", progress=False, max_workers=2) as pool:
        product = a @ b
        expression = 2.0 * (product + product.H) - A / 4 + -a
        found = expression.compute(executor=pool)
        expected = 2 * (A @ B + (A @ B).T) - A / 4 - A
        np.testing.assert_allclose(found.to_numpy(), expected, atol=1e-12)
        assert expression.compute(executor=pool) is found
        assert found.report.tasks == 6 * 4, "the product once, the array's quotient by NumPy"
        assert len(files(tmp_path)) == 3, "the operands and the result, without the array's tiles"
        factor = linalg.cholesky(product.H @ product, executor=pool)
        np.testing.assert_allclose(factor.to_numpy(), np.linalg.cholesky((A @ B).T @ (A @ B)), atol=1e-9 * np.linalg.cond(A @ B))


@pytest.mark.slow
def test_numpy_functions(matrices):
    a, _ = matrices
    with FunctionExecutor("local", progress=False, max_workers=2) as pool:
        gram = (a @ a.T).compute(executor=pool)
    lower = np.linalg.cholesky(gram)
    assert isinstance(lower, linalg.BigMatrix)
    np.testing.assert_allclose(lower.to_numpy(), np.linalg.cholesky(A @ A.T), atol=1e-10)
    w, _ = np.linalg.eigh(gram)
    np.testing.assert_allclose(w, np.linalg.eigvalsh(A @ A.T), atol=1e-12)
