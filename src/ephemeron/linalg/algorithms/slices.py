"""Rows of a matrix that begin within a tile, as a matrix of its own. Columns are rows of the transpose."""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, lambdapack, tiles
from ephemeron.linalg.kernels.slices import rows_of, rows_of_pair


@lambdapack
def first_rows(A: Input, C: Output, M: Size, N: Size) -> None:
    """The rows of A from the first on; how many is an option of the kernel (`with_options`)."""
    tiles(A, M, N)
    tiles(C, M, N)
    for i in range(M):
        for j in range(N):
            C[i, j] = rows_of(A[i, j], i, top=0, height=1, total=1)


@lambdapack
def rows_from(A: Input, C: Output, M: Size, K: Size, N: Size) -> None:
    """Rows of A (K × N tiles) from one within its first tile on: M ≤ K rows of tiles. Which is an option of the kernels."""
    tiles(A, K, N)
    tiles(C, M, N)
    for i in range(M):
        for j in range(N):
            if i + 1 < K:
                C[i, j] = rows_of_pair(A[i, j], A[i + 1, j], i, top=0, height=1, total=1)
            else:
                if i < K:
                    C[i, j] = rows_of(A[i, j], i, top=0, height=1, total=1)
