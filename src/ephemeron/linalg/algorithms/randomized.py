"""Randomised singular value decomposition (Halko, Martinsson, Tropp, 2011), with orthonormal bases by TSQR after every product."""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, lambdapack, tiles
from ephemeron.linalg.kernels.orthogonal import identity_like, leading_svd, thin_qr, thin_qr_pair
from ephemeron.linalg.kernels.products import copy, multiply, multiply_add


@lambdapack
def randomized_svd(
    A: Input,
    O: Input,  # noqa: E741
    Y: Temporary,
    E: Temporary,
    F: Temporary,
    C: Temporary,
    G: Temporary,
    Q: Temporary,
    X: Temporary,
    H: Temporary,
    J: Temporary,
    K: Temporary,
    B: Temporary,
    P: Temporary,
    S: Temporary,
    T: Temporary,
    U: Output,
    D: Output,
    V: Output,
    M: Size,
    N: Size,
    R: Size,
    L: Size,
) -> None:
    """U (M × 1 tiles), singular values D (one tile, 1 × k, descending) and V (N × 1 tiles) with A ≈ U D Vᴴ, of rank L.

    O (N × 1 tiles, at least L columns) is random, for instance normal. Round r multiplies the basis of the rows with A and
    with Aᴴ, so R rounds are R − 1 power iterations. Y, X are sums of products; E, F, H, J the Q of pairs in the trees over tile rows and
    tile columns; C, K the R on their way up and G, B the rows on their way down; Q, P the bases.
    """
    tiles(A, M, N)
    tiles(O, N, 1)
    tiles(U, M, 1)
    tiles(D, 1, 1)
    tiles(V, N, 1)
    high = ceil_log2(M)
    wide = ceil_log2(N)
    for r in range(R):
        for i in range(M):
            for k in range(N):
                if k == 0:
                    if r == 0:
                        Y[r, i, k] = multiply(A[i, k], O[k, 0])
                    else:
                        Y[r, i, k] = multiply(A[i, k], P[r - 1, k])
                elif r == 0:
                    Y[r, i, k] = multiply_add(Y[r, i, k - 1], A[i, k], O[k, 0])
                else:
                    Y[r, i, k] = multiply_add(Y[r, i, k - 1], A[i, k], P[r - 1, k])
            E[r, 0, i], C[r, 0, i] = thin_qr(Y[r, i, N - 1])
        for level in range(high):
            for i in range(0, M, 2 ** (level + 1)):
                if i + 2**level < M:
                    E[r, level + 1, i], F[r, level + 1, i], C[r, level + 1, i] = thin_qr_pair(
                        C[r, level, i], C[r, min(level, ceil_log2(M - i - 2**level)), i + 2**level]
                    )
        G[r, high, 0] = identity_like(C[r, high, 0])
        for u in range(high):
            level = high - 1 - u
            for i in range(0, M, 2 ** (level + 1)):
                if i + 2**level < M:
                    G[r, level, i] = multiply(E[r, level + 1, i], G[r, level + 1, i])
                    G[r, min(level, ceil_log2(M - i - 2**level)), i + 2**level] = multiply(F[r, level + 1, i], G[r, level + 1, i])
        for i in range(M):
            Q[r, i] = multiply(E[r, 0, i], G[r, 0, i])
        for j in range(N):
            for i in range(M):
                if i == 0:
                    X[r, j, i] = multiply(A[i, j], Q[r, i], adjoint_a=True)
                else:
                    X[r, j, i] = multiply_add(X[r, j, i - 1], A[i, j], Q[r, i], adjoint_a=True)
            H[r, 0, j], K[r, 0, j] = thin_qr(X[r, j, M - 1])
        for level in range(wide):
            for j in range(0, N, 2 ** (level + 1)):
                if j + 2**level < N:
                    H[r, level + 1, j], J[r, level + 1, j], K[r, level + 1, j] = thin_qr_pair(
                        K[r, level, j], K[r, min(level, ceil_log2(N - j - 2**level)), j + 2**level]
                    )
        B[r, wide, 0] = identity_like(K[r, wide, 0])
        for u in range(wide):
            level = wide - 1 - u
            for j in range(0, N, 2 ** (level + 1)):
                if j + 2**level < N:
                    B[r, level, j] = multiply(H[r, level + 1, j], B[r, level + 1, j])
                    B[r, min(level, ceil_log2(N - j - 2**level)), j + 2**level] = multiply(J[r, level + 1, j], B[r, level + 1, j])
        for j in range(N):
            P[r, j] = multiply(H[r, 0, j], B[r, 0, j])
    # Aᴴ Q = P K, so A ≈ Q Kᴴ Pᴴ; with Kᴴ = S D T that is (Q S) D (P Tᴴ)ᴴ
    C[R, 0, 0] = copy(K[R - 1, wide, 0], adjoint=True)
    S[0], D[0, 0], T[0] = leading_svd(C[R, 0, 0], L)
    for i in range(M):
        U[i, 0] = multiply(Q[R - 1, i], S[0])
    for j in range(N):
        V[j, 0] = multiply(P[R - 1, j], T[0], adjoint_b=True)
