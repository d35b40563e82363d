"""A region that cannot be started at first: the others train without it, and it joins while they go on. A region that leaves."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_daemon_death import processes_of
from training_runs import WORLD, combined, make_job

from ephemeron.errors import JobError, PlatformError, UserError
from ephemeron.events import Event, Note, Progress, RegionAdded, RegionExchanged, RegionLeft, Started
from ephemeron.regions.driver import added_regions
from ephemeron.regions.driver.region_events import members_of
from ephemeron.regions.entrance import Admissions
from ephemeron.regions.joining import join
from ephemeron.runs import run_platform
from ephemeron.runs.folders import RunFolder, events_of, runs_folder
from ephemeron.runs.region_activity import region_activities
from ephemeron.training.driver import configure, lifecycle, train
from ephemeron.training.driver.launching import launch
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import Result, open_run
from ephemeron.training.job import Fault, RunRegion
from gates import Gate

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.slow]
NEAR, MID, FAR = 0, 1, 2
"""First ranks of the regions."""
GROUPS = (
    RunRegion(name="near", workers=1, batch_size=12),
    RunRegion(name="mid", workers=1, batch_size=12),
    RunRegion(name="far", workers=2, batch_size=6),
)
POLICIES = (("sma", "none"), ("diloco:fragments=3,delay=2", "int4"), ("auto", "int8"), ("asgd-ga:staleness=2", "topk:0.2"), ("ama", "none"))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of regions that cannot be started, as often as they are named."""
    names: list[str] = []
    simulate = lifecycle.simulate

    async def start(prepared: Any, *args: Any, **options: Any) -> Any:
        name = prepared.spec.run_id.rpartition("-")[2]
        if name in names:
            names.remove(name)
            raise PlatformError("no answer")
        return await simulate(prepared, *args, **options)

    monkeypatch.setattr(lifecycle, "simulate", start)
    monkeypatch.setattr(added_regions, "RETRY_S", (0.5, 1.0))
    return names


def trained(*, faults: Sequence[Fault] = (), **overrides: Any) -> Result:
    compute = WORLD.compute
    assert compute is not None
    job = make_job(epochs=3, simulation=dataclasses.replace(WORLD, compute=dataclasses.replace(compute, a=200.0)))
    values = {"platform": "simulated", "regions": {"exchange_every": 4, "region": GROUPS}, "checkpoint_every": 4}
    return train(job, configure(job, **combined(values, overrides)), faults=faults)


def computed(events: list[Event], rank: int) -> dict[int, float]:
    """Time at which a rank had computed each iteration."""
    return {e.iteration: e.t for e in events if isinstance(e, Progress) and e.rank == rank}


def all_agree(result: Result) -> bool:
    hashes = [summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))]
    return len(hashes) == 3 and set(hashes) == {result.summary.weights_sha256}


@pytest.mark.parametrize(("sync", "compression"), POLICIES)
def test_a_region_that_is_started_late_joins(sync: str, compression: str, late: list[str]) -> None:
    late += ["far", "far"]
    result = trained(regions={"sync": sync, "compression": compression})
    assert result.finished
    assert all_agree(result)
    events = list(events_of(result.folder))
    notes = [event.text for event in events if isinstance(event, Note)]
    assert sum("cannot be started" in text for text in notes) == 2
    assert sum("joins with round" in text for text in notes) == 1
    own, others = computed(events, FAR), computed(events, NEAR)
    assert 0 < min(own) < max(own) == max(others)
    assert set(own) == set(range(min(own), max(own) + 1)) == set(computed(events, FAR + 1))
    exchanges = {e.iteration for e in events if isinstance(e, RegionExchanged) and e.rank == FAR}
    assert max(exchanges) == max(own) + 1


def test_no_region_waits_for_one_that_joins(late: list[str]) -> None:
    alone = computed(list(events_of(trained(regions={"region": GROUPS[:2], "sync": "sma"}).folder)), NEAR)
    late.append("far")
    events = list(events_of(trained(regions={"sync": "sma"}).folder))
    near, first = computed(events, NEAR), min(computed(events, FAR))

    def longest(times: dict[int, float], last: int) -> float:
        return max(times[i] - times[i - 1] for i in range(5, last))

    assert longest(near, first + 4) < 1.1 * longest(alone, first + 4)


