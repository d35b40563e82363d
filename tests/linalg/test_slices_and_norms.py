"""Slices off the borders of tiles, norms, inverses, and least squares as NumPy calls it."""

from __future__ import annotations

import numpy as np
import pytest
import tiling
from scipy.linalg import LinAlgWarning

from ephemeron import FunctionExecutor, linalg
from ephemeron.errors import JobError, SingularMatrix
from ephemeron.linalg.algorithms import products
from ephemeron.linalg.interpret import interpret
from ephemeron.linalg.language.program import with_options
from running import until

TILE = 8


@pytest.mark.parametrize("top", [0, 1, 5, 7])
@pytest.mark.parametrize("total", [3, 8, 11, 19])
def test_rows_that_begin_within_a_tile(top, total):
    a = tiling.random((32, 11), "complex64")[: top + total]
    program = with_options(products.rows_from if top else products.first_rows, top=top, height=TILE, total=total)
    sizes = {"M": tiling.count(total, TILE), "K": tiling.count(top + total, TILE), "N": 2}
    made = interpret(program, {n: sizes[n] for n in program.sizes}, {"A": tiling.tiled(a, TILE)})["C"]
    assert (tiling.joined(made, (total, 11), TILE, a.dtype) == a[top:]).all()


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("m", [3, 8, 43])
def test_norms_of_columns(m, power):
    a = tiling.random((m, 11), "complex128") * 1e160
    program, sizes = with_options(products.norms_of_columns, power=power), {"M": tiling.count(m, TILE), "N": 2}
    row = tiling.joined(interpret(program, sizes, {"A": tiling.tiled(a, TILE)})["C"], (1, 11), TILE, "float64")
    np.testing.assert_allclose(row[0] / 1e160, np.linalg.norm(a / 1e160, ord=power, axis=0), rtol=1e-14)


@pytest.fixture(scope="module")
def pool():
    with FunctionExecutor("local", progress=False, max_workers=2) as executor:
        yield executor


@pytest.fixture
def stored(tmp_path):
    return lambda a, tile=TILE: linalg.BigMatrix.from_numpy(a, tile=tile, store=(tmp_path / "m").as_uri())


def is_left(tmp_path, names):
    """These matrices and no other ones, once what nothing refers to is removed: a thread does that."""
    return until(lambda: {path.parent.name for path in (tmp_path / "m").rglob("*") if path.is_file()} == names)


@pytest.mark.slow
def test_slices_of_any_rows_and_columns(pool, stored, tmp_path):
    a = tiling.random((30, 21), "complex128")
    big = stored(a, (8, 5))
    for rows, columns in ((slice(3, 29), slice(6, 20)), (slice(8, 24), slice(3)), (slice(9, 11), slice(None))):
        part = big.H.T[rows, columns]
        assert (part.shape, part.tile) == (a[rows, columns].shape, (8, 5))
        found = part.compute(executor=pool)
        assert (found.to_numpy() == a.conj()[rows, columns]).all()
        found.delete()
    total = (big[:, 1:] + big[:, :20]).compute(executor=pool)
    assert (total.to_numpy() == a[:, 1:] + a[:, :20]).all()
    assert is_left(tmp_path, {big.stored.name, total.stored.name})


@pytest.mark.slow
def test_norms_and_inverses(pool, stored, tmp_path):
    a = tiling.random((20, 20), "float64")
    big = stored(a)
    for order in (None, "fro", 1, -1, np.inf, -np.inf, 2, "nuc"):
        np.testing.assert_allclose(linalg.norm(big, order, executor=pool), np.linalg.norm(a, order), rtol=1e-13)
    with pytest.raises(JobError, match="ord = 3 is no norm of matrices; use 'fro', 'nuc', 1, 2, or infinity"):
        linalg.norm(big, 3, executor=pool)
    inverse = linalg.inv(big, executor=pool)
    assert np.linalg.norm(inverse.to_numpy() @ a - np.eye(20)) < 1e-13 * np.linalg.cond(a)
    assert is_left(tmp_path, {big.stored.name, inverse.stored.name})
    prediction = linalg.predict("inv", big, executor=pool)
    assert prediction.tasks == inverse.report.tasks
    with pytest.raises(np.linalg.LinAlgError):
        linalg.inv(stored(np.ones((9, 9))), executor=pool)


@pytest.mark.slow
def test_least_squares_as_numpy_has_it(stored, tmp_path):
    a, b = tiling.random((30, 6), "float64"), tiling.random((30, 2), "float64", 1)
    big = stored(a)
    x, residuals, rank, s = np.linalg.lstsq(big, b)
    wanted = np.linalg.lstsq(a, b)
    np.testing.assert_allclose(x.to_numpy(), wanted[0], atol=1e-13)
    np.testing.assert_allclose(residuals, wanted[1], rtol=1e-12)
    assert rank == wanted[2] == 6
    np.testing.assert_allclose(s, wanted[3], rtol=1e-13)
    assert is_left(tmp_path, {big.stored.name, x.stored.name})
    dependent = a[:, [0, 1, 2, 3, 4, 4]]
    with pytest.warns(LinAlgWarning, match="the rank is 5, of 6 columns"):
        x, residuals, rank, s = np.linalg.lstsq(stored(dependent), b)
    wanted = np.linalg.lstsq(dependent, b)
    np.testing.assert_allclose(x.to_numpy(), wanted[0], atol=1e-13)
    assert (residuals.shape, rank) == (wanted[1].shape, 5)
    with pytest.raises(SingularMatrix, match=r"the rank is 5, and another one with rcond = 0.9"):
        np.linalg.lstsq(stored(dependent), b, rcond=0.9)
    assert isinstance(np.linalg.norm(big), float)
