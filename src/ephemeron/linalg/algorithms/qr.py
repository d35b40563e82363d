"""Tiled QR with a tree in every block column (communication-avoiding QR), and products with its Q.

Step k factors the tiles at and below row k of column k: leaf by leaf, then R above R along a binary tree. V and T keep the
reflectors: index 0 of the tree is the leaves, index l + 1 the pairs at distance 2**l. A row without partner takes no part in a level; its
value stays at the level of its last pair, min(level, ceil_log2(rows left below it)). Tiles are square, but for the last row
and column.
"""

from __future__ import annotations

from ephemeron.linalg.composition import in_sequence
from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, lambdapack, tiles
from ephemeron.linalg.kernels.orthogonal import (
    apply_leaf,
    apply_pair,
    apply_pair_above,
    apply_pair_below,
    leaf_columns,
    pair_columns,
    qr_leaf,
    qr_pair,
)
from ephemeron.linalg.kernels.products import copy


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
