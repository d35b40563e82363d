"""Singular values and eigenvalues on local functions: any shape, clustered and ill-conditioned spectra, every method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.linalg import norm
from tiling import conditioned, epsilon, random

from ephemeron import FunctionExecutor, linalg
from ephemeron.errors import JobError, NotFinite, NotHermitian
from ephemeron.linalg import spectral

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool():
    with FunctionExecutor("local", progress=False, max_workers=2) as executor:
        yield executor


@pytest.fixture
def stored(tmp_path: Path):
    def store(a, tile=16):
        return linalg.BigMatrix.from_numpy(a, tile=tile, store=(tmp_path / "matrices").as_uri())

    return store


def left_over(tmp_path: Path) -> set[str]:
    return {p.parent.name for p in (tmp_path / "matrices").rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("shape", "method", "dtype"),
    [
        ((50, 37), "band", "complex64"),
        ((80, 20), "band", "float64"),
        ((37, 50), "auto", "complex128"),
        ((40, 40), "auto", "float32"),
        ((20, 90), "band", "float64"),
    ],
)
def test_singular_values_and_vectors(pool, stored, tmp_path, shape, method, dtype):
    a = conditioned(*shape, 1e12, dtype)
    a[:, 3] = a[:, 2]
    big = stored(a)
    u, s, vh = linalg.svd(big, method=method, executor=pool)
    k, eps = min(shape), 20 * max(shape) * epsilon(dtype)
    left, right = u.to_numpy(), vh.to_numpy()
    assert (left.shape, s.shape, right.shape) == ((shape[0], k), (k,), (k, shape[1]))
    assert left.dtype == right.dtype == dtype
    assert norm(left.conj().T @ left - np.eye(k)) <= eps
    assert norm(right @ right.conj().T - np.eye(k)) <= eps
    assert norm((left * s) @ right - a) <= eps * norm(a)
    assert np.all(np.abs(s - np.linalg.svd(a.astype("complex128"), compute_uv=False)) <= eps * s[0])
    assert u.report.tasks > 1 or shape[0] == shape[1]
    assert left_over(tmp_path) == {m.stored.name for m in (big, u, vh)}


SPECTRA = {
    "clusters": np.repeat([-1.0, -1.0 + 1e-13, 2.0, 5.0], [12, 12, 12, 9]),
    "ill-conditioned": np.geomspace(1, 1e-15, 45) * np.where(np.arange(45) % 2, 1, -1),
    "zero": np.zeros(45),
}


def hermitian(values, dtype):
    q, _ = np.linalg.qr(random((len(values), len(values)), dtype))
    a = (q * values) @ q.conj().T
    return ((a + a.conj().T) / 2).astype(dtype)


@pytest.mark.parametrize(
    ("spectrum", "method", "dtype"),
    [
        ("clusters", "band", "complex128"),
        ("ill-conditioned", "band", "float64"),
        ("ill-conditioned", "auto", "complex64"),
        ("zero", "band", "float32"),
        ("clusters", "auto", "float64"),
    ],
)
def test_eigenvalues_and_vectors(pool, stored, tmp_path, spectrum, method, dtype):
    values = SPECTRA[spectrum]
    a = hermitian(values, dtype)
    big = stored(a)
    w, vectors = linalg.eigh(big, method=method, executor=pool)
    v, eps = vectors.to_numpy(), 20 * len(values) * epsilon(dtype)
    assert norm(v.conj().T @ v - np.eye(len(w))) <= eps
    assert norm(a @ v - v * w) <= eps * norm(a)
    assert np.all(np.abs(w - np.sort(values)) <= eps * max(np.abs(values).max(), epsilon(dtype)))
    assert left_over(tmp_path) == {big.stored.name, vectors.stored.name}


def test_values_alone(pool, stored, tmp_path):
    a = hermitian(np.linspace(-3, 3, 45), "complex128")
    inputs = []
    for method in ("band", "auto"):
        inputs.append(stored(a))
        found = linalg.eigvalsh(inputs[-1], method=method, executor=pool)
        np.testing.assert_allclose(found, np.linspace(-3, 3, 45), atol=1e-13)
    b = conditioned(50, 37, 1e10, "complex64")
    for given, method in ((b, "band"), (b.T.copy(), "auto")):
        inputs.append(stored(given))
        found = linalg.svdvals(inputs[-1], method=method, executor=pool)
        np.testing.assert_allclose(found, np.linalg.svd(b, compute_uv=False), atol=1e-5)
    assert left_over(tmp_path) == {m.stored.name for m in inputs}


def test_the_largest_singular_values(pool, stored):
    a = conditioned(70, 50, 1e9, "complex128")
    u, s, vh = linalg.randomized_svd(stored(a), 4, executor=pool)
    assert (u.shape, s.shape, vh.shape) == ((70, 4), (4,), (4, 50))
    exact = np.linalg.svd(a, compute_uv=False)
    np.testing.assert_allclose(s, exact[:4], rtol=1e-6)
    assert norm(a - (u.to_numpy() * s) @ vh.to_numpy(), 2) < 1.01 * exact[4]


def test_what_is_not_hermitian_or_not_finite_is_refused(pool, stored):
    a = np.eye(40)
    a[33, 2] = 1.0
    for method in ("band", "auto"):
        with pytest.raises(NotHermitian, match=r"at 1, 2 of the tile is 1.0, and .*2, 0"):
            linalg.eigh(stored(a), method=method, executor=pool)
    a[2, 33] = np.inf
    with pytest.raises(NotFinite, match="is inf"):
        linalg.svd(stored(a), executor=pool)


def test_a_matrix_that_no_function_can_hold_is_refused_before_anything_starts(pool, tmp_path):
    huge = linalg.BigMatrix.from_numpy(np.zeros((4, 4)), store=tmp_path.as_uri()).stored
    import dataclasses

    huge = linalg.BigMatrix(dataclasses.replace(huge, rows=40_000, columns=40_000, tile_rows=4000, tile_columns=4000))
    with pytest.raises(JobError, match=r"eigh of 40000 x 40000 needs \d+ MB in one function, .* values only"):
        linalg.eigh(huge, executor=pool)
    with pytest.raises(JobError, match="method = 'qr'; use one of"):
        linalg.svd(huge, method="qr", executor=pool)
    with pytest.raises(JobError, match=r"k = 0 singular values .* use 1 to 40000"):
        linalg.randomized_svd(huge, 0, executor=pool)


def test_a_randomized_svd_that_is_called_again_finds_its_random_matrix(stored):
    a = stored(random((30, 20), "complex64"))
    sample, other = (spectral._sample(a.stored, 7, seed) for seed in (0, 1))
    assert spectral._sample(a.stored, 7, 0).stored == sample.stored, "so the program has its name, and goes on from its tiles"
    assert sample.shape == (20, 7)
    assert (sample.to_numpy() != other.to_numpy()).all()
    assert len({spectral._sample(a.stored, width, 0).stored.name for width in (7, 8)}) == 2
