"""The smallest run of each benchmark: `python tests/benchmark_runs.py NAME` runs it, with a home folder of its own and without a file of results.

What takes a few CPU seconds is in `SHORT` and runs in the slow lane (`test_benchmarks.py`), the rest in `make test-nightly`. Peers and servers
that are not everywhere are left out of them by the benchmarks' own options.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600.0

SHORT = {
    "caching": "--json --samples 60 --scenes equal --seeds 1",
    "chaos": "--json --only simulated --schedules 2 --jobs 1 --minutes 1",
    "chaos_simulated": "--json --seeds 4 --processes 1",
    "collectives": "--json --quick --workers 2 --sizes 0.1 --channels memory --parts channels --minutes 0.1",
    "dashboard": "--json --functions 5 --iterations 50 --loads 1 --reading --root {folder}",
    "direct": "--json --parts rounds --workers 2 --sizes 0.004 --transports shared --turns 1 --stores",
    "durable_map_picture": "benchmarks/results/durable_map.json {folder}/picture.png",
    "geo_pictures": "benchmarks/results/geo.json {folder}/picture.png",
    "linalg": "--json --sizes 64 --operations cholesky --sides ephemeron --repeats 1 --warmup 0 --tile 32 --functions 1 --state objects",
    "linalg_eigen": "--json --size 64 --tiles 32 --repeats 1",
    "linalg_scale": "--json --parts simulated --operations cholesky --tiles 4 --tile 64 --repeats 1 --queries 2",
    "platforms": "--json --rounds 1 --only local",
    "preparation": "--json --rows 500 --turns 1 --workers 1",
    "rpc_engines": "",
    "sampling": "--json --measures overlap --samplers Independent --scenes same1 --seeds 1",
    "sparse_store": "--json --parts bytes --sides ours --turns 1 --seconds 0.1 --clients 1",
    "sparse_training": "--json --parts split --seconds 0.5 --workers 1 --rows 1000 --turns 1",
    "tasks": "--json --parts simulated --simulated-tasks 100 --functions 4",
    "transfer": "--json --table {folder}/table.csv",
}
"""What a run is given, where it takes no more than 5 CPU seconds."""
LONG = {
    "joblib_backend": "--json --turns 1 --short 20 --long 2 --values 1 --sides ephemeron",
    "adversity": "--json --only rows",
    "direct_algorithms": "--json --workers 2 --sizes 0.004 --machines 1 --turns 1",
    "direct_overlap": "--json --workers 2 --turns 1",
    "direct_recovery": "--json --epochs 4 --repeats 1",
    "direct_runs": "--json --turns 1 --models digits --sides direct",
    "durable_map": "--json --turns 1 --sides map_items;chunks --loads empty;MB --tasks 20 --payloads 2 --payload-mb 0.1 --items 300 --points 6 "
    "--groups 40 --table-mb 2 --bootstraps 5 --group-points 3 --virtual-runs 1 --virtual-points 5 --lambda-functions 4 --lambda-items 20 "
    "--keys 200,300 --computed 200",
    "elastic": "--json --turns 1 --iterations 90",
    "geo": "--json --quick --parts waiting",
    "detached": "--json --pairs 1 --tasks 20 --edge 200 --epochs 1",
    "handoffs": "--json --epochs 30 --pairs 1",
    "hap_convergence": "--json --quick --parts region --processes 1",
    "loading": "--json --images 64 --workers 1 --rounds 1",
    "local_steps": "--json --seeds 1 --epochs 1",
    "pipelining": "--json --models paced --rounds 1 --batch 8 --micro-batches 2",
    "placement": "--json --parts iteration throughput never_worse --nodes 20 --seeds 1 --limit-s 1 --workers 1 --instances 4",
    "planning": "--json --workloads 2 --repeats 1 --out {folder}",
    "prediction": "--json --platform simulated",
    "profile_cloud": "--json --only local",
    "rpc": "--json --turns 1 --echoes 1",
    "scaling": "--json --quick --parts compute",
    "simulator": "--json --quick",
    "siren": "--json --models linear --parts 13 --losses benchmarks/results/siren.json --budgets 6 --steps 2",
    "sparse_prediction": "--json --rows 2000 --rounds 1",
    "start": "--json --turns 1 --functions 2",
    "starts": "--json --turns 1 --together 2",
    "tuning": "--json --parts simulated --epochs 2",
}
"""What a run is given that takes longer."""


def found() -> set[str]:
    """Benchmarks: the modules that are commands, without those that only benchmarks start, which the list of all does not have."""
    texts = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    said, listed = "".join(texts.values()), (ROOT / "benchmarks" / "README.md").read_text()
    return {
        name
        for name, text in texts.items()
        if '__name__ == "__main__"' in text
        and (f"python -m benchmarks.{name}" in listed or not (f'"benchmarks.{name}"' in said or f'"{name}.py"' in said))
    }


def run(name: str, folder: Path) -> str:
    """Runs a benchmark at its smallest size and returns what it prints.

    Args:
        name: of the benchmark.
        folder: empty, for what it needs and writes.

    Raises:
        AssertionError: it has failed, or its result is not there.
    """
    rows = [
        f"{memory_mb},{mb},{0.02 + mb / (40 + memory_mb / 50)},{0.02 + mb / (50 + memory_mb / 50)}"
        for memory_mb in (512, 1769)
        for mb in (1, 2, 4, 8, 16, 24, 32)
    ]
    (folder / "table.csv").write_text("\n".join(["memory_mb,size_mb,upload_s,download_s", *rows]) + "\n")
    arguments = (SHORT | LONG)[name].format(folder=folder).split()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "EPHEMERON_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"python -m benchmarks.{name} {' '.join(arguments)}: {done.stderr[-3000:]}"
    if name.endswith(("_picture", "_pictures")):
        assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    elif "--json" in arguments:
        assert json.loads(done.stdout)
    else:
        assert done.stdout.strip()
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and prints its result."""
    parser = argparse.ArgumentParser(prog="python tests/benchmark_runs.py", description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=sorted(SHORT | LONG), metavar="NAME")
    name = parser.parse_args(argv).name
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        print(run(name, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
