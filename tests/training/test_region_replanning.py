"""New plans for regions that train: from measured times to fewer or more functions, while the rounds stay what they are."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence

import pytest
from click.testing import CliRunner
from training_runs import WORLD, configuration, make_job

from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.events import GenerationStarted, Progress, RegionExchanged, RegionReplanned, RegionResized, Traffic
from ephemeron.functions.world import RegionSlowdown
from ephemeron.prices import load_prices
from ephemeron.regions.driver import replanning
from ephemeron.regions.driver.region_events import members_of
from ephemeron.regions.online import OnlinePlan, RegionMeasurement, RunningRegion, online_plan
from ephemeron.regions.region_files import groups_of, parse_regions
from ephemeron.regions.scheduling.replanning import MeasuredIterations
from ephemeron.runs.folders import events_of
from ephemeron.runs.region_activity import region_activities
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.records import read_result
from ephemeron.training.job import RunRegion
from ephemeron.training.worker.spec import RunSpec

pytestmark = pytest.mark.usefixtures("home")
TIMES = {"slow": 1.0, "fast": 0.5}
"""Seconds of an iteration."""


def region(name: str, *times: tuple[int, float], most: int, batch: int = 24, iterations: int = 100) -> RunningRegion:
    """A region with measured seconds of an iteration, by number of functions; the last one is that of now."""
    measured = tuple(MeasuredIterations(power=w, samples=batch, iteration_s=s) for w, s in times)
    return RunningRegion(
        name=name, workers=times[-1][0], most=most, global_batch=batch, iterations=iterations, usd_per_hour=0.1, measured=measured
    )


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


def test_a_region_that_has_become_slower_grows_as_far_as_its_devices_go_to_keep_the_pace_of_the_beginning() -> None:
    def slowed(seconds: float, *, most: int) -> list[int]:
        begun = {"begun_with": 2, "first_iteration_s": 1.0}
        steady = dataclasses.replace(region("steady", (2, 1.0), most=6), **begun)
        return wanted(steady, dataclasses.replace(region("slow", (2, seconds), most=most), **begun))

    assert slowed(1.0, most=6) == [2, 2], "more functions are for the pace of the beginning, not for a better one"
    assert slowed(1.9, most=6) == [2, 4]
    assert slowed(2.9, most=6) == [2, 6]
    assert slowed(9.0, most=6) == [1, 6], "where the pace cannot be kept, the other one gives back what it would wait with"
    assert slowed(2.9, most=5) == [2, 4], "5 do not divide a batch of 24"
    assert slowed(2.9, most=2) == [1, 2]


def test_what_functions_are_worth_is_measured_where_their_number_changes_and_scaled_to_the_speed_of_now() -> None:
    job, c = make_job(), configuration(workers=2, batch_size=6)
    spec = RunSpec(
        run_id="run",
        model=job.model,
        loss=job.loss,
        optimizer=job.optimizer,
        configuration=c,
        epochs=9,
        seed=0,
        dtype="float32",
        samples=240,
        prices=load_prices("objects"),
    )
    measurement, t, iteration = RegionMeasurement("near", spec, most=4), 0.0, 0

    def pass_by(count: int, seconds: float) -> None:
        nonlocal t, iteration
        for _ in range(count):
            exchange_s = 5.0 if (iteration + 1) % 4 == 0 else 0.0
            t += seconds + exchange_s
            if exchange_s:
                measurement.feed(
                    RegionExchanged(
                        t=t, rank=0, attempt=0, iteration=iteration + 1, bytes_sent=0, bytes_received=0, seconds=5.0, staleness=0
                    )
                )
            measurement.feed(
                Progress(t=t, rank=0, attempt=0, iteration=iteration, epoch=0, version=0, samples=12, loss=1.0, spans=[], traffic=Traffic())
            )
            iteration += 1

    pass_by(8, 1.0)
    assert measurement.region().measured == ()
    pass_by(30, 1.0)
    assert [m.iteration_s for m in measurement.region().measured] == pytest.approx([1.0])
    measurement.feed(
        GenerationStarted(
            t=t,
            generation=1,
            from_iteration=iteration,
            from_epoch=1,
            workers=4,
            memory_mb=1769,
            aggregators=4,
            batch_size=3,
            nonaggregator_batch_size=3,
            iterations=99,
        )
    )
    pass_by(3, 9.0)
    pass_by(30, 0.6)
    pass_by(30, 1.8)
    found = measurement.region()
    assert (found.workers, found.most, found.begun_with) == (4, 4, 2)
    assert found.first_iteration_s == pytest.approx(1.0)
    assert [(m.power, m.iteration_s) for m in found.measured] == [(2.0, pytest.approx(3.0)), (4.0, pytest.approx(1.8))]


@pytest.mark.slow
def test_train_plans_anew_by_itself_when_a_region_slows_down_and_when_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    slow = RegionSlowdown(region="grows", start_s=25.0, seconds=60.0, factor=2.6)
    assert WORLD.compute is not None
    compute = dataclasses.replace(WORLD.compute, a=100.0, b=0.0)
    job = make_job(epochs=7, simulation=dataclasses.replace(WORLD, compute=compute, region_slowdowns=(slow,)))
    groups = (
        RunRegion(name="steady", workers=2, batch_size=12, memory_mb=1769),
        RunRegion(name="grows", workers=2, most_workers=6, batch_size=12, memory_mb=1769),
    )
    c = configure(job, platform="simulated", regions={"region": groups, "exchange_every": 5, "sync": "sma"})
    result = train(job, dataclasses.replace(c, regions=dataclasses.replace(c.regions, replan_every_s=2.0)))
    assert result.finished
    events = list(events_of(result.folder))
    asked = [event for event in events if isinstance(event, RegionReplanned)]
    had = [event.workers for event in events if isinstance(event, RegionResized)]
    assert had == [event.wanted for event in asked], "a region is asked once, and has what it was asked for"
    assert max(had) > 2
    assert had[-1] == 2, "and again as many as at the start"
    assert {event.region for event in asked} == {"grows"}
    last = [e for e in events if isinstance(e, Progress)][-1]
    assert last.iteration == 7 * 30 - 1, "an iteration has as many samples as before"
    assert region_activities(events)[1].workers == 2
    assert [region.iterations for region in result.summary.regions] == [210, 210], "of functions that are there"
    hashes = {summary.weights_sha256 for place in members_of(result.folder) if (summary := read_result(place))}
    assert hashes == {result.summary.weights_sha256}
    assert "2 → " in (result.folder.path / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replan_every_s = 0.2\n", "replan_every_s = 0.2 is too often; give 1 or more, or 0 for none"),
        ("replan_every = 9\n", "replan_every_s"),
    ],
)
def test_wrong_values_are_refused(text: str, said: str) -> None:
    with pytest.raises(JobError, match=re.escape(said)):
        parse_regions(text + '[[region]]\nname = "a"\nplatform = "local"\nworkers = 1\n')


def test_a_region_may_grow_to_what_its_devices_have_cores_for() -> None:
    text = '[[region]]\nname = "a"\nplatform = "local"\nworkers = 2\ndevices = [{kind = "skylake", cores = 8}]\n'
    groups = groups_of(parse_regions(text + text.replace('"a"', '"b"').replace("workers = 2\n", "")))
    assert [(g.workers, g.most_workers) for g in groups] == [(2, 8), (8, 8)]


def test_there_is_no_plan_before_all_regions_have_been_measured() -> None:
    assert (
        online_plan(
            [
                region("slow", (1, 1.0), most=1),
                region("fast", (4, 1.0), most=8).__class__(
                    name="fast", workers=4, most=8, global_batch=24, iterations=100, usd_per_hour=0.1, measured=()
                ),
            ]
        )
        is None
    )


@pytest.mark.parametrize("command", [["replan", "no-such"], ["leave", "no-such", "far"]])
def test_an_unknown_run_is_refused(command: list[str]) -> None:
    result = CliRunner().invoke(main, ["regions", *command])
    assert result.exit_code == 2
    assert "no-such" in result.output


@pytest.mark.slow
def test_functions_are_given_back_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plans: list[OnlinePlan | None] = []

    def planned(regions: Sequence[RunningRegion]) -> OnlinePlan | None:
        """The plan for these times in place of those that were measured."""
        if not all(each.measured for each in regions) or len(regions) < 2 or plans:
            return None
        plans.append(online_plan([region(r.name, (r.workers, TIMES[r.name]), most=r.most, batch=12) for r in regions]))
        return plans[0]

    monkeypatch.setattr(replanning, "online_plan", planned)
    groups = (RunRegion(name="slow", workers=1, batch_size=12), RunRegion(name="fast", workers=4, batch_size=3))
    job = make_job(epochs=3)
    c = configure(job, platform="simulated", regions={"region": groups, "exchange_every": 5, "sync": "diloco"}, checkpoint_every=4)
    result = train(job, dataclasses.replace(c, regions=dataclasses.replace(c.regions, replan_every_s=1.0)))
    assert result.finished
    [plan] = plans
    assert plan is not None
    slow, fast = plan.regions
    assert (slow.wanted, fast.workers) == (1, 4)
    assert fast.wanted == 2
    places = members_of(result.folder)
    generations = [event for event in events_of(places[1]) if isinstance(event, GenerationStarted)]
    assert [event.workers for event in generations] == [fast.wanted]
    of_run = [e for e in events_of(result.folder) if isinstance(e, RegionReplanned | RegionResized)]
    assert [(e.kind, e.region) for e in of_run] == [("region_replanned", "fast"), ("region_resized", "fast")]
    hashes = {summary.weights_sha256 for place in places if (summary := read_result(place))}
    assert hashes == {result.summary.weights_sha256}
