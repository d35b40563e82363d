"""Matrices on functions beside ScaLAPACK, dask.array and SciPy, on this machine: `python -m benchmarks.linalg --json`.

NumPyWren (survey 2.4) reports in table 3 a wall time of 1.4 to 1.6 times that of MPI, and in table 4 fewer core-seconds for QR and Cholesky,
each with a start penalty. Here four sides compute the same on the same number of cores, in turns in one run:

- ephemeron: local functions of one BLAS thread each, which are running when the clock starts; tiles are objects in a folder (of memory where
  the machine has /dev/shm); tasks are in a Valkey server, as NumPyWren's are in Redis, or in objects (`--state objects`). The clock
  runs from the call to the result, and includes the making of Q for QR.
- ScaLAPACK: one MPI process of one BLAS thread for each function; the clock is between two barriers. QR includes PDORGQR. Debian's OpenBLAS does
  not know processors that are younger than itself; it is told which kernels SciPy's OpenBLAS takes.
- dask.array: its scheduler of threads, with one BLAS thread in each; its matrices stay in memory.
- SciPy: one process, as many BLAS threads.

Core-seconds: for ScaLAPACK and SciPy cores times wall time, as in table 4; for ephemeron the seconds in which tasks computed, plus a start
penalty for each function: that of table 4 (20 s), and the time that a function took to start here.
Memory that a virtual machine has not touched lately costs up to 1 ms/MB, and ScaLAPACK's driver touches its matrices before its clock starts. So one
computation of ours before the first turn is not counted (`--warmup`), and before each turn a file as large as the tiles that will be written is put into their
folder and removed, and functions compute a small matrix.
CPU-seconds of all sides are beside them, because they suffer less from other load: of ours with the client, transfers and the Valkey
server; of ScaLAPACK with what its processes spend waiting for messages.
Bytes: of tiles that functions fetched and stored (without those that they had in memory), beside a lower bound for two processors with
the memory of a function: max(inputs + outputs, flops / (√8 √M) words) (Irony, Toledo, Tiskin 2004; Ballard et al. 2011).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import linalg_peers
from benchmarks.common import SEED, condensed, environment, write
from benchmarks.process_cpu import tree_cpu_s
from benchmarks.servers import started_valkey
from ephemeron import FunctionExecutor
from ephemeron import linalg as operations
from ephemeron.errors import EphemeronError
from ephemeron.linalg import BigMatrix, predict
from ephemeron.linalg.prediction.planner import Prediction
from ephemeron.units import MB

PENALTY_S = 20.0
"""Start penalty of table 4."""
FLOPS = {"gemm": 2.0, "cholesky": 1 / 3, "qr": 8 / 3, "svd": 22.0}
"""Times n³, of the usual algorithm; QR with Q."""
MATRICES = {"gemm": 3, "cholesky": 1, "qr": 2.5, "svd": 3}
"""Inputs and outputs, in matrices of n²; of symmetric and triangular ones half."""
TILES = {"gemm": 1, "cholesky": 2, "qr": 7, "svd": 4}
"""Matrices of n² that tasks write."""
IDLE_S = 600.0
"""Our functions stay while peers compute."""
SIDES = ("ephemeron", "scalapack", "dask", "scipy")


class Ours:
    """The side of this library for one size.

    Args:
        n: rows and columns.
        operation: to compute.
        tile: of matrices; 0: the library's choice.
        functions: at once.
        memory_mb: of each.
        store: address for tiles.
        channel: of the executor.
    """

    def __init__(self, n: int, operation: str, *, tile: int, functions: int, memory_mb: int, store: str, channel: str) -> None:
        self._operation, self._n, self._store = operation, n, store
        options = {"tile": tile or None, "store": store}
        self.a = BigMatrix.from_numpy(linalg_peers.matrix(n, definite=operation == "cholesky"), **options)
        self.b = BigMatrix.from_numpy(linalg_peers.matrix(n, seed=SEED + 1), **options) if operation == "gemm" else None
        self.tile = self.a.tile[0]
        self._small = BigMatrix.from_numpy(np.eye(320), tile=40, store=store)
        self._pool = FunctionExecutor(
            "local", progress=False, max_workers=functions, memory_mb=memory_mb, channel=channel, idle_timeout_s=IDLE_S
        )
        began = time.perf_counter()
        self._pool.submit(abs, -1).result()
        self.start_s = time.perf_counter() - began
        """Until the first function has run a task."""

    def warm(self) -> None:
        """All functions are running, and have imported what tasks need: there are enough tasks for each of them. The memory of the folder
        of tiles has been touched."""
        folder = Path(self._store.removeprefix("file://"))
        nbytes = min(TILES[self._operation] * 8 * self._n**2, shutil.disk_usage(folder).free // 2)
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(nbytes // MB):
                file.write(bytes(MB))
        _delete(self._compute(self._small, self._small)[0])

    def predicted(self) -> Prediction:
        """What the library tells of this computation before it starts, with the start of functions."""
        name = {"gemm": "matmul"}.get(self._operation, self._operation)
        return predict(name, *(each for each in (self.a, self.b) if each is not None), executor=self._pool)

    def _compute(self, a: BigMatrix, b: BigMatrix | None) -> tuple[list[BigMatrix], Any]:
        """Results as matrices, and what belongs to them."""
        if self._operation == "gemm":
            assert b is not None
            return [operations.matmul(a, b, executor=self._pool)], None
        if self._operation == "cholesky":
            return [operations.cholesky(a, executor=self._pool)], None
        if self._operation == "qr":
            return list(operations.qr(a, executor=self._pool)), None
        u, s, vh = operations.svd(a, executor=self._pool)
        return [u], (s, vh)

    def run(self) -> tuple[dict[str, float], Callable[[], float]]:
        """Figures of one computation, and its residual in units of n ε, after which the results are deleted."""
        cpu, began = tree_cpu_s(), time.perf_counter()
        made, rest = self._compute(self.a, self.b)
        if rest is not None:
            values, vh = np.asarray(rest[0]), rest[1]
            right = vh.to_numpy() if isinstance(vh, BigMatrix) else np.asarray(vh)
        seconds, cpu_s = time.perf_counter() - began, tree_cpu_s() - cpu
        report = made[0].report
        assert report is not None
        found = {
            "seconds": seconds,
            "cpu_seconds": cpu_s,
            "computing_s": report.core_seconds,
            "tasks": report.tasks,
            "read_bytes": report.bytes_read,
            "written_bytes": report.bytes_written,
        }

        def residual() -> float:
            first, a = made[0].to_numpy(), self.a.to_numpy()
            if self._operation == "gemm":
                assert self.b is not None
                left = a @ self.b.to_numpy() - first
            elif self._operation == "cholesky":
                left = a - first @ first.T
            elif self._operation == "qr":
                left = a - first @ made[1].to_numpy()
            else:
                left = a - (first * values.reshape(-1)) @ right
            size = np.linalg.norm(a) * (np.linalg.norm(first) if self._operation == "gemm" else 1.0)
            if self._operation == "gemm":
                size = np.linalg.norm(a) * np.linalg.norm(self.b.to_numpy()) if self.b is not None else size
            _delete(made)
            return float(np.linalg.norm(left) / (size * self._n * np.finfo(float).eps))

        return found, residual

    def close(self) -> dict[str, int]:
        """Ends functions; what they have fetched from and put into stores."""
        self._pool.shutdown()
        t = self._pool.traffic
        _delete([each for each in (self.a, self.b, self._small) if each is not None])
        return {"bytes_down": t.bytes_down, "bytes_up": t.bytes_up, "requests": t.puts + t.gets + t.polls + t.lists + t.deletes}


def _delete(matrices: list[BigMatrix]) -> None:
    for each in matrices:
        each.delete()


def least_bytes(operation: str, n: int, *, functions: int, memory_mb: int) -> float:
    """Lower bound on the bytes that all functions together move: each input read and each output written once, and, where memories are
    small, flops / (√8 √M) words for each of them, M words being a function's memory."""
    words = memory_mb * MB / 8
    bound = FLOPS[operation] * n**3 / 2 / (math.sqrt(8 * words)) - words * functions
    return 8 * max(MATRICES[operation] * n * n, bound)


