"""The remainder rule, for every count, batch size and world size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.scheduler import EpochPartition
from ephemeron.data.scheduler.delivery import merge, pick
from ephemeron.errors import JobError

counts = st.integers(0, 300)
batches = st.integers(1, 9)
worlds = st.integers(1, 9)


def sizes(count: int, batch: int, world_size: int, remainder: str = "keep") -> list[list[int]]:
    """Per step, the batch size of each rank."""
    deal = EpochPartition(count=count, batch=batch, world_size=world_size, remainder=remainder)  # type: ignore[arg-type]
    return [[len(deal.part(rank, step)) for rank in range(world_size)] for step in range(deal.batches)]


@given(counts, batches, worlds)
def test_keep_uses_every_position_once_in_order_with_equal_numbers_of_batches(count, batch, world_size):
    deal = EpochPartition(count=count, batch=batch, world_size=world_size)
    parts = [deal.part(rank, step) for step in range(deal.batches) for rank in range(world_size)]
    assert [position for part in parts for position in part] == list(range(count))
    assert all(len(part) <= batch for part in parts)
    assert deal.batches == -(-count // (batch * world_size))
    if count >= world_size and batch > 1:
        assert all(parts), "no batch is empty where that can be avoided"
    for step in sizes(count, batch, world_size):
        assert max(step) - min(step) <= 1
        assert step == sorted(step, reverse=True)
    for step in sizes(count, batch, world_size)[:-2]:
        assert set(step) == {batch}


@given(counts, batches, worlds)
def test_drop_leaves_out_less_than_a_step(count, batch, world_size):
    deal = EpochPartition(count=count, batch=batch, world_size=world_size, remainder="drop")
    used = [p for step in range(deal.batches) for rank in range(world_size) for p in deal.part(rank, step)]
    assert used == list(range(len(used)))
    assert 0 <= count - len(used) < batch * world_size
    assert all(size == batch for step in sizes(count, batch, world_size, "drop") for size in step)


@given(counts, batches, worlds)
def test_pad_fills_the_last_step(count, batch, world_size):
    deal = EpochPartition(count=count, batch=batch, world_size=world_size, remainder="pad")
    used = [p for step in range(deal.batches) for rank in range(world_size) for p in deal.part(rank, step)]
    assert used == list(range(len(used)))
    assert 0 <= len(used) - count < batch * world_size
    assert all(size == batch for step in sizes(count, batch, world_size, "pad") for size in step)


@given(counts, batches, worlds)
def test_even_gives_every_rank_equally_large_batches_and_never_an_empty_one(count, batch, world_size):
    deal = EpochPartition(count=count, batch=batch, world_size=world_size, remainder="even")
    used = [p for step in range(deal.batches) for rank in range(world_size) for p in deal.part(rank, step)]
    assert used == list(range(len(used)))
    assert 0 <= len(used) - count < world_size
    assert deal.batches == -(-count // (batch * world_size))
    assert all(len(set(step)) == 1 and 0 < step[0] <= batch for step in sizes(count, batch, world_size, "even"))
    assert all(step[0] == batch for step in sizes(count, batch, world_size, "even")[:-1])


def test_examples():
    assert sizes(20, 3, 2) == [[3, 3], [3, 3], [3, 3], [1, 1]]
    assert sizes(11, 3, 2) == [[3, 3], [3, 2]]
    assert sizes(9, 2, 4) == [[2, 1, 1, 1], [1, 1, 1, 1]], "the step before gives some up"
    assert sizes(17, 2, 4) == [[2, 2, 2, 2], [2, 1, 1, 1], [1, 1, 1, 1]]
    assert sizes(5, 1, 4) == [[1, 1, 1, 1], [1, 0, 0, 0]], "unavoidable, and explicit"
    assert sizes(2, 4, 3) == [[1, 1, 0]]
    assert sizes(0, 4, 3) == []
    assert sizes(11, 3, 2, "even") == [[3, 3], [3, 3]]
    assert sizes(9, 2, 4, "even") == [[2, 2, 2, 2], [1, 1, 1, 1]]
    assert sizes(11, 3, 1, "even") == [[3], [3], [3], [2]]
    assert sizes(9, 2, 4, "drop") == [[2, 2, 2, 2]]
    assert sizes(9, 2, 4, "pad") == [[2, 2, 2, 2], [2, 2, 2, 2]]


def test_two_worlds_with_the_same_global_batch_use_the_same_positions_in_each_step():
    one = EpochPartition(count=100, batch=12, world_size=1)
    for batch, world_size in ((6, 2), (4, 3), (2, 6)):
        deal = EpochPartition(count=100, batch=batch, world_size=world_size)
        assert deal.batches == one.batches == 9
        assert [deal.step(i) for i in range(7)] == [one.step(i) for i in range(7)]


def test_mistakes_are_named():
    for wrong in ({"count": -1}, {"batch": 0}, {"world_size": 0}):
        with pytest.raises(JobError, match=f"{next(iter(wrong))} = "):
            EpochPartition(**({"count": 1, "batch": 1, "world_size": 1} | wrong))
    with pytest.raises(JobError, match="remainder = 'lose'"):
        EpochPartition(count=1, batch=1, world_size=1, remainder="lose")  # type: ignore[arg-type]
    deal = EpochPartition(count=4, batch=2, world_size=2)
    for rank, sequence in ((2, 0), (-1, 0), (0, 1), (0, -1)):
        with pytest.raises(IndexError, match="is not among the 1 of 2 ranks"):
            deal.part(rank, sequence)


@given(st.sets(st.integers(0, 60)), st.integers(0, 70), st.integers(0, 70))
def test_spans_are_a_sequence_of_numbers(numbers, start, stop):
    ordered = sorted(numbers)
    spans = merge(range(number, number + 1) for number in reversed(ordered))
    assert [n for span in spans for n in span] == ordered
    assert all(after.start > before.stop for before, after in pairwise(spans))
    assert [n for span in pick(spans, range(start, stop)) for n in span] == ordered[start:stop]
