"""Public workloads placed here and by the dynamic program published with them, each plan measured by both cost models.

Their program is compiled from a checkout if there is a C++ compiler. It is optimal by its own measure, in which accelerators
compute and transfer in turn; ours is proved by ours. So neither plan may be better than the other by the other's measure, which
checks both proofs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.workloads import Workload, read, workloads
from ephemeron.partition import Schedule, SearchBudget, place, replay

SAMPLE = Schedule(kind="gpipe", micro_batches=1)
"""Schedule of one sample per micro-batch with one micro-batch in memory, as in their measure."""
NEAR = 1e-5
"""Relative; times are rounded to bytes of a link."""


def public_tasks(folder: Path | None) -> list[tuple[Path, Path]]:
    """Files, each with its checkout."""
    return [] if folder is None else [(path, folder) for path in workloads(folder)]


def placed_beside(path: Path, folder: Path, budget: SearchBudget, *, limit_s: float = 120.0) -> dict[str, Any]:
    """Places one workload with both programs.

    Args:
        path: its file.
        folder: the checkout.
        budget: of ours.
        limit_s: of theirs.
    """
    work = read(path)
    begun_s = time.process_time()
    plan = place(work.graph, work.topology, schedule=SAMPLE, budget=budget)
    row: dict[str, Any] = {
        "graph": work.name,
        "nodes": len(work.graph.nodes),
        "devices": len(work.topology.devices),
        "value_s": plan.value_s,
        "bound_s": plan.bound_s,
        "gap": round(plan.gap, 9),
        "solver_s": round(plan.solver_s, 2),
        "cpu_s": round(time.process_time() - begun_s, 2),
        "proved": plan.gap <= 1e-6,
        "ours_by_their_measure_ms": work.their_load(plan.placement),
        "method": plan.method,
        "shorter_than_best_peer": None,
    }
    row["theirs"] = theirs = _theirs(work, path, folder, limit_s)
    if "load_ms" in theirs:
        row["violations"] = int(
            plan.bound_s > theirs["by_our_measure_s"] * (1 + NEAR) or row["ours_by_their_measure_ms"] < theirs["load_ms"] * (1 - NEAR)
        )
    return row


@cache
def _compiled(source: Path) -> tuple[tempfile.TemporaryDirectory[str], Path] | None:
    """Path of their compiled program, in a folder that is deleted with this process; None: there is no compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    folder = tempfile.TemporaryDirectory()
    program = Path(folder.name) / "dp"
    subprocess.run([compiler, "-O3", "-w", "-o", str(program), str(source)], check=True, capture_output=True)
    return folder, program


def _theirs(work: Workload, path: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    made = _compiled(folder / "throughput-dp" / "dp.cpp")
    if made is None:
        return {"skipped": "no C++ compiler"}
    begun_s = time.monotonic()
    try:
        with path.open() as given:
            done = subprocess.run([str(made[1])], stdin=given, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"unsolved": f"after {limit_s:g} s"}
    seconds = round(time.monotonic() - begun_s, 2)
    if done.returncode or not done.stdout.lstrip().startswith("{"):
        return {"unsolved": done.stdout.strip()[:200], "seconds": seconds}
    result = json.loads(done.stdout)
    replayed = replay(work.graph, work.topology, work.placement_of(result), schedule=SAMPLE)
    return {"load_ms": result["maxLoad"], "seconds": seconds, "by_our_measure_s": replayed.bottleneck_s}
