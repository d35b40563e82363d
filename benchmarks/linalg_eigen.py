"""CPU seconds of the ways to the eigenvalues of a Hermitian matrix: `OPENBLAS_NUM_THREADS=1 python -m benchmarks.linalg_eigen --json`.

Kernels run one after another in this process, on one thread, so the figures are computing alone, without tasks and transfers. Ways
alternate in each repeat. `band` is the reduction, the solver on the band and the back transformation; of these all but the solver can run on
many functions. `jacobi sweep` is one of the six to ten sweeps that block Jacobi needs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import SEED, condensed, environment, write
from ephemeron.linalg.algorithms.jacobi import jacobi_svd
from ephemeron.linalg.algorithms.spectral import apply_band_q, hermitian_band
from ephemeron.linalg.interpret import interpret
from ephemeron.linalg.kernels import spectra

Tiles = dict[tuple[int, ...], np.ndarray[Any, np.dtype[Any]]]


def tiled(a: np.ndarray[Any, np.dtype[Any]], tile: int) -> Tiles:
    """Square tiles of an array whose sizes are multiples of `tile`."""
    down, across = (range(n // tile) for n in a.shape)
    return {(i, j): a[i * tile : (i + 1) * tile, j * tile : (j + 1) * tile].copy() for i in down for j in across}


def once(given: Tiles, n: int, tile: int) -> dict[str, float]:
    """CPU seconds by step."""
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        made = work()
        found[name] = time.process_time() - began
        return made

    count, whole = n // tile, spectra.Blocks((n, n), tile, given)
    timed("one function, vectors", lambda: spectra.hermitian_eigen(whole))
    timed("one function, values", lambda: spectra.hermitian_eigenvalues(whole))
    made = timed("band: reduction", lambda: interpret(hermitian_band, {"N": count}, {"A": given}))
    band = spectra.Blocks((n, n), tile, made["B"], is_half=True)
    timed("band: values of the band", lambda: spectra.banded_eigenvalues(band))
    _, v = timed("band: vectors of the band", lambda: spectra.hermitian_eigen(band))
    inputs = {"V": made["V"], "T": made["T"], "B": tiled(v, tile)}
    timed("band: back transformation", lambda: interpret(apply_band_q, {"N": count, "K": count}, inputs))
    timed("jacobi sweep", lambda: interpret(jacobi_svd, {"M": count, "N": count, "W": 1}, {"A": given}))
    return found


def measure(n: int, tile: int, repeats: int) -> dict[str, Any]:
    """Medians of CPU seconds by step."""
    g = np.random.default_rng(SEED).standard_normal((n, n))
    given = tiled((g + g.T) / 2, tile)
    found = [once(given, n, tile) for _ in range(repeats)]
    return {"n": n, "tile": tile, "cpu_s": {name: condensed([each[name] for each in found]) for name in found[0]}}


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1280)
    parser.add_argument("--tiles", type=int, nargs="+", default=[160, 64], help="rows of a tile")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="as all benchmarks; there is no other output")
    arguments = parser.parse_args()
    before = environment()
    threads = os.environ.get("OPENBLAS_NUM_THREADS")
    write({**before, "threads": threads, "rows": [measure(arguments.size, tile, arguments.repeats) for tile in arguments.tiles]})


if __name__ == "__main__":
    main()
