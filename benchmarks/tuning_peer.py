"""Ray Tune on the grid of `benchmarks.tuning`: one process and one core for each trial, in the same order of trials."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def ray_tune(
    points: list[dict[str, Any]], *, job_file: Path, epochs: int, cores: int, asha: bool, folder: Path
) -> list[dict[str, Any]]:
    """Runs all points.

    Returns:
        For each trial its values, its accuracy by epoch, and the seconds from the start of the search to its end.
    """
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    from benchmarks.tuning_trial import train_digits

    def trial(config: dict[str, Any]) -> None:
        train_digits(
            points[config["point"]],
            lambda accuracy: tune.report({"accuracy": accuracy}),
            job_file=job_file,
            epochs=epochs,
        )

    scheduler = ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=3) if asha else FIFOScheduler()
    began = time.time()
    found = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space={"point": tune.grid_search(list(range(len(points))))},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=scheduler, max_concurrent_trials=cores),
        run_config=tune.RunConfig(storage_path=str(folder), verbose=0),
    ).fit()
    return [
        {
            "values": points[result.config["point"]], "accuracies": list(result.metrics_dataframe["accuracy"]),
            "seconds": float(result.metrics["timestamp"]) - began,
        }
        for result in found
    ]  # fmt: skip
