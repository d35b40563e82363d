"""Speed of a function on kernels: a measured or assumed rate of matrix products, and each kernel's share of it."""

from __future__ import annotations

import time
from functools import lru_cache

import numpy as np

_SHARES = {
    "cholesky_factor": 0.4,
    "solve_lower": 0.5,
    "solve_lower_adjoint": 0.5,
    "solve_upper": 0.5,
    "solve_right_lower_adjoint": 0.5,
    "pivot_candidates": 0.35,
    "merge_candidates": 0.35,
    "factor_pivots": 0.4,
    "eliminate_rows": 0.5,
    "exchange_and_update": 0.8,
    "qr_leaf": 0.5,
    "qr_pair": 0.35,
    "apply_leaf": 0.65,
    "apply_pair": 0.6,
    "leaf_columns": 0.65,
    "apply_leaf_padded": 0.65,
    "qr_below": 0.5,
    "apply_below": 0.8,
    "below_columns": 0.8,
    "apply_below_to_upper": 0.8,
    "apply_below_to_lower": 0.8,
    "thin_qr": 0.3,
    "thin_qr_pair": 0.3,
    "thin_triangle": 0.3,
    "add_rows": 0.3,
    "pair_triangle": 0.3,
    "extend_triangle": 0.3,
    "small_svd": 0.25,
    "right_vectors": 0.25,
}
"""Of the rate of matrix products, for tiles of some hundred rows with OpenBLAS; others: all of it."""
_EDGE, _PRODUCTS, _LARGER = 64, 200, 1.3
"""Products this small run on one thread, whatever the number of threads of BLAS here; larger ones are as many times as fast."""


def share(kernel: str) -> float:
    """Speed of a kernel, as a share of that of matrix products."""
    return _SHARES.get(kernel, 1.0)


@lru_cache(maxsize=1)
def product_flops() -> float:
    """Floating-point operations in float64 that one core of this machine makes in a second: measured, for some 30 ms of CPU time."""
    a = np.random.default_rng(0).standard_normal((_EDGE, _EDGE))
    a @ a
    best = 0.0
    for _ in range(8):
        began = time.thread_time()
        for _ in range(_PRODUCTS // 2):
            a @ a
        best = max(best, _EDGE**3 * _PRODUCTS / max(time.thread_time() - began, 1e-6))
    return _LARGER * best
