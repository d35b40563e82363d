"""Each benchmark runs at its smallest size and prints its result; what takes longer than that allows is imported and asked for its options."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SMALLEST = {
    "caching": "--json --samples 60 --scenes equal --seeds 1",
    "chaos_simulated": "--json --seeds 4 --processes 1",
    "collectives": "--json --quick --workers 2 --sizes 0.1 --channels memory --parts channels --minutes 0.1",
    "dashboard": "--json --functions 5 --iterations 50 --loads 1 --reading --root {folder}",
    "direct": "--json --parts rounds --workers 2 --sizes 0.004 --transports shared --turns 1 --stores",
    "direct_algorithms": "--json --workers 2 --sizes 0.004 --machines 1 --turns 1",
    "geo": "--json --quick --parts waiting",
    "geo_pictures": "benchmarks/results/geo.json {folder}/picture.png",
    "hap_convergence": "--json --quick --parts region --processes 1",
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
}  # fmt: skip
"""What a smoke run of a benchmark is given."""
LONG = {
    "adversity": "its cases are programs and fit in some minutes",
    "direct_overlap": "beside DistributedDataParallel, whose processes start cold",
    "direct_recovery": "deaths at fixed iterations of a run of a minute",
    "direct_runs": "whole runs of four functions",
    "elastic": "runs of which the change comes after more than 20 iterations",
    "handoffs": "a run that is long enough to be handed over ten times",
    "loading": "rounds of every loader, with processes of their own",
    "local_steps": "one epoch of each configuration",
    "pipelining": "profiles and plans a model, and measures its stages",
    "placement": "its solver uses its time",
    "planning": "three searches of four workloads",
    "prediction": "a profile of the machine first",
    "profile_cloud": "a profile of the machine",
    "rpc": "peers that are compiled first",
    "scaling": "measures CPU times first",
    "simulator": "--quick is half a minute",
    "siren": "trains a policy",
    "sparse_prediction": "a profile of the machine first",
    "start": "beside DistributedDataParallel, whose processes start cold",
    "starts": "cold starts",
    "tuning": "searches to their end",
}
"""Benchmarks whose smallest size takes more than some CPU seconds, and what takes them."""
ELSEWHERE = {"chaos": "tests/training/test_chaos.py"}
"""Benchmarks that other tests run."""
SIDES = {
    "direct_peers", "geo_peers", "linalg_peers", "loading_sides", "moto_server", "rpc_peers", "sparse_store_sides", "start_peer",
}  # fmt: skip
"""Programs that a benchmark starts."""
NEEDS = {
    "linalg": ("mpicc", "no ScaLAPACK beside it; apt-get install libscalapack-openmpi-dev libopenmpi-dev openmpi-bin")
}


OPTIONS = """
import contextlib, io, json, runpy, sys, traceback
found = {}
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as e:
            found[name] = said.getvalue() if not e.code else f"exit {e.code}"
        except BaseException:
            found[name] = traceback.format_exc()
print(json.dumps(found))
"""
"""What benchmarks say of their options, in one process: most of them import PyTorch."""


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "EPHEMERON_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_benchmark_is_run() -> None:
    found = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    kinds = (SMALLEST, LONG, ELSEWHERE, SIDES)
    assert found == set().union(*kinds)
    assert len(found) == sum(map(len, kinds)), "each is of one kind"
    assert all(f"benchmarks.{name}" in (ROOT / test).read_text() for name, test in ELSEWHERE.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_at_its_smallest_size(name: str, tmp_path: Path) -> None:
    program, reason = NEEDS.get(name, ("", ""))
    if program and shutil.which(program) is None:
        pytest.skip(reason)
    rows = [
        f"{memory_mb},{mb},{0.02 + mb / (40 + memory_mb / 50)},{0.02 + mb / (50 + memory_mb / 50)}"
        for memory_mb in (512, 1769) for mb in (1, 2, 4, 8, 16, 24, 32)
    ]  # fmt: skip
    (tmp_path / "table.csv").write_text("\n".join(["memory_mb,size_mb,upload_s,download_s", *rows]) + "\n")
    said = run(tmp_path, "-m", f"benchmarks.{name}", *SMALLEST[name].format(folder=tmp_path).split())
    if "--json" in SMALLEST[name]:
        assert json.loads(said)
    elif name == "geo_pictures":
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert said.strip()


@pytest.mark.slow
def test_all_others_can_be_imported_and_say_their_options(tmp_path: Path) -> None:
    said = json.loads(run(tmp_path, "-c", OPTIONS, *LONG))
    assert said.keys() == LONG.keys()
    assert {name: text for name, text in said.items() if "--json" not in text} == {}
