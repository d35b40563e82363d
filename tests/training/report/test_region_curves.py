"""What a run of regions shows: one number of iterations, curves, quotas and the exchange of each region."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ephemeron.events import Evaluated, Event, GroupStarted, Progress, RunStarted, Traffic
from ephemeron.prices import load_prices
from ephemeron.runs.cost import CostMeter
from ephemeron.training.report.charts import learning_chart
from ephemeron.training.report.headline import Headline
from ephemeron.training.report.run_summary import RunSummary

PRICES = load_prices("objects")


def group(name: str, first: int, workers: int, memory_mb: int, iterations: int) -> GroupStarted:
    return GroupStarted(
        name=name,
        platform="local",
        first_rank=first,
        workers=workers,
        memory_mb=memory_mb,
        iterations=iterations,
        samples=100,
        servers=0,
        prices=dataclasses.asdict(PRICES),
        traffic=Traffic(),
        more_ranks=3,
    )


GROUPS = [group("frankfurt", 0, 2, 1408, 10), group("dublin", 2, 1, 1728, 20)]


def events(share: float = 1.0) -> list[Event]:
    found: list[Event] = [
        RunStarted(
            t=0.0,
            run_id="r",
            job="j",
            workers=3,
            aggregators=1,
            memory_mb=1728,
            iterations=20,
            epochs=1,
            samples=200,
            configuration={},
            platform="local",
            groups=GROUPS,
        )
    ]
    for rank, iterations in ((0, 10), (1, 10), (2, 20)):
        for i in range(int(share * iterations)):
            found.append(Progress(t=1.0 + i, rank=rank, attempt=0, iteration=i, epoch=0, samples=4, loss=1.0 + rank, version=i))
        sums: Any = {"loss": (2.0 * (1 + rank), 2.0)}
        found.append(Evaluated(t=30.0, rank=rank, attempt=0, iteration=iterations, epoch=1, samples=2, sums=sums))
    return found


@pytest.mark.parametrize(("share", "iterations"), [(1.0, 20), (0.5, 10), (0.0, 0)])
def test_the_number_of_iterations_is_one(share: float, iterations: int) -> None:
    """A finished run had done 138 of 270: the one was one region's, the other another's."""
    meter = CostMeter(PRICES)
    for event in events(share):
        meter.feed(event)
    assert meter.finished() == iterations


def test_each_region_has_curves_of_its_own() -> None:
    story = RunSummary.from_events(events(), PRICES)
    curves = dict(story.learning_of)
    assert {name: [e.loss for e in each.evaluations] for name, each in curves.items()} == {"frankfurt": [1.5], "dublin": [3.0]}
    assert {y for _, y in curves["dublin"].loss} == {3.0}
    drawn = str(learning_chart(story))
    assert "frankfurt: test loss" in drawn
    assert "dublin: test loss" in drawn


def test_each_region_has_its_own_memory() -> None:
    figures = Headline.of(RunSummary.from_events(events(), PRICES), None)
    assert figures.quotas == "frankfurt 2 × 1408 MB, dublin 1 × 1728 MB"
    assert "3 functions (frankfurt 2 × 1408 MB, dublin 1 × 1728 MB) trained 20 iterations" in figures.summary


def test_the_configuration_leaves_to_the_table_of_regions_what_each_has() -> None:
    result = {"regions": [{"name": "dublin"}], "generations": [{"from_iteration": 0, "workers": 3, "memory_mb": 1728}]}
    told = dict(Headline.of(RunSummary.from_events(events(), PRICES), result).configuration)
    assert {"regions", "generations", "memory_mb"} & told.keys() == set()
