"""Scripts of jobs that join, take and leave, and what is counted in the tests of samplers."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ephemeron.data.sampling import CollaborativeSampler, Coupled
from ephemeron.data.sampling.baselines import CoorDL, DynaGCS, Independent, Joader

SAMPLERS: dict[str, Callable[[int], CollaborativeSampler]] = {
    "Independent": lambda seed: Independent(seed=seed),
    "Independent ahead": lambda seed: Independent(seed=seed, ahead=1),
    "CoorDL": lambda seed: CoorDL(seed=seed),
    "Joader": lambda seed: Joader(seed=seed),
    "DynaGCS": lambda seed: DynaGCS(seed=seed),
    "Coupled": lambda seed: Coupled(seed=seed, window=6),
    "Coupled fair": lambda seed: Coupled(seed=seed, window=9, free_epochs=0),
    "Coupled free": lambda seed: Coupled(seed=seed, window=6, free_epochs=None),
}

names = st.sampled_from("abcd")
datasets = st.sets(st.integers(0, 40), min_size=1, max_size=30).map(sorted)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), names, datasets, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 3))),
        st.tuples(st.just("take"), names, st.one_of(st.none(), st.integers(1, 50)), st.floats(0, 5)),
        st.tuples(st.just("take"), names, st.none(), st.floats(0, 5)),
        st.tuples(st.just("leave"), names),
    ),
    min_size=5,
    max_size=60,
)


class Script:
    """Runs steps on a sampler, leaving out what is not allowed, and checks each answer."""

    def __init__(self, sampler: CollaborativeSampler) -> None:
        self.sampler = sampler
        self.now_s = 0.0
        self.datasets: dict[str, list[int]] = {}
        self.epochs: dict[str, int | None] = {}
        self.given: dict[str, list[list[int]]] = {}
        self.batches: dict[str, int] = {}

    def ended(self, job: str) -> bool:
        done = sum(map(len, self.given[job])) // len(self.datasets[job])
        return self.epochs[job] is not None and done >= self.epochs[job]

    def run(self, steps: Sequence[tuple[Any, ...]]) -> list[tuple[str, int, list[int]]]:
        out = []
        for step in steps:
            match step:
                case "join", job, indices, batch, epochs if job not in self.datasets:
                    self.sampler.add_job(job, indices, batch=batch, epochs=epochs)
                    self.datasets[job], self.batches[job], self.epochs[job] = indices, batch, epochs
                    self.given[job] = [[]]
                case "take", job, count, pause_s if job in self.datasets and not self.ended(job):
                    self.now_s += pause_s
                    out.append(self.take(job, count))
                case "leave", job if job in self.datasets:
                    self.sampler.remove_job(job)
                    del self.datasets[job], self.given[job]
        return out

    def take(self, job: str, count: int | None) -> tuple[str, int, list[int]]:
        """Exactly what was asked for, each sample once per epoch, all of one epoch: nobody starves."""
        batch = self.sampler.take(job, count, now_s=self.now_s)
        indices, orders = batch.indices.tolist(), self.given[job]
        left = len(self.datasets[job]) - len(orders[-1])
        assert len(indices) == min(count or self.batches[job], left)
        assert (batch.job, batch.epoch) == (job, len(orders) - 1)
        orders[-1] += indices
        assert len(set(orders[-1])) == len(orders[-1])
        assert set(orders[-1]) <= set(self.datasets[job])
        if len(orders[-1]) == len(self.datasets[job]):
            orders.append([])
        return job, batch.epoch, indices


def orders(
    sampler: CollaborativeSampler,
    datasets: Sequence[Sequence[int]],
    *,
    rates: Sequence[float],
    starts_s: Sequence[float],
    epochs: int,
    batch: int = 1,
) -> list[list[tuple[int, ...]]]:
    """The order of every epoch of every job, jobs running at steady rates. All end when the first has done enough."""
    due = [(start, job) for job, start in enumerate(starts_s)]
    heapq.heapify(due)
    found: list[list[list[int]]] = [[[]] for _ in datasets]
    while len(found[0]) <= epochs:
        now_s, job = heapq.heappop(due)
        name = str(job)
        if name not in sampler.jobs:
            sampler.add_job(name, datasets[job], batch=batch)
        taken = sampler.take(name, now_s=now_s).indices.tolist()
        found[job][-1] += taken
        if len(found[job][-1]) == len(datasets[job]):
            found[job].append([])
        heapq.heappush(due, (now_s + len(taken) / rates[job], job))
    return [[tuple(order) for order in of_job[:-1]] for of_job in found]


def chi_square_z(counts: Counter[Any], cells: int) -> float:
    """χ² of equally likely cells as a normal deviate (Wilson and Hilferty 1931): above 4.5 with probability 3e-6."""
    expected = sum(counts.values()) / cells
    chi2 = sum((n - expected) ** 2 / expected for n in counts.values()) + (cells - len(counts)) * expected
    spread = 2 / (9 * (cells - 1))
    return float(((chi2 / (cells - 1)) ** (1 / 3) - (1 - spread)) / spread**0.5)
