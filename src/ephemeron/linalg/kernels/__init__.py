"""Kernels over BLAS and LAPACK (SciPy): pure functions of tiles, float32, float64 and complex, of any shape that fits."""
