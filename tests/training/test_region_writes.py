"""Training does not wait until an exchange is stored: what had not been stored when rank 0 died is decided again, alike."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from typing import Any

import pytest
from training_runs import WORLD, make_job

from ephemeron.events import FaultFired, Loaded, Progress, RegionExchanged
from ephemeron.regions.driver.region_events import members_of
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Fault, RunRegion

pytestmark = pytest.mark.usefixtures("home")
GROUPS = tuple(RunRegion(name=name, workers=1, batch_size=24) for name in ("near", "far"))
FAR = 1
"""Rank of the region whose function dies."""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def trained(sync: str, compression: str, *, store_s: float, faults: Any = (), checkpoint_every: int = 4) -> Result:
    """A run of two regions.

    Args:
        store_s: latency of a region's store; an iteration takes 0.7 s.
    """
    world = dataclasses.replace(WORLD, latency_s=store_s, region_latency_s=0.03)
    job = make_job(epochs=2, simulation=world)
    values = {
        "platform": "simulated",
        "regions": {"region": GROUPS, "exchange_every": 5, "sync": sync, "compression": compression},
        "checkpoint_every": checkpoint_every,
    }
    return train(job, configure(job, **values), faults=faults).raise_if_failed()


def exchanges(result: Result) -> list[RegionExchanged]:
    return [e for e in events_of(result.folder) if isinstance(e, RegionExchanged) and e.rank == FAR]


def seconds(result: Result) -> float:
    """From the first step of the region to its last."""
    steps = [e.t for e in events_of(result.folder) if isinstance(e, Progress) and e.rank == FAR]
    return max(steps) - min(steps)


DELAYED = ("diloco:fragments=2,delay=3", "int4")


@pytest.mark.slow
def test_a_slow_store_does_not_slow_the_training() -> None:
    """What the last exchange stores is left out, and checkpoints, before which the store is asked for newer attempts."""
    quick, slow = (trained(*DELAYED, store_s=store_s, checkpoint_every=1000) for store_s in (0.001, 0.5))
    assert quick.summary.weights_sha256 == slow.summary.weights_sha256
    before_last = [exchanges(result)[-2].t - exchanges(result)[0].t for result in (quick, slow)]
    assert before_last[1] < 1.02 * before_last[0]


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "compression"), [DELAYED, ("diloco", "topk2:0.1"), ("sma", "none"), ("auto:limit=20", "int8")])
def test_weights_are_the_same_though_decisions_are_lost_that_were_not_stored(sync: str, compression: str) -> None:
    undisturbed = trained(sync, compression, store_s=2.0)
    iterations = [event.iteration for event in exchanges(undisturbed)]
    for first in (0, 1):
        faults = [
            Fault(kind="kill", rank=FAR, iteration=iteration + 1 + first % 2, phase="compute", attempt=attempt)
            for attempt, iteration in enumerate(iterations[1 + first : -1 : 2])
        ]
        disturbed = trained(sync, compression, store_s=2.0, faults=faults)
        events = events_of(disturbed.folder)
        assert sum(isinstance(event, FaultFired) for event in events) >= 2
        again = Counter(event.iteration for event in exchanges(disturbed))
        assert max(again.values()) > 1, "an exchange was decided twice"
        if not sync.startswith("auto"):  # plans follow measured time
            assert disturbed.summary.weights_sha256 == undisturbed.summary.weights_sha256
        hashes = {summary.weights_sha256 for place in members_of(disturbed.folder) if (summary := read_result(place))}
        assert hashes == {disturbed.summary.weights_sha256}
        begun = [event.iteration for event in events if isinstance(event, Loaded) and event.rank == FAR]
        assert all(iteration <= after + 2 * 5 for iteration, after in zip(iterations[1 + first : -1 : 2], begun[1:], strict=False))
