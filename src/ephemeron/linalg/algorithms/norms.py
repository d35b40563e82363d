"""Norms of the columns of a matrix, in a tree along its rows."""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, lambdapack, tiles
from ephemeron.linalg.kernels.norms import column_norms, join_norms
from ephemeron.linalg.kernels.products import copy


@lambdapack
def norms_of_columns(A: Input, T: Temporary, C: Output, M: Size, N: Size) -> None:
    """C (1 × N tiles) = sums of absolute values along the columns of A; with `power=2` their Euclidean norms (`with_options`)."""
    tiles(A, M, N)
    tiles(C, 1, N)
    depth = ceil_log2(M)
    for j in range(N):
        for i in range(M):
            T[0, j, i] = column_norms(A[i, j], power=1)
        for level in range(depth):
            for i in range(0, M, 2 ** (level + 1)):
                if i + 2**level < M:
                    T[level + 1, j, i] = join_norms(T[level, j, i], T[min(level, ceil_log2(M - i - 2**level)), j, i + 2**level], power=1)
        C[0, j] = copy(T[depth, j, 0])
