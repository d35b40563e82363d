"""Each sample exactly once per epoch per job, whatever dies: thousands of random schedules in virtual time.

`EPHEMERON_SCHEDULES=100000` runs so many; the default keeps the lane short. A failure names the seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from loading_plans import DEATHS, JobPlan, draw_jobs
from loading_world import World

from ephemeron.data.scheduler import Delivery

SCHEDULES = int(os.environ.get("EPHEMERON_SCHEDULES", "2000"))
PARTS = 10


def run(seed: int, **options) -> World:
    world = World(draw_jobs(random.Random(f"jobs {seed}")), seed, **options)
    try:
        world.run()
        examine(world)
    except Exception as e:
        e.add_note(f"schedule {seed}")
        raise
    return world


def examine(world: World) -> None:
    """The accounts at the end."""
    for job in world.jobs:
        plan = job.plan
        every = {(epoch, position): 1 for epoch in range(plan.epochs) for position in range(plan.samples)}
        assert all(count == 1 for count in job.used.values()), "nothing twice"
        if plan.remainder == "drop":
            assert job.used.items() <= every.items()
        else:
            assert job.used == every, "nothing lost"
        assert job.skipped <= world.luck.poison, "only what kills is left out"
    for key, killed in world.killed_by.items():
        assert key[-1] in world.luck.poison
        epochs_and_restarts = 2 * len(world.jobs) * 2 * (1 + world.luck.restarts)
        assert killed <= (DEATHS + 4) * epochs_and_restarts, "a poisoned sample is found out"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_each_sample_once_whatever_happens(part):
    for seed in range(part, SCHEDULES, PARTS):
        run(seed)


def test_invariants_hold_after_every_single_event():
    for seed in range(1_000_000, 1_000_030):
        run(seed, check=1.0)


FACTS = [
    "lost message",
    "repeated message",
    "killed",
    "frozen",
    "lease ran out",
    "loader given up came back",
    "failed",
    "late result accepted",
    "result dropped",
    "poisoned",
    "samples skipped",
    "router restarted",
    "resumed",
    "resumed twice",
    "limit passed",
    "giant held",
]


def test_the_schedules_contain_what_they_are_for():
    """A lane in which nothing dies proves nothing. Counted is what happened while a job was running."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        world = run(seed)
        seen.update(fact for fact, times in world.facts.items() if times)
        sizes = [(job.plan.samples, job.plan.shapes[0][1]) for job in world.jobs]
        seen["no samples"] += any(samples == 0 for samples, _ in sizes)
        seen["fewer than a batch"] += any(0 < samples < batch for samples, batch in sizes)
    rare = [fact for fact in [*FACTS, "no samples", "fewer than a batch"] if seen[fact] < 5]
    assert not rare, seen


@pytest.mark.parametrize("seed", range(12))
def test_the_stream_does_not_depend_on_loaders_or_luck(seed):
    plan = JobPlan(
        samples=random.Random(seed).choice([7, 23, 30]),
        seed=seed,
        epochs=2,
        remainder="keep",
        shapes=((1 + seed % 3, 1 + seed % 4),),
        random_flow=seed % 2 == 0,
    )
    streams = set()
    for luck in range(6):
        world = World([plan], 1000 * seed + luck, bad=luck > 0)
        streams.add(tuple(sorted(world.run().jobs[0].streams.items())))
    assert len(streams) == 1
    world_size, batch = plan.shapes[0]
    delivery = Delivery(samples=plan.samples, batch=batch, world_size=world_size)
    for (generation, epoch, rank, sequence), samples in next(iter(streams)):
        positions = delivery.batch(rank=rank, epoch=epoch, sequence=sequence).positions
        assert samples == tuple(world.jobs[0].sample(epoch, position) for position in positions)
        assert generation == 0
