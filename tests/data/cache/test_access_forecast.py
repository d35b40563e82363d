from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.cache import JobFuture, Joined, Knowledge
from ephemeron.errors import JobError


def future(samples: int = 10, **kwargs) -> JobFuture:
    return JobFuture(Joined(job="j", keys=range(samples), **kwargs))


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(0, 15))
def test_positions_are_those_of_the_announced_sequence_over_epochs(first, second, used) -> None:
    job = future(8)
    job.announce(first)
    job.announce(second)
    sequence = list(first) + list(second)
    for key in sequence[:used]:
        job.access(key, 0.0)
    for key in range(8):
        if key in sequence[used:]:
            assert job.position(key) == sequence.index(key, used)
            assert job.knows(key) is Knowledge.CERTAIN
        else:
            assert job.position(key) is None
            assert job.knows(key) is Knowledge.VISITED
    assert job.certain == 16 - used


def test_the_four_parts_of_a_sequence() -> None:
    job = future(10)
    job.announce([0, 1, 2, 3])
    job.expect({4: 0.5, 5: 0.2, 1: 9.0})
    job.access(0, 0.0)
    kinds = [job.knows(key) for key in (0, 1, 4, 5, 6, 99)]
    assert [k.name for k in kinds] == ["VISITED", "CERTAIN", "LIKELY", "LIKELY", "UNKNOWN", "FOREIGN"]
    # N - k = 9 of which 3 are certain and 2 likely: 3 + 2 + 4/2 (3-3)
    assert job.unknown_distance == 7
    # 3 + (5/7 · 1/2 + 2/7 · 2/2) · 6 (3-2, the heavier first)
    assert job.likely_distance == pytest.approx(3 + (5 / 7 / 2 + 2 / 7) * 6)
    # Ranks among two, if drawn in proportion to weights: the heavier comes second with probability 2/7.
    assert job.likely_distance_of(4) == pytest.approx(3 + 1 + 2 / 7)
    assert job.likely_distance_of(5) == pytest.approx(3 + 1 + 5 / 7)
    assert job.outlook(1) == (1, 1)
    assert job.outlook(6) == (6, 10)
    assert job.outlook(0) == (10, 20)
    assert job.outlook(99) is None


def test_expected_ranks_are_those_of_drawing_by_weight() -> None:
    weights = {0: 4.0, 1: 2.0, 2: 2.0, 3: 1.0}
    job = future(4)
    job.expect(weights)
    rng, drawn = random.Random(1), dict.fromkeys(weights, 0)
    for _ in range(20_000):
        ahead = sorted(weights, key=lambda key: rng.expovariate(weights[key]))
        for rank, key in enumerate(ahead, start=1):
            drawn[key] += rank
    for key in weights:
        assert job.likely_distance_of(key) == pytest.approx(drawn[key] / 20_000, abs=0.05)


def test_an_epoch_ends_with_its_last_sample() -> None:
    job = future(3)
    assert [job.access(key, 0.0) for key in (2, 0, 1)] == [False, False, True]
    assert job.left_in_epoch == 3
    assert all(job.awaits(key) for key in range(3))
    job.access(1, 0.0)
    assert [job.awaits(key) for key in (0, 1, 7)] == [True, False, False]


def test_batches_may_be_used_out_of_order() -> None:
    job = future(4)
    job.announce([0, 1, 2, 3])
    job.access(1, 0.0)
    job.access(0, 0.0)
    assert (job.accessed, job.certain, job.position(2)) == (2, 2, 2)


def test_mistakes_are_named() -> None:
    with pytest.raises(JobError, match="'j' joined with no keys"):
        JobFuture(Joined(job="j", keys=[]))
    with pytest.raises(JobError, match=r"weight = 0 of job 'j' is not above 0"):
        future(weight=0)
