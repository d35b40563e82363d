"""Tiled QR with a tree in every block column (communication-avoiding QR), and products with its Q.

Step k factors the tiles at and below row k of column k: leaf by leaf, then R above R along a binary tree. V and T keep the
reflectors: index 0 of the tree is the leaves, index l + 1 the pairs at distance 2**l. A row without partner takes no part in a level; its
value stays at the level of its last pair, min(level, ceil_log2(rows left below it)). Tiles are square, but for the last row
and column.

Tiled QR that goes down each block column (Buttari, Langou, Kurzak, Dongarra 2009), for matrices that are not tall.

Step k factors tile (k, k), then puts its R above each tile below it in turn. Each update takes 4 b³ operations, where a binary tree (`qr`)
takes 4 b³ at a leaf and 2 b³ at a pair, so that all of it takes the 4/3 n³ of LAPACK and fewer tasks. Its chains are as long as the block columns are, which
updates of other columns hide unless a matrix is tall. Tiles are square, but for the last row and column.
"""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, in_sequence, lambdapack, tiles
from ephemeron.linalg.kernels.orthogonal import (
    apply_below,
    apply_below_to_lower,
    apply_below_to_upper,
    apply_leaf,
    apply_leaf_padded,
    apply_pair,
    apply_pair_above,
    apply_pair_below,
    below_columns,
    identity_like,
    leaf_columns,
    pair_columns,
    qr_below,
    qr_leaf,
    qr_pair,
    small_svd,
    thin_qr_pair,
)
from ephemeron.linalg.kernels.orthogonal import thin_qr as tile_thin_qr
from ephemeron.linalg.kernels.products import copy, multiply


@lambdapack
def qr(A: Input, S: Temporary, W: Temporary, C: Temporary, V: Output, T: Output, R: Output, M: Size, N: Size) -> None:
    """R (upper tiles) of A, and the reflectors V and T of Q (steps × levels × M tiles).

    S[k] is what is left of A after k ≥ 1 steps; W are rows on their way up the tree; C is R of the panel on its way.
    """
    tiles(A, M, N)
    tiles(R, min(M, N), N)
    tiles(V, min(M, N), ceil_log2(M) + 1, M)
    tiles(T, min(M, N), ceil_log2(M) + 1, M)
    for k in range(min(M, N)):
        depth = ceil_log2(M - k)
        for i in range(k, M):
            if k == 0:
                V[k, 0, i], T[k, 0, i], C[k, 0, i] = qr_leaf(A[i, k])
            else:
                V[k, 0, i], T[k, 0, i], C[k, 0, i] = qr_leaf(S[k, i, k])
            for j in range(k + 1, N):
                if k == 0:
                    W[k, 0, i, j] = apply_leaf(V[k, 0, i], T[k, 0, i], A[i, j], adjoint=True)
                else:
                    W[k, 0, i, j] = apply_leaf(V[k, 0, i], T[k, 0, i], S[k, i, j], adjoint=True)
        for level in range(depth):
            for i in range(k, M, 2 ** (level + 1)):
                if i + 2**level < M:
                    other = min(level, ceil_log2(M - i - 2**level))
                    V[k, level + 1, i], T[k, level + 1, i], C[k, level + 1, i] = qr_pair(C[k, level, i], C[k, other, i + 2**level])
                    for j in range(k + 1, N):
                        W[k, level + 1, i, j], S[k + 1, i + 2**level, j] = apply_pair(
                            V[k, level + 1, i], T[k, level + 1, i], W[k, level, i, j], W[k, other, i + 2**level, j], adjoint=True
                        )
        R[k, k] = copy(C[k, depth, k])
        for j in range(k + 1, N):
            R[k, j] = copy(W[k, depth, k, j])


@lambdapack
def apply_q_adjoint(V: Input, T: Input, B: Input, S: Temporary, W: Temporary, X: Output, M: Size, N: Size, K: Size) -> None:
    """X = Qᴴ B for the reflectors of `qr`; B and X have M × K tiles."""
    tiles(V, min(M, N), ceil_log2(M) + 1, M)
    tiles(T, min(M, N), ceil_log2(M) + 1, M)
    tiles(B, M, K)
    tiles(X, M, K)
    for i in range(M):
        for j in range(K):
            S[0, i, j] = copy(B[i, j])
    for k in range(min(M, N)):
        depth = ceil_log2(M - k)
        for j in range(K):
            for i in range(k, M):
                W[k, 0, i, j] = apply_leaf(V[k, 0, i], T[k, 0, i], S[k, i, j], adjoint=True)
            for level in range(depth):
                for i in range(k, M, 2 ** (level + 1)):
                    if i + 2**level < M:
                        other = min(level, ceil_log2(M - i - 2**level))
                        W[k, level + 1, i, j], S[k + 1, i + 2**level, j] = apply_pair(
                            V[k, level + 1, i], T[k, level + 1, i], W[k, level, i, j], W[k, other, i + 2**level, j], adjoint=True
                        )
            X[k, j] = copy(W[k, depth, k, j])
    for i in range(min(M, N), M):
        for j in range(K):
            X[i, j] = copy(S[min(M, N), i, j])


