"""Matrices whose values are beyond the normal numbers: errors are those of LAPACK, not infinite."""

from __future__ import annotations

import numpy as np
import pytest

from ephemeron.linalg.algorithms import equations, qr
from ephemeron.linalg.interpret import interpret
from ephemeron.linalg.kernels.factors import triangular_solution
from ephemeron.linalg.kernels.lapack import scale_of_tiny

N, TILE = 48, 16
SMALL = {"float64": 2.0**-1030, "float32": 2.0**-130, "complex128": 2.0**-1030, "complex64": 2.0**-130}


def tiny(dtype: str, rows: int = N) -> np.ndarray:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((rows, N)) + (1j * rng.standard_normal((rows, N)) if dtype[0] == "c" else 0)
    return a.astype(dtype) * np.dtype(dtype).type(SMALL[dtype])


def tiles(a: np.ndarray, width: int = TILE) -> dict[tuple[int, ...], np.ndarray]:
    return {(i // TILE, j // width): a[i : i + TILE, j : j + width] for i in range(0, len(a), TILE) for j in range(0, a.shape[1], width)}


def joined(found, rows: int, columns: int, width: int = TILE) -> np.ndarray:
    made = np.zeros((rows, columns), next(iter(found.values())).dtype)
    for (i, j), tile in found.items():
        made[i * TILE : i * TILE + tile.shape[0], j * width : j * width + tile.shape[1]] = tile
    return made


def error(found: np.ndarray, a: np.ndarray) -> float:
    """Beside the size of the matrix, in units of rounding and rows; computed where both are normal numbers."""
    up = a.dtype.type(2.0 ** (1000 if np.finfo(a.dtype).bits == 64 else 120))
    scaled = (a * up).astype("complex128")
    return float(np.linalg.norm(found * 1.0 - scaled) / np.linalg.norm(scaled) / np.finfo(a.dtype).eps / len(a))


def grown(a: np.ndarray) -> np.ndarray:
    return (a * a.dtype.type(2.0 ** (1000 if np.finfo(a.dtype).bits == 64 else 120))).astype("complex128")


def lapack_error(a: np.ndarray) -> float:
    q, r = np.linalg.qr(a)
    return error(q.astype("complex128") @ grown(r), a)


@pytest.mark.parametrize("dtype", SMALL)
def test_qr(dtype):
    for program, rows in ((qr.thin_qr, N), (qr.thin_qr, 2 * N), (qr.flat_thin_qr, N)):
        a = tiny(dtype, rows)
        found = interpret(program, {"M": rows // TILE, "N": N // TILE}, {"A": tiles(a)})
        q, r = joined(found["Q"], rows, N), joined(found["R"], N, N)
        assert np.linalg.norm(q.conj().T @ q - np.eye(N)) < 100 * N * np.finfo(dtype).eps
        assert error(q.astype("complex128") @ grown(r), a) < max(8, 2 * lapack_error(a))


@pytest.mark.parametrize("dtype", SMALL)
def test_lu(dtype):
    a = tiny(dtype)
    found = interpret(equations.lu, {"M": N // TILE, "N": N // TILE}, {"A": tiles(a)})
    lower = interpret(equations.permuted_lower, {"M": 3, "N": 3}, {"L": found["L"], "P": found["P"]})["F"]
    made = joined(lower, N, N).astype("complex128") @ grown(joined(found["U"], N, N))
    rows = [int(np.argmin(np.abs(grown(a) - row).sum(axis=1))) for row in made]
    assert sorted(rows) == list(range(N))
    assert error(made, a[rows]) < 60


@pytest.mark.parametrize("dtype", SMALL)
def test_equations(dtype):
    a, b = tiny(dtype), tiny(dtype)[:, :TILE]
    upper = np.triu(a) + np.eye(N, dtype=dtype) * a.dtype.type(8 * SMALL[dtype])
    found = interpret(equations.backward_substitution, {"N": N // TILE, "M": 1}, {"U": tiles(upper), "B": tiles(b)})["X"]
    x = joined(found, N, TILE)
    assert np.isfinite(x).all()
    expected = np.linalg.solve(grown(upper), grown(b))
    assert np.linalg.norm(x - expected) < 1e5 * np.finfo(dtype).eps * np.linalg.norm(expected)


def test_least_squares():
    a = tiny("float64", 2 * N)
    b = a @ np.ones((N, 1))
    made = interpret(qr.tsqr, {"M": 2}, {"A": {(i, 0): a[i * N : (i + 1) * N] for i in range(2)}})
    q = np.concatenate([made["Q"][i, 0] for i in range(2)])
    x = triangular_solution(made["R"][0, 0], q.T @ b, lower=False)
    np.testing.assert_allclose(x, np.ones((N, 1)), atol=1e-6)


def test_ordinary_values_are_not_scaled():
    assert scale_of_tiny(np.full((2, 2), 1e-200)) == 1
    assert scale_of_tiny(np.zeros((2, 2))) == 1
    assert scale_of_tiny(np.zeros((0, 2))) == 1
    assert scale_of_tiny(np.full((2, 2), np.nan)) == 1
    assert scale_of_tiny(np.array([[0.0, 1.0], [1e-310, 0.0]])) == 1
    assert scale_of_tiny(np.full((2, 2), 5e-324)) * 5e-324 > 1e-30
    mixed = np.array([[1e-310, 1.0]])
    assert scale_of_tiny(mixed) == 1
