"""NumPyWren's size on simulated functions: `python -m benchmarks.linalg_scale --json`.

simulated   N = 262,144 in tiles of 4,096 on up to 512 functions of one vCPU, with the latency and bandwidth of S3 and a function
            (`benchmarks.linalg_scale_model` says what is real and what is modelled): time, core-seconds, cost, and utilisation over time, for
            Cholesky, GEMM, QR (R and the reflectors; down the columns as for square matrices here, and by the tree for tall ones), and the first stage of the SVD (reduction to band form), with functions that follow
            the tasks, without and with tasks that begin before they are released (`functions.tasks.followers`), and with all functions all the time, as a cluster is billed. `ideal_s` is flops / (vCPUs × rate): no system beats it.
            `published` is what the survey says about tables 3 and 4 (section 2.4): its copy has no cells of the tables, and no MPI is simulated.
autoscaling functions for each task in the queue against time and cost (the scaling factor of NumPyWren's provisioner), and the time after
            which a function without a task ends; tiles of half and twice the rows.
analysis    real: time of a query of the dependency analysis, and its memory, for 10² to 10¹² tiles (`benchmarks.linalg_scale_control`).
scheduler   real: tasks released per second, without computing anything, by queue adapter; each task's edges are connected and counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import environment, write
from benchmarks.linalg_scale_control import analysis, scheduler
from benchmarks.linalg_scale_model import Outcome, Simulated, World, curve
from benchmarks.linalg_scale_picture import parallelism
from benchmarks.provisioner import ScalingLimits
from ephemeron.events import Traffic
from ephemeron.linalg.algorithms import equations, products, spectral
from ephemeron.linalg.algorithms import qr as qr_programs
from ephemeron.linalg.algorithms.qr import flat_qr
from ephemeron.linalg.language.program import Program
from ephemeron.prices import load_prices

PROGRAMS: Mapping[str, tuple[Program, Sequence[str]]] = {
    "cholesky": (equations.cholesky, ("N",)),
    "gemm": (products.matmul, ("M", "N", "K")),
    "qr": (flat_qr, ("M", "N")),
    "qr_tree": (qr_programs.qr, ("M", "N")),
    "svd_first_stage": (spectral.upper_band, ("M", "N")),
}
_WALL = "1.4 to 1.6 times MPI's wall time"
PUBLISHED: Mapping[str, str] = {
    "cholesky": f"{_WALL}; 1.15 times fewer core-seconds",
    "gemm": f"{_WALL}; more core-seconds",
    "qr": f"{_WALL}; 1.15 times fewer core-seconds",
    "qr_tree": f"{_WALL}; 1.15 times fewer core-seconds",
    "svd_first_stage": f"{_WALL}; more than 3 times fewer core-seconds, in part because the algorithms differ",
}
"""NumPyWren, survey 2.4, on tables 3 and 4."""
PENALTY_S = 20.0
"""Start penalty of table 4 for each function."""
IDLE_S = (30.0, 60.0)
"""Seconds without a task after which a function ends, beside 10, the default of `FunctionExecutor`."""
FACTORS = (0.0625, 0.125, 0.25, 0.5, 1.0)
PARTS = ("simulated", "autoscaling", "analysis", "scheduler")


def simulate(
    operation: str,
    tiles: int,
    tile: int,
    *,
    functions: int = 512,
    factor: float = 1.0,
    idle_s: float = 10.0,
    static: bool = False,
    parts: int = 60,
    followers: bool = False,
) -> dict[str, Any]:
    """A row of figures."""
    program, names = PROGRAMS[operation]
    world = World(functions=functions, idle_s=idle_s, followers=followers)
    limits = ScalingLimits(most=functions, tasks_per_executor=1 / factor, hold_s=20.0, burst=1000, starts_per_s=100.0)
    began = time.perf_counter()
    out = Simulated(program, dict.fromkeys(names, tiles), tile=tile, world=world, limits=limits, static=static).run()
    return {
        "operation": operation,
        "n": tiles * tile,
        "tile": tile,
        "functions": functions,
        "scaling_factor": factor,
        "idle_timeout_s": idle_s,
        "followers": followers,
        "provisioner": "none: all functions all the time" if static else "scaling.decide",
        "published": PUBLISHED[operation],
        **figures(out, world),
        "simulated_in_s": round(time.perf_counter() - began, 1),
        "utilisation": curve(out, world, parts=parts),
    }


def figures(out: Outcome, world: World) -> dict[str, Any]:
    """Time, core-seconds and cost of a run."""
    prices = load_prices("objects")
    ideal_s = out.flops / (world.functions * world.flops)
    reads = round(out.bytes_read and out.requests * out.bytes_read / (out.bytes_read + out.bytes_written))
    storage = prices.storage_usd(Traffic(puts=out.requests - reads, gets=reads))
    return {
        "tasks": out.tasks,
        "seconds": round(out.seconds, 1),
        "ideal_s": round(ideal_s, 1),
        "to_ideal": round(out.seconds / ideal_s, 3),
        "core_seconds": {
            "computing": round(out.computing_s),
            "functions": round(out.active_s),
            "functions_with_start_of_table_4": round(out.active_s + PENALTY_S * out.starts),
            "cluster": round(out.seconds * world.functions),
            "cluster_at_ideal_time": round(ideal_s * world.functions),
        },
        "core_seconds_of_a_cluster_to_ours": round(out.seconds * world.functions / (out.active_s + PENALTY_S * out.starts), 3),
        "starts": out.starts,
        "most_functions": out.most_functions,
        "utilisation_of_functions": round(out.computing_s / out.active_s, 4),
        "tb_read": round(out.bytes_read / 1e12, 3),
        "tb_written": round(out.bytes_written / 1e12, 3),
        "usd": {"functions": round(prices.functions_usd(out.active_s * world.memory_gb, out.starts), 2), "requests": round(storage, 2)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--operations", nargs="*", choices=tuple(PROGRAMS), default=tuple(PROGRAMS))
    parser.add_argument("--tiles", type=int, default=64, help="rows of tiles; N = 64 × 4096 = 262,144")
    parser.add_argument("--tile", type=int, default=4096)
    parser.add_argument("--scheduler-tiles", type=int, default=12, help="of the graph that adapters release")
    parser.add_argument("--repeats", type=int, default=3, help="of each adapter")
    parser.add_argument("--queries", type=int, default=200, help="of the analysis at each size")
    parser.add_argument("--picture", type=Path, help="SVG file for tasks, functions and utilisation over time")
    parser.add_argument("--json", action="store_true", help="as all benchmarks; there is no other output")
    arguments = parser.parse_args()
    result = environment()
    if "simulated" in arguments.parts:
        rows = result["simulated"] = []
        for operation in arguments.operations:
            for static, followers in ((False, False), (False, True), (True, False)):
                rows.append(simulate(operation, arguments.tiles, arguments.tile, static=static, followers=followers))
                print({k: v for k, v in rows[-1].items() if k != "utilisation"}, file=sys.stderr)
        if arguments.picture:
            arguments.picture.write_text(
                parallelism([row for row in rows if row["provisioner"] == "scaling.decide" and not row["followers"]])
            )
    if "autoscaling" in arguments.parts:
        result["autoscaling_simulated"] = [
            simulate("cholesky", arguments.tiles, arguments.tile, factor=factor, parts=10) for factor in FACTORS
        ]
        result["idle_timeout_simulated"] = [
            simulate(operation, arguments.tiles, arguments.tile, idle_s=idle_s, parts=10)
            for operation in arguments.operations
            for idle_s in IDLE_S
        ]
        result["tile_size_simulated"] = [
            simulate("cholesky", arguments.tiles * arguments.tile // tile, tile, followers=followers, parts=10)
            for tile in (arguments.tile // 2, 2 * arguments.tile)
            for followers in (False, True)
        ]
    if "analysis" in arguments.parts:
        result["analysis"] = analysis(arguments.queries)
    if "scheduler" in arguments.parts:
        result["scheduler"] = scheduler(arguments.scheduler_tiles, arguments.repeats)
    write(result)


if __name__ == "__main__":
    main()
