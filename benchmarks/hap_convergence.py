"""Accuracy under HAP, SSP and ASP compared with BSP at equal epochs, for remedies against staleness.

    python -m benchmarks.hap_convergence [--json] [--quick] [--parts remedies,region,figures] [--processes 2]

Parts:

- `remedies`: the remedies of `stale_training.REMEDIES` over learning rate × K × optimiser, W = 4, 6 epochs: all of them on a dense
  network, some on the network of `examples/digits`;
- `region`: the remedy that is the default, and none, over learning rate × momentum × protocol × optimiser × W, 15 epochs (the
  example's). From this come the tested region and the factor of additional epochs;
- `figures`: figures 5.8 to 5.11 of FasDL: training loss and accuracy against cost, for the configurations of table 5.3.

A cell is one setting and protocol, its accuracy the mean of three seeds. Goal: at most 0.5 points below BSP.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click
import torch

from benchmarks.common import environment, write
from benchmarks.hap_figures import figures
from benchmarks.stale_training import REMEDIES, Curve, Setting, same_bank, train
from ephemeron.training.job import Target
from ephemeron.training.job.convergence import outside_region

GOAL_POINTS = 0.5
BANK = 18
"""Runs that are computed together."""
SEEDS = (0, 1, 2)
DEFAULT = "local"
COMPARED = (*REMEDIES, "local+scale", "local+clip", "local+spike")
FEWER = ("none", "momentum-prediction", "local", "scale", "clip", "local+spike")
STUDY = (("sgd", 0.9, (0.05, 0.1)), ("nesterov", 0.9, (0.05,)), ("adam", 0.9, (0.003,)))
REGION = (
    ("sgd", 0.9, (0.02, 0.05, 0.1, 0.2, 0.4)),
    ("sgd", 0.95, (0.05, 0.1)),
    ("sgd", 0.5, (0.2, 1.0)),
    ("sgd", 0.0, (0.3, 0.6, 1.2)),
    ("nesterov", 0.9, (0.05, 0.1, 0.2)),
    ("adam", 0.9, (0.003, 0.01, 0.03)),
    ("adamw", 0.9, (0.003, 0.01)),
)
CONVOLUTIONAL = (("sgd", 0.9, (0.05, 0.1)), ("adam", 0.9, (0.003,)))
Grid = tuple[tuple[str, float, tuple[float, ...]], ...]


def grid(rows: Grid) -> Iterator[tuple[str, float, float]]:
    return ((kind, momentum, lr) for kind, momentum, rates in rows for lr in rates)


PROTOCOLS = (("hap", 1), ("hap", 2), ("hap", 3), ("ssp:1", 4), ("ssp:2", 4), ("asp", 4))
"""Protocol and K."""


def _started() -> None:
    torch.set_num_threads(1)


def run(settings: Iterable[Setting], *, processes: int) -> list[Curve]:
    """All runs, in banks, on some processes."""
    banks: dict[tuple[object, ...], list[Setting]] = {}
    for s in settings:
        banks.setdefault(same_bank(s), []).append(s)
    parts = [bank[i : i + BANK] for bank in banks.values() for i in range(0, len(bank), BANK)]
    curves: list[Curve] = []
    began = time.monotonic()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _started) as pool:
        for done, found in enumerate(pool.map(train, parts), 1):
            curves += found
            print(f"{done} of {len(parts)} banks, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return curves


# -- comparison -----------------------------------------------------------------------------------------------


def _key(s: Setting) -> tuple[object, ...]:
    """The cell's setting without its protocol."""
    return s.model, s.workers, s.batch, s.nonaggregator_batch, s.optimizer, s.momentum, s.lr


