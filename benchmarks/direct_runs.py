"""Whole runs over direct channels beside DistributedDataParallel over gloo and Ray Train, in turns on one machine.

    python -m benchmarks.direct_runs [--json] [--turns 3] [--models digits,resnet18] [--sides direct,folder,ddp,ray]

Every side trains the same model on the digits (8 × 8) with four processes, batches of 16 for each and an evaluation after each
epoch. `iteration_s`: mean time of an iteration after the first one. `first_iteration_s`: from the command to the end of the
first iteration. `total_s`: from the command to its end. Our functions get a quota of one vCPU each, the peers' processes have none:
all share the cores of the machine. Where K = 2 through the store (`folder`) is among the sides, `requests_ratio` says how many
times more requests it makes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks import direct_models
from benchmarks.common import ROOT, condensed, environment, write
from ephemeron.data.sources import readers
from ephemeron.data.spec import DataSpec

WORKERS = 4
MEMORY_MB = 1769
"""One vCPU for each function."""
EPOCHS = {"digits": 15, "resnet18": 2}
LEARNING_RATE = {"digits": 0.1, "resnet18": 0.02}
SIDES = ("direct", "folder", "ddp", "ray")
LIMIT_S = 900.0
_JOB = """
name = "{model}"
model = "direct_models:{model}"
loss = "cross_entropy"
optimizer = {{ target = "SGD", options = {{ lr = {lr}, momentum = 0.9 }} }}
epochs = {epochs}
seed = 0
[data]
source = "digits"
[run]
workers = {workers}
batch_size = 16
memory_mb = {memory}
"""


def _ours(channel: str, *more: str) -> Callable[[str, Path], dict[str, Any]]:
    def run(model: str, folder: Path) -> dict[str, Any]:
        job = folder / f"{model}.toml"
        job.write_text(_JOB.format(model=model, lr=LEARNING_RATE[model], epochs=EPOCHS[model], workers=WORKERS, memory=MEMORY_MB))
        (folder / "direct_models.py").write_text(Path(direct_models.__file__).read_text())
        home = folder / "home"
        began = time.time()
        done = _command(
            [str(Path(sys.executable).with_name("ephemeron")), "train", str(job), "--channel", channel, "--json", *more],
            {"EPHEMERON_HOME": str(home)},
        )
        total_s = time.time() - began
        result = json.loads(done)
        run_dir = home / "runs" / result["run_id"]
        record = json.loads((run_dir / "run.json").read_text())
        times = [
            event["t"]
            for event in map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
            if event["kind"] == "progress" and event["rank"] == 0
        ]
        return {
            "iterations": result["iterations"],
            "iteration_s": (times[-1] - times[0]) / (len(times) - 1),
            "first_iteration_s": record["wall_time"] + times[0] - began,
            "total_s": total_s,
            "accuracy": result["metrics"]["accuracy"],
            "requests": result["traffic"]["store_requests"],
            "billed_usd": result["cost_usd"],
        }

    return run


def _peer(*command: str) -> Callable[[str, Path], dict[str, Any]]:
    def run(model: str, folder: Path) -> dict[str, Any]:
        out = folder / "peer.json"
        began = time.time()
        _command(
            [
                sys.executable,
                "-m",
                *command,
                "--model",
                model,
                "--data",
                str(folder / "digits.npz"),
                "--epochs",
                str(EPOCHS[model]),
                "--learning-rate",
                str(LEARNING_RATE[model]),
                "--out",
                str(out),
            ],
            {"OMP_NUM_THREADS": "1"},
        )
        total_s = time.time() - began
        found = json.loads(out.read_text())
        first_at = found.pop("first_iteration_at")
        return {**found, "first_iteration_s": first_at - began, "total_s": total_s}

    return run


_RUNS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "direct": _ours("direct"),
    "folder": _ours("folder", "--aggregators", "2"),
    "ddp": _peer("torch.distributed.run", "--nproc-per-node", str(WORKERS), "-m", "benchmarks.direct_peers", "ddp"),
    "ray": _peer("benchmarks.direct_peers", "ray"),
}


def _command(command: Sequence[str], variables: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command[:6])} has failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _save_digits(path: Path) -> None:
    samples, _ = readers.read_digits(DataSpec(source="digits"))
    train = len(samples.inputs) * 4 // 5
    np.savez(
        path,
        train_inputs=samples.inputs[:train],
        train_targets=samples.targets[:train],
        test_inputs=samples.inputs[train:],
        test_targets=samples.targets[train:],
    )


def measure(models: Sequence[str], sides: Sequence[str], turns: int, told: Callable[[str], None]) -> dict[str, Any]:
    """Figures of all sides by model, with the ratios of ours to DistributedDataParallel within turns."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ephemeron-benchmark-") as name:
        folder = Path(name)
        _save_digits(folder / "digits.npz")
        for model in models:
            rows: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
            for turn in range(turns):
                order = [sides[(turn + i) % len(sides)] for i in range(len(sides))]
                for side in order:
                    rows[side].append(_RUNS[side](model, folder))
                    last = rows[side][-1]
                    told(f"{model} {side}: {last['iteration_s'] * 1e3:.1f} ms, {last['total_s']:.1f} s in all")
            found[model] = {side: _summary(rows[side]) for side in sides} | {"ratios": _ratios(rows)}
    return found


_TIMES = ("iteration_s", "first_iteration_s", "total_s")


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    same = {name: rows[-1][name] for name in rows[-1] if name not in _TIMES}
    return same | {name: condensed([row[name] for row in rows]) for name in _TIMES}


def _ratios(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of the ratios within turns."""
    ratios: dict[str, Any] = {}
    for other in ("ddp", "ray", "folder"):
        if other in rows and "direct" in rows:
            for name in _TIMES:
                pairs = zip(rows["direct"], rows[other], strict=True)
                ratios[f"direct/{other} {name}"] = round(median(ours[name] / theirs[name] for ours, theirs in pairs), 3)
    if "folder" in rows and "direct" in rows:
        ratios["requests_ratio"] = round(
            median(f["requests"] / d["requests"] for f, d in zip(rows["folder"], rows["direct"], strict=True)), 1
        )
    return ratios


def _split(_: click.Context, __: click.Parameter, text: str) -> list[str]:
    return text.split(",")


@click.command(help=__doc__)
@click.option("--turns", default=3, show_default=True)
@click.option("--models", default="digits,resnet18", show_default=True, callback=_split)
@click.option("--sides", default=",".join(SIDES), show_default=True, callback=_split)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(turns: int, models: list[str], sides: list[str], as_json: bool) -> None:
    """The command."""
    result = environment()
    result["runs"] = measure(models, sides, turns, lambda text: click.echo(text, err=True))
    if as_json:
        write(result)
        return
    for model, found in result["runs"].items():
        for name, ratio in found["ratios"].items():
            click.echo(f"{model}: {name} = {ratio}")


if __name__ == "__main__":
    main()
