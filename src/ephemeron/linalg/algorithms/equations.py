"""Cholesky factors, LU with tournament pivoting (Grigori, Demmel, Xiang: CALU, 2011), and equations with them and with triangles.

Step k exchanges rows of the tiles at and below row k, by the pivots P[k, 0]. As in LINPACK, tiles of L that earlier steps made are not
exchanged: A = Π₀ L₀ Π₁ L₁ … U. Equations need no more, since right-hand sides go through the same steps.
`permuted_lower` makes the L of P A = L U.
"""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, lambdapack, tiles
from ephemeron.linalg.kernels.factors import (
    cholesky_factor,
    eliminate_rows,
    exchange_and_update,
    exchange_rows,
    factor_pivots,
    gather_pivots,
    merge_candidates,
    pivot_candidates,
    solve_lower,
    solve_lower_adjoint,
    solve_right_lower_adjoint,
    solve_upper,
)
from ephemeron.linalg.kernels.products import add, copy, multiply_subtract, subtract_gram


@lambdapack
def lu(A: Input, S: Temporary, C: Temporary, Q: Temporary, G: Temporary, L: Output, U: Output, P: Output, M: Size, N: Size) -> None:
    """L (lower tiles), U (upper tiles) and P (min(M, N) × 1 tiles, lists of pivots) of A, in min(M, N) steps.

    S[k] is what is left of A after k steps; C and Q are candidates for pivots and their places, G the pivot rows of one column.
    """
    tiles(A, M, N)
    tiles(L, M, min(M, N))
    tiles(U, min(M, N), N)
    tiles(P, min(M, N), 1)
    for i in range(M):
        for j in range(N):
            S[0, i, j] = copy(A[i, j])
    for k in range(min(M, N)):
        depth = ceil_log2(M - k)
        for i in range(k, M):
            C[k, 0, i], Q[k, 0, i] = pivot_candidates(S[k, i, k], i)
        for level in range(depth):
            for i in range(k, M, 2 ** (level + 1)):
                if i + 2**level < M:
                    other = min(level, ceil_log2(M - i - 2**level))
                    C[k, level + 1, i], Q[k, level + 1, i] = merge_candidates(
                        C[k, level, i], Q[k, level, i], C[k, other, i + 2**level], Q[k, other, i + 2**level]
                    )
        L[k, k], U[k, k], P[k, 0] = factor_pivots(C[k, depth, k], Q[k, depth, k], S[k, k, k], k)
        for i in range(k + 1, M):
            L[i, k] = eliminate_rows(S[k, i, k], S[k, k, k], P[k, 0], U[k, k], k, i)
        for j in range(k + 1, N):
            for i in range(k, M):
                G[k, 0, i, j] = gather_pivots(S[k, i, j], P[k, 0], i)
            for level in range(depth):
                for i in range(k, M, 2 ** (level + 1)):
                    if i + 2**level < M:
                        G[k, level + 1, i, j] = add(G[k, level, i, j], G[k, min(level, ceil_log2(M - i - 2**level)), i + 2**level, j])
            U[k, j] = solve_lower(L[k, k], G[k, depth, k, j], unit=True)
            for i in range(k + 1, M):
                S[k + 1, i, j] = exchange_and_update(S[k, i, j], S[k, k, j], P[k, 0], L[i, k], U[k, j], k, i)


@lambdapack
def lu_forward(L: Input, P: Input, B: Input, S: Temporary, G: Temporary, X: Output, N: Size, M: Size) -> None:
    """X with L X = B for the L and P of `lu`: the right-hand sides go through its exchanges and updates."""
    tiles(L, N, N)
    tiles(P, N, 1)
    tiles(B, N, M)
    tiles(X, N, M)
    for i in range(N):
        for j in range(M):
            S[0, i, j] = copy(B[i, j])
    for k in range(N):
        depth = ceil_log2(N - k)
        for j in range(M):
            for i in range(k, N):
                G[k, 0, i, j] = gather_pivots(S[k, i, j], P[k, 0], i)
            for level in range(depth):
                for i in range(k, N, 2 ** (level + 1)):
                    if i + 2**level < N:
                        G[k, level + 1, i, j] = add(G[k, level, i, j], G[k, min(level, ceil_log2(N - i - 2**level)), i + 2**level, j])
            X[k, j] = solve_lower(L[k, k], G[k, depth, k, j], unit=True)
            for i in range(k + 1, N):
                S[k + 1, i, j] = exchange_and_update(S[k, i, j], S[k, k, j], P[k, 0], L[i, k], X[k, j], k, i)


@lambdapack
def permuted_lower(L: Input, P: Input, S: Temporary, G: Temporary, F: Output, M: Size, N: Size) -> None:
    """F, the unit lower triangular (or trapezoidal) factor of P A = F U: the L of `lu` after the exchanges of all later steps."""
    tiles(L, M, min(M, N))
    tiles(P, min(M, N), 1)
    tiles(F, M, min(M, N))
    for j in range(min(M, N)):
        F[j, j] = copy(L[j, j])
        for i in range(j + 1, M):
            S[j + 1, i, j] = copy(L[i, j])
        for k in range(j + 1, min(M, N)):
            depth = ceil_log2(M - k)
            for i in range(k, M):
                G[k, 0, i, j] = gather_pivots(S[k, i, j], P[k, 0], i)
            for level in range(depth):
                for i in range(k, M, 2 ** (level + 1)):
                    if i + 2**level < M:
                        G[k, level + 1, i, j] = add(G[k, level, i, j], G[k, min(level, ceil_log2(M - i - 2**level)), i + 2**level, j])
            F[k, j] = copy(G[k, depth, k, j])
            for i in range(k + 1, M):
                S[k + 1, i, j] = exchange_rows(S[k, i, j], S[k, k, j], P[k, 0], k, i)
        for i in range(min(M, N), M):
            F[i, j] = copy(S[min(M, N), i, j])


# -- A = L Lᴴ (figures 16 and 19 of NumPyWren ---------------------------------------------------------------------


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


# -- equations with a triangular matrix ---------------------------------------------------------------------------


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