def compared(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Every cell compared with BSP of the same setting."""
    cells: dict[tuple[object, ...], list[Curve]] = {}
    for c in curves:
        s = c.setting
        bsp = s.sync == "bsp"
        cells.setdefault((_key(s), s.sync, 0 if bsp else s.aggregators, "none" if bsp else s.remedy), []).append(c)
    found = []
    for (key, sync, k, remedy), runs in cells.items():
        if sync == "bsp":
            continue
        base = _mean(cells[key, "bsp", 0, "none"])
        mine = _mean(runs)
        model, workers, batch, other, optimizer, momentum, lr = key  # type: ignore[misc]
        found.append(
            {
                "model": model,
                "workers": workers,
                "batch": batch,
                "nonaggregator_batch": other,
                "optimizer": optimizer,
                "momentum": momentum,
                "lr": lr,
                "sync": sync,
                "aggregators": k,
                "remedy": remedy,
                "bsp_accuracy": round(base[-1], 4),
                "accuracy": round(mine[-1], 4),
                "short_points": round(100 * (base[-1] - mine[-1]), 2),
                "within_goal": base[-1] - mine[-1] <= GOAL_POINTS / 100 + 1e-9,
                "epochs_factor": _factor(base, mine),
            }
        )
    return found


def _mean(runs: Sequence[Curve]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*(c.accuracy for c in runs), strict=True)]


def _factor(base: Sequence[float], mine: Sequence[float]) -> float | None:
    """Epochs until BSP's final accuracy less one point, divided by those of BSP. None: not reached."""
    target = base[-1] - 0.01
    ours, theirs = _reached(mine, target), _reached(base, target)
    return None if ours is None or theirs is None else round(ours / theirs, 3)


def _reached(curve: Sequence[float], target: float) -> float | None:
    """Epochs until an accuracy is reached first, interpolated."""
    before = 0.0
    for i, value in enumerate(curve):
        if value >= target:
            return i + (target - before) / max(value - before, 1e-9)
        before = value
    return None


def by_remedy(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For every remedy: in how many cells it meets the goal, and how far it falls short."""
    found = {}
    for remedy in dict.fromkeys(c["remedy"] for c in cells):
        mine = [c for c in cells if c["remedy"] == remedy]
        short = [c["short_points"] for c in mine]
        found[remedy] = {
            "cells": len(mine),
            "within_goal": sum(c["within_goal"] for c in mine),
            "mean_short_points": round(statistics.fmean(short), 2),
            "worst_short_points": max(short),
        }
    return dict(sorted(found.items(), key=lambda item: (-item[1]["within_goal"], item[1]["mean_short_points"])))


def factors(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Factor of epochs by protocol and remedy: mean over the cells that reach the accuracy, and how many do not."""
    found: dict[str, Any] = {}
    for sync, remedy in dict.fromkeys((c["sync"], c["remedy"]) for c in cells):
        mine = [c["epochs_factor"] for c in cells if c["sync"] == sync and c["remedy"] == remedy]
        known = [f for f in mine if f is not None]
        found.setdefault(sync, {})[remedy] = {
            "mean": round(statistics.fmean(known), 3) if known else None,
            "most": max(known, default=None),
            "not_reached": len(mine) - len(known),
        }
    return found


# -- parts ----------------------------------------------------------------------------------------------------


def study_settings(*, quick: bool) -> list[Setting]:
    rows: Grid = (("sgd", 0.9, (0.05, 0.1)), ("adam", 0.9, (0.003,)))
    worlds = [("mlp", rows if quick else STUDY)] + ([] if quick else [("cnn", CONVOLUTIONAL)])
    found = []
    for model, (kind, momentum, lr) in ((model, row) for model, rows in worlds for row in grid(rows)):
        base = Setting(model=model, optimizer=kind, momentum=momentum, lr=lr, epochs=6)
        remedies = COMPARED if model == "mlp" and not quick else FEWER
        for seed in SEEDS:
            found.append(dataclasses.replace(base, seed=seed, sync="bsp"))
            found += [dataclasses.replace(base, seed=seed, aggregators=k, remedy=r) for k in (1, 2) for r in remedies]
    return found


def region_settings(*, quick: bool) -> list[Setting]:
    found = []
    for kind, momentum, lr in grid((("sgd", 0.9, (0.05,)), ("adam", 0.9, (0.003,))) if quick else REGION):
        base = Setting(model="mlp", optimizer=kind, momentum=momentum, lr=lr, epochs=15)
        found += _around(base, PROTOCOLS, ("none", DEFAULT))
    for kind, momentum, lr in () if quick else grid(CONVOLUTIONAL):
        base = Setting(model="cnn", optimizer=kind, momentum=momentum, lr=lr, epochs=15)
        found += _around(base, PROTOCOLS[:2], (DEFAULT,))
        found += _around(dataclasses.replace(base, model="mlp", nonaggregator_batch=24), (("hap", 2),), (DEFAULT,))
        found += _around(
            dataclasses.replace(base, model="mlp", workers=16, batch=4, nonaggregator_batch=4), (("hap", 1), ("hap", 8)), (DEFAULT,)
        )
    return found


def _around(base: Setting, protocols: Sequence[tuple[str, int]], remedies: Sequence[str]) -> list[Setting]:
    """A setting under BSP and under some protocols, by seed."""
    stale = [dataclasses.replace(base, sync=sync, aggregators=k, remedy=r) for sync, k in protocols for r in remedies]
    return [dataclasses.replace(s, seed=seed) for s in (dataclasses.replace(base, sync="bsp"), *stale) for seed in SEEDS]


def region_of(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summaries of all cells, and of those in the region that launches and plans do not warn of."""
    tested = [c for c in cells if c["remedy"] == DEFAULT and not _outside(c)]
    return {
        "default": DEFAULT,
        "summary": by_remedy(cells),
        "epochs_factor": factors(cells),
        "tested": {"summary": by_remedy(tested), "epochs_factor": factors(tested)},
    }


def _outside(c: dict[str, Any]) -> str:
    name = {"sgd": "SGD", "nesterov": "SGD", "adam": "Adam", "adamw": "AdamW"}[c["optimizer"]]
    options = {"lr": c["lr"], **({"momentum": c["momentum"]} if name == "SGD" else {})}
    return outside_region(Target(target=name, options=options), sync=c["sync"], workers=c["workers"])


def measure(parts: Sequence[str], *, quick: bool, processes: int) -> dict[str, Any]:
    """Results of the parts."""
    found: dict[str, Any] = {}
    if "remedies" in parts:
        cells = compared(run(study_settings(quick=quick), processes=processes))
        found["remedies"] = {"meaning": REMEDIES, "summary": by_remedy(cells), "cells": cells}
    if "region" in parts:
        cells = compared(run(region_settings(quick=quick), processes=processes))
        found["region"] = {**region_of(cells), "cells": cells}
    if "figures" in parts:
        found["figures"] = figures(run, remedy=DEFAULT, quick=quick, processes=processes)
    return found


def show(found: dict[str, Any]) -> None:
    """Prints summaries."""
    for part in ("remedies", "region"):
        for remedy, row in found.get(part, {}).get("summary", {}).items():
            click.echo(
                f"{part:9} {remedy:26} {row['within_goal']:3} of {row['cells']:3} cells within {GOAL_POINTS} points of BSP, "
                f"mean {row['mean_short_points']:+.2f}, worst {row['worst_short_points']:+.2f} points short"
            )
    for row in found.get("region", {}).get("tested", {}).get("summary", {}).values():
        click.echo(
            f"tested region: {row['within_goal']} of {row['cells']} cells within {GOAL_POINTS} points, worst {row['worst_short_points']:+.2f}"
        )
    for sync, by in found.get("region", {}).get("tested", {}).get("epochs_factor", {}).items():
        row = by[DEFAULT]
        click.echo(f"factor of epochs, {sync:6} {row['mean']} (most {row['most']}, not reached in {row['not_reached']})")
    for row in found.get("figures", {}).get("rows", []):
        click.echo(
            f"figure {row['figure']} {row['workload']:10} {row['side']:12} at ${row['cost_usd']:.3f}: loss {row['loss']:.3f}, accuracy {row['accuracy']:.3f}"
        )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quick", is_flag=True, help="A small part of the settings, within two minutes.")
@click.option("--parts", default="remedies,region,figures", show_default=True)
@click.option("--processes", default=2, show_default=True)
def main(as_json: bool, quick: bool, parts: str, processes: int) -> None:
    began = time.monotonic()
    result = {**environment(), "goal_points": GOAL_POINTS, "seeds": SEEDS}
    found = measure(parts.split(","), quick=quick, processes=processes)
    result |= {"seconds": round(time.monotonic() - began), **found}
    if as_json:
        write(result)
    else:
        show(found)


if __name__ == "__main__":
    main()
