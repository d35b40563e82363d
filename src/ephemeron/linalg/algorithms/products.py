"""C = A B, C = A Aᴴ, sums, and the identity."""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, lambdapack, tiles
from ephemeron.linalg.kernels.orthogonal import identity_like
from ephemeron.linalg.kernels.products import (
    add,
    column_norms,
    copy,
    join_norms,
    multiply,
    multiply_add,
    multiply_add_pairs,
    multiply_pairs,
    rows_of,
    rows_of_pair,
    scaled,
    weighted_sum,
)


@lambdapack
def matmul(A: Input, B: Input, P: Temporary, C: Output, M: Size, N: Size, K: Size) -> None:
    """C = A B, summed along K in order: the result does not depend on timing."""
    tiles(A, M, K)
    tiles(B, K, N)
    tiles(C, M, N)
    for i in range(M):
        for j in range(N):
            if K == 1:
                C[i, j] = multiply(A[i, 0], B[0, j])
            else:
                P[i, j, 0] = multiply(A[i, 0], B[0, j])
                for k in range(1, K - 1):
                    P[i, j, k] = multiply_add(P[i, j, k - 1], A[i, k], B[k, j])
                C[i, j] = multiply_add(P[i, j, K - 2], A[i, K - 1], B[K - 1, j])


@lambdapack
def matmul_pairs(A: Input, B: Input, P: Temporary, C: Output, M: Size, N: Size, K: Size) -> None:
    """The bits of `matmul` with four products in each task: a quarter of its tasks, and of its partial sums that are stored.

    A task holds nine tiles. The first task of a sum has the one to four products that are left over.
    """
    tiles(A, M, K)
    tiles(B, K, N)
    tiles(C, M, N)
    groups = (K - 1) // 4
    first = K - 4 * groups
    for i in range(M):
        for j in range(N):
            if groups == 0:
                if first == 1:
                    C[i, j] = multiply(A[i, 0], B[0, j])
                if first == 2:
                    C[i, j] = multiply_pairs(A[i, 0], B[0, j], A[i, 1], B[1, j])
                if first == 3:
                    C[i, j] = multiply_pairs(A[i, 0], B[0, j], A[i, 1], B[1, j], A[i, 2], B[2, j])
                if first == 4:
                    C[i, j] = multiply_pairs(A[i, 0], B[0, j], A[i, 1], B[1, j], A[i, 2], B[2, j], A[i, 3], B[3, j])
            else:
                if first == 1:
                    P[i, j, 0] = multiply(A[i, 0], B[0, j])
                if first == 2:
                    P[i, j, 0] = multiply_pairs(A[i, 0], B[0, j], A[i, 1], B[1, j])
                if first == 3:
                    P[i, j, 0] = multiply_pairs(A[i, 0], B[0, j], A[i, 1], B[1, j], A[i, 2], B[2, j])
                if first == 4:
                    P[i, j, 0] = multiply_pairs(A[i, 0], B[0, j], A[i, 1], B[1, j], A[i, 2], B[2, j], A[i, 3], B[3, j])
                for g in range(groups):
                    k = first + 4 * g
                    if g + 1 < groups:
                        P[i, j, g + 1] = multiply_add_pairs(
                            P[i, j, g], A[i, k], B[k, j], A[i, k + 1], B[k + 1, j], A[i, k + 2], B[k + 2, j], A[i, k + 3], B[k + 3, j]
                        )
                    else:
                        C[i, j] = multiply_add_pairs(
                            P[i, j, g], A[i, k], B[k, j], A[i, k + 1], B[k + 1, j], A[i, k + 2], B[k + 2, j], A[i, k + 3], B[k + 3, j]
                        )


