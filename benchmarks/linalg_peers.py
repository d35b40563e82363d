"""The other sides of `benchmarks.linalg`: ScaLAPACK under MPI, dask.array, SciPy. Each run is a process of its own, and times itself.

`python -m benchmarks.linalg_peers dask|scipy OPERATION N TILE WORKERS` prints one line of JSON: seconds and CPU-seconds of the computation
alone, on matrices that are in memory. ScaLAPACK's driver is `linalg_scalapack.c`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, SEED

OPERATIONS = ("gemm", "cholesky", "qr", "svd")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_BLOCK = 64
"""ScaLAPACK's distribution block; 32 and 128 were slower here for n = 2,000."""
_CORE_OF = """
import ctypes, glob, os, numpy, scipy
for package in (scipy, numpy):
    for path in glob.glob(os.path.join(os.path.dirname(package.__file__) + ".libs", "*openblas*")):
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_get_corename", "scipy_openblas_get_corename64_"):
            if hasattr(library, name):
                function = getattr(library, name)
                function.restype = ctypes.c_char_p
                print(function().decode())
                raise SystemExit
"""


def openblas_core() -> str:
    """Name of the processor for which SciPy's OpenBLAS computes, as `OPENBLAS_CORETYPE` has it; empty: SciPy has another BLAS.

    Debian's OpenBLAS is older: it takes processors that are newer than itself for a Prescott, and computes there at a fifth of the speed. So its
    processes are told the name.
    """
    found = subprocess.run([sys.executable, "-c", _CORE_OF], capture_output=True, text=True)
    return found.stdout.strip()


def matrix(n: int, *, definite: bool = False, seed: int = SEED) -> np.ndarray[Any, Any]:
    """Uniform random values in [-0.5, 0.5); `definite`: the symmetric part of its lower triangle, plus n on the diagonal."""
    a = np.random.default_rng(seed).random((n, n)) - 0.5
    if not definite:
        return a
    lower = np.tril(a)
    return lower + lower.T - np.diag(lower.diagonal()) + n * np.eye(n)


class Scalapack:
    """Debian's ScaLAPACK, compiled once into a folder.

    Args:
        folder: for the program.
        processes: of MPI, each with one BLAS thread.

    Raises:
        RuntimeError: a compiler, MPI or the library is missing.
    """

    def __init__(self, folder: Path, *, processes: int) -> None:
        for tool in ("mpicc", "mpirun"):
            if shutil.which(tool) is None:
                raise RuntimeError(
                    f"{tool} is not here: apt-get install libscalapack-openmpi-dev libopenmpi-dev openmpi-bin libopenblas-dev"
                )
        self._program, self._processes, core = folder / "linalg_scalapack", processes, openblas_core()
        self._core = {"OPENBLAS_CORETYPE": core} if core else {}
        source = Path(__file__).parent / "linalg_scalapack.c"
        libraries = ["-lscalapack-openmpi", "-llapack", "-lblas", "-lm"]
        done = subprocess.run(["mpicc", "-O2", str(source), "-o", str(self._program), *libraries], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the driver of ScaLAPACK does not compile: {done.stderr.strip()[-500:]}")

    def version(self) -> str:
        """Of Debian's packages, and the BLAS below."""
        names = ["libscalapack-openmpi2.2", "openmpi-bin", "libopenblas0-pthread"]
        found = subprocess.run(["dpkg-query", "-W", *names], capture_output=True, text=True).stdout.split("\n")
        linked = subprocess.run(["ldd", str(self._program)], capture_output=True, text=True).stdout
        blas = "OpenBLAS" if "openblas" in linked else "the reference BLAS"
        return "; ".join(
            [*(" ".join(line.split()) for line in found if line), f"linked to {blas}", *(f"{n}={v}" for n, v in self._core.items())]
        )

    def run(self, operation: str, n: int, *, limit_s: float) -> dict[str, float]:
        """Seconds and CPU-seconds of all processes between two barriers; a process that waits for a message uses CPU."""
        done = subprocess.run(
            [
                "mpirun",
                "--allow-run-as-root",
                "--oversubscribe",
                "--mca",
                "mpi_yield_when_idle",
                "1",
                "-n",
                str(self._processes),
                str(self._program),
                "1",
                str(self._processes),
                str(_BLOCK),
                str(n),
                "1",
                operation,
            ],
            capture_output=True,
            text=True,
            env={**os.environ, **_ONE_THREAD, **self._core},
            timeout=limit_s,
        )
        if done.returncode:
            raise RuntimeError(f"ScaLAPACK failed: {done.stderr.strip()[-500:]}")
        found = json.loads(done.stdout.strip().split("\n")[-1])
        if not found["residual"] < 100:
            raise RuntimeError(f"ScaLAPACK's {operation} has a residual of {found['residual']} n eps")
        return {"seconds": found["seconds"], "cpu_seconds": found["cpu_seconds"]}


def run(side: str, operation: str, n: int, *, tile: int, workers: int, limit_s: float) -> dict[str, float]:
    """A side of this module, in a process of its own."""
    threads = _ONE_THREAD if side == "dask" else {name: str(workers) for name in _ONE_THREAD}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.linalg_peers", side, operation, str(n), str(tile), str(workers)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **threads},
        timeout=limit_s,
    )
    if done.returncode:
        raise RuntimeError(f"{side} failed: {done.stderr.strip()[-300:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().split("\n")[-1])
    return found


def _scipy(operation: str, n: int, tile: int, workers: int) -> Callable[[], object]:
    import scipy.linalg

    a, b = matrix(n, definite=operation == "cholesky"), matrix(n, seed=SEED + 1)
    return {
        "gemm": lambda: a @ b,
        "cholesky": lambda: scipy.linalg.cholesky(a, lower=True, check_finite=False),
        "qr": lambda: scipy.linalg.qr(a, mode="economic", check_finite=False),
        "svd": lambda: scipy.linalg.svd(a, full_matrices=False, check_finite=False, lapack_driver="gesdd"),
    }[operation]


def _dask(operation: str, n: int, tile: int, workers: int) -> Callable[[], object]:
    import dask
    import dask.array as da

    a, b = matrix(n, definite=operation == "cholesky"), matrix(n, seed=SEED + 1)
    # its QR and SVD take one column of chunks, none of which has more columns than rows: for a square matrix that is one chunk
    tile = max(d for d in range(1, min(tile, n) + 1) if n % d == 0)  # its Cholesky takes no ragged chunks
    chunks = (n, n) if operation in ("qr", "svd") else (tile, tile)
    left, right = da.from_array(a, chunks=chunks), da.from_array(b, chunks=chunks)
    wanted = {
        "gemm": lambda: (left @ right,),
        "cholesky": lambda: (da.linalg.cholesky(left, lower=True),),
        "qr": lambda: da.linalg.qr(left),
        "svd": lambda: da.linalg.svd(left),
    }[operation]()
    return lambda: dask.compute(*wanted, scheduler="threads", num_workers=workers)


def main(arguments: list[str]) -> None:
    side, operation, n, tile, workers = arguments[0], arguments[1], *map(int, arguments[2:])
    (_scipy if side == "scipy" else _dask)(operation, 200, 100, workers)()  # imports, and threads that start
    compute = (_scipy if side == "scipy" else _dask)(operation, n, tile, workers)
    cpu, began = time.process_time(), time.perf_counter()
    compute()
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": round(seconds, 5), "cpu_seconds": round(time.process_time() - cpu, 5)}))


if __name__ == "__main__":
    main(sys.argv[1:])
