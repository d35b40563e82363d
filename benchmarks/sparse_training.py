"""Sparse logistic regression on functions: what makes it fast, beside scikit-learn and a parameter server on Ray; parts of a step.

    python -m benchmarks.sparse_training [--parts stages,peers,split] [--seconds S] [--workers W] [--rows N] [--json]

stages     PyWren's form, a map of stateless functions for each update over an object store, improved one by one as in figure 9 of Cirrus
           (survey 2.2): functions that last, prefetched minibatches, no barrier, the sparse store instead of the object store, and multi-get.
           The object store is a folder with 10 ms per request and 70 MB/s for each function. Gradients per second, loss over time.
peers      scikit-learn's `SGDClassifier`, the best of some learning rates, and a parameter server of Ray actors with the same minibatches, model
           and optimiser, in the same run.
split      microseconds of a step by phase (survey 2.1, figure 3), one function in a process without a quota and one shard, several turns. Goal:
           500 outside computing.

Data of the shape of Criteo's, 2^20 hashed features. Loss is that of test data, times are since the first gradient.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import condensed, environment, write
from benchmarks.sparse_training_data import FEATURES, prepared
from benchmarks.sparse_training_sides import (
    BATCH,
    MODEL,
    Trace,
    lasting,
    multi_get,
    one_function,
    pywren,
    ray_server,
    scikit_learn,
    stateless,
    stored,
    whole_model,
)
from ephemeron.data.tables import TableDataset
from ephemeron.sparse.training.part import PHASES
from ephemeron.sparse.training.run import evaluate

PARTS = ("stages", "peers", "split")
_RATES = (0.001, 0.003, 0.01)
"""Learning rates of scikit-learn that are tried."""
_POINTS = 12
"""Of a curve."""
_SPLIT = {20: 2000, 100: 1000, 1000: 150}
"""Steps of a turn by the samples of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    result: dict[str, Any] = environment()
    parts = args.parts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(Path(folder) / "train", rows=args.rows)
        test = prepared(Path(folder) / "test", rows=20_000, first_partition=1000)
        result["data"] = {"rows": len(data), "features": FEATURES, "batch": BATCH, "workers": args.workers}
        if "stages" in parts:
            result["stages"] = asyncio.run(stages(data, test, args.workers, args.seconds, Path(folder)))
        if "peers" in parts:
            result["peers"] = peers(data, test, args.workers, args.seconds)
        if "split" in parts:
            result["split"] = asyncio.run(split(data, args.turns))
    if args.json:
        write(result)
    else:
        show(result)


async def stages(data: TableDataset, test: TableDataset, workers: int, seconds: float, folder: Path) -> dict[str, Any]:
    """All stages, one after the other."""
    address, batches = await stored(data, folder / "objects")
    world = pywren.World(objects=address, features=FEATURES, batches=batches, workers=workers)
    found: dict[str, Any] = {}
    for name, run in (
        ("stateless functions", lambda: stateless(world, seconds)),
        ("functions that last", lambda: lasting(world, seconds, prefetch=False, asynchronous=False)),
        ("prefetched minibatches", lambda: lasting(world, seconds, prefetch=True, asynchronous=False)),
        ("no barrier", lambda: lasting(world, seconds, prefetch=True, asynchronous=True)),
        ("sparse store, whole model", lambda: whole_model(world, seconds)),
    ):
        for key in Path(folder / "objects").rglob("*"):  # models and gradients of the stage before
            if key.is_file() and "batch" not in str(key.relative_to(folder / "objects")):
                key.unlink()
        found[name] = summary(name, await run(), test)
    trace, step_us = await multi_get(data, workers, epochs=5)
    found["sparse store, multi-get"] = {**summary("sparse store, multi-get", trace, test), "step_us": _rounded(step_us)}
    return found


def peers(data: TableDataset, test: TableDataset, workers: int, seconds: float) -> dict[str, Any]:
    """The sides that are not ours. One that is not installed is left out."""
    found: dict[str, Any] = {}
    best: dict[str, Any] | None = None
    try:
        for rate in _RATES:
            side = summary(f"SGDClassifier, rate {rate}", scikit_learn(data, rate, seconds / 2), test)
            if best is None or side["least_loss"] < best["least_loss"]:
                best = {**side, "rate": rate}
        found["scikit-learn SGDClassifier"] = best
    except ModuleNotFoundError as e:
        print(f"scikit-learn is left out: {e}", file=sys.stderr)
    try:
        found["Ray actors"] = summary("Ray actors", ray_server(data, workers, seconds), test)
    except ModuleNotFoundError as e:
        print(f"Ray is left out: {e}", file=sys.stderr)
    return found


async def split(data: TableDataset, turns: int) -> dict[str, Any]:
    """A step by phase, for several sizes of minibatches; the sizes in turns."""
    measured: dict[int, list[dict[str, float]]] = {batch: [] for batch in _SPLIT}
    for _ in range(turns):
        for batch, steps in _SPLIT.items():
            measured[batch].append(await one_function(data, batch, steps))
    found: dict[str, Any] = {}
    for batch, rows in measured.items():
        outside = [sum(row[phase] for phase in PHASES if phase != "compute") for row in rows]
        found[str(batch)] = {**{name: condensed([row[name] for row in rows]) for name in rows[0]}, "outside_compute": condensed(outside)}
        print(f"{batch} samples:", {k: v["median"] for k, v in found[str(batch)].items()}, file=sys.stderr)
    return found


def summary(name: str, trace: Trace, test: TableDataset) -> dict[str, Any]:
    """Gradients per second, and loss over time."""
    looks = trace.weights[:: max(1, len(trace.weights) // _POINTS)]
    if trace.weights[-1] is not looks[-1]:
        looks.append(trace.weights[-1])
    losses = [(round(t, 2), round(evaluate(MODEL, {pywren.WEIGHTS: w[:, None]}, test)["loss"], 4)) for t, w in looks]
    found = {
        "gradients_per_s": round(trace.per_s, 2),
        "samples_per_gradient": trace.batch,
        "samples_per_s": round(trace.per_s * trace.batch),
        "gradients": trace.gradients[-1][1],
        "seconds": round(trace.gradients[-1][0], 2),
        "least_loss": min(loss for _, loss in losses),
        "loss": losses,
    }
    print(name, {k: v for k, v in found.items() if k != "loss"}, losses[-1], file=sys.stderr, flush=True)
    return found


def _rounded(step: dict[str, float]) -> dict[str, float]:
    return {phase: round(us, 1) for phase, us in step.items()}


def show(result: dict[str, Any]) -> None:
    """Tables of a result."""
    line: Callable[..., None] = print
    for group in ("stages", "peers"):
        for name, row in result.get(group, {}).items():
            line(f"{name:32} {row['gradients_per_s']:>10} gradients/s  {row['samples_per_s']:>9} samples/s  loss", row["loss"][-1])
    for batch, row in result.get("split", {}).items():
        line(f"{batch:>5} samples", *(f"{phase} {value['median']:.0f}" for phase, value in row.items()))


if __name__ == "__main__":
    main()
