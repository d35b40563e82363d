"""Vectors with NumPy's shapes, rows and columns beside matrices, sums, means, deviations and principal components, against NumPy."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.linalg import LinAlgWarning

from ephemeron import FunctionExecutor, linalg
from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.linalg import BigMatrix
from ephemeron.linalg.computation import BigVector
from ephemeron.linalg.statistics import mean, std
from ephemeron.linalg.statistics import sum as total

RNG = np.random.default_rng(0)
A = RNG.standard_normal((20, 20)) + 5 * np.eye(20)
TALL = RNG.standard_normal((30, 7)) + 3
V = RNG.standard_normal(20)


@pytest.fixture(scope="module")
def pool():
    with FunctionExecutor("simulated", progress=False, max_workers=1) as executor:
        yield executor


@pytest.fixture
def stored(tmp_path: Path):
    return lambda a, tile=12: BigMatrix.from_numpy(a, tile=tile, store=tmp_path.as_uri())


@pytest.mark.slow
def test_products_with_vectors_are_vectors(pool, stored):
    a = stored(A)
    for expression, expected in (
        (a @ V, A @ V),
        (V @ a, V @ A),
        (a.T @ V, A.T @ V),
        (a @ (a @ V), A @ (A @ V)),
        ((V @ a) @ a, V @ A @ A),
        (2 * (a @ V) - V, 2 * (A @ V) - V),
        (V - a @ V, V - A @ V),
        (-(a @ V) / 4 + a @ V, A @ V * 0.75),
        (a @ V + 1, A @ V + 1),
        (np.matmul(a, V), A @ V),
        (np.dot(a, V), A @ V),
    ):
        assert isinstance(expression, BigVector)
        assert (expression.shape, expression.ndim, len(expression)) == ((20,), 1, 20)
        found = expression.compute(executor=pool)
        assert found.to_numpy().shape == (20,)
        np.testing.assert_allclose(found.to_numpy(), expected, atol=1e-11)
    assert isinstance(a @ V[:, None], BigMatrix)
    with pytest.raises(JobError, match="vectors of 20 and 3 values cannot be added"):
        a @ V + np.ones(3)


@pytest.mark.slow
def test_equations_with_vectors_give_vectors(pool, stored):
    a, tall, y = stored(A), stored(TALL), RNG.standard_normal(30)
    for found, expected in (
        (linalg.solve(a, V, executor=pool), np.linalg.solve(A, V)),
        (linalg.solve(a, a @ V, executor=pool), V),
        (linalg.lstsq(tall, y, executor=pool), np.linalg.lstsq(TALL, y)[0]),
        (linalg.matmul(a, V, executor=pool), A @ V),
    ):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.to_numpy(), expected, atol=1e-10)
        np.testing.assert_allclose(found - expected, 0, atol=1e-10)
    assert linalg.solve(a, V[:, None], executor=pool).shape == (20, 1)


@pytest.mark.slow
def test_numpy_functions_with_vectors(stored):
    y = RNG.standard_normal(30)
    assert np.linalg.solve(stored(A), V).shape == (20,)
    x, residuals, rank, _ = np.linalg.lstsq(stored(TALL), y)
    wanted = np.linalg.lstsq(TALL, y)
    assert (x.shape, residuals.shape, rank) == (wanted[0].shape, wanted[1].shape, 7)
    np.testing.assert_allclose(x.to_numpy(), wanted[0], atol=1e-12)
    np.testing.assert_allclose(residuals, wanted[1], rtol=1e-10)


def test_arrays_are_stored_for_as_long_as_it_takes(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    y = TALL @ np.arange(7.0)
    found = linalg.lstsq(TALL, y, executor=pool)
    np.testing.assert_allclose(found.to_numpy(), np.arange(7.0), atol=1e-10)
    assert {p.parent.name for p in (tmp_path / "matrices").rglob("*.*")} == {found.column.stored.name}
    with pytest.warns(LinAlgWarning, match="the rank is 1, of 2 columns"):
        linalg.lstsq(np.ones((4, 2)), np.ones(4), executor=pool)
    with pytest.raises(JobError, match="cholesky takes a BigMatrix, this is a list; store it first"):
        linalg.cholesky([[1.0]], executor=pool)


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a + 2,
        lambda a: 2 - a,
        lambda a: a - np.arange(7.0),
        lambda a: np.arange(7.0) - a,
        lambda a: a + np.arange(30.0)[:, None],
        lambda a: np.arange(30.0)[:, None] - a,
        lambda a: a + np.arange(7.0)[None],
        lambda a: a.T - np.arange(30.0),
    ],
)
def test_rows_and_columns_and_numbers_are_broadcast(pool, stored, write):
    np.testing.assert_allclose(write(stored(TALL)).compute(executor=pool).to_numpy(), write(TALL), atol=1e-14)


def test_what_cannot_be_broadcast_is_refused(stored):
    a = stored(TALL)
    for wrong in (np.arange(30.0), np.ones((3, 7)), np.ones((2, 3, 4)), "x"):
        with pytest.raises(JobError, match=r"cannot be added|dimensions"):
            a + wrong


@pytest.mark.parametrize(
    ("dtype", "axis"),
    [*(("float64", axis) for axis in (None, 0, 1, -1)), ("float32", 0), ("float32", 1), ("complex128", None), ("complex128", 0)],
)
def test_sums_means_and_deviations(pool, stored, axis, dtype):
    values = TALL.astype(dtype) + (1j if dtype[0] == "c" else 0)
    a = stored(values)
    eps = 30 * np.finfo(dtype).eps
    for function, ours in ((np.sum, total), (np.mean, mean), (np.std, std)):
        expected = function(values, axis=axis)
        found = ours(a, axis, executor=pool)
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_allclose(found, expected, rtol=10 * eps)


def test_deviations_do_not_cancel(pool, stored):
    values = 1e8 + RNG.standard_normal((40, 3))
    np.testing.assert_allclose(std(stored(values), 0, 1, executor=pool), values.std(0, ddof=1), rtol=1e-7)


@pytest.mark.slow
def test_methods_and_numpy_functions(stored):
    a = stored(TALL)
    np.testing.assert_allclose(a.mean(0), TALL.mean(0))
    np.testing.assert_allclose((a - a.mean(0)).to_numpy(), TALL - TALL.mean(0), atol=1e-14)
    np.testing.assert_allclose(np.mean(a, axis=1), TALL.mean(1))
    np.testing.assert_allclose(np.std(a, axis=0, ddof=1), TALL.std(0, ddof=1))
    np.testing.assert_allclose(a.sum(), TALL.sum())
    np.testing.assert_allclose(np.sum(a @ a.T), (TALL @ TALL.T).sum())
    with pytest.raises(JobError, match="axis = 2"):
        a.sum(2)


def components(a: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    _, s, vh = np.linalg.svd(a - a.mean(0), full_matrices=False)
    vh *= np.sign(vh[np.arange(len(vh)), np.argmax(np.abs(vh), axis=1)])[:, None]
    return vh[:k], s[:k] ** 2 / (len(a) - 1)


@pytest.mark.parametrize("tile", [(15, 8), pytest.param(4, marks=pytest.mark.slow)])
def test_principal_components(pool, stored, tile):
    a = TALL * 2.0 ** -np.arange(7)
    found = linalg.pca(stored(a, tile), 3, executor=pool)
    vh, variances = components(a, 3)
    np.testing.assert_allclose(found.mean, a.mean(0), rtol=1e-13)
    np.testing.assert_allclose(found.components, vh, atol=1e-6)
    np.testing.assert_allclose(found.explained_variance, variances, rtol=1e-6)
    np.testing.assert_allclose(found.scores.to_numpy(), (a - a.mean(0)) @ vh.T, atol=1e-5)
    with pytest.raises(JobError, match="8 principal components of 30 x 7 values; use 1 to 7"):
        linalg.pca(stored(a), 8, executor=pool)


@pytest.mark.slow
def test_the_command_for_principal_components(tmp_path):
    np.save(tmp_path / "a.npy", TALL)
    run = CliRunner().invoke
    done = run(main, ["linalg", "pca", str(tmp_path / "a.npy"), "-k", "2", "--out", str(tmp_path / "found")])
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in (tmp_path / "found").iterdir()) == ["components.npy", "explained_variance.npy", "mean.npy", "scores.npy"]
    np.testing.assert_allclose(np.load(tmp_path / "found" / "components.npy"), components(TALL, 2)[0], atol=1e-9)
    assert run(main, ["linalg", "pca", str(tmp_path / "a.npy"), "-k", "2", "--dry-run"]).exit_code == 0


def test_the_command_tells_warnings(tmp_path):
    a = np.hstack([TALL, TALL])
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", a[:, 0])
    out = str(tmp_path / "x.npy")
    done = CliRunner().invoke(
        main, ["linalg", "lstsq", str(tmp_path / "a.npy"), str(tmp_path / "b.npy"), "--out", out, "--platform", "simulated"]
    )
    assert done.exit_code == 0, done.output
    assert "warning: lstsq: the rank is 7, of 14 columns" in done.output + done.stderr
    np.testing.assert_allclose(np.load(out)[:, 0], [0.5, 0, 0, 0, 0, 0, 0] * 2, atol=1e-12)


def test_matrices_are_not_compared(stored):
    a = stored(A)
    for one, other in [*itertools.product((a, BigVector(stored(A[:, :1]))), (a, A, 1.0)), (A[:, 0], BigVector(stored(A[:, :1])))]:
        with pytest.raises(JobError, match=r"matrices cannot be compared with ==; compare to_numpy\(\), or use norm"):
            one == other  # noqa: B015
    assert a != None  # noqa: E711
    assert len({a, a}) == 1
