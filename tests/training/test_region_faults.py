"""Regions in virtual time: a region that is cut off, and many of them."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from training_runs import WORLD, combined, make_job

from ephemeron.events import Progress, RegionExchanged
from ephemeron.functions.world import RegionBlackout
from ephemeron.regions.driver.region_events import members_of
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import Result
from ephemeron.training.job import RunRegion

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.slow]
THREE = (
    RunRegion(name="near", workers=2, batch_size=24),
    RunRegion(name="mid", workers=1, batch_size=24),
    RunRegion(name="far", workers=1, batch_size=24),
)
SLOW_WORLD = dataclasses.replace(WORLD, compute=dataclasses.replace(WORLD.compute, a=200.0)) if WORLD.compute else WORLD


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def trained(*, dark: tuple[RegionBlackout, ...] = (), groups: Any = THREE, epochs: int = 2, **overrides: Any) -> Result:
    job = make_job(epochs=epochs, simulation=dataclasses.replace(SLOW_WORLD, region_blackouts=dark))
    values = {"platform": "simulated", "regions": {"region": groups, "exchange_every": 3}, "checkpoint_every": 4}
    return train(job, configure(job, **combined(values, overrides)))


def times(result: Result, rank: int) -> dict[int, float]:
    """Time at which each iteration of a rank was done."""
    found = events_of(result.folder)
    return {e.iteration: e.t for e in found if isinstance(e, Progress) and e.rank == rank}


def exchanges(result: Result, rank: int) -> dict[int, float]:
    found = events_of(result.folder)
    return {e.iteration: e.t for e in found if isinstance(e, RegionExchanged) and e.rank == rank}


def test_a_blackout_of_30_s_costs_the_other_regions_nothing() -> None:
    undisturbed = trained(regions={"sync": "ama:staleness=1000"})
    begin = exchanges(undisturbed, 3)[6]
    disturbed = trained(regions={"sync": "ama:staleness=1000"}, dark=(RegionBlackout(region="far", start_s=begin, seconds=30),))
    for rank in (0, 2):
        before, after = times(undisturbed, rank), times(disturbed, rank)
        last = max(before) - 1  # the exchange at the end waits for all regions
        # There are fewer updates to read meanwhile, and as many more of them at once afterwards.
        assert max(after[i] - before[i] for i in before if i <= last) < 0.1
    assert disturbed.finished


def test_a_blackout_changes_no_weights_of_synchronous_policies_and_ends_when_the_region_is_reached() -> None:
    undisturbed = trained(regions={"sync": "diloco"})
    begin = exchanges(undisturbed, 3)[6]
    dark = RegionBlackout(region="far", start_s=begin, seconds=30)
    disturbed = trained(regions={"sync": "diloco"}, dark=(dark,))
    assert disturbed.summary.weights_sha256 == undisturbed.summary.weights_sha256
    first = min(t for t in exchanges(disturbed, 3).values() if t >= begin + 30)
    assert first <= begin + 30 + 10
    assert disturbed.summary.seconds <= undisturbed.summary.seconds + 30 + 10


def test_fifty_regions_train_one_model() -> None:
    groups = tuple(RunRegion(name=f"region-{i}", workers=1, batch_size=8) for i in range(50))
    result = trained(groups=groups, epochs=1, regions={"sync": "diloco", "exchange_every": 2})
    assert result.finished
    assert {s.weights_sha256 for place in members_of(result.folder) if (s := read_result(place))} == {result.summary.weights_sha256}
