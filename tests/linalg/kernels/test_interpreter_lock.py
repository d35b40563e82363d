"""Kernels that compute for minutes leave the interpreter to the thread that renews the lease of their task."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from ephemeron.linalg.kernels import spectra


@pytest.mark.parametrize(
    "solve", ["singular_vectors", "singular_values", "hermitian_eigen", "hermitian_eigenvalues", "banded_eigenvalues"]
)
def test_another_thread_runs_while_lapack_computes(solve, monkeypatch):
    lapack, ticks, seen, is_over = spectra._lapack, [0], [], threading.Event()

    def observed(*arguments):
        before = ticks[0]
        lapack(*arguments)
        seen.append(ticks[0] - before)

    def ticker():
        while not is_over.is_set():
            ticks[0] += 1
            time.sleep(0.0005)

    monkeypatch.setattr(spectra, "_lapack", observed)
    g = np.random.default_rng(0).standard_normal((320, 320))
    half = solve == "banded_eigenvalues"
    blocks = spectra.Blocks((320, 320), 320, {(0, 0): np.tril(g + g.T) if half else g + g.T}, is_half=half)
    interval, thread = sys.getswitchinterval(), threading.Thread(target=ticker)
    sys.setswitchinterval(1000.0)  # no thread gives way unless it lets go of the lock itself
    thread.start()
    try:
        for _ in range(20):
            getattr(spectra, solve)(blocks)
            if any(seen):
                break
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()
    assert any(seen)