@pytest.mark.parametrize("sync", ["sma", "auto", "asgd-ga:staleness=2"])
@pytest.mark.parametrize("leaver", ["near", "far"])
def test_a_region_leaves_and_the_others_go_on(sync: str, leaver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(self: Admissions) -> None:
        self.leaves = self._name == leaver and self._lifecycle.now() > 15.0

    monkeypatch.setattr(Admissions, "_look", look)
    result = trained(regions={"sync": sync})
    assert result.finished
    events = list(events_of(result.folder))
    [left] = [event for event in events if isinstance(event, RegionLeft)]
    assert left.region == leaver
    gone, stays = (NEAR, MID) if leaver == "near" else (FAR, NEAR)
    assert max(computed(events, gone)) < max(computed(events, stays)) - 20
    hashes = [summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))]
    assert hashes.count(result.summary.weights_sha256) == 2
    assert result.summary.weights_sha256 is not None


class UntilItTrains:
    """Keeps the regions of a run from ending before another one trains: its model waits until that one has started, then it goes on slowly.

    Args:
        file: gate of the model of all regions.
        rank: of the other region, `far`.
        kill: at which event of that rank its processes are killed, once; None: never.
    """

    def __init__(self, file: Path, rank: int, *, kill: type[Event] | None = Started) -> None:
        self._gate, self._rank, self._kill = Gate(file), rank, kill
        self.model = self._gate.model(20)
        self.killed: list[int] = []

    def __call__(self, event: Event) -> None:
        if not isinstance(event, (Started, Progress)) or event.rank != self._rank:
            return
        if self.killed or type(event) is not self._kill:
            self._gate.open(0.3 if isinstance(event, Started) else 0.0)
            return
        [run] = runs_folder().iterdir()
        self.killed += processes_of(run / "groups" / f"{run.name}-far")
        for pid in self.killed:
            os.kill(pid, signal.SIGKILL)


def test_a_region_on_this_machine_joins_over_tcp_though_it_is_killed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused, gate = run_platform.start, ["far"], UntilItTrains(tmp_path / "gate", 1)

    async def started(folder: RunFolder, *args: Any, **options: Any) -> Any:
        if folder.run_id.rpartition("-")[2] in refused:
            refused.clear()
            raise PlatformError("no answer")
        return await start(folder, *args, **options)

    monkeypatch.setattr(run_platform, "start", started)
    monkeypatch.setattr(added_regions, "RETRY_S", (0.2, 1.0))
    groups = (RunRegion(name="near", workers=1, batch_size=12, listen="127.0.0.1:0"), RunRegion(name="far", workers=1, batch_size=12))
    job = make_job(epochs=4, model=gate.model)
    values = {"platform": "local", "regions": {"exchange_every": 4, "region": groups}, "checkpoint_every": 8}
    configuration = configure(job, **combined(values, {"regions": {"sync": "diloco", "communicator": "tcp"}}))
    result = train(job, configuration, on_event=gate)
    assert result.finished
    assert gate.killed
    events = list(events_of(result.folder))
    own = computed(events, 1)
    assert 0 < min(own) < max(own)
    assert len([event for event in events if isinstance(event, Started) and event.rank == 1]) == 2
    hashes = [summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))]
    assert hashes == [result.summary.weights_sha256] * 2


def test_a_region_of_direct_links_joins_though_one_of_its_functions_is_killed_after_that(late: list[str]) -> None:
    late.append("far")
    result = trained(regions={"sync": "sma"}, channel="direct", faults=[Fault(kind="kill", rank=FAR + 1, iteration=30, phase="compute")])
    assert result.finished
    assert all_agree(result)
    events = list(events_of(result.folder))
    assert 0 < min(computed(events, FAR)) < 30
    assert [e.attempt for e in events if isinstance(e, Started) and e.rank == FAR + 1] == [0, 1]


