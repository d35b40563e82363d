"""Kernels leave the interpreter to the thread that fetches and stores tiles, and renews the lease of their task."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from ephemeron.linalg.kernels import factors, lapack, orthogonal, products, spectra

N = 320
G = np.random.default_rng(0).standard_normal((N, N))
S, L, U = G + G.T, np.tril(G) + N * np.eye(N), np.triu(G) + N * np.eye(N)
V, T, _ = orthogonal.reflectors(G)
BLOCKS = spectra.Blocks((N, N), N, {(0, 0): S})
COMPUTING = {
    "singular_vectors": lambda: spectra.singular_vectors(BLOCKS),
    "singular_values": lambda: spectra.singular_values(BLOCKS),
    "hermitian_eigen": lambda: spectra.hermitian_eigen(BLOCKS),
    "hermitian_eigenvalues": lambda: spectra.hermitian_eigenvalues(BLOCKS),
    "banded_eigenvalues": lambda: spectra.banded_eigenvalues(spectra.Blocks((N, N), N, {(0, 0): np.tril(S)}, is_half=True)),
    "cholesky_factor": lambda: factors.cholesky_factor(S + N * np.eye(N)),
    "solve_lower": lambda: factors.solve_lower(L, G),
    "subtract_gram": lambda: products.subtract_gram(S, G),
    "qr_leaf": lambda: orthogonal.qr_leaf(G),
    "apply_leaf": lambda: orthogonal.apply_leaf(V, T, G),
    "qr_below": lambda: orthogonal.qr_below(U, G),
    "apply_below": lambda: orthogonal.apply_below(V, T, G, G),
    "pivot_candidates": lambda: factors.pivot_candidates(G, 0),
}


@pytest.mark.parametrize("computing", COMPUTING.values(), ids=COMPUTING)
def test_another_thread_runs_while_lapack_computes(computing, monkeypatch):
    call, ticks, seen, is_over = lapack._call, [0], [], threading.Event()

    def observed(*arguments):
        before = ticks[0]
        call(*arguments)
        seen.append(ticks[0] - before)

    def ticker():
        while not is_over.is_set():
            ticks[0] += 1
            time.sleep(0.0005)

    monkeypatch.setattr(lapack, "_call", observed)
    interval, thread = sys.getswitchinterval(), threading.Thread(target=ticker)
    sys.setswitchinterval(1000.0)  # no thread gives way unless it lets go of the lock itself
    thread.start()
    try:
        for _ in range(500):  # on a busy machine the other thread may not get a processor for a while
            computing()
            if any(seen):
                break
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()
    assert any(seen)
