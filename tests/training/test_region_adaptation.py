"""Rounds that follow the link: the same weights whichever functions die, since replacements read the plans that were decided; and other rounds when the link changes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from training_runs import make_job

from ephemeron.communication.channels import wrappers
from ephemeron.events import FaultFired, RegionExchanged
from ephemeron.functions import simulated
from ephemeron.functions.world import Simulation
from ephemeron.regions.driver.region_events import members_of
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Fault, RunRegion

pytestmark = pytest.mark.usefixtures("home")

PAIR = (RunRegion(name="near", workers=2, batch_size=24, share=2), RunRegion(name="far", workers=1, batch_size=12, memory_mb=1024, share=1))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take a second each."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def trained(*, faults: Any = (), mb_s: float = 0.05, epochs: int = 3, sync: str = "auto:limit=20,momentum=0.5") -> Result:
    compute: Any = {"a": 50.0, "b": 4.0, "m": 0.0}
    world = Simulation(compute=compute, region_latency_s=0.05, region_bandwidth_mb_s=mb_s)
    job = make_job(epochs=epochs, simulation=world)
    values: dict[str, Any] = {
        "platform": "simulated",
        "regions": {"region": PAIR, "exchange_every": 4, "sync": sync},
        "checkpoint_every": 4,
    }
    return train(job, configure(job, **values), faults=faults).raise_if_failed()


def plans(result: Result, rank: int = 0) -> list[str]:
    """Plans in the order in which a region has learned them."""
    events = [e for e in events_of(result.folder) if isinstance(e, RegionExchanged) and e.rank == rank]
    return list(dict.fromkeys(event.plan for event in events))


def hashes(result: Result) -> set[str | None]:
    return {summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))}


@pytest.mark.slow
def test_regions_agree_on_rounds_that_follow_the_link() -> None:
    result = trained()
    assert len(hashes(result)) == 1
    assert plans(result)[0] == "H=4 none fragments=1 delay=0"
    assert len(plans(result)) > 1
    assert plans(result, 0) == plans(result, 2)
    assert result.summary.metrics["accuracy"] > 0.3


PHASES = ("compute", "upload", "aggregate", "download", "wait")


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_weights_are_the_same_whichever_functions_are_killed(phase: str) -> None:
    """On a link so fast that the choice does not depend on how long replacements take."""
    faults = [
        Fault(kind="kill", rank=rank, iteration=12 + 5 * rank, phase=phase, attempt=attempt) for attempt in (0, 1) for rank in (0, 1, 2)
    ]
    undisturbed, disturbed = (trained(mb_s=50.0, faults=given) for given in ((), faults))
    assert sum(isinstance(event, FaultFired) for event in events_of(disturbed.folder)) >= 2
    assert "H=8 none fragments=4 delay=1" in plans(undisturbed)
    assert disturbed.summary.weights_sha256 == undisturbed.summary.weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [3, 8, 13])
def test_regions_agree_though_the_one_that_plans_is_killed(iteration: int) -> None:
    faults = [Fault(kind="kill", rank=0, iteration=iteration, phase="wait")]
    disturbed = trained(faults=faults)
    assert any(isinstance(event, FaultFired) for event in events_of(disturbed.folder))
    assert len(hashes(disturbed)) == 1
    assert set(plans(disturbed, 2)) == set(plans(disturbed, 0))


class ChangingLink(wrappers.LinkModel):
    """Becomes slower at a time."""

    slow_from_s, slow = 25.0, 1e-4

    def reserve(self, now: float, nbytes: int) -> float:
        changed = asyncio.get_running_loop().time() >= self.slow_from_s
        self.free_at = max(now, self.free_at) + nbytes / (self.rate * (self.slow if changed else 1.0))
        return self.free_at


class ThrottledByChange(wrappers.Throttled):
    """The network of a function whose bandwidth changes, if it is that between regions."""

    def __init__(self, inner: Any, *, latency_s: float, bandwidth_mb_s: float) -> None:
        super().__init__(inner, latency_s=latency_s, bandwidth_mb_s=bandwidth_mb_s)
        if bandwidth_mb_s == 2.0:
            self.up, self.down = ChangingLink(bandwidth_mb_s), ChangingLink(bandwidth_mb_s)


@pytest.mark.slow
def test_rounds_change_when_the_link_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "Throttled", ThrottledByChange)
    result = trained(mb_s=2.0, epochs=6)
    assert len(hashes(result)) == 1
    learned = [each for each in plans(result) if each]
    slow = [each for each in learned if " none " not in each]
    assert " none " in learned[1], learned
    assert slow, learned
