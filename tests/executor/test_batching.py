"""Sizes of batches follow what tasks take; nothing is published twice or never."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ephemeron.executor.batching import BATCH_S, MOST_IN_BATCH, Batching


def measured(seconds: float, *, workers: int = 4) -> Batching:
    batching = Batching(workers=workers, outstanding=9)
    for _ in range(9):
        batching.done(seconds)
    return batching


def test_until_something_is_known_each_function_gets_two_tasks():
    batching = Batching(workers=3)
    assert batching.to_publish(1000) == 6
    assert batching.sizes(6, 1000) == [1] * 6
    batching.outstanding = 6
    assert batching.to_publish(994) == 0


def test_long_tasks_go_alone_and_short_ones_together():
    assert measured(10.0).per_batch == 1
    assert measured(0.01).per_batch == round(BATCH_S / 0.01)
    assert measured(1e-7).per_batch == MOST_IN_BATCH


def test_the_last_tasks_are_spread_over_all_functions():
    assert measured(0.01).sizes(64, 64) == [8, 7, 7, 6, 5, 5, 5, 5, 5, 5, 5, 1]
    assert measured(1.0).sizes(8, 8) == [1] * 8
    assert measured(1e-6).sizes(1000, 1000) == [200] * 5, "tasks of no time are not worth a request each"


@given(st.floats(1e-6, 100.0), st.integers(1, 1000), st.integers(1, 20_000))
def test_all_tasks_are_published_in_the_end(seconds, workers, waiting):
    batching, published = measured(seconds, workers=workers), 0
    while waiting:
        count = batching.to_publish(waiting)
        assert count, "with nothing outstanding there is room"
        sizes = batching.sizes(count, waiting)
        assert sum(sizes) == count
        assert min(sizes) >= 1
        assert max(sizes) <= batching.per_batch
        published, waiting = published + count, waiting - count
