"""Hit rates of cache policies for jobs that share a dataset: `python -m benchmarks.caching`.

Four jobs, each with its own uniformly random order in every epoch (as with PyTorch's sampler), five epochs, a cache for
half of the samples, and objects of one size. Cold: the accesses of first epochs. Steady: those of epochs two to five. The cache
begins empty, and every missed object is offered to it at once. Time is virtual, so results do not depend on the machine.

Policies that use announced accesses are measured twice: with each epoch announced when it begins, as in the thesis, and with
each epoch announced one epoch early (`ahead`). The thesis compares at equal speeds, with 5 figures that are multiples of 1/2000,
and MinIO at 37.50: one cold epoch of four jobs over 500 samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import SEED, condensed, environment, write
from benchmarks.sharing import AccessTrace, Task, access_trace, merged
from ephemeron.data.cache import CachePolicy, NextUse
from ephemeron.data.cache.baselines import ALSD, LFU, LRU, Belady, MinIO, RefCnt
from ephemeron.data.sampling.baselines import Independent

EPOCHS = 5
SCENES = ("equal", "jitter", "speeds", "joining", "overlapping")
THESIS = {"LRU": 30.40, "LFU": 29.25, "MinIO": 37.50, "RefCnt": 53.85, "ALSD": 57.05}
IDENTITY = ("samples", "scene", "policy")
POLICIES: dict[str, tuple[Callable[[AccessTrace], CachePolicy], int]] = {
    "LRU": (lambda trace: LRU(), 0),
    "LFU": (lambda trace: LFU(), 0),
    "MinIO": (lambda trace: MinIO(), 0),
    "RefCnt": (lambda trace: RefCnt(), 0),
    "ALSD": (lambda trace: ALSD(), 0),
    "ALSD, ahead": (lambda trace: ALSD(), 1),
    "NextUse": (lambda trace: NextUse(), 0),
    "NextUse, ahead": (lambda trace: NextUse(), 1),
    "Belady": (lambda trace: Belady(trace.order), 0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--samples", type=int, nargs="+", default=[500, 2000], metavar="N")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="keep the other rows of this earlier result")
    arguments = parser.parse_args()
    rows = [row for samples in arguments.samples for scene in arguments.scenes for row in measure(samples, scene, arguments.seeds)]
    about = {"benchmark": "caching", "jobs": 4, "epochs": EPOCHS, "capacity": 0.5, "thesis_cold_percent": THESIS}
    result = merged(arguments.merge, {**environment(), **about, "rows": rows}, IDENTITY)
    if arguments.json:
        write(result)
    else:
        show(result, Console(width=130))


def measure(samples: int, scene: str, seeds: int) -> list[dict[str, Any]]:
    """Hit rates of every policy in one scenario, over some seeds; all policies see the same accesses."""
    tasks, drift, noise = scenes(samples)[scene]
    universe = len({index for task in tasks for index in task.indices})
    capacity = universe // 2
    rates: dict[str, list[Any]] = {name: [] for name in POLICIES}
    for seed in range(SEED, SEED + seeds):
        traces = [access_trace(Independent(seed=seed, ahead=a), tasks, seed=seed, drift=drift, noise=noise) for a in (0, 1)]
        assert traces[0].order == traces[1].order
        for name, (policy, ahead) in POLICIES.items():
            rates[name].append(traces[ahead].hit_rates(policy(traces[ahead]), capacity))
    return [
        {
            "samples": samples,
            "scene": scene,
            "policy": name,
            "capacity": capacity,
            **{f"{part}_percent": condensed([getattr(rate, part) for rate in found]) for part in ("cold", "steady", "all")},
        }
        for name, found in rates.items()
    ]


def scenes(samples: int) -> dict[str, tuple[list[Task], float, float]]:
    """By scenario: the jobs, the drift of their speeds, and the noise of the time of a batch."""
    full = range(samples)
    part = int(0.7 * samples)
    starts_and_ends = ((0.0, 2.6), (0.3, 99.0), (0.9, 99.0), (1.6, 4.2))
    return {
        "equal": ([Task(indices=full, epochs=EPOCHS) for _ in range(4)], 0.0, 0.0),
        "jitter": ([Task(indices=full, epochs=EPOCHS, batch=8) for _ in range(4)], 0.2, 0.3),
        "speeds": ([Task(indices=full, epochs=EPOCHS, batch=8, rate=r) for r in (1.0, 0.8, 0.6, 0.4)], 0.1, 0.3),
        "joining": (
            [Task(indices=full, epochs=EPOCHS, starts_s=start * samples, leaves_s=end * samples) for start, end in starts_and_ends],
            0.05,
            0.1,
        ),
        "overlapping": ([Task(indices=range(j * samples // 10, j * samples // 10 + part), epochs=EPOCHS) for j in range(4)], 0.05, 0.1),
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a table for each number of samples: cold and steady, medians."""
    for samples in sorted({row["samples"] for row in result["rows"]}):
        table = Table(title=f"{samples} samples, half of them cached: cold / steady, % (medians)")
        table.add_column("policy")
        for name in ("thesis, cold", *SCENES):
            table.add_column(name, justify="right")
        found = {(row["scene"], row["policy"]): row for row in result["rows"] if row["samples"] == samples}
        for policy in POLICIES:
            cells = [f"{THESIS[policy]:.2f}" if policy in THESIS else "–"]
            for scene in SCENES:
                row = found.get((scene, policy))
                cells.append("–" if row is None else _cell(row))
            table.add_row(policy, *cells)
        console.print(table)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['cold_percent']['median']:.2f} / {row['steady_percent']['median']:.2f}"


if __name__ == "__main__":
    main()
