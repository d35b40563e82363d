from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data import Sampler, assign, batch_indices, epoch_order, global_batch, plan_split
from ephemeron.data.shuffle import Purpose, permutation

splits = st.builds(plan_split, st.integers(1, 400), st.lists(st.integers(1, 40), min_size=1, max_size=6))
seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**40)


@given(splits, seeds, epochs)
def test_each_rank_uses_each_of_its_samples_once_per_epoch(split, seed, epoch) -> None:
    for rank, count in enumerate(split.counts):
        batches = [batch_indices(split, rank, epoch, i, seed=seed) for i in range(split.iterations)]
        assert [len(b) for b in batches] == [split.batch_at(rank, i) for i in range(split.iterations)]
        np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(count))


@given(splits, seeds, epochs)
def test_global_batches_of_an_epoch_cover_the_training_set(split, seed, epoch) -> None:
    owned = assign(split.samples, split, seed)
    batches = [global_batch(split, owned, epoch, i, seed=seed) for i in range(split.iterations)]
    np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(split.samples))


def test_global_batch_is_the_ranks_batches_in_rank_order() -> None:
    split = plan_split(50, [3, 5, 2])
    owned = assign(50, split, 11)
    parts = [owned[r][Sampler(split, r, 11).batch(4 + 2 * split.iterations)] for r in range(3)]
    np.testing.assert_array_equal(global_batch(split, owned, 2, 4, seed=11), np.concatenate(parts))


@given(splits, seeds, st.lists(st.integers(0, 200), max_size=12))
def test_sampler_needs_no_history(split, seed, iterations) -> None:
    sampler = Sampler(split, 0, seed)
    for iteration in iterations:
        epoch, i = divmod(iteration, split.iterations)
        np.testing.assert_array_equal(sampler.batch(iteration), batch_indices(split, 0, epoch, i, seed=seed))


def test_sampler_computes_an_order_once_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "ephemeron.data.iteration_samples.epoch_order",
        lambda count, *, seed, rank, epoch: asked.append(epoch) or epoch_order(count, seed=seed, rank=rank, epoch=epoch),
    )
    split = plan_split(20, [5])
    sampler = Sampler(split, 0, 0)
    for iteration in range(3 * split.iterations):
        sampler.batch(iteration)
    assert asked == [0, 1, 2]


def test_orders_differ_by_seed_rank_epoch_and_purpose() -> None:
    orders = {
        tuple(permutation(30, seed=s, purpose=p, rank=r, epoch=e))
        for s in (0, 1, 2**32, 2**63)
        for p in Purpose
        for r in (0, 1, 2)
        for e in (0, 1, 2)
    }
    assert len(orders) == 4 * 3 * 3 * 3


def test_order_is_the_same_everywhere() -> None:
    """Golden: if this changes, a relayed run no longer goes on where it stopped."""
    assert epoch_order(12, seed=42, rank=3, epoch=5).tolist() == [9, 1, 7, 11, 10, 6, 4, 0, 2, 3, 8, 5]
    assert epoch_order(0, seed=0, rank=0, epoch=0).tolist() == []


def test_global_random_state_is_left_alone() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    first = epoch_order(100, seed=1, rank=0, epoch=0)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.random.seed(4)
    np.testing.assert_array_equal(first, epoch_order(100, seed=1, rank=0, epoch=0))


def test_permutations_are_roughly_uniform() -> None:
    firsts = np.bincount([epoch_order(10, seed=0, rank=0, epoch=e)[0] for e in range(2000)], minlength=10)
    assert firsts.min() > 140
    assert firsts.max() < 260


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="empty training set"):
        Sampler(plan_split(0, [4]), 0, 0)
    with pytest.raises(IndexError, match="rank 2 is not in 0 … 1"):
        Sampler(plan_split(9, [4, 4]), 2, 0)
    with pytest.raises(IndexError, match="iteration 9"):
        batch_indices(plan_split(9, [4, 4]), 0, 0, 9, seed=0)


def test_merged_batches_use_every_sample_once_and_dropped_ones_other_samples_in_each_epoch():
    merged, dropped = plan_split(23, [4, 3], last="merge"), plan_split(23, [4, 3], last="drop")
    for rank in range(2):
        used = [batch_indices(merged, rank, 0, i, seed=1).tolist() for i in range(merged.iterations)]
        assert sorted(n for batch in used for n in batch) == list(range(merged.counts[rank]))
        assert len(used[-1]) > len(used[0])
    left = [
        set(range(dropped.counts[0])) - {int(n) for i in range(3) for n in batch_indices(dropped, 0, epoch, i, seed=1)}
        for epoch in range(6)
    ]
    assert {len(s) for s in left} == {dropped.counts[0] - 12}
    assert len(set.union(*left)) > len(left[0])
