"""Matrices without full rank, with NaN and infinity, and nearly singular ones: right, refused by place, or told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.linalg import LinAlgWarning

from ephemeron import FunctionExecutor, linalg
from ephemeron.errors import NotFinite, NotPositiveDefinite, SingularMatrix
from ephemeron.linalg import BigMatrix, computation
from ephemeron.linalg.kernels.factors import one_norm

RNG = np.random.default_rng(0)
HALF = RNG.standard_normal((30, 5))
TWICE = np.hstack([HALF, HALF])
SIDES = RNG.standard_normal((30, 2))


@pytest.fixture(scope="module")
def pool():
    with FunctionExecutor("simulated", progress=False, max_workers=1) as executor:
        yield executor


@pytest.fixture
def stored(tmp_path):
    return lambda a, tile=8: BigMatrix.from_numpy(a, tile=tile, store=tmp_path.as_uri())


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
@pytest.mark.parametrize("tile", [pytest.param(5, marks=pytest.mark.slow), (15, 10)])
def test_least_squares_without_full_rank_has_the_least_norm(pool, stored, tile, dtype):
    a, b = TWICE.astype(dtype), SIDES.astype(dtype)
    expected, _, rank, _ = np.linalg.lstsq(a, b, rcond=None)
    assert rank == 5
    with pytest.warns(LinAlgWarning, match="the rank is 5, of 10 columns; X is the solution of least norm"):
        found = linalg.lstsq(stored(a, tile), b, executor=pool).to_numpy()
    np.testing.assert_allclose(found, expected, atol=1e3 * np.finfo(a.dtype).eps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "a",
    [
        np.zeros((8, 3)),
        np.ones((8, 3)),
        np.diag([1.0, 1e-17, 1.0]),
        np.vander(np.linspace(0, 1, 30), 20),
        np.hstack([TWICE * 1e-200, HALF[:, :1] * 1e-220]),
        np.eye(6) - 1 / 6,
    ],
    ids=["zero", "ones", "tiny pivot", "Vandermonde", "small", "centred"],
)
def test_the_rank_is_that_of_numpy(pool, stored, a):
    b = RNG.standard_normal((len(a), 1))
    expected, _, rank, s = np.linalg.lstsq(a, b, rcond=None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = linalg.lstsq(stored(a), b, executor=pool).to_numpy()
    assert [str(w.message) for w in told] == (
        [f"lstsq: the rank is {rank}, of {a.shape[1]} columns; X is the solution of least norm"] * int(rank < a.shape[1])
    )
    cond = s[0] / s[rank - 1] if rank else 1
    np.testing.assert_allclose(found, expected, atol=1e-15 * 30 * cond * max(1, abs(expected).max()))


@pytest.mark.slow
def test_where_least_norm_needs_more_memory_the_rank_is_refused(pool, stored, monkeypatch):
    for limit in (0, 800):  # neither the condition number nor the singular values fit into a function; or these alone
        monkeypatch.setattr(computation, "solver_bytes", lambda solver, *_, n=limit: 2**40 * ("cond" not in solver or not n))
        with pytest.raises(SingularMatrix, match=r"the 10 columns depend on each other: the condition number of R is .* or more"):
            linalg.lstsq(stored(TWICE), SIDES, executor=pool)
    full = linalg.lstsq(stored(HALF), SIDES, executor=pool).to_numpy()
    np.testing.assert_allclose(full, np.linalg.lstsq(HALF, SIDES)[0], atol=1e-13)


CHECKED: dict[str, Callable[..., Any]] = {
    "cholesky": linalg.cholesky,
    "lu": linalg.lu,
    "qr": linalg.qr,
    "inv": linalg.inv,
    "norm": linalg.norm,
    "svd": linalg.svd,
    "svdvals": linalg.svdvals,
    "eigh": linalg.eigh,
    "eigvalsh": linalg.eigvalsh,
    "solve": lambda a, **options: linalg.solve(a, np.ones((10, 1)), **options),
    "solve, positive definite": lambda a, **options: linalg.solve(a, np.ones((10, 1)), assume_a="positive definite", **options),
    "lstsq": lambda a, **options: linalg.lstsq(a, np.ones((10, 1)), **options),
    "randomized_svd": lambda a, **options: linalg.randomized_svd(a, 2, **options),
    "infinite norm": lambda a, **options: linalg.norm(a, np.inf, **options),
}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", [each if each in ("lu", "norm") else pytest.param(each, marks=pytest.mark.slow) for each in CHECKED])
def test_a_value_that_is_not_finite_is_refused_by_its_place(pool, stored, name, value):
    a = np.eye(10) * 4 + 1
    a[6, 5] = a[5, 6] = value
    place = "(6, 5|5, 6)" if name != "infinite norm" else "5, 6"
    with pytest.raises(NotFinite, match=rf"the value at {place} of A is {value} \(.*tile 1, 1 of A"):
        CHECKED[name](stored(a, 4), executor=pool)


def test_right_hand_sides_are_checked_and_checks_can_be_left_out(pool, stored):
    sides = np.ones((10, 1))
    sides[7] = np.nan
    with pytest.raises(NotFinite, match="the value at 7, 0 of B is nan"):
        linalg.solve(stored(np.eye(10)), sides, executor=pool)
    a = np.ones((6, 3))
    a[3, 2] = np.nan
    big = stored(a)
    assert np.isnan(linalg.norm(big, check=False, executor=pool))
    with pytest.raises(NotFinite, match="the value at 3, 2 of A is nan"):  # not from the kept result
        linalg.norm(big, executor=pool)
    _, r = linalg.qr(big, check=False, executor=pool)
    assert np.isnan(r.to_numpy()).any()
    np.testing.assert_array_equal((big + big).compute(executor=pool).to_numpy(), a + a)  # NaN is a value for arithmetic


def test_a_place_is_that_of_the_matrix_that_was_given(pool, stored):
    a = np.ones((12, 8))
    a[9, 6] = np.inf
    with pytest.raises(NotFinite, match=r"the value at 2, 5 of A is inf \(.*tile 0, 1 of A, row 2"):
        linalg.norm(stored(a, 4)[4:, :].T[4:, :], executor=pool)


def dependent(n: int = 60) -> np.ndarray:
    a = np.random.default_rng(1).standard_normal((n, n))
    a[:, -1] = a[:, :-1] @ np.linspace(-1, 1, n - 1)
    return a


@pytest.mark.parametrize(
    ("what", "compute"),
    [
        ("solve", lambda a, pool: linalg.solve(a, np.ones((a.shape[0], 1)), executor=pool)),
        pytest.param("inv", lambda a, pool: linalg.inv(a, executor=pool), marks=pytest.mark.slow),
    ],
)
def test_equations_of_a_nearly_singular_matrix_are_told(pool, stored, what, compute):
    with pytest.warns(LinAlgWarning, match=rf"{what}: .* condition number is about \d.\de\+1[5-9]"):
        compute(stored(dependent(), 30), pool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(stored(dependent() + np.eye(60), 30), pool)


def test_a_nearly_singular_positive_definite_matrix_is_told(pool, stored):
    a = np.diag([1.0, 1, 1, 1e-17])
    with pytest.warns(LinAlgWarning, match=r"solve: .* condition number is about 1.0e\+17"):
        linalg.solve(stored(a, 2), np.ones((4, 1)), assume_a="positive definite", executor=pool)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "complex128", "float32"])
@pytest.mark.parametrize("solver", ["general", "positive definite"])
def test_condition_numbers_from_factors(pool, stored, monkeypatch, dtype, solver):
    """Beside those of NumPy, within the factor that such estimates have."""
    seen: list[float] = []
    real = computation.reciprocal_condition

    def watched(*arguments: Any, **options: Any) -> float | None:
        seen.append(real(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr("ephemeron.linalg.operations.reciprocal_condition", watched)
    g = np.random.default_rng(3).standard_normal((30, 30)) + (0.2j if dtype[0] == "c" else 0)
    for scale in (0, 3):
        a = (g * 10.0 ** -np.linspace(0, scale, 30)).astype(dtype)
        if solver != "general":
            a = a @ a.conj().T + np.eye(30, dtype=dtype) * 1e-3
        linalg.solve(stored(a, 10), np.ones((30, 1), dtype), assume_a=solver, executor=pool)
        assert 0.9 < seen[-1] * np.linalg.cond(a.astype("complex128"), 1) < 10, (scale, seen[-1])


def test_a_norm_is_a_lower_bound_that_is_mostly_right():
    ratios = []
    for seed in range(30):
        a = np.random.default_rng(seed).standard_normal((20, 20))
        found, wanted = one_norm(lambda x, a=a: a @ x, lambda x, a=a: a.T @ x, 20, a.dtype), np.linalg.norm(a, 1)
        assert wanted / 3 < found < wanted * (1 + 1e-12)
        ratios.append(found / wanted)
    assert np.mean(ratios) > 0.85


def test_errors_name_the_row_of_the_matrix(pool, stored):
    a = np.eye(12)
    a[9, 9] = -1
    with pytest.raises(NotPositiveDefinite, match=r"^cholesky: .* row 9 of the matrix \(cholesky, L\[1, 1\]\)"):
        linalg.cholesky(stored(a), executor=pool)
    a[9, 9] = 0
    with pytest.raises(SingularMatrix, match=r"^solve: .* row 9 of the matrix \(lu, "):
        linalg.solve(stored(a), np.ones((12, 1)), executor=pool)
