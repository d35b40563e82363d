"""Equations with a triangular matrix, for M right-hand sides (tile columns)."""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, lambdapack, tiles
from ephemeron.linalg.kernels.products import multiply_subtract
from ephemeron.linalg.kernels.triangular import solve_lower, solve_lower_adjoint, solve_upper


@lambdapack
def forward_substitution(L: Input, B: Input, S: Temporary, X: Output, N: Size, M: Size) -> None:
    """X with L X = B, where L is lower triangular."""
    tiles(L, N, N)
    tiles(B, N, M)
    tiles(X, N, M)
    for j in range(M):
        for i in range(N):
            if i == 0:
                X[i, j] = solve_lower(L[i, i], B[i, j])
            else:
                X[i, j] = solve_lower(L[i, i], S[i, i, j])
            for k in range(i + 1, N):
                if i == 0:
                    S[i + 1, k, j] = multiply_subtract(B[k, j], L[k, i], X[i, j])
                else:
                    S[i + 1, k, j] = multiply_subtract(S[i, k, j], L[k, i], X[i, j])


@lambdapack
def adjoint_substitution(L: Input, B: Input, S: Temporary, X: Output, N: Size, M: Size) -> None:
    """X with Lᴴ X = B, where L is lower triangular: from the last block row to the first."""
    tiles(L, N, N)
    tiles(B, N, M)
    tiles(X, N, M)
    for j in range(M):
        for t in range(N):
            i = N - 1 - t
            if t == 0:
                X[i, j] = solve_lower_adjoint(L[i, i], B[i, j])
            else:
                X[i, j] = solve_lower_adjoint(L[i, i], S[t, i, j])
            for k in range(i):
                if t == 0:
                    S[t + 1, k, j] = multiply_subtract(B[k, j], L[i, k], X[i, j], adjoint_a=True)
                else:
                    S[t + 1, k, j] = multiply_subtract(S[t, k, j], L[i, k], X[i, j], adjoint_a=True)


@lambdapack
def backward_substitution(U: Input, B: Input, S: Temporary, X: Output, N: Size, M: Size) -> None:
    """X with U X = B, where U is upper triangular: from the last block row to the first."""
    tiles(U, N, N)
    tiles(B, N, M)
    tiles(X, N, M)
    for j in range(M):
        for t in range(N):
            i = N - 1 - t
            if t == 0:
                X[i, j] = solve_upper(U[i, i], B[i, j])
            else:
                X[i, j] = solve_upper(U[i, i], S[t, i, j])
            for k in range(i):
                if t == 0:
                    S[t + 1, k, j] = multiply_subtract(B[k, j], U[k, i], X[i, j])
                else:
                    S[t + 1, k, j] = multiply_subtract(S[t, k, j], U[k, i], X[i, j])
