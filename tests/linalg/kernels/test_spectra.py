"""Eigenvalues and singular values of narrow bands in LAPACK's band storage are those of the whole matrix."""

from __future__ import annotations

import numpy as np
import pytest

from ephemeron.linalg.kernels import spectra


def cut(a, tile, row, column):
    return a[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("n", [50, 47])
def test_a_narrow_band(dtype, n):
    rng, tile = np.random.default_rng(n), 2
    a = rng.standard_normal((n, n)) + (1j * rng.standard_normal((n, n)) if np.dtype(dtype).kind == "c" else 0)
    i, j = np.indices(a.shape)
    upper = np.where((j >= i) & (j <= i + tile), a, 0).astype(dtype)
    lower = (np.tril(upper.conj().T, -1) + np.diag(upper.diagonal().real)).astype(dtype)
    steps = range(-(-n // tile))
    above = {(r, c): cut(upper, tile, r, c) for r in steps for c in (r, r + 1) if c in steps}
    below = {(r, c): cut(lower, tile, r, c) for r in steps for c in (r - 1, r) if c in steps}
    tolerance = 20 * n * np.finfo(dtype).eps
    band = spectra.Blocks((n, n), tile, above)
    assert band.is_narrow
    np.testing.assert_allclose(spectra.singular_values(band)[0][0], np.linalg.svd(upper, compute_uv=False), atol=tolerance)
    half = spectra.Blocks((n, n), tile, below, is_half=True)
    np.testing.assert_allclose(spectra.hermitian_eigenvalues(half)[0][0], np.linalg.eigvalsh(lower), atol=tolerance)
    np.testing.assert_allclose(spectra.hermitian_eigen(half)[0][0], np.linalg.eigvalsh(lower), atol=tolerance)
