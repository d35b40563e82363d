"""Promise 9: every contribution is used exactly once, under asynchronous protocols too, whatever dies."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from training_runs import WORLD, synthetic

from ephemeron.events import PHASES, FaultFired, Invoked, Progress
from random_schedules import seeds


def count(seed: int, *, sync: str, kills: int = 0, pattern: str = "k-reduce", **how):
    """A random run that counts; returns it, and how many contributions were not used exactly once by somebody."""
    rng = random.Random(seed)
    workers = rng.randint(2, 6)
    faults = [f"kill:rank={rng.randrange(workers)},iteration={rng.randrange(12)},phase={rng.choice(PHASES)}" for _ in range(kills)]
    faults += [f"delay:rank={r},factor={rng.uniform(1.5, 8):.2f}" for r in range(workers) if rng.random() < 0.4]
    world = dataclasses.replace(WORLD, straggler_sigma=rng.choice([0.0, 0.3, 0.8]))
    run = synthetic(
        counting=True,
        sync=sync,
        pattern=pattern,
        workers=workers,
        aggregators=rng.randint(1, workers),
        world=world,
        samples=workers * 16 * 6,
        epochs=2,
        checkpoint_every=rng.randint(1, 5),
        faults=faults,
        **how,
    )
    assert run.ending.status == "finished", run.ending.causes
    wrong = int(np.count_nonzero(run.ending.arrays["counts"] != 1))
    off = run.ending.final.metrics["loss"]
    return run, wrong or off


SEEDS = seeds(range(12), 2)


@pytest.mark.parametrize(("sync", "pattern"), [("asp", "k-reduce"), ("hsp", "k-reduce"), ("ssp:2", "k-reduce"), ("ssp:2", "pipelined")])
def test_stragglers(sync, pattern):
    wrong = {seed: off for seed in SEEDS if (off := count(seed, sync=sync, pattern=pattern)[1])}
    assert not wrong


@pytest.mark.parametrize(("sync", "pattern"), [("asp", "k-reduce"), ("hsp", "k-reduce"), ("ssp:2", "k-reduce"), ("ssp:2", "pipelined")])
def test_kills(sync, pattern):
    fired, wrong = 0, {}
    for seed in SEEDS:
        run, off = count(seed, sync=sync, pattern=pattern, kills=2)
        fired += len(run.of(FaultFired))
        if off:
            wrong[seed] = off
    assert not wrong
    assert fired > 2 * len(SEEDS) // 3


@pytest.mark.parametrize("sync", ["asp", "hsp", "ssp:0", "ssp:2"])
@pytest.mark.parametrize("how", [{"function_timeout_s": 4.0}, {"faults": ["kill:rank=0,iteration=7,phase=compute"]}], ids=str)
def test_one_function_alone(sync, how):
    """Every protocol of one rank is BSP, past lifetimes and deaths as well."""
    world = dataclasses.replace(WORLD, cold_start_s=0.05)
    alone = {"workers": 1, "aggregators": 1, "samples": 16 * 20, "checkpoint_every": 3, "world": world}
    run = synthetic(counting=True, sync=sync, **alone, **how)
    assert (run.ending.arrays["counts"] == 1).all()
    assert len(run.of(Invoked)) > 1
    assert run.left == {"run/spec", "run/result"}
    assert synthetic(sync=sync, **alone, **how).sha == synthetic(**alone).sha


def test_one_function_alone_applies_what_it_has_computed():
    run = synthetic(sync="asp", workers=1, aggregators=1)
    assert all(e.version == e.iteration for e in run.of(Progress))
