"""LU with tournament pivoting (Grigori, Demmel, Xiang: CALU, 2011), and equations with it.

Step k exchanges rows of the tiles at and below row k, by the pivots P[k, 0]. As in LINPACK, tiles of L that earlier steps made are not
exchanged: A = Π₀ L₀ Π₁ L₁ … U. Equations need no more, since right-hand sides go through the same steps.
`permuted_lower` makes the L of P A = L U.
"""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, lambdapack, tiles
from ephemeron.linalg.kernels.pivoting import (
    eliminate_rows,
    exchange_and_update,
    exchange_rows,
    factor_pivots,
    gather_pivots,
    merge_candidates,
    pivot_candidates,
)
from ephemeron.linalg.kernels.products import add, copy
from ephemeron.linalg.kernels.triangular import solve_lower


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
