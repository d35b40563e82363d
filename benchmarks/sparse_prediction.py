"""Predictions of sparse runs compared with real runs of this machine.

    python -m benchmarks.sparse_prediction [--json] [--rows 100000] [--rounds 3]

Logistic regression on data of the shape of Criteo's (2^20 hashed features), functions of the local platform, real shards. In each round
the job is measured, as `ephemeron profile` does, and each configuration is predicted from that and run. Errors are of each round, and
the median of the rounds counts: on a busy machine clocks of one round have little to do with those of another. `cpu_s`, CPU seconds of
all functions, hardly depends on other work. `train_s` is from the first minibatch of the first function to the last report of the last.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common import SEED, environment, write
from benchmarks.sparse_training_data import ROWS_PER_PARTITION, prepared
from ephemeron.config.typed import plain
from ephemeron.events import Event, Loaded, Progress
from ephemeron.sparse.job.predictor import SparsePredictor
from ephemeron.sparse.job.profiling import measure
from ephemeron.training.driver import configure, train
from ephemeron.training.job import Job
from ephemeron.training.job.job_file import parse_job

TEST_ROWS = 10_000
QUANTITIES = ("seconds", "cost_usd", "train_s", "cpu_s")
CONFIGURATIONS: tuple[tuple[int, int, int, int], ...] = ((1, 1, 1000, 8), (2, 1, 1000, 8), (2, 2, 1000, 8), (1, 1, 250, 3), (2, 1, 250, 3))
"""Functions, shards, samples of a step, epochs."""


def job_of(folder: Path, rows: int) -> Job:
    """The job, with its data."""
    prepared(folder / "train", rows=rows)
    prepared(folder / "test", rows=TEST_ROWS, first_partition=-(-rows // ROWS_PER_PARTITION))
    return parse_job(
        {
            "name": "clicks",
            "seed": SEED,
            "data": {"source": "prepared", "path": "."},
            "run": {"batch_size": 1000},
            "sparse": {"model": "logistic", "optimizer": {"target": "adagrad", "options": {"learning_rate": 0.05}}},
        },
        folder=folder,
    )


def variant(job: Job, c: tuple[int, int, int, int]) -> Job:
    """The job in one configuration."""
    workers, shards, batch_size, epochs = c
    assert job.sparse is not None
    sparse = dataclasses.replace(job.sparse, shards=shards)
    return dataclasses.replace(job, epochs=epochs, run={"workers": workers, "batch_size": batch_size}, sparse=sparse)


def one(job: Job, predictor: SparsePredictor) -> dict[str, Any]:
    """One run beside its prediction, and the load before it."""
    events: list[Event] = []
    load = os.getloadavg()[0]
    p = predictor.predicted(job, configure(job))
    summary = train(job, configure(job), on_event=events.append).raise_if_failed().summary
    reports = [e for e in events if isinstance(e, Progress)]
    begun = min(e.t for e in events if isinstance(e, Loaded))
    measured = {
        "seconds": summary.seconds,
        "cost_usd": summary.cost_usd,
        "train_s": max(e.t for e in reports) - begun,
        "cpu_s": sum({e.rank: e.cpu_s or 0.0 for e in reports}.values()),
    }
    predicted = {"seconds": p.seconds, "cost_usd": p.cost_usd, "train_s": p.epoch_s * job.epochs, "cpu_s": p.cpu_s}
    return {
        "load": round(load, 2),
        "bottleneck": p.bottleneck,
        **{
            name: {"predicted": round(predicted[name], 7), "measured": round(value, 7), "error": round(predicted[name] / value - 1, 4)}
            for name, value in measured.items()
        },
    }


def median(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Median error of the rounds."""
    return {name: round(statistics.median(r[name]["error"] for r in runs), 4) for name in QUANTITIES}


@click.command()
@click.option("--json", "as_json", is_flag=True)
@click.option("--rows", default=100_000, show_default=True, help="Of the training data.")
@click.option("--rounds", default=3, show_default=True, help="Measurements, and runs of each configuration.")
def main(as_json: bool, rows: int, rounds: int) -> None:
    """Measures how well time and cost of sparse runs are predicted."""
    result: dict[str, Any] = environment() | {"benchmark": "sparse_prediction", "rows": rows, "test_rows": TEST_ROWS}
    runs: list[list[dict[str, Any]]] = [[] for _ in CONFIGURATIONS]
    profiles = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EPHEMERON_HOME"] = str(Path(folder) / "home")
        job = job_of(Path(folder), rows)
        for _ in range(rounds):
            predictor = SparsePredictor(measure(job, on_progress=_say))
            profiles.append(predictor.profile)
            for found, c in zip(runs, CONFIGURATIONS, strict=True):
                found.append(one(variant(job, c), predictor))
                _say(f"{c}: {found[-1]}")
    names = ("workers", "shards", "batch_size", "epochs")
    result["runs"] = [
        {**dict(zip(names, c, strict=True)), "error": median(found), "rounds": found} for c, found in zip(CONFIGURATIONS, runs, strict=True)
    ]
    errors = {name: [abs(r["error"][name]) for r in result["runs"]] for name in QUANTITIES}
    result["error"] = {name: {"median": statistics.median(found), "most": max(found)} for name, found in errors.items()}
    result["profiles"] = [{"profile": plain(p), "costs": plain(p.costs())} for p in profiles]
    result["load_after"] = [round(load, 2) for load in os.getloadavg()]
    if as_json:
        return write(result)
    click.echo(f"errors of the medians: {result['error']}")
    for row in result["runs"]:
        click.echo(f"{[row[name] for name in names]}: {row['error']}")


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