@lambdapack
def apply_q(V: Input, T: Input, B: Input, S: Temporary, W: Temporary, X: Output, M: Size, N: Size, K: Size) -> None:
    """X = Q B for the reflectors of `qr`; B and X have M × K tiles. The steps of `qr` backwards.

    S[t] is the result of the last t steps; W[k, l] are rows at level l of the tree of step k, on their way to its leaves.
    """
    tiles(V, min(M, N), ceil_log2(M) + 1, M)
    tiles(T, min(M, N), ceil_log2(M) + 1, M)
    tiles(B, M, K)
    tiles(X, M, K)
    for i in range(M):
        for j in range(K):
            S[0, i, j] = copy(B[i, j])
    for t in range(min(M, N)):
        k = min(M, N) - 1 - t
        depth = ceil_log2(M - k)
        for j in range(K):
            # row k has taken no part in the steps after k: it is as B has it
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
    for i in range(M):
        for j in range(K):
            X[i, j] = copy(S[min(M, N), i, j])


@lambdapack
def form_q(V: Input, T: Input, S: Temporary, W: Temporary, Q: Output, M: Size, N: Size) -> None:
    """The first min(M, N) columns of tiles of Q for the reflectors of `qr` (as LAPACK's orgqr).

    The steps of `apply_q` to the first columns of the identity, without those that meet zeros alone: step k changes columns from k on.
    """
    tiles(V, min(M, N), ceil_log2(M) + 1, M)
    tiles(T, min(M, N), ceil_log2(M) + 1, M)
    tiles(Q, M, min(M, N))
    for s in range(min(M, N)):
        k = min(M, N) - 1 - s
        depth = ceil_log2(M - k)
        for u in range(depth):
            level = depth - 1 - u
            for i in range(k, M, 2 ** (level + 1)):
                if i + 2**level < M:
                    other = min(level, ceil_log2(M - i - 2**level))
                    if u == 0:
                        W[k, level, i, k], W[k, other, i + 2**level, k] = pair_columns(
                            V[k, level + 1, i], T[k, level + 1, i], V[k, 0, i], V[k, 0, i + 2**level]
                        )
                    else:
                        W[k, level, i, k], W[k, other, i + 2**level, k] = apply_pair_above(
                            V[k, level + 1, i], T[k, level + 1, i], W[k, level + 1, i, k], V[k, 0, i + 2**level]
                        )
                    for j in range(k + 1, min(M, N)):
                        if u == 0:
                            W[k, level, i, j], W[k, other, i + 2**level, j] = apply_pair_below(
                                V[k, level + 1, i], T[k, level + 1, i], V[k, 0, i], S[k + 1, i + 2**level, j]
                            )
                        else:
                            W[k, level, i, j], W[k, other, i + 2**level, j] = apply_pair(
                                V[k, level + 1, i], T[k, level + 1, i], W[k, level + 1, i, j], S[k + 1, i + 2**level, j]
                            )
        if k + 1 == M:
            if k == 0:
                Q[k, k] = leaf_columns(V[k, 0, k], T[k, 0, k])
            else:
                S[k, k, k] = leaf_columns(V[k, 0, k], T[k, 0, k])
        else:
            for i in range(k, M):
                for j in range(k, min(M, N)):
                    if k == 0:
                        Q[i, j] = apply_leaf(V[k, 0, i], T[k, 0, i], W[k, 0, i, j])
                    else:
                        S[k, i, j] = apply_leaf(V[k, 0, i], T[k, 0, i], W[k, 0, i, j])


thin_qr = in_sequence("thin_qr", qr, form_q)
"""Q and R in one graph."""


# -- tiled QR that goes down each block column (Buttari -----------------------------------------------------------