def compare(
    operation: str, n: int, arguments: argparse.Namespace, scalapack: linalg_peers.Scalapack | None, *, store: str, channel: str
) -> dict[str, Any]:
    """One operation at one size: all sides, in turns."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    found: list[dict[str, float]] = []
    notes: dict[str, str] = {}
    residuals: list[float] = []
    ours = Ours(
        n, operation, tile=arguments.tile, functions=arguments.functions, memory_mb=arguments.memory_mb, store=store, channel=channel
    )
    say = lambda text: print(f"{operation} n={n}: {text}", file=sys.stderr)  # noqa: E731

    def one(side: str) -> dict[str, float]:
        if side == "ephemeron":
            ours.warm()
            figures, residual = ours.run()
            found.append(figures)
            residuals.append(residual())
            if not residuals[-1] < 100:
                raise RuntimeError(f"a residual of {residuals[-1]} n eps")
            return figures
        if side == "scalapack":
            assert scalapack is not None
            return scalapack.run(operation, n, limit_s=arguments.limit_s)
        return linalg_peers.run(side, operation, n, tile=ours.tile, workers=arguments.functions, limit_s=arguments.limit_s)

    prediction = ours.predicted()
    try:
        for _ in range(arguments.warmup if "ephemeron" in arguments.sides else 0):
            ours.run()[1]()
        for _ in range(arguments.repeats):
            for side in arguments.sides:
                if side in notes:
                    continue
                try:
                    figures = one(side)
                    times[side].append(figures["seconds"])
                    cpu[side].append(figures["cpu_seconds"])
                    say(f"{side} {times[side][-1]:.3f} s, {cpu[side][-1]:.3f} CPU-seconds, load {os.getloadavg()[0]:.1f}")
                except (RuntimeError, EphemeronError, subprocess.TimeoutExpired) as e:
                    is_late = isinstance(e, subprocess.TimeoutExpired)
                    told = f"no result within {arguments.limit_s:g} s" if is_late else str(e)
                    notes[side] = told.strip().split("\n")[-1][:300]
                    say(f"{side}: {notes[side]}")
    finally:
        moved = ours.close()
    row: dict[str, Any] = {
        "operation": operation,
        "n": n,
        "tile": ours.tile,
        "seconds": {side: condensed(values) for side, values in times.items() if values},
        "cpu_seconds": {side: condensed(values) for side, values in cpu.items() if values},
        "not_measured": notes,
    }
    if found:
        row |= _ours(operation, n, arguments, found, moved, start_s=ours.start_s, residual=max(residuals))
        row["predicted"] = {"seconds": round(prediction.seconds, 4), "chain_s": round(prediction.chain_s, 4)}
    pairs = list(zip(times["ephemeron"], times["scalapack"], strict=False))
    for side in SIDES[1:]:
        both = list(zip(times["ephemeron"], times[side], strict=False))
        row[f"to_{side}"] = condensed([ours_s / theirs_s for ours_s, theirs_s in both]) if both else None
    if pairs:
        wall, active = row["seconds"]["scalapack"]["median"], row["core_seconds"]["computing"]
        row["core_seconds"]["scalapack"] = round(arguments.functions * wall, 4)
        row["core_seconds"]["to_scalapack"] = round(active / (arguments.functions * wall), 4)
    return row


def _ours(
    operation: str,
    n: int,
    arguments: argparse.Namespace,
    found: list[dict[str, float]],
    moved: dict[str, int],
    *,
    start_s: float,
    residual: float,
) -> dict[str, Any]:
    computing = condensed([f["computing_s"] for f in found])["median"]
    least, turns = (least_bytes(operation, n, functions=arguments.functions, memory_mb=arguments.memory_mb), len(found) + arguments.warmup)
    return {
        "tasks": int(found[0]["tasks"]),
        "residual_n_eps": round(residual, 5),
        "core_seconds": {
            "computing": computing,
            "with_start_measured": round(computing + arguments.functions * start_s, 4),
            "with_start_of_table_4": round(computing + arguments.functions * PENALTY_S, 4),
            "start_s": round(start_s, 4),
        },
        "bytes": {
            "least": round(least),
            "fetched": moved["bytes_down"] // turns,
            "stored": moved["bytes_up"] // turns,
            "read_by_tasks": int(found[0]["read_bytes"]),
            "to_least": round((moved["bytes_down"] + moved["bytes_up"]) / turns / least, 3),
            "requests": moved["requests"] // turns,
        },
    }


@contextlib.contextmanager
def stores(state: str, folder: str) -> Iterator[tuple[str, str, Path]]:
    """Addresses for tiles and for tasks, and a folder for programs."""
    with contextlib.ExitStack() as stack:
        room = Path(folder) if folder else Path("/dev/shm") if Path("/dev/shm").is_dir() else None
        tiles = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="linalg-", dir=room)))
        other = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="linalg-")))
        channel = "folder"
        if state == "valkey":
            server = started_valkey(other, durable=False)
            stack.callback(server.process.kill)
            channel = f"redis://127.0.0.1:{server.port}/0"
        yield tiles.as_uri(), channel, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", type=int, default=[4000, 8000], help="rows and columns")
    parser.add_argument("--operations", nargs="*", choices=linalg_peers.OPERATIONS, default=linalg_peers.OPERATIONS)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="computations of ours that are not counted, at each size")
    parser.add_argument("--tile", type=int, default=0, help="rows of a tile; by default the library's choice")
    parser.add_argument("--functions", type=int, default=2, help="functions, MPI processes and threads")
    parser.add_argument("--memory-mb", type=int, default=3000, help="of a function: below two vCPUs' is one BLAS thread")
    parser.add_argument("--state", choices=("valkey", "objects"), default="valkey", help="where tasks are")
    parser.add_argument("--store", default="", help="folder for tiles; by default one in memory")
    parser.add_argument("--limit-s", type=float, default=300.0, help="longest run of a peer")
    parser.add_argument("--json", action="store_true", help="as all benchmarks; there is no other output")
    arguments = parser.parse_args()
    rows = []
    before = environment()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells turn off for what runs in the background
    with stores(arguments.state, arguments.store) as (store, channel, folder):
        scalapack = linalg_peers.Scalapack(folder, processes=arguments.functions) if "scalapack" in arguments.sides else None
        with contextlib.suppress(KeyboardInterrupt):  # what was measured until then is written
            for n, operation in itertools.product(arguments.sizes, arguments.operations):
                rows.append(compare(operation, n, arguments, scalapack, store=store, channel=channel))
                free = shutil.disk_usage(store.removeprefix("file://")).free
                print(f"{free / 1e9:.1f} GB are free for tiles", file=sys.stderr)
        peers = {} if scalapack is None else {"scalapack": scalapack.version()}
    write(
        {
            **before,
            "peers": peers,
            "repeats": arguments.repeats,
            "functions": arguments.functions,
            "memory_mb": arguments.memory_mb,
            "tasks_in": arguments.state,
            "tiles_in": "a folder in memory" if not arguments.store else "a folder",
            "goal": {"to_scalapack": 1.25},
            "rows": rows,
        }
    )


if __name__ == "__main__":
    main()
