"""Sizes of batches follow what tasks take; nothing is published twice or never."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ephemeron.executor.batching import BATCH_S, MOST_IN_BATCH, Batching


def measured(seconds: float, *, workers: int = 4, function: str = "f") -> Batching:
    batching = Batching(workers=workers)
    batching.published(function, 9)
    for _ in range(9):
        batching.done(function, seconds)
    return batching


def sizes(batching: Batching, waiting: int) -> list[int]:
    return batching.sizes(["f"] * waiting, waiting)


def test_until_something_is_known_each_function_gets_two_tasks():
    batching = Batching(workers=3)
    assert sizes(batching, 1000) == [1] * 6
    batching.published("f", 6)
    assert sizes(batching, 994) == []


def test_long_tasks_go_alone_and_short_ones_together():
    assert measured(10.0).per_batch("f") == 1
    assert measured(0.01).per_batch("f") == round(BATCH_S / 0.01)
    assert measured(1e-7).per_batch("f") == MOST_IN_BATCH


def test_the_last_tasks_are_spread_over_all_functions():
    assert sizes(measured(0.01), 64) == [8, 7, 7, 6, 5, 5, 5, 5, 5, 5, 5, 1]
    assert sizes(measured(1.0), 8) == [1] * 8
    assert sizes(measured(1e-6, workers=2), 1000) == [200] * 5, "tasks of no time are not worth a request each"


def test_tasks_of_one_function_say_nothing_of_those_of_another_one():
    batching = measured(1e-6, workers=2)
    assert batching.sizes(["g"] * 100, 100) == [1] * 4, "they may take long"
    batching.published("g", 4)
    assert batching.sizes(["g"] * 96, 96) == []
    assert batching.sizes(["f"] * 1000, 1000) == [200] * 4


def test_a_batch_of_several_functions_takes_no_longer_than_others():
    batching = measured(0.1, workers=2)
    batching.published("g")
    batching.done("g", 0.25)
    assert batching.sizes(["f", "g"] * 50, 100)[:3] == [3, 2, 2]


@given(st.floats(1e-6, 100.0), st.integers(1, 1000), st.integers(1, 20_000))
def test_all_tasks_are_published_in_the_end(seconds, workers, waiting):
    batching = measured(seconds, workers=workers)
    while waiting:
        found = sizes(batching, waiting)
        assert found, "with nothing outstanding there is room"
        assert min(found) >= 1
        assert max(found) <= batching.per_batch("f")
        waiting -= sum(found)
        assert waiting >= 0
