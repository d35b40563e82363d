"""Regions of unequal speed, in virtual time: what they keep of the throughput that each has alone, and what the slowest costs the others."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import pytest
from training_runs import make_job

from ephemeron.events import Progress
from ephemeron.regions.scheduling.optimizer import Offer, RegionOffers, choice_of
from ephemeron.regions.scheduling.replanning import shares
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.result import Result
from ephemeron.training.job import RunRegion, Simulation

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.slow]

POWERS = (1.0, 2.0, 4.0)
WORLD = Simulation(compute={"a": 177.0, "b": 0.0, "m": 0.0}, cold_start_s=0.1)  # type: ignore[arg-type]
"""A step of 8 samples takes 0.8 s with a power of 1."""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take a second each."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def samples_per_s(result: Result) -> float:
    """Samples a second, from the first step of any region to the last one."""
    work = [e for e in events_of(result.folder) if isinstance(e, Progress)]
    begun = min(start for e in work for _, start, _ in e.spans)
    return sum(e.samples for e in work) / (max(e.t for e in work) - begun)


def alone(power: float) -> float:
    compute = WORLD.compute
    assert compute is not None
    world = dataclasses.replace(WORLD, compute=dataclasses.replace(compute, a=compute.a / power))
    job = make_job(epochs=1, simulation=world)
    return samples_per_s(train(job, configure(job, platform="simulated", workers=1, memory_mb=1769, batch_size=8)))


def together(parts: Sequence[float], sync: str) -> Result:
    groups = tuple(
        RunRegion(name=f"region{i}", workers=1, memory_mb=1769, share=part, power=power)
        for i, (part, power) in enumerate(zip(parts, POWERS, strict=True))
    )
    job = make_job(epochs=2, simulation=WORLD, evaluate_every="2 epochs")
    c = configure(job, regions={"region": groups, "sync": sync, "exchange_every": 5}, platform="simulated", batch_size=8)
    result = train(job, c)
    assert result.finished
    return result


@pytest.mark.parametrize("sync", ["sma", "asgd-ga"])
def test_three_regions_at_speed_1_2_4_keep_nine_tenths_of_their_throughput(sync: str) -> None:
    rates = [alone(power) for power in POWERS]
    measured = [
        RegionOffers(name=f"r{i}", offers=(Offer(kind="own", usd_per_hour=1.0, power=1.0),), cores={"own": 1}, work=100 / rate)
        for i, rate in enumerate(rates)
    ]
    parts = shares(measured, [choice_of(region, (1,)) for region in measured], samples=[100, 100, 100])
    assert parts == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.1)
    kept = together(parts, sync)
    assert samples_per_s(kept) >= 0.9 * sum(rates)
    assert max(region.waiting_share for region in kept.summary.regions) < 0.15


def test_with_equal_parts_the_slowest_region_sets_the_pace() -> None:
    equal = together((1.0, 1.0, 1.0), "sma")
    slow, middle, fast = equal.summary.regions
    assert slow.waiting_share < 0.1
    assert middle.waiting_share == pytest.approx(1 / 2, abs=0.1)
    assert fast.waiting_share == pytest.approx(3 / 4, abs=0.1)
