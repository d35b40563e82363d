"""Singular values and eigenvalues: two-sided reductions to band form, products with their orthogonal factors, and a randomised decomposition.

`upper_band` is the first stage of singular values (GE2GB: Ltaief, Kurzak, Dongarra 2010), `hermitian_band` that of eigenvalues (SY2SB: Haidar,
Ltaief, Dongarra 2011), each with the trees of `qr`: step k factors a block column, and from the right a block row. What is left is a
band of one tile beside the diagonal, which one function can hold; LAPACK goes on with it (`execution.gathered`).
`hermitian_band` updates both triangles, twice the operations of an update that uses the symmetry, for whole tiles in every task.
"""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, lambdapack, tiles
from ephemeron.linalg.kernels.orthogonal import (
    apply_leaf,
    apply_leaf_right,
    apply_pair,
    apply_pair_right,
    finite_copy,
    hermitian_diagonal,
    hermitian_tile,
    identity_like,
    leading_svd,
    lq_leaf,
    pad_rows,
    qr_leaf,
    qr_pair,
    thin_qr,
    thin_qr_pair,
    zero_rows,
)
from ephemeron.linalg.kernels.products import copy, multiply, multiply_add


@lambdapack
def upper_band(
    A: Input,
    S: Temporary,
    W: Temporary,
    C: Temporary,
    X: Temporary,
    Y: Temporary,
    G: Temporary,
    B: Output,
    V: Output,
    T: Output,
    H: Output,
    J: Output,
    M: Size,
    N: Size,
) -> None:
    """B with A = Q B Pᴴ: tiles on the diagonal (upper triangular) and above it (lower triangular). For M ≥ N.

    V and T are the reflectors of Q as in `qr.qr`; H and J those of P, by step, level and tile column. S[k] is what is left of A after
    k steps. In step k, W are rows on their way up the tree of the column, X rows that took part; Y columns on their way up the
    tree of the row; C and G the triangles of both trees.
    """
    tiles(A, M, N)
    tiles(B, min(M, N), N)
    tiles(V, min(M, N), ceil_log2(M) + 1, M)
    tiles(T, min(M, N), ceil_log2(M) + 1, M)
    tiles(H, min(M, N), ceil_log2(N) + 1, N)
    tiles(J, min(M, N), ceil_log2(N) + 1, N)
    for i in range(M):
        for j in range(N):
            S[0, i, j] = finite_copy(A[i, j])
    for k in range(min(M, N)):
        depth = ceil_log2(M - k)
        for i in range(k, M):
            V[k, 0, i], T[k, 0, i], C[k, 0, i] = qr_leaf(S[k, i, k])
            for j in range(k + 1, N):
                W[k, 0, i, j] = apply_leaf(V[k, 0, i], T[k, 0, i], S[k, i, j], adjoint=True)
        for level in range(depth):
            for i in range(k, M, 2 ** (level + 1)):
                if i + 2**level < M:
                    other = min(level, ceil_log2(M - i - 2**level))
                    V[k, level + 1, i], T[k, level + 1, i], C[k, level + 1, i] = qr_pair(C[k, level, i], C[k, other, i + 2**level])
                    for j in range(k + 1, N):
                        W[k, level + 1, i, j], X[k, i + 2**level, j] = apply_pair(
                            V[k, level + 1, i], T[k, level + 1, i], W[k, level, i, j], W[k, other, i + 2**level, j], adjoint=True
                        )
        B[k, k] = copy(C[k, depth, k])
        wide = ceil_log2(N - k - 1)
        for j in range(k + 1, N):
            H[k, 0, j], J[k, 0, j], G[k, 0, j] = lq_leaf(W[k, depth, k, j])
            for i in range(k + 1, M):
                Y[k, 0, i, j] = apply_leaf_right(H[k, 0, j], J[k, 0, j], X[k, i, j])
        for level in range(wide):
            for j in range(k + 1, N, 2 ** (level + 1)):
                if j + 2**level < N:
                    beside = min(level, ceil_log2(N - j - 2**level))
                    H[k, level + 1, j], J[k, level + 1, j], G[k, level + 1, j] = qr_pair(G[k, level, j], G[k, beside, j + 2**level])
                    for i in range(k + 1, M):
                        Y[k, level + 1, i, j], S[k + 1, i, j + 2**level] = apply_pair_right(
                            H[k, level + 1, j], J[k, level + 1, j], Y[k, level, i, j], Y[k, beside, i, j + 2**level]
                        )
        if k + 1 < N:
            B[k, k + 1] = copy(G[k, wide, k + 1], adjoint=True)
            for i in range(k + 1, M):
                S[k + 1, i, k + 1] = copy(Y[k, wide, i, k + 1])


