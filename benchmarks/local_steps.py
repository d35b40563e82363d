"""Local steps and outer optimisers on digits: accuracy after equal epochs, exchanges, time and cost; and HSP beside BSP and ASP.

    python -m benchmarks.local_steps [--json] [--seeds 3] [--epochs 15]

The job is `examples/digits` on four simulated functions of 1,769 MB with AWS Lambda's and S3's latencies and prices (virtual time,
real gradients; a step of 16 samples takes 0.1 s). A row is one configuration, its accuracy the mean over the seeds.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import click
import torch

from benchmarks.common import environment, write
from ephemeron.training.driver import configure, train
from ephemeron.training.job import Job, Simulation, Target, load_job

JOB = Path(__file__).parents[1] / "examples" / "digits" / "job.toml"
WORLD = Simulation(compute={"a": 8.85, "b": 4.0, "m": 0.0})  # type: ignore[arg-type]
RATE = 0.05
DILOCO = Target(target="SGD", options={"lr": 0.7, "momentum": 0.9, "nesterov": True})
MILD = Target(target="SGD", options={"lr": 1.0, "momentum": 0.3, "nesterov": True})
ROWS: dict[str, dict[str, Any]] = {
    "bsp": {},
    "hsp": {"sync": "hsp"},
    "asp": {"sync": "asp"},
    **{f"{h} local steps, average": {"exchange": {"local_steps": h}} for h in (2, 4, 8, 16)},
    **{f"{h} local steps, Nesterov 0.9, lr 0.7": {"exchange": {"local_steps": h, "outer_optimizer": DILOCO}} for h in (4, 8)},
    **{f"{h} local steps, Nesterov 0.3, lr 1": {"exchange": {"local_steps": h, "outer_optimizer": MILD}} for h in (4, 8)},
    "4 local steps, average, hap": {"exchange": {"local_steps": 4}, "sync": "hap"},
    "4 local steps, average, int8": {"exchange": {"local_steps": 4, "compression": "int8"}},
}


def once(job: Job, how: dict[str, Any]) -> dict[str, Any]:
    """One run."""
    s = train(job, configure(job, platform="simulated", memory_mb=1769, **how)).raise_if_failed().summary
    return {
        "accuracy": s.metrics["accuracy"],
        "iterations": s.iterations,
        "seconds": s.seconds,
        "cost_usd": s.cost_usd,
        "requests": s.traffic.puts + s.traffic.gets + s.traffic.polls,
    }


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True)
@click.option("--seeds", default=3)
@click.option("--epochs", default=15)
def main(as_json: bool, seeds: int, epochs: int) -> None:
    torch.set_num_threads(1)
    job = load_job(JOB)
    job = dataclasses.replace(
        job,
        epochs=epochs,
        simulation=WORLD,
        limits=dataclasses.replace(job.limits, budget_usd=None),
        optimizer=Target(target="SGD", options={"lr": RATE, "momentum": 0.9}),
    )
    rows = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["EPHEMERON_HOME"] = home
        for name, how in ROWS.items():
            found = [once(dataclasses.replace(job, seed=seed), how) for seed in range(seeds)]
            rows.append({"configuration": name, **{key: mean(f[key] for f in found) for key in found[0]}})
            r = rows[-1]
            click.echo(
                f"{name:42} accuracy {r['accuracy']:.4f}  {r['iterations']:5.0f} exchanges  {r['seconds']:6.1f} s  "
                f"${r['cost_usd']:.5f}  {r['requests']:6.0f} requests",
                err=as_json,
            )
    if as_json:
        write({**environment(), "epochs": epochs, "seeds": seeds, "rows": rows})


if __name__ == "__main__":
    main()
