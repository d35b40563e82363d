"""New plans for regions that train: from measured times to fewer or more functions, while the rounds stay what they are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import pytest
from click.testing import CliRunner
from training_runs import make_job

from ephemeron.cli.main import main
from ephemeron.events import Event, Progress
from ephemeron.geo import online
from ephemeron.geo.online import OnlinePlan, RunningRegion, online_plan, replan
from ephemeron.geo.scheduling.replanning import MeasuredIterations
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.group_runs import members_of
from ephemeron.training.driver.records import read_result
from ephemeron.training.driver.result import events_of
from ephemeron.training.job import RunGroup

pytestmark = pytest.mark.usefixtures("home")
TIMES = {"slow": 1.0, "fast": 0.5}
"""Seconds of an iteration."""


def region(name: str, *times: tuple[int, float], most: int, batch: int = 24, iterations: int = 100) -> RunningRegion:
    """A region with measured seconds of an iteration, by number of functions; the last one is that of now."""
    measured = tuple(MeasuredIterations(power=w, samples=batch, iteration_s=s) for w, s in times)
    return RunningRegion(
        name=name, workers=times[-1][0], most=most, global_batch=batch, iterations=iterations, usd_per_hour=0.1,
        measured=measured,
    )  # fmt: skip


def wanted(*regions: RunningRegion) -> list[int]:
    plan = online_plan(regions)
    assert plan is not None
    return [each.wanted for each in plan.regions]


def test_a_region_that_would_wait_gives_functions_back_and_gets_them_again() -> None:
    slow = region("slow", (1, 1.0), most=1)
    assert wanted(slow, region("fast", (8, 0.125), most=8)) == [1, 1]
    assert wanted(slow, region("fast", (8, 0.5), most=8)) == [1, 4]
    # With a part that more functions do not shorten: 0.2 + 0.8 / W.
    assert wanted(slow, region("fast", (8, 0.3), (4, 0.4), most=8)) == [1, 1]
    faster = region("slow", (1, 0.2), most=1)
    assert wanted(faster, region("fast", (1, 1.0), most=8)) == [1, 6], "5 do not divide a batch of 24"
    assert wanted(region("slow", (1, 0.97), most=1), region("fast", (4, 1.0), most=8)) == [1, 4], "not worth it"


def test_more_data_is_more_work() -> None:
    grown = region("grown", (2, 0.1), most=4, iterations=400)
    assert wanted(grown, region("other", (4, 0.1), most=4, iterations=100)) == [4, 2]


def test_there_is_no_plan_before_all_regions_have_been_measured() -> None:
    assert online_plan([region("slow", (1, 1.0), most=1), region("fast", (4, 1.0), most=8).__class__(
        name="fast", workers=4, most=8, global_batch=24, iterations=100, usd_per_hour=0.1, measured=())]) is None  # fmt: skip


@pytest.mark.parametrize("command", [["replan", "no-such"], ["leave", "no-such", "far"]])
def test_an_unknown_run_is_refused(command: list[str]) -> None:
    result = CliRunner().invoke(main, ["geo", *command])
    assert result.exit_code == 2
    assert "no-such" in result.output


@pytest.mark.slow
def test_functions_are_given_back_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    asked: list[threading.Thread] = []
    plans = []

    def planned(regions: Sequence[RunningRegion]) -> OnlinePlan | None:
        """The plan for these times in place of those that were measured, which depend on what else this machine does."""
        assert all(each.measured[-1].iteration_s > 0 for each in regions), "all have been measured"
        return online_plan([region(r.name, (r.workers, TIMES[r.name]), most=r.most, batch=12) for r in regions])

    def ask() -> None:
        plans.append(replan("last", apply=True))

    monkeypatch.setattr(online, "online_plan", planned)

    def on_event(event: Event) -> None:
        if isinstance(event, Progress) and event.rank == 0 and event.iteration >= 12 and not asked:
            asked.append(threading.Thread(target=ask))
            asked[0].start()

    groups = (
        RunGroup(name="slow", workers=1, batch_size=12),
        RunGroup(name="fast", workers=4, batch_size=3),
    )
    job = make_job(epochs=3)
    configuration = configure(
        job, platform="local", groups=groups, exchange_every=5, checkpoint_every=4, region_sync="diloco"
    )
    result = train(job, configuration, on_event=on_event)
    asked[0].join()
    assert result.finished
    [plan] = plans
    assert plan is not None
    slow, fast = plan.regions
    assert (slow.wanted, fast.workers) == (1, 4)
    assert fast.wanted == 2
    places = members_of(result.folder)
    generations = [event for event in events_of(places[1]) if event.kind == "generation_started"]
    assert [event.workers for event in generations] == [fast.wanted]  # type: ignore[attr-defined]
    hashes = {summary.weights_sha256 for place in places if (summary := read_result(place))}
    assert hashes == {result.summary.weights_sha256}
