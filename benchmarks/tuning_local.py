"""The part `local` of `benchmarks.tuning`: searches on this machine, and Ray Tune's in turn with them."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tuning import CORES, SIDES, job_of, machine_usd, searched, study_of, with_best
from benchmarks.tuning_peer import SCHEDULERS, ray_tune
from ephemeron.tuning.sampling import begin_trial, quiet, suggest

OURS = ("grid to its end", "grid, ASHA", "grid, Hyperband")
Row = dict[str, Any]


def local(epochs: int, turns: int, say: Callable[[Row], None], earlier: Sequence[list[Row]]) -> dict[str, Any]:
    """All sides in each turn, after `earlier` turns.

    Returns:
        `turns`: for each turn the rows of all sides in the order in which they were run; `sides`: medians over all turns.
    """
    found = list(earlier)
    for _ in range(turns):
        found.append(one_turn(epochs, say, reverse=len(found) % 2 == 1))
    return {"turns": found, "sides": [medians(side, found) for side in (*OURS, *SCHEDULERS)]}


def one_turn(epochs: int, say: Callable[[Row], None], *, reverse: bool) -> list[Row]:
    """All sides once, Ray Tune's first if `reverse`; Ray runs only while they do."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job = job_of(folder, epochs=epochs, platform="local")
        points = grid_order(folder)

        def ours() -> list[Row]:
            rows = []
            for name in OURS[:: -1 if reverse else 1]:
                load = os.getloadavg()[0]
                row = searched(study_of(folder, "local", **SIDES[name], concurrency=CORES))
                rows.append({"side": name, **row, "machine_usd": machine_usd(row["wall_s"]), "load": round(load, 2)})
                say(rows[-1])
            return rows

        def peers() -> list[Row]:
            return ray_sides(points, job, epochs, folder, say, reverse=reverse)

        rows = [*peers(), *ours()] if reverse else [*ours(), *peers()]
    return with_best(rows)


def ray_sides(
    points: list[dict[str, Any]], job: Path, epochs: int, folder: Path, say: Callable[[Row], None], *, reverse: bool
) -> list[Row]:
    """Ray Tune on the same points."""
    import ray

    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its workers otherwise give way to other work
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # for its workers, which import these modules
    began = time.perf_counter()
    ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False, logging_level="error")
    init_s = time.perf_counter() - began
    rows = []
    try:
        for side in list(SCHEDULERS)[:: -1 if reverse else 1]:
            load, began = os.getloadavg()[0], time.perf_counter()
            trials = ray_tune(points, job_file=job, epochs=epochs, side=side, folder=folder / "ray")
            wall_s = time.perf_counter() - began
            whole = sorted((t for t in trials if len(t["accuracies"]) == epochs), key=lambda t: t["seconds"])
            best = max(whole, key=lambda t: t["accuracies"][-1])
            rows.append(
                {
                    "side": side,
                    "seconds": round(wall_s, 3),
                    "wall_s": round(wall_s, 3),
                    "init_s": round(init_s, 3),
                    "cost_usd": None,
                    "machine_usd": machine_usd(wall_s),
                    "best": best["accuracies"][-1],
                    "parameters": best["values"],
                    "trials": {"finished": len(whole), "pruned": len(trials) - len(whole), "failed": 0},
                    "evaluations": sum(len(t["accuracies"]) for t in trials),
                    "load": round(load, 2),
                    "finished": [
                        {
                            "value": t["accuracies"][-1],
                            "seconds": round(t["seconds"], 3),
                            "wall_s": round(t["seconds"], 3),
                            "cost_usd": None,
                        }
                        for t in whole
                    ],
                }
            )
            say(rows[-1])
    finally:
        ray.shutdown()
    return rows


def grid_order(folder: Path) -> list[dict[str, Any]]:
    """Points of the grid in the order in which the studies suggest them: it depends on their seed alone."""
    import optuna

    file = study_of(folder, "order", **SIDES["grid to its end"]).file
    with quiet():
        study = optuna.create_study()
    points: list[dict[str, Any]] = []
    while len(points) < file.trials:
        values, system = suggest(study, file.spec, file.space)
        begin_trial(study, file.space, values, system, {})
        points.append(values)
    return points


def medians(side: str, turns: Sequence[list[Row]]) -> Row:
    """One side over all turns; `to_best` over those in which it reached the best value of the grid."""
    rows = [row for turn in turns for row in turn if row["side"] == side]
    reached = [row["to_best"] for row in rows if row["to_best"] is not None]
    middle: Row = {"side": side, "turns": len(rows)}
    for key in ("wall_s", "init_s", "cost_usd", "machine_usd", "best", "evaluations"):
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            middle[key] = round(statistics.median(values), 7)
    middle["finished"] = [row["trials"]["finished"] for row in rows]
    middle["reached"] = len(reached)
    if reached:
        wall_s = statistics.median(found["wall_s"] for found in reached)
        middle["to_best"] = {"wall_s": round(wall_s, 3), "machine_usd": machine_usd(wall_s)}
        costs = [found["cost_usd"] for found in reached if found["cost_usd"] is not None]
        if costs:
            middle["to_best"]["cost_usd"] = round(statistics.median(costs), 9)
    return middle
