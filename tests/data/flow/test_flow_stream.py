"""Positions, ranks and batches: every sample once, equal counts, any resume."""

from __future__ import annotations

import json
from collections import Counter
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.flow import BatchStream
from ephemeron.errors import JobError


def epoch(streams: list[BatchStream], steps: int | None = None) -> list[list[list[int]]]:
    """Batches by rank, until the end of the epoch or for some steps."""
    out: list[list[list[int]]] = [[] for _ in streams]
    for step in count():
        if step == steps:
            return out
        batches = [s.next() for s in streams]
        assert len({b is None for b in batches}) == 1, "ranks do not end together"
        if batches[0] is None:
            return out
        for mine, batch in zip(out, batches, strict=True):
            assert batch is not None
            mine.append([int(i) for i in batch])
    raise AssertionError


def group(world: int, **values: object) -> list[BatchStream]:
    return [BatchStream(**{"samples": 20, "batch_size": 4, "world_size": world, "rank": r, **values}) for r in range(world)]


sizes = st.tuples(st.integers(0, 200), st.integers(1, 20), st.integers(1, 7)).filter(lambda x: x[0] == 0 or x[0] >= x[2])


@given(sizes, st.integers(0, 5), st.booleans())
def test_every_sample_once_and_equally_many_batches(size, seed, shuffle):
    samples, batch, world = size
    got = epoch(group(world, samples=samples, batch_size=batch, seed=seed, shuffle=shuffle, remainder="keep"))
    assert sorted(i for mine in got for b in mine for i in b) == list(range(samples))
    assert len({len(mine) for mine in got}) == 1
    assert all(b for mine in got for b in mine) or batch == 1
    assert all(len(b) == batch for mine in got for b in mine[:-2])
    assert all(len(b) <= batch for mine in got for b in mine)


@given(sizes, st.integers(1, 7), st.integers(1, 20), st.integers(0, 10), st.integers(0, 10))
def test_resumed_twice_with_other_ranks_and_batches(size, other_world, other_batch, first, second):
    samples, batch, world = size
    values = {"samples": samples, "seed": 3, "remainder": "keep"}
    a = group(world, batch_size=batch, **values)
    got = epoch(a, first)
    states = [s.state_dict() for s in a]
    assert all(state == states[0] for state in states)
    for the_world, the_batch, steps in ((other_world, other_batch, second), (world, batch, None)):
        if 0 < samples < the_world:
            return
        b = group(the_world, batch_size=the_batch, **values)
        for s in b:
            s.load_state_dict(json.loads(json.dumps(states[0])))
        got += epoch(b, steps)
        states = [s.state_dict() for s in b]
    assert sorted(i for mine in got for x in mine for i in x) == list(range(samples))


def test_fewer_samples_left_than_ranks_are_still_dealt_out_once():
    (one,) = group(1, samples=10, batch_size=3)
    got = epoch([one], 3)
    three = group(3, samples=10, batch_size=3, remainder="keep")
    for s in three:
        s.load_state_dict(one.state_dict())
    rest = [s.next() for s in three]
    assert sorted(int(i) for b in rest if b is not None for i in b) == sorted(set(range(10)) - {i for b in got[0] for i in b})
    assert all(s.next() is None for s in three)


def test_the_order_depends_on_seed_and_epoch_only():
    orders = {tuple(BatchStream(samples=50, batch_size=7, seed=s, epoch=e).order()) for s in (0, 1) for e in (0, 1)}
    assert len(orders) == 4
    assert np.array_equal(
        BatchStream(samples=50, batch_size=1, rank=2, world_size=3).order(), BatchStream(samples=50, batch_size=9).order()
    )


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 7), st.integers(0, 10))
def test_by_default_all_ranks_get_equally_large_batches_also_when_resumed(samples, batch, world, steps):
    """Nothing is left out, and no more comes twice than it takes to make the shares equal."""
    first = group(2, samples=samples, batch_size=3)
    before = {i for mine in epoch(first, steps) for b in mine for i in b}
    ranks = group(world, samples=samples, batch_size=batch)
    for s in ranks:
        s.load_state_dict(first[0].state_dict())
        assert s.length == -(-samples // (batch * world)), "the length is that of a whole epoch"
    got = epoch(ranks)
    assert len({tuple(map(len, mine)) for mine in got}) == 1
    assert all(0 < len(b) <= batch for mine in got for b in mine)
    after = [i for mine in got for b in mine for i in b]
    assert before | set(after) == set(range(samples))
    assert len(after) - (samples - min(samples, len(before))) < world


@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 5), st.sampled_from(["even", "keep", "drop", "pad"]))
def test_the_share_of_a_rank(samples, batch, world, remainder):
    if remainder == "keep" and samples < world:
        return
    for stream in group(world, samples=samples, batch_size=batch, remainder=remainder):
        share, length = stream.share, stream.length
        sizes = [len(stream.next()) for _ in range(stream.steps_left())]
        assert stream.next() is None
        assert (len(sizes), sum(sizes)) == (length, share)


def test_drop_leaves_out_and_pad_fills():
    dropped = epoch(group(2, samples=21, remainder="drop"))
    assert [len(b) for mine in dropped for b in mine] == [4, 4, 4, 4]
    streams = group(2, samples=21, remainder="pad")
    padded = epoch(streams)
    assert [len(b) for mine in padded for b in mine] == [4] * 6
    counted = Counter(i for mine in padded for b in mine for i in b)
    assert set(counted) == set(range(21))
    twice = {i for i, n in counted.items() if n == 2}
    assert twice == {int(i) for i in streams[0].order()[:3]}


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"samples": 5, "batch_size": 0}, "batch_size = 0"),
        ({"samples": 5, "batch_size": 1, "rank": 2, "world_size": 2}, "rank 2"),
        ({"samples": 2, "batch_size": 1, "world_size": 3, "remainder": "keep"}, "2 samples for 3 ranks"),
    ],
)
def test_nonsense_is_refused(values, match):
    with pytest.raises(JobError, match=match):
        BatchStream(**values)


@pytest.mark.parametrize("other", [{"samples": 6}, {"seed": 1}, {"shuffle": False}])
def test_a_state_of_something_else_is_refused(other):
    state = BatchStream(samples=5, batch_size=2).state_dict()
    with pytest.raises(JobError, match=next(iter(other))):
        BatchStream(**{"samples": 5, "batch_size": 2, **other}).load_state_dict(state)


@pytest.mark.parametrize("damage", [{"epoch": None}, {"consumed": 6}, {"consumed": -1}, {"epoch": -1}, {"epoch": "0"}])
def test_a_damaged_state_is_refused(damage):
    state = {**BatchStream(samples=5, batch_size=2).state_dict(), **damage}
    with pytest.raises(JobError, match=f"{next(iter(damage))} = "):
        BatchStream(samples=5, batch_size=2).load_state_dict(state)
