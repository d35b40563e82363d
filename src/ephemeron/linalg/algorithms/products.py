"""C = A B and C = A Aᴴ."""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, ceil_log2, lambdapack, tiles
from ephemeron.linalg.kernels.products import add, copy, multiply, multiply_add


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
def matmul_layers(
    A: Input, B: Input, P: Temporary, T: Temporary, C: Output, M: Size, N: Size, K: Size, Q: Size
) -> None:
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
                        T[level + 1, i, j, q] = add(
                            T[level, i, j, q],
                            T[min(level, ceil_log2(layers - q - 2**level)), i, j, q + 2**level],
                        )
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
