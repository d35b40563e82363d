"""What a run costs that functions drive, beside the same run that its client drives: time, requests to the store and list price.

    python -m benchmarks.detached [--json] [--pairs 3] [--tasks 2000] [--edge 2000] [--epochs 15]

Three kinds of runs on this machine: training of the digits, a map of many small tasks, a Cholesky factorisation. Both sides alternate. Seconds are from the
start of the command to the end of the run: of a detached one, to the end of `ephemeron attach`, which follows at once. `returned_s` is when the
command had returned. Requests and cost of the functions that drive are beside those of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.common import ROOT, condensed, environment, write
from ephemeron.runs import detached
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.runs.header import open_header

WORDS = "def square(number):\n    return number * number\n"


def command(arguments: Sequence[str], place: Path) -> float:
    """Seconds of a command that succeeds."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-P", "-m", "ephemeron.cli.main", *arguments],
        cwd=place,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    return time.perf_counter() - began


def once(arguments: Sequence[str], place: Path, *, detach: bool) -> dict[str, Any]:
    """One run, in a home of its own."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["EPHEMERON_HOME"] = home
        began = time.perf_counter()
        returned_s = command([*arguments, *["--detach"] * detach], place)
        (folder,) = [RunFolder(path.parent) for path in Path(home, "runs").glob("*/run.json")]
        header = open_header(folder)
        if detach:
            command(["attach", folder.run_id], place)
        seconds = time.perf_counter() - began
        meter = CostMeter(header.prices, memory_mb=header.memory_mb)
        for event in events_of(folder):
            meter.feed(event)
        result = json.loads((folder.path / "result.json").read_text())
        driving = detached.driving_cost(folder, header)
        return {
            "seconds": seconds,
            "returned_s": returned_s,
            "run_seconds": result["seconds"],
            "requests": meter.traffic.requests,
            "cost_usd": result["cost_usd"],
            "driving_requests": 0 if driving is None else driving.requests,
            "driving_gb_seconds": 0.0 if driving is None else driving.gb_seconds,
            "driving_usd": 0.0 if driving is None else driving.cost_usd,
        }


@click.command()
@click.option("--pairs", default=3, show_default=True, help="Runs of each side.")
@click.option("--tasks", default=2000, show_default=True, help="Tasks of the map.")
@click.option("--edge", default=2000, show_default=True, help="Rows of the matrix.")
@click.option("--epochs", default=15, show_default=True, help="Epochs of the training.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; this is the only form.")
def main(pairs: int, tasks: int, edge: int, epochs: int, as_json: bool) -> None:
    """Measures the overhead of detached drivers."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "map"  # a folder of its own, which is sent with its module
        place.mkdir()
        (place / "words.py").write_text(WORDS)
        (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(tasks)))
        a = np.random.default_rng(0).standard_normal((edge, edge))
        np.save(Path(folder) / "A.npy", a @ a.T + edge * np.eye(edge))
        kinds = {
            "train": ("train", str(ROOT / "examples" / "digits" / "job.toml"), "--workers", "2", "--epochs", str(epochs)),
            "map": ("map", "words:square", "--items", "items.jsonl", "--out", "out.jsonl", "--max-workers", "2"),
            "cholesky": ("linalg", "cholesky", "../A.npy", "--out", "../L.npy", "--tile", str(max(1, edge // 8)), "--max-workers", "2"),
        }
        for kind, arguments in kinds.items():
            sides: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for pair in range(pairs):
                for detach in (False, True) if pair % 2 == 0 else (True, False):
                    sides[detach].append(once(arguments, place, detach=detach))
            found[kind] = {
                name: {key: condensed([each[key] for each in sides[detach]]) for key in sides[detach][0]}
                for name, detach in (("client", False), ("detached", True))
            }
            client, own = (median(each["seconds"] for each in sides[detach]) for detach in (False, True))
            found[kind]["overhead_s"] = round(own - client, 3)
    write({"benchmark": "detached", "environment": environment(), "kinds": found})


if __name__ == "__main__":
    main()
