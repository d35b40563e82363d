"""Overlap and uniformity of samplers for several jobs: `python -m benchmarks.sampling`.

**Overlap** (DPFlow section 5.2.2, table 5-2, figure 5-3): the hit rate of a cache for 5 % of the samples, which hits only samples
that other jobs used lately. Four jobs with the same 1,000 samples and batches of 16, one epoch each from an empty cache. The table
names four scenarios (jobs start at the same time or not, train equally long or not) and no figures. Here jobs that do not start
together start a quarter of an epoch after one another, and jobs that are not equally fast have speeds 1, 0.8, 0.6 and 0.4. The
thesis fixes ALSD as the policy; `NextUse` is measured beside it, and Belady's optimum for the same draws. A second row of
each gives epochs two to four of jobs that continue.

**Uniformity** (section 5.2.3): 10,000 epochs of 1,000 samples in a row. For each sample, χ² of how often it was at each
position, 999 degrees of freedom, adjusted after Benjamini and Hochberg over all samples; below 0.05 it is significant. The
same for the order of 4,950 pairs of samples. In addition the mean rank correlation between an epoch and the next, which detects
orders that repeat themselves. Two jobs, of which the first is examined: in step; half an epoch apart and at speeds 1 and
0.6 (`speed2`); half an epoch apart at equal speeds (`same2`); in step over datasets that have half in common (`overlapping`).
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import SEED, condensed, environment, write
from benchmarks.sharing import Task, access_trace, merged
from ephemeron.data.cache import NextUse
from ephemeron.data.cache.baselines import ALSD, Belady
from ephemeron.data.sampling import CollaborativeSampler, Coupled
from ephemeron.data.sampling.baselines import CoorDL, DynaGCS, Independent, Joader

SAMPLES, CAPACITY, BATCH, EPOCHS = 1000, 50, 16, 4
SCENES = ("same1", "same2", "speed1", "speed2")
RANDOM_SCENES = ("same1", "same2", "speed2", "overlapping")
THESIS = {"same1": {"DynaGCS": 75.0, "Independent": 9.0}, "speed2": {"DynaGCS": 15.0, "Joader": 9.0, "CoorDL": 3.0}}
IDENTITY = ("measure", "scene", "sampler", "epochs")
RANDOM_EPOCHS, RANDOM_BATCH, PAIRED = 10_000, 32, 100
SAMPLERS: dict[str, Callable[[int], CollaborativeSampler]] = {
    "Independent": lambda seed: Independent(seed=seed),
    "CoorDL": lambda seed: CoorDL(seed=seed),
    "Joader": lambda seed: Joader(seed=seed),
    "DynaGCS": lambda seed: DynaGCS(seed=seed),
    "Coupled": lambda seed: Coupled(seed=seed, window=CAPACITY),
    "Coupled, always free": lambda seed: Coupled(seed=seed, window=CAPACITY, free_epochs=None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--measures", nargs="+", choices=("overlap", "uniformity"), default=["overlap", "uniformity"])
    parser.add_argument("--samplers", nargs="+", choices=list(SAMPLERS), default=list(SAMPLERS), metavar="NAME")
    parser.add_argument("--scenes", nargs="+", choices=sorted({*SCENES, *RANDOM_SCENES}), metavar="SCENE")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, for overlap")
    parser.add_argument("--epochs", type=int, default=RANDOM_EPOCHS, help="for uniformity")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="keep the other rows of this earlier result")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.samplers:
        if "overlap" in arguments.measures:
            for scene in arguments.scenes or SCENES:
                rows += overlap(name, scene, arguments.seeds)
        if "uniformity" in arguments.measures:
            for scene in arguments.scenes or RANDOM_SCENES:
                rows.append(uniformity(name, scene, arguments.epochs))
                print(name, scene, rows[-1]["jobs"][0], file=sys.stderr)
    about = {"benchmark": "sampling", "samples": SAMPLES, "capacity": CAPACITY, "batch": BATCH, "thesis_overlap_percent": THESIS}
    result = merged(arguments.merge, {**environment(), **about, "rows": rows}, IDENTITY)
    if arguments.json:
        write(result)
    else:
        show(result, Console(width=130))


# -- overlap --------------------------------------------------------------------------------------------------------


def overlap(sampler: str, scene: str, seeds: int) -> list[dict[str, Any]]:
    """Hit rates with 5 % cached: of one epoch each, and of epochs two to four of jobs that continue."""
    rates = (1.0, 1.0, 1.0, 1.0) if scene.startswith("same") else (1.0, 0.8, 0.6, 0.4)
    starts = (0.0, 0.0, 0.0, 0.0) if scene.endswith("1") else (0.0, 0.25, 0.5, 0.75)
    policies = {"ALSD": lambda s: ALSD(), "NextUse": lambda s: NextUse(), "Belady": lambda s: Belady(s.order)}
    found: dict[tuple[int, str], list[float]] = {}
    waited = False
    for epochs in (1, EPOCHS):
        tasks = [
            Task(indices=range(SAMPLES), rate=rate, starts_s=start * SAMPLES, epochs=epochs, batch=BATCH)
            for rate, start in zip(rates, starts, strict=True)
        ]
        for seed in range(SEED, SEED + seeds):
            trace = access_trace(SAMPLERS[sampler](seed), tasks, seed=seed)
            waited |= trace.waited
            for policy, make in policies.items():
                hits = trace.hit_rates(make(trace), CAPACITY)
                found.setdefault((epochs, policy), []).append(hits.all if epochs == 1 else hits.steady)
    return [
        {
            "measure": "overlap",
            "scene": scene,
            "sampler": sampler,
            "epochs": "first" if epochs == 1 else f"2 to {EPOCHS}",
            "starved": waited,
            **{f"{policy.lower()}_percent": condensed(found[epochs, policy]) for policy in policies},
        }
        for epochs in (1, EPOCHS)
    ]


# -- uniformity -----------------------------------------------------------------------------------------------------


def uniformity(sampler: str, scene: str, epochs: int) -> dict[str, Any]:
    """χ² of positions and of pairs, and the correlation of an epoch with the one before, for each of two jobs."""
    datasets = [range(SAMPLES), range(SAMPLES // 2, SAMPLES // 2 + SAMPLES)] if scene == "overlapping" else [range(SAMPLES)] * 2
    rates = (1.0, 0.6) if scene == "speed2" else (1.0, 1.0)
    starts = (0.0, 0.5) if scene.endswith("2") else (0.0, 0.0)
    tallies = [Tally(dataset) for dataset in datasets]
    for job, order in orders(SAMPLERS[sampler](SEED), datasets, rates, starts, epochs):
        tallies[job].add(order)
    return {"measure": "uniformity", "scene": scene, "sampler": sampler, "epochs": epochs, "jobs": [tally.result() for tally in tallies]}


def orders(
    sampler: CollaborativeSampler, datasets: Sequence[Sequence[int]], rates: Sequence[float], starts: Sequence[float], epochs: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Every epoch of every job as it ends, until the first job has completed `epochs`."""
    due = [(start * SAMPLES, takes, job) for job, start in enumerate(starts) for takes in (False, True)]
    heapq.heapify(due)
    parts: list[list[np.ndarray]] = [[] for _ in datasets]
    ended = 0
    while ended < epochs:
        now_s, takes, job = heapq.heappop(due)
        name = str(job)
        if not takes:
            sampler.add_job(name, datasets[job], batch=RANDOM_BATCH)
            continue
        batch = sampler.take(name, now_s=now_s)
        parts[job].append(batch.indices)
        if sum(map(len, parts[job])) == SAMPLES:
            yield job, np.concatenate(parts[job])
            parts[job].clear()
            ended += job == 0
        heapq.heappush(due, (now_s + len(batch.indices) / rates[job], True, job))


