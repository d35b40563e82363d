"""The shared buffer: exact references, bytes that stay below the limit, and nobody who stalls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ephemeron.data.scheduler import RemoteBuffer
from ephemeron.data.scheduler.local_buffer import SizeEstimate
from ephemeron.errors import JobError


def buffer(limit: int = 100, guess: int = 10, **batches: list[list[object]]) -> RemoteBuffer:
    made = RemoteBuffer(limit_nbytes=limit, guess_nbytes=guess)
    for consumer, announced in batches.items():
        for ticket, keys in enumerate(announced):
            made.announce(consumer, ticket, keys)
    return made


def load(made: RemoteBuffer, nbytes: int = 10) -> list[object]:
    """Admits and loads until nothing more is admitted; returns what was loaded, in order."""
    loaded: list[object] = []
    while keys := made.admit():
        for key in keys:
            assert made.arrived(key, nbytes) == ()
            loaded.append(key)
            made.validate()
    return loaded


def test_objects_are_shared_and_gone_with_their_last_reference():
    made = buffer(a=[[1, 2], [3]], b=[[2, 3]])
    assert sorted(load(made)) == [1, 2, 3]
    assert made.missing("a", 0) == made.missing("b", 0) == ()
    assert made.release("a", 0) == (1,)
    assert made.release("a", 0) == (), "once"
    assert made.release("b", 0) == (2,)
    assert made.release("a", 1) == (3,)
    assert made.buffered_nbytes == 0
    made.validate()


def test_reading_releases_nothing():
    made = buffer(a=[[1]])
    assert made.missing("a", 0) == (1,)
    load(made)
    assert made.missing("a", 0) == made.missing("a", 0) == ()


def test_next_batches_come_first_then_prefetching_goes_ahead_evenly():
    made = buffer(60, 10, a=[["a0"], ["a1"], ["a2"], ["a3"]], b=[["b0"], ["b1"], ["b2"]])
    assert made.admit() == ("a0", "b0", "a1", "b1", "a2", "b2")
    assert made.reserved_nbytes == 60
    assert made.admit() == ()
    assert made.announced("a") == (0, 1, 2, 3)


def test_a_next_batch_is_admitted_whatever_the_limit_says():
    made = buffer(30, 10, a=[[0], [1], [2], [3]])
    assert load(made) == [0, 1, 2]
    made.announce("b", 0, [7, 8])
    assert made.admit() == (7, 8)
    assert made.arrived(7, 10) == (2,), "what is wanted last makes room"
    assert made.arrived(8, 10) == (1,)
    made.validate()
    assert made.missing("a", 0) == ()
    assert made.missing("a", 1) == (1,)
    made.release("b", 0)
    assert load(made) == [1, 2]


def test_actual_size_replaces_the_estimate():
    made = buffer(100, 1, a=[[0], [1], [2], [3]])
    assert made.admit() == (0, 1, 2, 3)
    assert made.arrived(0, 90) == ()
    assert (made.buffered_nbytes, made.reserved_nbytes) == (90, 3)
    assert made.arrived(1, 90) == (1,), "refused: nobody waits for it"
    assert made.arrived(2, 8) == ()
    made.validate()
    assert made.admit() == (), "known not to fit"
    made.release("a", 0)
    assert made.admit() == (1,), "now it is next"


def test_a_giant_lets_others_pass_and_is_loaded_when_it_is_next():
    made = buffer(100, 10, a=[[0], ["giant"], [2], [3]], b=[[5], [6], [7]])
    assert set(made.admit()) == {0, "giant", 2, 3, 5, 6, 7}
    for key in (0, 2, 3, 5, 6, 7):
        assert made.arrived(key, 10) == ()
    assert made.arrived("giant", 10_000) == ("giant",), "it drives out nothing, though it is wanted sooner"
    made.announce("b", 3, [8])
    made.announce("a", 4, [4])
    assert made.admit() == (8, 4)
    for key in (8, 4):
        made.arrived(key, 10)
    assert made.release("a", 0) == (0,)
    assert made.admit() == ("giant",)
    gone = made.arrived("giant", 10_000)
    assert set(gone) == {2, 3, 4, 6, 7, 8}, "all but next batches"
    assert made.buffered_nbytes == 10_010
    made.validate()
    made.release("b", 0)
    assert made.admit() == (6,), "the other job goes on, batch by batch"
    assert made.arrived(6, 10) == ()
    assert made.release("a", 1) == ("giant",)
    assert made.buffered_nbytes == 10
    made.validate()


def test_a_giant_that_is_no_longer_next_but_wanted_later_has_to_go():
    made = buffer(50, 10, a=[["giant"], [1]], b=[[2], ["giant"]])
    load(made, 10)
    made.remove_consumer("a")
    made.remove_consumer("b")
    made = buffer(50, 10, a=[["giant"], [1]], b=[[2], ["giant"]])
    made.admit()
    made.arrived("giant", 1000)
    made.arrived(2, 10)
    assert made.release("a", 0) == ("giant",)
    made.validate()
    assert "giant" not in made.admit()


def test_what_nobody_wants_is_refused_and_what_is_left_behind_is_released():
    made = buffer(a=[[1, 2], [3]], b=[[1]])
    made.admit()
    made.arrived(2, 10)
    assert sorted(made.remove_consumer("a")) == [2, 3]
    assert made.reserved_nbytes == 10
    assert made.arrived(3, 10) == (3,)
    assert made.remove_consumer("a") == ()
    assert made.missing("b", 0) == (1,)
    with pytest.raises(KeyError):
        made.missing("a", 0)
    made.validate()


def test_what_was_given_up_counts_as_present():
    made = buffer(a=[[1, 2]])
    made.admit()
    made.arrived(1, 0)
    made.arrived(2, 10)
    assert made.missing("a", 0) == ()
    assert made.size.nbytes == 10, "and says nothing about sizes"


def test_announcing_again_changes_nothing_and_out_of_order_is_a_mistake():
    made = buffer(a=[[1], [2]])
    made.announce("a", 0, [9])
    made.validate()
    assert made.admit() == (1, 2)
    made.release("a", 0)
    with pytest.raises(ValueError, match="batch 0 of a was announced after a later one"):
        made.announce("a", 0, [1])
    made.remove_consumer("a")
    made.announce("a", 0, [1, 1])
    assert made.admit() == (1,)


def test_an_arrival_that_was_found_elsewhere_needs_no_admission():
    made = buffer(a=[[1, 2]])
    assert made.arrived(1, 30) == ()
    assert made.arrived(1, 30) == ()
    assert made.buffered_nbytes == 30
    assert made.admit() == (2,)
    made.validate()


def test_a_limit_that_lets_nothing_in():
    with pytest.raises(JobError, match="limit_nbytes = 0 of a prefetch buffer"):
        RemoteBuffer(limit_nbytes=0)


def test_the_estimate_shrugs_at_giants_even_the_first_and_follows_real_changes():
    estimate = SizeEstimate(1000)
    assert estimate.nbytes == 1000
    estimate.saw(100_000)
    assert estimate.nbytes == 100_000
    estimate.saw(100)
    assert estimate.nbytes == 250
    for _ in range(32):
        estimate.saw(100)
    assert estimate.nbytes == 100
    estimate.saw(100_000)
    assert estimate.nbytes == 110
    for _ in range(32):
        estimate.saw(5000)
    assert estimate.nbytes == 5000


# -- random schedules -------------------------------------------------------------------------------------

KEYS = st.integers(0, 30)
SIZES = {key: 1 + 7 * key % 40 for key in range(31)} | {13: 5000, 17: 900}


class Traffic(RuleBasedStateMachine):
    @initialize(limit=st.integers(1, 300), guess=st.integers(0, 100))
    def begin(self, limit, guess):
        self.made = RemoteBuffer(limit_nbytes=limit, guess_nbytes=guess)
        self.batches: dict[str, dict[int, list[int]]] = {"a": {}, "b": {}, "c": {}}
        self.ticket = 0
        self.here: set[int] = set()
        self.loading: set[int] = set()

    def drop(self, keys):
        self.here.difference_update(keys)
        self.loading.difference_update(keys)

    @rule(consumer=st.sampled_from("abc"), keys=st.lists(KEYS, max_size=5))
    def announce(self, consumer, keys):
        self.ticket += 1
        self.made.announce(consumer, self.ticket, keys)
        self.batches[consumer][self.ticket] = keys

    @rule()
    def admit(self):
        before = self.made.buffered_nbytes + self.made.reserved_nbytes
        granted = self.made.admit()
        assert not set(granted) & (self.loading | self.here)
        assert len(granted) == len(set(granted))
        self.loading.update(granted)
        first = [next(iter(batches.values())) for batches in self.batches.values() if batches]
        entitled = {key for batch in first for key in batch}
        assert entitled <= self.here | self.loading, "next batches are always on their way"
        if set(granted) - entitled:
            assert self.made.buffered_nbytes + self.made.reserved_nbytes <= max(self.made.limit_nbytes, before)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), many=st.integers(1, 4))
    def arrive(self, data, many):
        for _ in range(min(many, len(self.loading))):
            key = data.draw(st.sampled_from(sorted(self.loading)))
            gone = self.made.arrived(key, SIZES[key])
            self.loading.discard(key)
            self.here.add(key)
            self.drop(gone)

    @rule(consumer=st.sampled_from("abc"))
    def release(self, consumer):
        if ready := [t for t in self.batches[consumer] if not self.made.missing(consumer, t)][:1]:
            self.drop(self.made.release(consumer, ready[0]))
            for ticket in [t for t in self.batches[consumer] if t <= ready[0]]:
                del self.batches[consumer][ticket]

    @rule(consumer=st.sampled_from("abc"))
    def leave(self, consumer):
        self.drop(self.made.remove_consumer(consumer))
        self.batches[consumer] = {}

    @invariant()
    def holds(self):
        if not hasattr(self, "made"):
            return
        self.made.validate()
        assert self.made.buffered_nbytes == sum(SIZES[key] for key in self.here), "what it counts is what is there"
        for consumer, batches in self.batches.items():
            assert self.made.announced(consumer) == tuple(batches)
            for ticket, keys in batches.items():
                assert set(self.made.missing(consumer, ticket)) == set(keys) - self.here

    def teardown(self):
        """Without limit or luck, every batch of every consumer comes, in order."""
        for _ in range(200):
            if not hasattr(self, "made") or not any(self.batches.values()):
                break
            self.admit()
            for key in sorted(self.loading):
                if key in self.loading:
                    self.loading.discard(key)
                    self.here.add(key)
                    self.drop(self.made.arrived(key, SIZES[key]))
            for consumer in "abc":
                self.release(consumer)
            self.holds()
        else:
            pytest.fail("somebody stalls")
        assert not hasattr(self, "made") or (self.here, self.made.buffered_nbytes) == (set(), 0)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 10**12), max_size=200))
def test_an_estimate_is_never_above_the_largest_seen(sizes):
    estimate = SizeEstimate(0)
    for size in sizes:
        estimate.saw(size)
    assert 0 <= estimate.nbytes <= max(sizes, default=0)
