"""Tiled QR that goes down each block column (Buttari, Langou, Kurzak, Dongarra 2009), for matrices that are not tall.

Step k factors tile (k, k), then puts its R above each tile below it in turn. Each update takes 4 b³ operations, where a binary tree (`qr`)
takes 4 b³ at a leaf and 2 b³ at a pair, so that all of it takes the 4/3 n³ of LAPACK and fewer tasks. Its chains are as long as the block columns are, which
updates of other columns hide unless a matrix is tall. Tiles are square, but for the last row and column.
"""

from __future__ import annotations

from ephemeron.linalg.composition import in_sequence
from ephemeron.linalg.embedding import Input, Output, Size, Temporary, lambdapack, tiles
from ephemeron.linalg.kernels.orthogonal import (
    apply_below,
    apply_below_to_lower,
    apply_below_to_upper,
    apply_leaf,
    apply_leaf_padded,
    below_columns,
    leaf_columns,
    qr_below,
    qr_leaf,
)


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
