"""Time and cost of a search: a grid to its end, ASHA, and TPE with ASHA here; Ray Tune's grid and ASHA beside them.

    python -m benchmarks.tuning [--json] [--parts simulated,local,service] [--epochs 9]

`simulated`: functions of AWS Lambda in virtual time (real gradients, a step of 16 samples takes 0.1 s at 1,769 MB), eight at a
time. `local`: this machine, a trial on one function and one core, two at a time; Ray Tune in the same run, one process and one
core for each trial, the same points in the same order. `service`: trials whose samples take 3 ms of CPU time each to decode, each for
itself and through one data service.

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
from ephemeron.training.planner.prices import load_machines
from ephemeron.tuning import Study
from ephemeron.tuning.folder import TrialRecord

DIGITS = Path(__file__).parents[1] / "examples" / "digits"
SPACE: dict[str, list[Any]] = {
    "optimizer.options.lr": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3],
    "model.options.width": [8, 16],
}
SIDES: dict[str, dict[str, Any]] = {
    "grid to its end": {"sampler": "grid"},
    "grid, ASHA": {"sampler": "grid", "pruner": "asha"},
    "grid, ASHA from the third evaluation on": {"sampler": "grid", "pruner": {"name": "asha", "min_evaluations": 3}},
    "grid, Hyperband": {"sampler": "grid", "pruner": "hyperband"},
    "TPE, ASHA": {"sampler": "tpe", "pruner": "asha", "trials": 12},
}
IMAGES = 2
CORES = 2
MACHINE = "c7i.large"
"""Two vCPUs: what the whole of this machine would cost while a search runs."""


def job_of(folder: Path, *, epochs: int, platform: str) -> Path:
    """The digits on one function."""
    job = {
        "name": "digits", "model": "model:build", "code": [str(DIGITS)], "epochs": epochs, "seed": 0, "data": {"source": "digits"},
        "optimizer": {"target": "SGD", "options": {"lr": 0.1, "momentum": 0.9}},
        "simulation": {"compute": {"a": 8.85, "b": 4.0, "m": 0.0}},
        "run": {"platform": platform, "workers": 1, "pattern": "standalone", "memory_mb": 1769, "batch_size": 64},
    }  # fmt: skip
    path = folder / "job.toml"
    path.write_text(toml_text(job))
    return path


def study_of(folder: Path, name: str, **values: Any) -> Study:
    """A study beside `job.toml`."""
    path = folder / f"{name}.toml"
    study = {
        "job": "job.toml",
        "metric": "accuracy",
        "mode": "max",
        "predict": False,
        "seed": 1,
        "space": SPACE,
        **values,
    }
    path.write_text(toml_text(study))
    return Study.open(path, out=folder / f"{name}-{secrets.token_hex(3)}")


def searched(study: Study) -> dict[str, Any]:
    """Runs a study; when each trial has finished, and what had been spent by then."""
    finished: list[dict[str, Any]] = []

    def on_trial(trial: TrialRecord) -> None:
        if trial.state == "finished":
            status = study.status
            finished.append({"value": trial.value, "seconds": status.seconds, "cost_usd": status.spent_usd})

    began = time.perf_counter()
    result = study.run(on_trial=on_trial)
    document = result.to_json()
    return {
        "seconds": document["seconds"], "wall_s": round(time.perf_counter() - began, 3), "cost_usd": document["cost_usd"],
        "best": document["best"]["value"], "parameters": document["best"]["parameters"], "trials": document["trials"],
        "evaluations": sum(t.evaluations for t in result.status.trials), "finished": finished,
        "predicted": document["predicted"],
    }  # fmt: skip


def with_best(rows: list[dict[str, Any]], test_samples: int = 359) -> list[dict[str, Any]]:
    """Adds when a side has reached the best value of the grid."""
    wanted = rows[0]["best"] - (IMAGES + 0.5) / test_samples
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


def local(epochs: int, say: Any) -> list[dict[str, Any]]:
    """All sides on this machine, and Ray Tune."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job = job_of(folder, epochs=epochs, platform="local")
        for name, how in list(SIDES.items())[:2]:
            rows.append({"side": name, **searched(study_of(folder, "local", **how, concurrency=CORES))})
            rows[-1]["machine_usd"] = machine_usd(rows[-1]["wall_s"])
            say(rows[-1])
        rows += ray_sides(job, epochs, folder, say)
    return with_best(rows)


def ray_sides(job: Path, epochs: int, folder: Path, say: Any) -> list[dict[str, Any]]:
    """Ray Tune on the same points, in the order in which Optuna's grid had them."""
    import ray

    from benchmarks.tuning_peer import ray_tune

    points = grid_order(folder)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its workers otherwise give way to other work
    began = time.perf_counter()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # for its workers, which import this module
    ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False, logging_level="error")
    init_s = time.perf_counter() - began
    rows = []
    try:
        for name, asha in (("Ray Tune, grid, ASHA", True), ("Ray Tune, grid to its end", False)):
            began = time.perf_counter()
            trials = ray_tune(points, job_file=job, epochs=epochs, cores=CORES, asha=asha, folder=folder / "ray")
            wall_s = time.perf_counter() - began
            whole = sorted((t for t in trials if len(t["accuracies"]) == epochs), key=lambda t: t["seconds"])
            best = max(whole, key=lambda t: t["accuracies"][-1])
            rows.append({
                "side": name, "seconds": round(wall_s, 3), "wall_s": round(wall_s, 3), "init_s": round(init_s, 3), "cost_usd": None,
                "machine_usd": machine_usd(wall_s), "best": best["accuracies"][-1], "parameters": best["values"],
                "trials": {"finished": len(whole), "pruned": len(trials) - len(whole), "failed": 0},
                "evaluations": sum(len(t["accuracies"]) for t in trials),
                "finished": [{"value": t["accuracies"][-1], "seconds": round(t["seconds"], 3), "cost_usd": None} for t in whole],
            })  # fmt: skip
            say(rows[-1])
    finally:
        ray.shutdown()
    return rows


def grid_order(folder: Path) -> list[dict[str, Any]]:
    """Points of the grid in the order of the study that was run first."""
    first = min(folder.glob("local-*/study.json"), key=lambda p: p.stat().st_ctime)
    trials = sorted(json.loads(first.read_text())["trials"], key=lambda t: t["number"])
    return [t["parameters"] for t in trials]


def machine_usd(seconds: float) -> float:
    """Price of the rented machine for so long, without its boot."""
    machine = next(m for m in load_machines() if m.name == MACHINE)
    return round(machine.hour_usd * seconds / 3600, 7)


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True)
@click.option("--parts", default="simulated,local,service")
@click.option("--epochs", default=9)
def main(as_json: bool, parts: str, epochs: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    sys.modules.setdefault("matplotlib.figure", None)  # type: ignore[arg-type]

    def say(row: dict[str, Any]) -> None:
        value = f"accuracy {row['best']:.4f}" if "best" in row else ""
        cost = "" if row.get("cost_usd") is None else f"${row['cost_usd']:.5f}"
        click.echo(f"{row['side']:28} {row['seconds']:7.1f} s  {cost:10} {value}  {row.get('trials', '')}", err=as_json)

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["EPHEMERON_HOME"] = home
        for part in parts.split(","):
            if part == "service":
                from benchmarks.tuning_service import sides

                found[part] = sides(say)
            else:
                found[part] = {"simulated": simulated, "local": local}[part](epochs, say)
    if as_json:
        write({**environment(), "epochs": epochs, "points": 12, "machine_price": MACHINE, **found})


if __name__ == "__main__":
    main()