@lambdapack
def matmul_layers(A: Input, B: Input, P: Temporary, T: Temporary, C: Output, M: Size, N: Size, K: Size, Q: Size) -> None:
    """C = A B with Q layers that work at the same time on parts of K, and a tree of sums over them (2.5-D).

    Pays where M N tasks at a time are fewer than the executors.
    """
    tiles(A, M, K)
    tiles(B, K, N)
    tiles(C, M, N)
    layers = min(Q, K)
    depth = ceil_log2(layers)
    for i in range(M):
        for j in range(N):
            for q in range(layers):
                first = q * K // layers
                last = (q + 1) * K // layers - 1
                for k in range(first, last + 1):
                    if k == first:
                        P[i, j, k] = multiply(A[i, k], B[k, j])
                    else:
                        P[i, j, k] = multiply_add(P[i, j, k - 1], A[i, k], B[k, j])
                T[0, i, j, q] = copy(P[i, j, last])
            for level in range(depth):
                for q in range(0, layers, 2 ** (level + 1)):
                    if q + 2**level < layers:
                        T[level + 1, i, j, q] = add(T[level, i, j, q], T[min(level, ceil_log2(layers - q - 2**level)), i, j, q + 2**level])
            C[i, j] = copy(T[depth, i, j, 0])


@lambdapack
def syrk(A: Input, P: Temporary, C: Output, N: Size, K: Size) -> None:
    """The lower tiles of C = A Aᴴ."""
    tiles(A, N, K)
    tiles(C, N, N)
    for i in range(N):
        for j in range(i + 1):
            if K == 1:
                C[i, j] = multiply(A[i, 0], A[j, 0], adjoint_b=True)
            else:
                P[i, j, 0] = multiply(A[i, 0], A[j, 0], adjoint_b=True)
                for k in range(1, K - 1):
                    P[i, j, k] = multiply_add(P[i, j, k - 1], A[i, k], A[j, k], adjoint_b=True)
                C[i, j] = multiply_add(P[i, j, K - 2], A[i, K - 1], A[j, K - 1], adjoint_b=True)


@lambdapack
def combine(A: Input, B: Input, C: Output, M: Size, N: Size) -> None:
    """C = A + B; with other options of the kernel α A + β B (`with_options`)."""
    tiles(A, M, N)
    tiles(B, M, N)
    tiles(C, M, N)
    for i in range(M):
        for j in range(N):
            C[i, j] = weighted_sum(A[i, j], B[i, j], alpha=1.0, beta=1.0)


@lambdapack
def combine_row(A: Input, B: Input, C: Output, M: Size, N: Size) -> None:
    """`combine` where B is one row, which is added to each of A's."""
    tiles(A, M, N)
    tiles(B, 1, N)
    tiles(C, M, N)
    for i in range(M):
        for j in range(N):
            C[i, j] = weighted_sum(A[i, j], B[0, j], alpha=1.0, beta=1.0)


@lambdapack
def combine_column(A: Input, B: Input, C: Output, M: Size, N: Size) -> None:
    """`combine` where B is one column, which is added to each of A's."""
    tiles(A, M, N)
    tiles(B, M, 1)
    tiles(C, M, N)
    for i in range(M):
        for j in range(N):
            C[i, j] = weighted_sum(A[i, j], B[i, 0], alpha=1.0, beta=1.0)


@lambdapack
def scale(A: Input, C: Output, M: Size, N: Size) -> None:
    """C = A; with other options of the kernel α A (`with_options`)."""
    tiles(A, M, N)
    tiles(C, M, N)
    for i in range(M):
        for j in range(N):
            C[i, j] = scaled(A[i, j], real=1.0, imaginary=0.0)


@lambdapack
def identity(A: Input, C: Output, N: Size) -> None:
    """The diagonal tiles of the identity of the size of A, whose tiles are read for their shapes."""
    tiles(A, N, N)
    tiles(C, N, N)
    for i in range(N):
        C[i, i] = identity_like(A[i, i])


# -- norms of the columns of a matrix, in a tree along its rows ---------------------------------------------------


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


# -- rows of a matrix that begin within a tile --------------------------------------------------------------------


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