def test_a_region_that_its_cloud_refuses_at_first_joins_once_it_is_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, admitted, gate = [0], launch.admitted, UntilItTrains(tmp_path / "gate", 1, kill=None)

    def refuse(*args: Any, **options: Any) -> Any:
        asked[0] += 1
        if asked[0] in (2, 3):  # of the second region: before the launch, and the first time after it
            raise JobError("function 'far' is not deployed", remedy="deploy it")
        return admitted(*args, **options)

    monkeypatch.setattr(launch, "admitted", refuse)
    monkeypatch.setattr(launch, "may_be_refused", lambda platform: True)
    monkeypatch.setattr(launch, "_provisional", lambda c, cloud: admitted(make_job(), c, cloud))
    monkeypatch.setattr(added_regions, "RETRY_S", (0.2, 0.5))
    groups = (RunRegion(name="near", workers=1, batch_size=12), RunRegion(name="far", workers=1, batch_size=12))
    job = make_job(epochs=4, model=gate.model)
    values = {"platform": "local", "regions": {"exchange_every": 4, "region": groups}, "checkpoint_every": 8}
    result = train(job, configure(job, **values), on_event=gate)
    assert result.finished
    assert asked[0] == 4
    events = list(events_of(result.folder))
    notes = [event.text for event in events if isinstance(event, Note) and "far cannot be started" in event.text]
    assert notes[0].startswith("region far cannot be started: function 'far' is not deployed; deploy it; the others")
    own = computed(events, 1)
    assert 0 < min(own) < max(own)
    hashes = [summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))]
    assert hashes == [result.summary.weights_sha256] * 2
    asked[0] = 0
    with pytest.raises(JobError, match="is not deployed"):
        train(job, configure(job, **combined(values, {"regions": {"least_regions": 2}})))


def test_a_region_that_the_run_does_not_know_joins_it_though_its_function_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "regions.toml"
    table = '[[region]]\nname = "{}"\nplatform = "local"\nworkers = 1\n'
    file.write_text("".join(map(table.format, ("far", "near", "other"))))
    said: list[str] = []
    asking: list[threading.Thread] = []
    gate = UntilItTrains(tmp_path / "gate", 2, kill=Progress)

    def ask() -> None:
        for run, region in (("no-such", "far"), ("last", "nowhere"), ("last", "near"), ("last", "far"), ("last", "far")):
            try:
                said.append(str(join(run, region, file)))
            except UserError as e:
                said.append(str(e))

    def on_event(event: Event) -> None:
        if isinstance(event, Progress) and not asking:
            asking.append(threading.Thread(target=ask))
            asking[0].start()
        gate(event)

    groups = (RunRegion(name="near", workers=1, batch_size=12), RunRegion(name="mid", workers=1, batch_size=12))
    job = make_job(epochs=4, model=gate.model)
    values = {"platform": "local", "regions": {"exchange_every": 4, "region": groups}, "checkpoint_every": 8}
    result = train(job, configure(job, **combined(values, {"regions": {"sync": "diloco"}})), on_event=on_event)
    asking[0].join()
    assert result.finished
    no_run, nowhere, near, far, again = said
    assert "'no-such'" in no_run
    assert "regions are far, near, other" in nowhere
    assert "has a region 'near' already" in near
    assert far == str((result.folder.run_id, 1))
    assert "has a region 'far' already" in again
    assert gate.killed
    events = list(events_of(result.folder))
    [added] = [event.group for event in events if isinstance(event, RegionAdded)]
    assert (added.name, added.first_rank, added.workers) == ("far", 2, 1)
    own = computed(events, 2)
    assert 0 < min(own) < max(own)
    assert len([event for event in events if isinstance(event, Started) and event.rank == 2]) == 2
    assert all_agree(result)
    assert [region.name for region in result.summary.regions] == ["near", "mid", "far"]
    assert [region.started.name for region in region_activities(events)] == ["near", "mid", "far"]
    assert str(open_run("last")[2].configuration.regions.region[2].name) == "far"
    with pytest.raises(UserError, match="is not running"):
        join("last", "other", file)
