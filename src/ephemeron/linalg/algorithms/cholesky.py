"""A = L Lᴴ (figures 16 and 19 of NumPyWren, survey 2.4), and equations with it."""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, lambdapack, tiles
from ephemeron.linalg.kernels.products import multiply_subtract, subtract_gram
from ephemeron.linalg.kernels.triangular import cholesky_factor, solve_right_lower_adjoint


@lambdapack
def cholesky(A: Input, S: Temporary, L: Output, N: Size) -> None:
    """The lower tiles of L with L Lᴴ = A; reads the lower tiles of A. S[i] is what is left of A after i block columns."""
    tiles(A, N, N)
    tiles(L, N, N)
    for i in range(N):
        if i == 0:
            L[i, i] = cholesky_factor(A[i, i])
        else:
            L[i, i] = cholesky_factor(S[i, i, i])
        for j in range(i + 1, N):
            if i == 0:
                L[j, i] = solve_right_lower_adjoint(L[i, i], A[j, i])
                S[i + 1, j, j] = subtract_gram(A[j, j], L[j, i])
            else:
                L[j, i] = solve_right_lower_adjoint(L[i, i], S[i, j, i])
                S[i + 1, j, j] = subtract_gram(S[i, j, j], L[j, i])
            for k in range(i + 1, j):
                if i == 0:
                    S[i + 1, j, k] = multiply_subtract(A[j, k], L[j, i], L[k, i], adjoint_b=True)
                else:
                    S[i + 1, j, k] = multiply_subtract(S[i, j, k], L[j, i], L[k, i], adjoint_b=True)
