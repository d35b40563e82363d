"""The numbers of a report: they must be those of the events, however often an event was repeated."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import report_runs as runs

from ephemeron.events import Ended, Evaluated, Event, Invoked, Progress, RunEnded, Started, Traffic, from_json, to_json
from ephemeron.prices import load_prices
from ephemeron.training.report import RunSummary
from ephemeron.training.report.charts import bytes_chart, learning_chart
from ephemeron.training.report.headline import Headline
from ephemeron.training.report.lanes import MAX_RECTS, Column, cells, lanes
from ephemeron.training.report.metrics import DRAWN_POINTS, thin
from ephemeron.training.report.tables import bill_table, invocation_table


def tell(events: list[Event]) -> RunSummary:
    return RunSummary.from_events(events, runs.PRICES)


def progress(rank: int, iteration: int, loss: float, *, attempt: int = 0, samples: int = 16, t: float = 1.0, **more: object) -> Progress:
    return Progress(t=t, rank=rank, attempt=attempt, iteration=iteration, epoch=0, samples=samples, loss=loss, version=0, **more)


@pytest.fixture(scope="module")
def long_story() -> RunSummary:
    return tell(runs.long_run())


def test_loss_is_weighted_by_samples() -> None:
    story = tell([progress(0, 0, 1.0, samples=10), progress(1, 0, 4.0, samples=30)])
    assert story.learning.loss == ((0.0, 3.25),)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_highest_attempt_counts_whenever_it_came(order: tuple[int, int]) -> None:
    story = tell([progress(0, 5, 10.0 + a, attempt=a) for a in order])
    assert story.learning.loss == ((5.0, 11.0),)


def test_loss_that_is_no_number_is_counted_and_not_drawn() -> None:
    story = tell([progress(0, 0, 1.0), progress(0, 1, math.nan), progress(0, 2, math.inf)])
    assert story.learning.loss == ((0.0, 1.0),)
    assert (story.learning.not_finite, story.learning.iterations, story.learning.last_loss) == (2, 3, 1.0)


def test_the_line_has_a_gap_where_the_loss_is_no_number() -> None:
    losses = [3.0, 2.0, math.nan, math.inf, 1.0, 0.5]
    story = tell([progress(0, i, loss) for i, loss in enumerate(losses)])
    path = re.search(r'<path d="([^"]*)" class="line blue"', learning_chart(story))
    assert path is not None
    assert re.sub(r"[-0-9. ]+", "", path[1]) == "MLML", "two lines of two points each"


def test_thinned_lines_keep_their_gaps() -> None:
    losses = [math.nan if i % 1000 == 999 else 1.0 + i % 7 for i in range(6000)]
    told = tell([progress(0, i, loss) for i, loss in enumerate(losses)]).learning
    assert sum(math.isnan(y) for _, y in told.loss) == 5
    assert sum(math.isnan(y) for _, y in told.smooth) == 5
    assert len(told.loss) <= DRAWN_POINTS + 10
    assert told.not_finite == 6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_test_loss_that_is_no_number_is_a_gap_too(value: float) -> None:
    def evaluated(epoch: int, loss: float, correct: int | None) -> Evaluated:
        return Evaluated(
            t=epoch,
            rank=0,
            attempt=0,
            epoch=epoch,
            iteration=epoch,
            samples=1,
            sums={"loss": (loss, 1), "accuracy": None if correct is None else (correct, 1)},
        )

    story = tell([evaluated(1, 1.0, 1), evaluated(2, value, None), evaluated(3, 0.5, 0)])
    assert [e.loss for e in story.learning.evaluations] == [1.0, None, 0.5]
    assert [e.accuracy for e in story.learning.evaluations] == [1.0, None, 0.0]
    assert "nan" not in learning_chart(story).lower()


def test_events_with_numbers_that_json_lacks_are_json_all_the_same() -> None:
    line = to_json(progress(0, 3, math.nan))
    assert '"loss":null' in line
    read = from_json(line)
    assert isinstance(read, Progress)
    assert math.isnan(read.loss)


def test_evaluation_sums_ranks_and_drops_repeats() -> None:
    def evaluated(rank: int, attempt: int, correct: int) -> Evaluated:
        return Evaluated(
            t=1, rank=rank, attempt=attempt, epoch=1, iteration=9, samples=10, sums={"loss": (5.0, 10), "accuracy": (correct, 10)}
        )

    (point,) = tell([evaluated(0, 0, 5), evaluated(1, 1, 9), evaluated(1, 0, 0)]).learning.evaluations
    assert (point.accuracy, point.loss, point.samples, point.ranks) == (14 / 20, 0.5, 20, 2)


@pytest.mark.parametrize("make", [runs.clean, runs.relayed, runs.stopped, runs.failed])
def test_cost_is_the_sum_of_the_bills(make: object) -> None:
    events = make()  # type: ignore[operator]
    spent = tell(events).spending
    assert spent.total_usd == pytest.approx(runs.bills(events), rel=1e-12)
    assert spent.series["total_usd"][-1] == pytest.approx(spent.total_usd, rel=1e-9)
    assert list(spent.series["total_usd"]) == sorted(spent.series["total_usd"])
    assert not spent.estimated


def test_killed_function_keeps_the_traffic_it_last_reported() -> None:
    events = runs.replaced()
    story = tell(events)
    killed = next(r for r in story.invocations if (r.rank, r.attempt) == (2, 0))
    last = max((e.traffic for e in events if isinstance(e, Progress) and (e.rank, e.attempt) == (2, 0)), key=lambda t: t.puts)
    assert killed.traffic == last
    assert killed.status == "lost"
    assert story.spending.total_usd > runs.bills(events)


def test_bytes_over_direct_links_are_drawn_listed_and_billed() -> None:
    sent = Traffic(puts=10_000, direct_bytes_sent=3_000_000, direct_bytes_received=2_000_000)
    prices = dataclasses.replace(load_prices("objects"), direct_byte_usd=1e-9)
    told = RunSummary.from_events([*runs.replaced(), progress(1, 99, 1.0, t=3.0, traffic=sent)], prices)
    assert told.spending.points("direct_bytes_sent")[-1][1] == 3_000_000
    assert told.spending.direct_usd == pytest.approx(3e-3)
    assert "sent over direct links" in bytes_chart(told)
    assert "3.0 MB sent, 2.0 MB received" in bill_table(told, Headline.of(told, None))
    assert "direct bytes" in invocation_table(told)
    other = tell(runs.replaced())
    assert "direct" not in invocation_table(other) + bill_table(other, Headline.of(other, None)) + bytes_chart(other)


def test_compute_accrues_evenly_to_the_bill() -> None:
    events: list[Event] = [
        Invoked(t=0, rank=0, attempt=0, invocation="a"),
        Started(t=2, rank=0, attempt=0, invocation="a", cold=True),
        progress(0, 0, 1.0, t=4),
        Ended(t=6, rank=0, attempt=0, invocation="a", status="ok", gb_seconds=8.0),
    ]
    spent = tell(events).spending
    compute = dict(zip(spent.times, spent.series["compute_usd"], strict=True))
    price = runs.PRICES.gb_second_usd
    assert compute == pytest.approx({0: 0, 2: 0, 4: 4 * price, 6: 8 * price})


def test_open_invocation_is_reckoned_from_its_quota() -> None:
    story = tell(runs.running())
    assert story.status == "running"
    assert story.spending.estimated
    row = story.invocations[0]
    assert row.status == "running"
    assert row.gb_seconds == pytest.approx(704 / 1024 * (story.seconds - row.start))


def test_invocation_without_end_stops_at_its_last_sign_of_life() -> None:
    events = [e for e in runs.replaced() if not (isinstance(e, Ended) and e.status == "lost")]
    row = next(r for r in tell(events).invocations if (r.rank, r.attempt) == (2, 0))
    assert row.status == "unknown"
    assert row.end < 2.5


def test_platform_that_starts_a_call_twice() -> None:
    """The second function of one call steps aside; the counters are those of the first."""

    def life(name: str, a: float, b: float, outcome: str, puts: int) -> list[Event]:
        return [
            Started(t=a, rank=0, attempt=0, invocation=name, cold=True),
            Ended(t=b, rank=0, attempt=0, invocation=name, status="ok", outcome=outcome, traffic=Traffic(puts=puts)),
        ]

    step = progress(0, 0, 1.0, t=1.5, traffic=Traffic(puts=7))
    story = tell([*life("a", 1, 3, "finished", 9), *life("b", 1.2, 2, "duplicate", 1), step])
    assert {r.invocation: r.traffic.puts for r in story.invocations} == {"a": 9, "b": 1}
    assert story.spending.traffic.puts == 10


def test_repeated_lines_change_nothing() -> None:
    events = runs.clean()
    once, twice = tell(events), tell([*events, *events])
    assert dataclasses.replace(twice, resumes=(), faults=()) == dataclasses.replace(once, resumes=(), faults=())


def test_resume_after_a_stop_reopens_the_run() -> None:
    run = runs.Run()
    run.launch(t=50.0)
    story = tell([*runs.stopped(), *run.events])
    assert (story.status, story.resumes) == ("running", (50.0,))
    assert tell([*runs.stopped(), *run.events, RunEnded(t=60, status="finished")]).status == "finished"


def test_lane_shows_one_phase_at_a_time_and_totals_count_all() -> None:
    spans = [("upload", 0.0, 3.0), ("compute", 1.0, 2.0), ("upload", 2.5, 4.0)]
    (lane,) = lanes([progress(0, 0, 1.0, spans=spans)], [0], 4.0)
    assert [(s.phase, s.start, s.end) for s in lane.segments] == [("upload", 0, 1), ("compute", 1, 2), ("upload", 2, 4)]
    assert (lane.totals["upload"], lane.totals["compute"]) == (4.0, 1.0)


@pytest.mark.slow
def test_long_run_is_merged_with_the_same_shares(long_story: RunSummary) -> None:
    assert long_story.merged
    assert sum(len(c.seconds) for lane in long_story.lanes for c in lane.columns) <= MAX_RECTS
    for lane in long_story.lanes:
        shown = sum(c.seconds.get("compute", 0.0) for c in lane.columns)
        assert shown == pytest.approx(lane.totals["compute"], rel=1e-6)


def test_long_run_is_thinned(long_story: RunSummary) -> None:
    assert long_story.learning.iterations == 2_500
    assert len(long_story.learning.loss) <= DRAWN_POINTS
    assert len(long_story.spending.times) <= DRAWN_POINTS
    assert long_story.spending.series["total_usd"][-1] == pytest.approx(long_story.spending.total_usd)


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(float(x), 1.0) for x in range(50_000)]
    points[31_234] = (31_234.0, 99.0)
    kept = thin(points)
    assert len(kept) <= DRAWN_POINTS
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert points[31_234] in kept
    assert list(kept) == sorted(kept)


def test_cells_keep_the_shares() -> None:
    columns = [Column(float(i), i + 1.0, {"compute": 0.55, "upload": 0.3, "wait": 0.05}) for i in range(200)]
    seconds: dict[str, float] = {}
    for s in cells(columns):
        seconds[s.phase] = seconds.get(s.phase, 0.0) + s.end - s.start
    assert seconds == pytest.approx({"compute": 110, "upload": 60, "wait": 10}, abs=1.5)


@pytest.mark.parametrize("make", [runs.launched, runs.failed, list])
def test_story_of_nothing(make: object) -> None:
    story = tell(make())  # type: ignore[operator]
    assert story.learning.iterations == 0
    assert story.learning.final is None
