"""Singular values and eigenvalues of matrices that are stored as tiles: what users call."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.algorithms import tall
from ephemeron.linalg.computation import check_tall, computing, family_tile, tall_outputs
from ephemeron.linalg.matrices.big_matrix import BigMatrix


def svd(
    a: BigMatrix, *, executor: FunctionExecutor | None = None
) -> tuple[BigMatrix, npt.NDArray[Any], npt.NDArray[Any]]:
    """U, singular values and Vᴴ with A = U diag(s) Vᴴ, for a tall matrix: QR, then the singular values of R in one function.

    Args:
        a: shape [m, n], m ≥ n, with one column of tiles.
        executor: runs the tasks.

    Returns:
        U, of shape [m, n]; s, of shape [n], descending; Vᴴ, of shape [n, n].

    Raises:
        JobError: it has several columns of tiles, or more columns than rows.
    """
    stored = a.stored
    check_tall(stored, what="svd")
    if stored.tiles[1] > 1:
        raise JobError(
            f"svd takes matrices with one column of tiles, this one has {stored.tiles[1]}",
            remedy=f"store it with tile=({stored.tile_rows}, {stored.columns})",
        )
    m = {"M": stored.tiles[0]}
    with computing(executor, "svd", a) as computation:
        factors = computation.run(tall.tsqr, m, {"A": stored}, tall_outputs(stored))
        values, vectors = computation.family(), computation.family()
        made = computation.run(
            tall.tall_svd, m, {"Q": factors["Q"], "R": factors["R"]},
            {"U": tall_outputs(stored)["Q"], "D": values, "W": vectors},
        )  # fmt: skip
        singular, right = family_tile(made["D"], (0, 0)), family_tile(made["W"], (0, 0))
        computation.scratch(*factors.values(), made["D"], made["W"])
    return computation.result(made["U"]), singular.reshape(-1), right