@lambdapack
def hermitian_band(
    A: Input, S: Temporary, W: Temporary, C: Temporary, X: Temporary, Y: Temporary, B: Output, V: Output, T: Output, N: Size
) -> None:
    """B with A = Q B Qᴴ for a Hermitian A: tiles on the diagonal and below it (upper triangular). V and T are the reflectors of Q.

    Reads both triangles of A to check them. Step k acts on the tile rows and columns after k; names as in `upper_band`.
    """
    tiles(A, N, N)
    tiles(B, N, N)
    tiles(V, N, ceil_log2(N) + 1, N)
    tiles(T, N, ceil_log2(N) + 1, N)
    for i in range(N):
        S[0, i, i] = hermitian_diagonal(A[i, i])
        for j in range(i):
            S[0, i, j] = hermitian_tile(A[i, j], A[j, i])
            if j > 0:
                S[0, j, i] = copy(S[0, i, j], adjoint=True)
    for k in range(N - 1):
        depth = ceil_log2(N - k - 1)
        for i in range(k + 1, N):
            V[k, 0, i], T[k, 0, i], C[k, 0, i] = qr_leaf(S[k, i, k])
            for j in range(k + 1, N):
                W[k, 0, i, j] = apply_leaf(V[k, 0, i], T[k, 0, i], S[k, i, j], adjoint=True)
        for level in range(depth):
            for i in range(k + 1, N, 2 ** (level + 1)):
                if i + 2**level < N:
                    other = min(level, ceil_log2(N - i - 2**level))
                    V[k, level + 1, i], T[k, level + 1, i], C[k, level + 1, i] = qr_pair(C[k, level, i], C[k, other, i + 2**level])
                    for j in range(k + 1, N):
                        W[k, level + 1, i, j], X[k, i + 2**level, j] = apply_pair(
                            V[k, level + 1, i], T[k, level + 1, i], W[k, level, i, j], W[k, other, i + 2**level, j], adjoint=True
                        )
        for j in range(k + 1, N):
            Y[k, 0, k + 1, j] = apply_leaf_right(V[k, 0, j], T[k, 0, j], W[k, depth, k + 1, j])
            for i in range(k + 2, N):
                Y[k, 0, i, j] = apply_leaf_right(V[k, 0, j], T[k, 0, j], X[k, i, j])
        for level in range(depth):
            for j in range(k + 1, N, 2 ** (level + 1)):
                if j + 2**level < N:
                    beside = min(level, ceil_log2(N - j - 2**level))
                    for i in range(k + 1, N):
                        Y[k, level + 1, i, j], S[k + 1, i, j + 2**level] = apply_pair_right(
                            V[k, level + 1, j], T[k, level + 1, j], Y[k, level, i, j], Y[k, beside, i, j + 2**level]
                        )
        B[k, k] = copy(S[k, k, k])
        B[k + 1, k] = copy(C[k, depth, k + 1])
        for i in range(k + 1, N):
            S[k + 1, i, k + 1] = copy(Y[k, depth, i, k + 1])
    B[N - 1, N - 1] = copy(S[N - 1, N - 1, N - 1])


@lambdapack
def apply_thin_q(V: Input, T: Input, B: Input, S: Temporary, W: Temporary, X: Output, M: Size, N: Size, K: Size) -> None:
    """X = Q B for the reflectors of `qr.qr` or the left ones of `upper_band`, where zeros below B complete it to M tile rows.

    B has min(M, N) × K tiles, X has M × K. The steps are those of `qr.apply_q`.
    """
    tiles(V, min(M, N), ceil_log2(M) + 1, M)
    tiles(T, min(M, N), ceil_log2(M) + 1, M)
    tiles(B, min(M, N), K)
    tiles(X, M, K)
    for j in range(K):
        for i in range(min(M, N)):
            S[0, i, j] = pad_rows(B[i, j], V[0, 0, i])
        for i in range(min(M, N), M):
            S[0, i, j] = zero_rows(V[0, 0, i], B[0, j])
    for t in range(min(M, N)):
        k = min(M, N) - 1 - t
        depth = ceil_log2(M - k)
        for j in range(K):
            W[k, depth, k, j] = copy(S[0, k, j])
            for u in range(depth):
                level = depth - 1 - u
                for i in range(k, M, 2 ** (level + 1)):
                    if i + 2**level < M:
                        other = min(level, ceil_log2(M - i - 2**level))
                        W[k, level, i, j], W[k, other, i + 2**level, j] = apply_pair(
                            V[k, level + 1, i], T[k, level + 1, i], W[k, level + 1, i, j], S[t, i + 2**level, j]
                        )
            for i in range(k, M):
                S[t + 1, i, j] = apply_leaf(V[k, 0, i], T[k, 0, i], W[k, 0, i, j])
    for j in range(K):
        for i in range(M):
            X[i, j] = copy(S[min(M, N), i, j])


@lambdapack
def apply_band_q(V: Input, T: Input, B: Input, S: Temporary, W: Temporary, X: Output, N: Size, K: Size) -> None:
    """X = Q B, where Q is that of `hermitian_band`, or P of `upper_band`: step k acts on the tile rows after k. B has N × K tiles."""
    tiles(V, N, ceil_log2(N) + 1, N)
    tiles(T, N, ceil_log2(N) + 1, N)
    tiles(B, N, K)
    tiles(X, N, K)
    for j in range(K):
        X[0, j] = copy(B[0, j])
        for i in range(1, N):
            S[0, i, j] = copy(B[i, j])
    for t in range(N - 1):
        k = N - 2 - t
        depth = ceil_log2(N - k - 1)
        for j in range(K):
            W[k, depth, k + 1, j] = copy(S[0, k + 1, j])
            for u in range(depth):
                level = depth - 1 - u
                for i in range(k + 1, N, 2 ** (level + 1)):
                    if i + 2**level < N:
                        other = min(level, ceil_log2(N - i - 2**level))
                        W[k, level, i, j], W[k, other, i + 2**level, j] = apply_pair(
                            V[k, level + 1, i], T[k, level + 1, i], W[k, level + 1, i, j], S[t, i + 2**level, j]
                        )
            for i in range(k + 1, N):
                S[t + 1, i, j] = apply_leaf(V[k, 0, i], T[k, 0, i], W[k, 0, i, j])
    for j in range(K):
        for i in range(1, N):
            X[i, j] = copy(S[N - 1, i, j])


# -- randomised singular value decomposition (Halko ---------------------------------------------------------------


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
