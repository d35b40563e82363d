"""Tall matrices of one tile column: TSQR with explicit Q (Demmel et al.), singular values and vectors by way of R."""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, lambdapack, tiles
from ephemeron.linalg.kernels.orthogonal import identity_like, small_svd, thin_qr, thin_qr_pair
from ephemeron.linalg.kernels.products import copy, multiply


@lambdapack
def tsqr(A: Input, L: Temporary, E: Temporary, F: Temporary, C: Temporary, G: Temporary, Q: Output, R: Output, M: Size) -> None:
    """Q (M × 1 tiles, orthonormal columns) and R (one tile) of A (M × 1 tiles).

    L are the Q of the leaves; E and F the upper and lower rows of the Q of a pair; C the R on their way up the tree, and G the
    rows of the product of all pairs above, on their way down.
    """
    tiles(A, M, 1)
    tiles(Q, M, 1)
    tiles(R, 1, 1)
    depth = ceil_log2(M)
    for i in range(M):
        L[i], C[0, i] = thin_qr(A[i, 0])
    for level in range(depth):
        for i in range(0, M, 2 ** (level + 1)):
            if i + 2**level < M:
                E[level, i], F[level, i], C[level + 1, i] = thin_qr_pair(
                    C[level, i], C[min(level, ceil_log2(M - i - 2**level)), i + 2**level]
                )
    R[0, 0] = copy(C[depth, 0])
    G[depth, 0] = identity_like(C[depth, 0])
    for u in range(depth):
        level = depth - 1 - u
        for i in range(0, M, 2 ** (level + 1)):
            if i + 2**level < M:
                G[level, i] = multiply(E[level, i], G[level + 1, i])
                G[min(level, ceil_log2(M - i - 2**level)), i + 2**level] = multiply(F[level, i], G[level + 1, i])
    for i in range(M):
        Q[i, 0] = multiply(L[i], G[0, i])


@lambdapack
def tall_svd(Q: Input, R: Input, E: Temporary, U: Output, D: Output, W: Output, M: Size) -> None:
    """U (M × 1 tiles), singular values D (one tile, 1 × k, descending) and W = Vᴴ (one tile) of Q R, from the result of `tsqr`."""
    tiles(Q, M, 1)
    tiles(R, 1, 1)
    tiles(U, M, 1)
    tiles(D, 1, 1)
    tiles(W, 1, 1)
    E[0], D[0, 0], W[0, 0] = small_svd(R[0, 0])
    for i in range(M):
        U[i, 0] = multiply(Q[i, 0], E[0])