class Tally:
    """Counts over the epochs of one job."""

    def __init__(self, dataset: Sequence[int]) -> None:
        self.first = dataset[0]
        self.at = np.zeros((SAMPLES, SAMPLES), dtype=np.int32)  # sample, position
        self.pairs = np.zeros((PAIRED, PAIRED), dtype=np.int32)
        self.paired = np.arange(0, SAMPLES, SAMPLES // PAIRED)
        self.before: np.ndarray | None = None
        self.correlations: list[float] = []
        self.epochs = 0

    def add(self, order: np.ndarray) -> None:
        """Counts one epoch."""
        order = order - self.first
        positions = np.empty(SAMPLES, dtype=np.int64)
        positions[order] = np.arange(SAMPLES)
        assert len(set(order.tolist())) == SAMPLES, "each sample once"
        self.at[order, np.arange(SAMPLES)] += 1
        few = positions[self.paired]
        self.pairs += few[:, None] < few[None, :]
        if self.before is not None:
            middle = (SAMPLES - 1) / 2
            scale = SAMPLES * (SAMPLES**2 - 1) / 12
            self.correlations.append(float((self.before - middle) @ (positions - middle) / scale))
        self.before = positions
        self.epochs += 1

    def result(self) -> dict[str, Any]:
        """Numbers that are significant after Benjamini and Hochberg, and the correlation with its z score."""
        from scipy import stats

        expected = self.epochs / SAMPLES
        chi2 = ((self.at - expected) ** 2).sum(axis=1) / expected
        positions = stats.false_discovery_control(stats.chi2.sf(chi2, SAMPLES - 1))
        upper = np.triu_indices(PAIRED, 1)
        z = (self.pairs[upper] - self.epochs / 2) / math.sqrt(self.epochs / 4)
        pairs = stats.false_discovery_control(2 * stats.norm.sf(np.abs(z)))
        mean = float(np.mean(self.correlations))
        return {
            "epochs": self.epochs,
            "significant_samples": int((positions < 0.05).sum()),
            "least_adjusted_p_of_samples": float(f"{positions.min():.3g}"),
            "mean_chi_square": round(float(chi2.mean()), 2),
            "significant_pairs": int((pairs < 0.05).sum()),
            "least_adjusted_p_of_pairs": float(f"{pairs.min():.3g}"),
            "rank_correlation_with_next_epoch": round(mean, 5),
            "its_z": round(mean * math.sqrt(len(self.correlations) * (SAMPLES - 1)), 2),
        }


# -- tables ---------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    for measure, show_one in (("overlap", show_overlap), ("uniformity", show_uniformity)):
        rows = [row for row in result["rows"] if row["measure"] == measure]
        if rows:
            show_one(rows, console)


def show_overlap(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints two lines for each sampler: first epochs, and later ones."""
    table = Table(title="Overlap, %: ALSD / NextUse / Belady (medians); first epochs, then epochs two to four")
    table.add_column("sampler")
    for scene in SCENES:
        table.add_column(scene, justify="right")
    found = {(row["scene"], row["sampler"], row["epochs"]): row for row in rows}
    for sampler in SAMPLERS:
        for epochs in ("first", f"2 to {EPOCHS}"):
            table.add_row(sampler, *(_overlap_cell(found.get((scene, sampler, epochs))) for scene in SCENES))
    console.print(table)


def show_uniformity(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints significant samples and pairs of the first job, and the correlation of an epoch with the next."""
    table = Table(title="Significant samples, significant pairs, rank correlation with the next epoch (first job)")
    table.add_column("sampler")
    for scene in RANDOM_SCENES:
        table.add_column(scene, justify="right")
    found = {(row["scene"], row["sampler"]): row for row in rows}
    for sampler in SAMPLERS:
        table.add_row(sampler, *(_random_cell(found.get((scene, sampler))) for scene in RANDOM_SCENES))
    console.print(table)


def _overlap_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return " / ".join(f"{row[f'{policy}_percent']['median']:.1f}" for policy in ("alsd", "nextuse", "belady"))


def _random_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    job = row["jobs"][0]
    return f"{job['significant_samples']}, {job['significant_pairs']}, {job['rank_correlation_with_next_epoch']:+.4f}"


if __name__ == "__main__":
    main()
