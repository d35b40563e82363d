from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data import assign, plan_split
from ephemeron.errors import JobError

sizes = st.integers(0, 5000)
batch_lists = st.lists(st.integers(1, 70), min_size=1, max_size=9)


@given(sizes, batch_lists)
def test_every_sample_belongs_to_one_rank(samples: int, batches: list[int]) -> None:
    split = plan_split(samples, batches)
    assert sum(split.counts) == samples
    assert min(split.counts) >= 0


@given(sizes, batch_lists)
def test_shares_are_those_of_equations_4_3_and_4_4_within_one_sample(samples: int, batches: list[int]) -> None:
    split = plan_split(samples, batches)
    for count, batch in zip(split.counts, batches, strict=True):
        assert abs(count * sum(batches) - samples * batch) < sum(batches)


@given(sizes, batch_lists)
def test_all_ranks_end_their_epoch_together(samples: int, batches: list[int]) -> None:
    split = plan_split(samples, batches)
    assert split.iterations == -(-samples // sum(batches))
    for rank, batch in enumerate(batches):
        used = [split.batch_at(rank, i) for i in range(split.iterations)]
        assert sum(used) == split.counts[rank]
        assert all(n == batch for n in used[:-1])
        assert all(0 <= n <= batch for n in used)


@given(sizes, batch_lists)
def test_no_iteration_is_empty_over_all_ranks(samples: int, batches: list[int]) -> None:
    split = plan_split(samples, batches)
    for i in range(split.iterations):
        assert 0 < sum(split.batch_at(rank, i) for rank in range(len(batches))) <= split.global_batch


@given(sizes, batch_lists, st.integers(-5, 2**70))
def test_assign_covers_exactly(samples: int, batches: list[int], seed: int) -> None:
    split = plan_split(samples, batches)
    dealt = assign(samples, split, seed)
    assert tuple(map(len, dealt)) == split.counts
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), np.arange(samples))


def test_fasdl_example() -> None:
    split = plan_split(1000, [8, 8, 16, 16])  # K = 2, B^a = 8, B^n = 16: B^g = 48
    assert split.iterations == 21
    assert split.counts == (167, 167, 333, 333)
    assert [split.batch_at(r, 20) for r in range(4)] == [7, 7, 13, 13]


def test_fewer_samples_than_ranks() -> None:
    split = plan_split(2, [4, 4, 4])
    assert split.counts == (1, 1, 0)
    assert split.iterations == 1
    assert split.batch_at(2, 0) == 0


def test_seed_decides_the_assignment() -> None:
    split = plan_split(100, [3, 5])
    first, again, other = (assign(100, split, seed)[0].tolist() for seed in (7, 7, 8))
    assert first == again != other


def test_mistakes_are_named() -> None:
    with pytest.raises(JobError, match="no ranks"):
        plan_split(5, [])
    with pytest.raises(JobError, match="samples = -1"):
        plan_split(-1, [2])
    with pytest.raises(JobError, match="batch size of rank 1 is 0"):
        plan_split(5, [2, 0])
    split = plan_split(5, [2])
    with pytest.raises(IndexError, match="iteration 3 is not among the 3"):
        split.batch_at(0, 3)
    with pytest.raises(IndexError, match="rank 1"):
        split.batch_at(1, 0)
    with pytest.raises(ValueError, match=r"6 samples .* split of 5"):
        assign(6, split, 0)


@given(st.integers(1, 200), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_the_partial_iteration_is_merged_or_dropped(samples, batches):
    kept, merged = plan_split(samples, batches), plan_split(samples, batches, last="merge")
    full = samples // sum(batches)
    assert merged.iterations == max(1, full)
    for rank, owned in enumerate(merged.counts):
        assert sum(merged.batch_at(rank, i) for i in range(merged.iterations)) == owned
        assert all(merged.batch_at(rank, i) >= batches[rank] for i in range(merged.iterations)) or not full
    if not full:
        with pytest.raises(JobError, match="leaves nothing of"):
            plan_split(samples, batches, last="drop")
        return
    dropped = plan_split(samples, batches, last="drop")
    assert dropped.iterations == full
    assert dropped.counts == kept.counts
    assert {dropped.batch_at(r, i) for r in range(len(batches)) for i in range(full)} == set(batches)
