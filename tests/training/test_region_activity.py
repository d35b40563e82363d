"""What a region does, from its events: step rate, waiting share, staleness and bytes; on the page of a run."""

from __future__ import annotations

import dataclasses

import pytest

from ephemeron.cli.progress import region_line
from ephemeron.events import Event, GroupStarted, Progress, RegionExchanged, RunStarted, Traffic
from ephemeron.prices import load_prices
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.region_activity import region_activities
from ephemeron.training.report import RunSummary, render_html

PRICES = load_prices("objects", platform="simulated")


def events_of_two_regions(exchanges: int = 4) -> list[Event]:
    """Near computes five iterations of a second and waits one second; far computes three of two seconds and does not wait."""
    groups = [
        GroupStarted(
            name=name,
            platform="simulated",
            first_rank=rank,
            workers=1,
            memory_mb=1769,
            iterations=30,
            samples=100,
            servers=0,
            prices=dataclasses.asdict(PRICES),
            traffic=Traffic(),
        )
        for rank, name in enumerate(("near", "far"))
    ]
    found: list[Event] = [
        RunStarted(
            t=0.0,
            run_id="r",
            job="j",
            workers=2,
            aggregators=1,
            memory_mb=1769,
            iterations=30,
            epochs=3,
            samples=200,
            configuration={},
            platform="simulated",
            wall_time=0.0,
            groups=groups,
        )
    ]
    for rank, (steps, step_s, waited) in enumerate(((5, 1.0, 1.0), (3, 2.0, 0.0))):
        t, iteration = 10.0, 0
        for _ in range(exchanges):
            for _ in range(steps):
                found.append(
                    Progress(
                        t=t + step_s,
                        rank=rank,
                        attempt=0,
                        iteration=iteration,
                        epoch=0,
                        samples=8,
                        loss=1.0,
                        version=iteration,
                        spans=[("compute", t, t + step_s)],
                    )
                )
                t, iteration = t + step_s, iteration + 1
            t += waited
            found.append(
                RegionExchanged(
                    t=t, rank=rank, attempt=0, iteration=iteration, bytes_sent=1000, bytes_received=400, seconds=waited, staleness=rank
                )
            )
    return sorted(found, key=lambda event: event.t)


def test_activity_of_two_regions() -> None:
    near, far = region_activities(events_of_two_regions())
    assert near.waiting_share == pytest.approx(1 / 6)
    assert far.waiting_share == 0.0
    assert near.steps_per_s == pytest.approx(19 / 22), "exchanges among its iterations count"
    assert far.steps_per_s == pytest.approx(0.5)
    assert (near.wan_bytes_sent, near.wan_bytes_received, near.exchanges, far.staleness) == (4000, 1600, 4, 1)
    assert [point.iterations for point in near.points] == [5, 10, 15, 20]


def test_iterations_that_are_repeated_count_once() -> None:
    events = events_of_two_regions()
    again = [e for e in events if isinstance(e, Progress) and e.rank == 0][-3:]
    near, _ = region_activities([*events, *again])
    assert near.steps_per_s == pytest.approx(19 / 22)


def test_a_reader_that_skips_events_sees_the_same_rate() -> None:
    events = [e for e in events_of_two_regions() if not (isinstance(e, Progress) and e.rank == 1 and e.iteration % 3)]
    _, far = region_activities(events)
    assert far.steps_per_s == pytest.approx(0.5)


def test_the_bill_and_the_progress_of_train_read_the_same() -> None:
    meter = CostMeter(PRICES)
    for event in events_of_two_regions():
        meter.feed(event)
    summary = meter.groups[0].region(34.0)
    assert (summary.waiting_share, summary.wan_bytes_sent) == (0.1667, 4000)
    line = region_line(meter.groups[1], 34.0)
    assert line.startswith("far: 0.5 steps/s, waits 0.0%, 1 round ahead, 4.0 kB sent, 1.6 kB received, $")


def test_the_report_has_a_table_and_pictures_of_regions() -> None:
    events = events_of_two_regions()
    page = render_html(RunSummary.from_events(events, PRICES), {"regions": [{"name": "near", "cost_usd": 0.25}]})
    assert "Waiting for other regions" in page
    assert "16.7%" in page
    assert "$0.25" in page
    alone = [e for e in events if not isinstance(e, RegionExchanged)]
    assert "Waiting for other regions" not in render_html(RunSummary.from_events(alone, PRICES), None)
