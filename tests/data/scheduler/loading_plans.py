"""What a simulated loading service is to do, and what goes wrong meanwhile: drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

DEATHS = 4
"""Loaders that die or freeze of themselves; so many retries keep samples that are not to blame."""


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What a job wants; from the jobs' generator."""

    samples: int
    seed: int
    epochs: int
    remainder: str
    shapes: tuple[tuple[int, int], ...]
    """(world size, batch): the first, and one for each resumption."""
    random_flow: bool
    """Samples differ by epoch, so nothing is shared."""


@dataclass(kw_only=True)
class Luck:
    """What goes wrong, and how much of it; from the other generator."""

    lost: float
    repeated: float
    delay_s: float
    deaths: int
    most_loaders: int
    restarts: int
    poison: frozenset[int]
    flaky: frozenset[int]
    giant: int | None
    limit_nbytes: int


def draw_jobs(rng: random.Random) -> list[JobPlan]:
    """One or two jobs: primes, fewer samples than a batch, none at all."""
    return [
        JobPlan(
            samples=rng.choice([0, 1, 2, 3, 5, 7, 11, 13, 17, 23, rng.randint(1, 30)]),
            seed=rng.randrange(2**32),
            epochs=rng.randint(1, 2),
            remainder=rng.choice(["keep", "keep", "even", "drop", "pad"]),
            shapes=tuple((rng.randint(1, 3), rng.randint(1, 6)) for _ in range(rng.randint(1, 3))),
            random_flow=rng.random() < 0.3,
        )
        for _ in range(rng.randint(1, 2))
    ]


def draw_luck(rng: random.Random, *, bad: bool = True) -> Luck:
    """How bad it gets."""
    return Luck(
        lost=rng.choice([0, 0.05, 0.2]) * bad,
        repeated=rng.choice([0, 0.05, 0.2]) * bad,
        delay_s=rng.choice([0.01, 0.1, 0.5]),
        deaths=rng.randint(0, DEATHS) * bad,
        most_loaders=rng.randint(1, 5),
        restarts=rng.randint(0, 2) * bad,
        poison=frozenset(rng.sample(range(30), rng.choice([0, 0, 1, 2]))) if bad else frozenset(),
        flaky=frozenset(rng.sample(range(30), 3)) if bad else frozenset(),
        giant=rng.choice([None, rng.randrange(30)]),
        limit_nbytes=rng.choice([1, 60, 300, 2000]),
    )
