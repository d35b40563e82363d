"""Ray Tune on the grid of `benchmarks.tuning`: one process and one core for each trial, in the same order of trials."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEDULERS: dict[str, dict[str, Any]] = {
    "Ray Tune, ASHA": {"grace_period": 3},
    "Ray Tune, asynchronous Hyperband": {"grace_period": 1, "brackets": 2},
    "Ray Tune, Hyperband": {},
}
"""Options of the schedulers, all with reduction factor 3; ASHA begins at the third evaluation of nine, as the other side's does. Ray Tune
calls its ASHA with several brackets asynchronous Hyperband. Its `HyperBandScheduler` suspends trials, which go on from their
checkpoints. Processes are used again for later trials (`reuse_actors`)."""


def ray_tune(points: list[dict[str, Any]], *, job_file: Path, epochs: int, side: str, folder: Path) -> list[dict[str, Any]]:
    """Runs all points, as many at a time as Ray has cores.

    Returns:
        For each trial its values, its accuracy by epoch, and the seconds from the start of the search to its last report.
    """
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler

    from benchmarks.tuning_trial import train_digits

    options = SCHEDULERS[side]
    suspends = not options

    def trial(config: dict[str, Any]) -> None:
        def report(accuracy: float, save: Callable[[Path], None]) -> None:
            metrics = {"accuracy": accuracy, "at": time.time()}
            if not suspends:
                tune.report(metrics)
                return
            with tempfile.TemporaryDirectory() as place:
                save(Path(place) / "state.pt")
                tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(place))

        def train(resume: Path | None) -> None:
            train_digits(points[config["point"]], report, job_file=job_file, epochs=epochs, resume=resume)

        checkpoint = tune.get_checkpoint()
        if checkpoint is None:
            train(None)
            return
        with checkpoint.as_directory() as place:
            train(Path(place) / "state.pt")

    scheduler: Any
    if suspends:
        scheduler = HyperBandScheduler(max_t=epochs, reduction_factor=3)
    else:
        scheduler = ASHAScheduler(max_t=epochs, reduction_factor=3, **options)
    began = time.time()
    found = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space={"point": tune.grid_search(list(range(len(points))))},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(folder), verbose=0),
    ).fit()
    return [
        {
            "values": points[result.config["point"]],
            "accuracies": list(result.metrics_dataframe["accuracy"]),
            "seconds": float(result.metrics["at"]) - began,
        }
        for result in found
    ]