@lambdapack
def flat_qr(A: Input, S: Temporary, W: Temporary, C: Temporary, V: Output, T: Output, R: Output, M: Size, N: Size) -> None:
    """R (upper tiles) of A, and the reflectors V and T of Q (steps × M tiles).

    S[k] is what is left of A after k ≥ 1 steps; W[k, i] is row k after the tiles down to row i; C is R of the panel, likewise.
    """
    tiles(A, M, N)
    tiles(R, min(M, N), N)
    tiles(V, min(M, N), M)
    tiles(T, min(M, N), M)
    for k in range(min(M, N)):
        if k == M - 1:
            if k == 0:
                V[k, k], T[k, k], R[k, k] = qr_leaf(A[k, k])
            else:
                V[k, k], T[k, k], R[k, k] = qr_leaf(S[k, k, k])
        else:
            if k == 0:
                V[k, k], T[k, k], C[k, k] = qr_leaf(A[k, k])
            else:
                V[k, k], T[k, k], C[k, k] = qr_leaf(S[k, k, k])
        for j in range(k + 1, N):
            if k == M - 1:
                if k == 0:
                    R[k, j] = apply_leaf(V[k, k], T[k, k], A[k, j], adjoint=True)
                else:
                    R[k, j] = apply_leaf(V[k, k], T[k, k], S[k, k, j], adjoint=True)
            else:
                if k == 0:
                    W[k, k, j] = apply_leaf(V[k, k], T[k, k], A[k, j], adjoint=True)
                else:
                    W[k, k, j] = apply_leaf(V[k, k], T[k, k], S[k, k, j], adjoint=True)
        for i in range(k + 1, M):
            if i == M - 1:
                if k == 0:
                    V[k, i], T[k, i], R[k, k] = qr_below(C[k, i - 1], A[i, k])
                else:
                    V[k, i], T[k, i], R[k, k] = qr_below(C[k, i - 1], S[k, i, k])
            else:
                if k == 0:
                    V[k, i], T[k, i], C[k, i] = qr_below(C[k, i - 1], A[i, k])
                else:
                    V[k, i], T[k, i], C[k, i] = qr_below(C[k, i - 1], S[k, i, k])
            for j in range(k + 1, N):
                if i == M - 1:
                    if k == 0:
                        R[k, j], S[k + 1, i, j] = apply_below(V[k, i], T[k, i], W[k, i - 1, j], A[i, j], adjoint=True)
                    else:
                        R[k, j], S[k + 1, i, j] = apply_below(V[k, i], T[k, i], W[k, i - 1, j], S[k, i, j], adjoint=True)
                else:
                    if k == 0:
                        W[k, i, j], S[k + 1, i, j] = apply_below(V[k, i], T[k, i], W[k, i - 1, j], A[i, j], adjoint=True)
                    else:
                        W[k, i, j], S[k + 1, i, j] = apply_below(V[k, i], T[k, i], W[k, i - 1, j], S[k, i, j], adjoint=True)


@lambdapack
def flat_form_q(V: Input, T: Input, S: Temporary, W: Temporary, Q: Output, M: Size, N: Size) -> None:
    """The first min(M, N) columns of tiles of Q for the reflectors of `flat_qr` (as LAPACK's orgqr).

    The steps of `flat_qr` backwards, to the first columns of the identity, without those that meet zeros alone: step k changes columns from k
    on. S[k] are its results, W[k, i] is row k on its way up, after the tile of row i.
    """
    tiles(V, min(M, N), M)
    tiles(T, min(M, N), M)
    tiles(Q, M, min(M, N))
    for s in range(min(M, N)):
        k = min(M, N) - 1 - s
        if k == M - 1:
            if k == 0:
                Q[k, k] = leaf_columns(V[k, k], T[k, k])
            else:
                S[k, k, k] = leaf_columns(V[k, k], T[k, k])
        for u in range(M - 1 - k):
            i = M - 1 - u
            if i == M - 1:
                if k == 0:
                    W[k, i, k], Q[i, k] = below_columns(V[k, i], T[k, i])
                else:
                    W[k, i, k], S[k, i, k] = below_columns(V[k, i], T[k, i])
            else:
                if k == 0:
                    W[k, i, k], Q[i, k] = apply_below_to_upper(V[k, i], T[k, i], W[k, i + 1, k])
                else:
                    W[k, i, k], S[k, i, k] = apply_below_to_upper(V[k, i], T[k, i], W[k, i + 1, k])
            for j in range(k + 1, min(M, N)):
                if i == M - 1:
                    if k == 0:
                        W[k, i, j], Q[i, j] = apply_below_to_lower(V[k, i], T[k, i], S[k + 1, i, j])
                    else:
                        W[k, i, j], S[k, i, j] = apply_below_to_lower(V[k, i], T[k, i], S[k + 1, i, j])
                else:
                    if k == 0:
                        W[k, i, j], Q[i, j] = apply_below(V[k, i], T[k, i], W[k, i + 1, j], S[k + 1, i, j])
                    else:
                        W[k, i, j], S[k, i, j] = apply_below(V[k, i], T[k, i], W[k, i + 1, j], S[k + 1, i, j])
        if k < M - 1:
            for j in range(k, min(M, N)):
                if k == 0:
                    Q[k, j] = apply_leaf_padded(V[k, k], T[k, k], W[k, k + 1, j])
                else:
                    S[k, k, j] = apply_leaf_padded(V[k, k], T[k, k], W[k, k + 1, j])


flat_thin_qr = in_sequence("flat_thin_qr", flat_qr, flat_form_q)
"""Q and R in one graph: the first tasks of `flat_form_q` run beside the last ones of `flat_qr`, which are a chain."""


# -- tall matrices of one tile column -----------------------------------------------------------------------------


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
        L[i], C[0, i] = tile_thin_qr(A[i, 0])
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
