"""Time and cost of a search: a grid to its end, ASHA, Hyperband and TPE here; Ray Tune's ASHA and Hyperband beside them.

    python -m benchmarks.tuning [--json] [--parts simulated,local,service] [--epochs 9] [--turns 3] [--into FILE]

`simulated`: functions of AWS Lambda in virtual time (real gradients, a step of 16 samples takes 0.1 s at 1,769 MB), eight at a
time. `local`: this machine, a trial on one function and one core, two at a time; Ray Tune in the same run, one process and one
core for each trial, the same points in the same order with the same samples in the same order; all sides once in each turn, and in the
opposite order in every second one. `service`: trials whose samples take 3 ms of CPU time each to decode, each for itself and through one
data service. `--into` replaces the parts in a file, and adds the turns of `local` to those that it has.

`to_best` is when the first trial has finished whose value is within two test images of the best of the grid.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.common import environment, write
from ephemeron.config.toml import toml_text
from ephemeron.prices import load_machines
from ephemeron.tuning import Study
from ephemeron.tuning.folder import TrialRecord

DIGITS = Path(__file__).parents[1] / "examples" / "digits"
SPACE: dict[str, list[Any]] = {"optimizer.options.lr": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3], "model.options.width": [8, 16]}
SIDES: dict[str, dict[str, Any]] = {
    "grid to its end": {"sampler": "grid"},
    "grid, ASHA": {"sampler": "grid", "pruner": "asha"},
    "grid, ASHA from the first evaluation on": {"sampler": "grid", "pruner": {"name": "asha", "min_evaluations": 1}},
    "grid, Hyperband": {"sampler": "grid", "pruner": "hyperband"},
    "TPE, ASHA": {"sampler": "tpe", "pruner": "asha", "trials": 12},
}
"""ASHA's first decision is by default after the square root of a trial's evaluations: the third of nine."""
IMAGES = 2
CORES = 2
MACHINE = "c7i.large"
"""Two vCPUs: what the whole of this machine would cost while a search runs."""


def job_of(folder: Path, *, epochs: int, platform: str) -> Path:
    """The digits on one function."""
    job = {
        "name": "digits",
        "model": "model:build",
        "code": [str(DIGITS)],
        "epochs": epochs,
        "seed": 0,
        "data": {"source": "digits"},
        "optimizer": {"target": "SGD", "options": {"lr": 0.1, "momentum": 0.9}},
        "simulation": {"compute": {"a": 8.85, "b": 4.0, "m": 0.0}},
        "run": {"platform": platform, "workers": 1, "pattern": "standalone", "memory_mb": 1769, "batch_size": 64},
    }
    path = folder / "job.toml"
    path.write_text(toml_text(job))
    return path


def study_of(folder: Path, name: str, **values: Any) -> Study:
    """A study beside `job.toml`."""
    path = folder / f"{name}.toml"
    study = {"job": "job.toml", "metric": "accuracy", "mode": "max", "predict": False, "seed": 1, "space": SPACE, **values}
    path.write_text(toml_text(study))
    return Study.open(path, out=folder / f"{name}-{secrets.token_hex(3)}")


def searched(study: Study) -> dict[str, Any]:
    """Runs a study; when each trial has finished, and what had been spent by then."""
    finished: list[dict[str, Any]] = []
    began = time.perf_counter()

    def on_trial(trial: TrialRecord) -> None:
        if trial.state == "finished":
            status, wall_s = study.status, round(time.perf_counter() - began, 3)
            finished.append({"value": trial.value, "seconds": status.seconds, "wall_s": wall_s, "cost_usd": status.spent_usd})

    result = study.run(on_trial=on_trial)
    document = result.to_json()
    return {
        "seconds": document["seconds"],
        "wall_s": round(time.perf_counter() - began, 3),
        "cost_usd": document["cost_usd"],
        "best": document["best"]["value"],
        "parameters": document["best"]["parameters"],
        "trials": document["trials"],
        "evaluations": sum(t.evaluations for t in result.status.trials),
        "finished": finished,
        "predicted": document["predicted"],
    }


def with_best(rows: list[dict[str, Any]], test_samples: int = 359) -> list[dict[str, Any]]:
    """Adds when a side has reached the best value of the grid to its end."""
    grid = next(row for row in rows if row["side"] == "grid to its end")
    wanted = grid["best"] - (IMAGES + 0.5) / test_samples
    for row in rows:
        reached = [f for f in row.pop("finished") if f["value"] >= wanted]
        row["to_best"] = {k: v for k, v in reached[0].items() if k != "value"} if reached else None
    return rows


def simulated(epochs: int, say: Any) -> list[dict[str, Any]]:
    """All sides in virtual time."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job_of(folder, epochs=epochs, platform="simulated")
        for name, how in SIDES.items():
            row = searched(study_of(folder, "simulated", **how, concurrency=8, predict=True))
            rows.append({"side": name, **row})
            say(rows[-1])
    return with_best(rows)


def machine_usd(seconds: float) -> float:
    """Price of the rented machine for so long, without its boot."""
    machine = next(m for m in load_machines() if m.name == MACHINE)
    return round(machine.hour_usd * seconds / 3600, 7)


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True)
@click.option("--parts", default="simulated,local,service")
@click.option("--epochs", default=9)
@click.option("--turns", default=3, help="of part local")
@click.option("--into", type=click.Path(path_type=Path))
def main(as_json: bool, parts: str, epochs: int, turns: int, into: Path | None) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    sys.modules.setdefault("matplotlib.figure", None)  # type: ignore[arg-type]

    def say(row: dict[str, Any]) -> None:
        value = f"accuracy {row['best']:.4f}" if "best" in row else ""
        cost = "" if row.get("cost_usd") is None else f"${row['cost_usd']:.5f}"
        click.echo(f"{row['side']:44} {row['seconds']:7.1f} s  {cost:10} {value}  {row.get('trials', '')}", err=True)

    result: dict[str, Any] = json.loads(into.read_text()) if into is not None and into.exists() else {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["EPHEMERON_HOME"] = home
        for part in parts.split(","):
            before = environment()
            if part == "service":
                from benchmarks.tuning_service import sides

                found: Any = {"sides": sides(say)}
            elif part == "local":
                from benchmarks.tuning_local import local

                found = local(epochs, turns, say, result.get("local", {}).get("turns", []))
            else:
                found = {"sides": simulated(epochs, say)}
            result[part] = {**found, **before, "epochs": epochs, "load_after": [round(x, 2) for x in os.getloadavg()]}
    result |= {"benchmark": "tuning", "points": 12, "machine_price": MACHINE}
    if into is not None:
        into.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        write(result)


if __name__ == "__main__":
    main()
