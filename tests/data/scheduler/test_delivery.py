"""Exactly once: whatever is repeated, lost, restarted from an old state, or resumed with another world."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.scheduler import DeliveredBatch, Delivery, DeliveryRefused, EpochEnd
from ephemeron.errors import JobError


class Rank:
    """A trainer that uses its batches in order."""

    def __init__(self, delivery: Delivery, rank: int, epoch: int = 0) -> None:
        self.rank, self.generation = rank, delivery.generation
        self.epoch, self.used = epoch, 0

    def step(self, delivery: Delivery) -> tuple[int, tuple[int, ...]] | None:
        """Uses a batch: its epoch and positions. None: the epoch ended."""
        answer = delivery.request(rank=self.rank, epoch=self.epoch, sequence=self.used, acked=self.used, generation=self.generation)
        if isinstance(answer, EpochEnd):
            self.epoch, self.used = self.epoch + 1, 0
            return None
        assert isinstance(answer, DeliveredBatch)
        assert (answer.epoch, answer.sequence, answer.rank) == (self.epoch, self.used, self.rank)
        self.used += 1
        return answer.epoch, answer.positions[: len(answer.positions) - answer.padding]

    def tell(self, delivery: Delivery) -> bool:
        return delivery.acknowledge(rank=self.rank, epoch=self.epoch, acked=self.used, generation=self.generation)


def saved(delivery: Delivery) -> Delivery:
    """As it is after a restart."""
    loaded = Delivery(samples=delivery.samples, batch=1, world_size=1)
    loaded.load_state_dict(json.loads(json.dumps(delivery.state_dict())))
    assert loaded.state_dict() == delivery.state_dict()
    return loaded


def ask(delivery: Delivery, rank: int, sequence: int, *, epoch: int = 0, acked: int = 0, generation: int = 0):
    return delivery.request(rank=rank, epoch=epoch, sequence=sequence, acked=acked, generation=generation)


def test_a_repeated_request_gets_the_same_answer_and_an_acknowledged_one_none():
    delivery = Delivery(samples=10, batch=2, world_size=2)
    first = ask(delivery, 0, 0)
    assert first == ask(delivery, 0, 0) == DeliveredBatch(epoch=0, rank=0, sequence=0, positions=(0, 1))
    assert ask(delivery, 0, 1).positions == (4, 5), "requests may run ahead of acknowledgements"
    assert ask(delivery, 1, 0).positions == (2, 3)
    assert ask(delivery, 0, 1, acked=1).positions == (4, 5)
    assert isinstance(ask(delivery, 0, 0), DeliveryRefused)
    assert ask(delivery, 0, 2, acked=1).positions == (8,)
    assert ask(delivery, 0, 3, acked=3) == EpochEnd(epoch=0, batches=3)
    assert ask(delivery, 0, 0, epoch=1).positions == (0, 1)
    assert isinstance(ask(delivery, 0, 3, acked=3), DeliveryRefused), "it has moved on"


def test_an_acknowledgement_never_goes_back():
    delivery = Delivery(samples=10, batch=1, world_size=1)
    ask(delivery, 0, 5, acked=5)
    ask(delivery, 0, 6, acked=2)
    assert delivery.state_dict()["at"] == [[0, 5]]


def test_an_epoch_without_samples_has_no_batches():
    delivery = Delivery(samples=0, batch=4, world_size=3)
    assert ask(delivery, 2, 0) == EpochEnd(epoch=0, batches=0)
    assert ask(delivery, 2, 0, epoch=7) == EpochEnd(epoch=7, batches=0)
    delivery.reshape(world_size=2)
    assert ask(delivery, 0, 0, generation=1) == EpochEnd(epoch=0, batches=0)


def test_fewer_samples_than_ranks_make_empty_batches_that_say_so():
    delivery = Delivery(samples=2, batch=4, world_size=3)
    assert [ask(delivery, rank, 0).positions for rank in range(3)] == [(0,), (1,), ()]


def test_padding_repeats_the_beginning_and_is_marked():
    delivery = Delivery(samples=5, batch=2, world_size=2, remainder="pad")
    assert delivery.batches(0) == 2
    assert ask(delivery, 0, 1) == DeliveredBatch(epoch=0, rank=0, sequence=1, positions=(4, 0), padding=1)
    assert ask(delivery, 1, 1) == DeliveredBatch(epoch=0, rank=1, sequence=1, positions=(1, 2), padding=2)
    tiny = Delivery(samples=1, batch=2, world_size=2, remainder="pad")
    assert [ask(tiny, rank, 0).positions for rank in range(2)] == [(0, 0), (0, 0)]


def test_resuming_deals_out_what_was_not_acknowledged():
    delivery = Delivery(samples=20, batch=2, world_size=2)
    for rank in range(2):
        delivery.acknowledge(rank=rank, epoch=3, acked=2, generation=0)
    delivery.reshape(world_size=3)
    assert delivery.state_dict()["left"] == {"3": [[8, 20]]}, "in step, what is left is one span"
    assert delivery.batches(3) == 2
    assert delivery.batches(4) == 4
    batches = [ask(delivery, r, s, epoch=3, acked=0, generation=1).positions for s in range(2) for r in range(3)]
    assert batches == [(8, 9), (10, 11), (12, 13), (14, 15), (16, 17), (18, 19)]
    assert isinstance(ask(delivery, 0, 2, epoch=3, acked=2, generation=0), DeliveryRefused), "ranks of before are fenced off"
    delivery.acknowledge(rank=0, epoch=4, acked=0, generation=1)
    assert "3" in delivery.state_dict()["left"], "two ranks are still in it"
    for rank in range(3):
        delivery.acknowledge(rank=rank, epoch=4, acked=0, generation=1)
    assert delivery.state_dict()["left"] == {}


def test_ranks_out_of_step_leave_spans():
    delivery = Delivery(samples=16, batch=2, world_size=2)
    delivery.acknowledge(rank=1, epoch=0, acked=3, generation=0)
    delivery.acknowledge(rank=0, epoch=0, acked=1, generation=0)
    delivery.reshape(world_size=1, batch=5)
    assert delivery.state_dict()["left"] == {"0": [[4, 6], [8, 10], [12, 16]]}
    assert [ask(delivery, 0, s, generation=1).positions for s in range(2)] == [(4, 5, 8, 9, 12), (13, 14, 15)]
    delivery.acknowledge(rank=0, epoch=0, acked=1, generation=1)
    delivery.reshape(world_size=2)
    assert delivery.state_dict()["left"] == {"0": [[13, 16]]}


def test_an_epoch_that_was_cut_at_its_end_ends_once_more():
    delivery = Delivery(samples=4, batch=2, world_size=2, remainder="drop")
    for rank in range(2):
        delivery.acknowledge(rank=rank, epoch=0, acked=1, generation=0)
    delivery.reshape(world_size=1)
    assert ask(delivery, 0, 0, generation=1) == EpochEnd(epoch=0, batches=0)
    assert ask(delivery, 0, 1, epoch=1, generation=1).positions == (2, 3)


def test_dropped_positions_stay_dropped_once_the_epoch_is_over():
    delivery = Delivery(samples=7, batch=2, world_size=2, remainder="drop")
    for rank in range(2):
        delivery.acknowledge(rank=rank, epoch=0, acked=1, generation=0)
    delivery.reshape(world_size=1)
    assert delivery.batches(0) == 0


def test_mistakes_are_named():
    with pytest.raises(JobError, match="batch = 0"):
        Delivery(samples=3, batch=0, world_size=1)
    delivery = Delivery(samples=10, batch=2, world_size=2)
    with pytest.raises(IndexError, match="rank 2 is not in 0 … 1"):
        ask(delivery, 2, 0)
    with pytest.raises(IndexError, match="rank 0 cannot have used 9 of 3 batches of epoch 0"):
        ask(delivery, 0, 9, acked=9)
    with pytest.raises(JobError, match="generation = 0 is not after 0"):
        delivery.reshape(world_size=1, generation=0)
    state = delivery.state_dict()
    with pytest.raises(JobError, match="has 10 samples, the dataset has 11"):
        Delivery(samples=11, batch=2, world_size=2).load_state_dict(state)
    with pytest.raises(JobError, match="version 99"):
        delivery.load_state_dict(state | {"version": 99})
    for damage in ({"at": None}, {"at": []}, {"left": {"x": []}}, {"batch": "2"}, {"left": []}):
        with pytest.raises(JobError, match=r"damaged|is too small"):
            delivery.load_state_dict(state | damage)
    del state["generation"]
    with pytest.raises(JobError, match="damaged"):
        delivery.load_state_dict(state)


def test_the_state_does_not_grow_with_samples_epochs_or_resumptions_in_step():
    sizes = []
    for samples in (100, 10_000_000):
        delivery = Delivery(samples=samples, batch=3, world_size=4)
        for epoch in range(1, 30):
            for rank in range(delivery.world_size):
                delivery.acknowledge(rank=rank, epoch=epoch, acked=2, generation=delivery.generation)
            delivery.reshape(world_size=3 + epoch % 3)
        sizes.append(len(json.dumps(delivery.state_dict())))
    assert sizes[1] < sizes[0] + 20


shapes = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 25)), min_size=1, max_size=5
)  # (world size, batch, steps before the next resumption)


@given(st.integers(0, 40), shapes, st.integers(0, 2**32), st.sampled_from(["keep", "even", "drop", "pad"]), st.booleans())
def test_every_position_of_every_epoch_is_used_once_over_any_number_of_resumptions(samples, shapes, seed, remainder, in_step):
    rng = random.Random(seed)
    world_size, batch, _ = shapes[0]
    delivery = Delivery(samples=samples, batch=batch, world_size=world_size, remainder=remainder)
    used: Counter[tuple[int, int]] = Counter()
    ranks = [Rank(delivery, r) for r in range(world_size)]
    last = 0
    for number, (_, _, steps) in enumerate(shapes):
        for i in range(steps):
            rank = ranks[i % len(ranks)] if in_step else rng.choice(ranks)
            if (got := rank.step(delivery)) is not None:
                used.update((got[0], position) for position in got[1])
            last = max(last, rank.epoch + 1)
            if rng.random() < 0.1:
                delivery = saved(delivery)
        if number + 1 < len(shapes):
            assert all(rank.tell(delivery) for rank in ranks)
            world_size, batch, _ = shapes[number + 1]
            delivery.reshape(world_size=world_size, batch=batch)
            delivery = saved(delivery)
            epoch = min(rank.epoch for rank in ranks)
            assert not any(rank.tell(delivery) for rank in ranks)
            ranks = [Rank(delivery, r, epoch) for r in range(world_size)]
    for rank in ranks:
        while rank.epoch < last:
            if (got := rank.step(delivery)) is not None:
                used.update((got[0], position) for position in got[1])
    every = {(epoch, position) for epoch in range(last) for position in range(samples)}
    assert all(count == 1 for count in used.values())
    assert set(used) == every or (remainder == "drop" and set(used) < every)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32))
def test_a_router_that_restarts_from_an_older_state_delivers_nothing_twice(samples, batch, world_size, seed):
    rng = random.Random(seed)
    delivery = Delivery(samples=samples, batch=batch, world_size=world_size)
    ranks = [Rank(delivery, r) for r in range(world_size)]
    used: list[tuple[int, int]] = []
    old = delivery.state_dict()
    for _ in range(60):
        if (got := rng.choice(ranks).step(delivery)) is not None:
            used += [(got[0], position) for position in got[1]]
        if rng.random() < 0.2:
            old = delivery.state_dict()
        if rng.random() < 0.2:
            delivery.load_state_dict(old)
    assert len(used) == len(set(used))
