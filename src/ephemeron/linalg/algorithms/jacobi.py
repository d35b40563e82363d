"""Singular values and right vectors of any matrix by one-sided block Jacobi, with a number of sweeps that is given.

Every sweep visits all pairs of tile columns in order; each visit makes the columns of the pair orthogonal, the larger first, so the columns
end sorted. How many sweeps are enough depends on the values, which cannot decide in LAmbdaPACK: six to ten, fewer for
a triangular factor. The rotations are exactly unitary up to rounding, so for X = A V the factors of a QR of X give A = Q R Vᴴ, where R
is diagonal but for what has not converged: its size is the check, and the backward error is LAPACK's. A Hermitian A is shifted to be positive
definite; then V holds its eigenvectors.
"""

from __future__ import annotations

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, lambdapack, tiles
from ephemeron.linalg.kernels.jacobi import add_rows, extend_triangle, pair_triangle, right_vectors, rotate_pair, thin_triangle, zero_block
from ephemeron.linalg.kernels.products import copy, multiply


@lambdapack
def jacobi_svd(
    A: Input, B: Temporary, H: Temporary, J: Temporary, Y: Temporary, Z: Temporary, X: Output, V: Output, M: Size, N: Size, W: Size
) -> None:
    """Unitary V (N × N tiles) and X = A V (M × N tiles), whose columns are orthogonal after enough of W sweeps.

    Y[s, i, j] and Z[s, i, j] are X and V after s visits of tile column j, of which every sweep has N − 1; H are R of the rows above, J the
    rotations. The first rotations, B, are of single tile columns.
    """
    tiles(A, M, N)
    tiles(X, M, N)
    tiles(V, N, N)
    visits = W * (N - 1)
    for j in range(N):
        for i in range(M):
            if i == 0:
                B[j, i] = thin_triangle(A[i, j])
            else:
                B[j, i] = add_rows(B[j, i - 1], A[i, j])
        Z[0, j, j] = right_vectors(B[j, M - 1])
        for i in range(M):
            Y[0, i, j] = multiply(A[i, j], Z[0, j, j])
        for i in range(N):
            if i != j:
                Z[0, i, j] = zero_block(A[0, i], A[0, j])
    for w in range(W):
        for p in range(N):
            for q in range(p + 1, N):
                mine = w * (N - 1) + q - 1
                theirs = w * (N - 1) + p
                for i in range(M):
                    if i == 0:
                        H[w, p, q, i] = pair_triangle(Y[mine, i, p], Y[theirs, i, q])
                    else:
                        H[w, p, q, i] = extend_triangle(H[w, p, q, i - 1], Y[mine, i, p], Y[theirs, i, q])
                J[w, p, q] = right_vectors(H[w, p, q, M - 1])
                for i in range(M):
                    Y[mine + 1, i, p], Y[theirs + 1, i, q] = rotate_pair(Y[mine, i, p], Y[theirs, i, q], J[w, p, q])
                for i in range(N):
                    Z[mine + 1, i, p], Z[theirs + 1, i, q] = rotate_pair(Z[mine, i, p], Z[theirs, i, q], J[w, p, q])
    for j in range(N):
        for i in range(M):
            X[i, j] = copy(Y[visits, i, j])
        for i in range(N):
            V[i, j] = copy(Z[visits, i, j])
