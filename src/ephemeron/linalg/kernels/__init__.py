"""Kernels over BLAS and LAPACK (SciPy): pure functions of tiles, float32, float64 and complex, of any shape that fits."""

from ephemeron.errors import derive_from_numpy

derive_from_numpy()
