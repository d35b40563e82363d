"""Functions of a region that has done its share end until the others have done theirs."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from training_runs import WORLD, make_job

from ephemeron.events import Ended, Invoked, Progress
from ephemeron.regions import follower
from ephemeron.regions.driver.region_events import members_of
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Fault, RunRegion

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.slow]
WORKERS = 4
GROUPS = (RunRegion(name="fast", workers=WORKERS, batch_size=3, power=6.0), RunRegion(name="slow", workers=1, batch_size=12))
SYNC = "asgd-ga:staleness=1000"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def trained(*, faults: Any = ()) -> Result:
    compute = WORLD.compute
    assert compute is not None
    job = make_job(epochs=1, simulation=dataclasses.replace(WORLD, compute=dataclasses.replace(compute, a=400.0)))
    values = {"platform": "simulated", "regions": {"exchange_every": 10, "region": GROUPS, "sync": SYNC}, "checkpoint_every": 7}
    return train(job, configure(job, **values), faults=faults)


def hashes(result: Result) -> set[str | None]:
    return {summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))}


def test_functions_that_only_wait_end_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    result = trained()
    assert result.finished
    assert hashes(result) == {result.summary.weights_sha256}
    events = list(events_of(result.folder))
    ended = [event for event in events if isinstance(event, Ended) and event.outcome == "released"]
    assert sorted(event.rank for event in ended) == [2, 3], "the leader stays, and the one that would replace it"
    back = [event for event in events if isinstance(event, Invoked) and event.attempt == 1]
    assert sorted(event.rank for event in back) == [2, 3]
    done = {e.rank: e.t for e in events if isinstance(e, Progress)}
    assert max(e.t for e in ended) < min(e.t for e in back)
    assert max(done[rank] for rank in (2, 3)) <= max(e.t for e in ended) < done[WORKERS]
    group, slow = result.summary.regions
    assert group.released_s == pytest.approx(sum(b.t for b in back) - sum(e.t for e in ended), abs=0.01)
    assert slow.released_s == 0
    monkeypatch.setattr(follower, "LEAST_PATIENCE_S", 1e9)
    kept = trained()
    assert kept.summary.weights_sha256 == result.summary.weights_sha256
    saved = kept.summary.regions[0].gb_seconds - group.gb_seconds
    assert saved > 0.5 * group.released_s * 1769 / 1024, "less the second start"


def test_functions_come_back_though_the_leader_is_replaced() -> None:
    iterations = trained().summary.regions[0].iterations
    killed = trained(faults=[Fault(kind="kill", rank=0, iteration=iterations - 1, phase="wait")])
    assert killed.finished
    assert hashes(killed) == {killed.summary.weights_sha256}
