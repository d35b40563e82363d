"""Programs and kernels that tests run on functions."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg

from ephemeron.linalg.embedding import Input, Output, Size, Temporary, lambdapack, tiles
from ephemeron.linalg.language.kernel import kernel


def _die(name: str) -> None:
    """Kills this process if a test asks for it, once for each name, by a variable that local functions are given."""
    folder = os.environ.get("LC_MARKS", "")
    if folder and (mark := Path(folder) / name).exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def _freeze() -> None:
    """Stops this process if a test asks for it, until the test continues it."""
    folder = os.environ.get("LC_MARKS", "")
    if folder and (mark := Path(folder) / "freeze").exists():
        mark.rename(mark.with_name(f"frozen-{os.getpid()}"))
        os.kill(os.getpid(), signal.SIGSTOP)


def _halt() -> None:
    """Waits while a test says so."""
    folder = os.environ.get("LC_MARKS", "")
    while folder and (Path(folder) / "halt").exists():
        time.sleep(0.01)


@kernel()
def factor(a: Any) -> Any:
    _die("factor")
    _freeze()
    return scipy.linalg.cholesky(a, lower=True)


@kernel()
def divide(a: Any, lower: Any) -> Any:
    _die("divide")
    return np.ascontiguousarray(scipy.linalg.solve_triangular(lower, a.T, lower=True).T)


@kernel()
def update(s: Any, a: Any, b: Any) -> Any:
    _die("update")
    _halt()
    return s - a @ b.T


@kernel(outputs=2)
def halves(a: Any) -> Any:
    return a / 2, a - a / 2


@kernel()
def add(a: Any, b: Any) -> Any:
    return a + b


@lambdapack
def tiled_cholesky(A: Input, L: Output, S: Temporary, n: Size):
    tiles(A, n, n)
    tiles(L, n, n)
    for i in range(n):
        if i == 0:
            L[0, 0] = factor(A[0, 0])
        else:
            L[i, i] = factor(S[i, i, i])
        for j in range(i + 1, n):
            if i == 0:
                L[j, 0] = divide(A[j, 0], L[0, 0])
            else:
                L[j, i] = divide(S[i, j, i], L[i, i])
        for j in range(i + 1, n):
            for k in range(i + 1, j + 1):
                if i == 0:
                    S[1, j, k] = update(A[j, k], L[j, 0], L[k, 0])
                else:
                    S[i + 1, j, k] = update(S[i, j, k], L[j, i], L[k, i])


@lambdapack
def halves_of_a_view(A: Input, B: Output, H: Temporary, G: Temporary, m: Size, n: Size):
    tiles(A, m, n)
    tiles(B, m, n)
    for i in range(m):
        for j in range(n):
            H[i, j], G[i, j] = halves(A[i, j])
            B[i, j] = add(H[i, j], G[i, j])
