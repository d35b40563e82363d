"""Polling by prediction: few polls, small delays, and changes are followed."""

from __future__ import annotations

import json
import random
import statistics

import numpy as np
import pytest
from groups import PolledChannel, Rounds, random_vectors
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.communication.channels.base import GROWTH, LEAST_STEP_S
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.training.collectives.object_receiver import MEMORY, ArrivalPredictor, cheapest


class Sender:
    """Objects that appear some time after a reference, and a reader that polls for them with growing steps."""

    def __init__(self, *, skew_s: float = 0.0, seed: int = 0) -> None:
        self.expectation = ArrivalPredictor()
        self.skew_s = skew_s
        self.random = random.Random(seed)
        self.reference = 1000.0
        self.polls = self.gets = 0
        self.delays: list[float] = []

    def round(self, after_s: float, jitter_s: float) -> None:
        self.reference += 10
        appears = self.reference + after_s + abs(self.random.gauss(0, jitter_s))
        predicted = self.expectation.predict("s", self.reference)
        asked = self.reference if predicted is None else predicted
        step, gap = LEAST_STEP_S, 0.0
        while asked < appears:
            self.polls += 1
            asked, gap = asked + step, step
            step = min(0.25, step * GROWTH)
        self.gets += 1
        self.delays.append(asked - appears)
        age = asked - appears + 0.05 + self.skew_s
        self.expectation.observe("s", self.reference, found=asked, gap_s=gap, age_s=age)

    def rounds(self, n: int, after_s: float, jitter_s: float) -> tuple[float, float]:
        """Polls per get and median delay of these rounds."""
        polls, gets, seen = self.polls, self.gets, len(self.delays)
        for _ in range(n):
            self.round(after_s, jitter_s)
        return (self.polls - polls) / (self.gets - gets), statistics.median(self.delays[seen:])


@pytest.mark.parametrize("skew_s", [0.0, -3.0, 0.4])
@pytest.mark.parametrize(("jitter_s", "most_polls"), [(0.0, 0.2), (0.002, 0.5), (0.01, 1.5)])
def test_few_polls_and_small_delays(jitter_s, most_polls, skew_s):
    sender = Sender(skew_s=skew_s)
    sender.rounds(30, 1.5, jitter_s)
    polls, delay = sender.rounds(300, 1.5, jitter_s)
    assert polls < most_polls
    assert delay < 0.002 + 0.6 * jitter_s


@given(st.lists(st.floats(0, 1), min_size=1, max_size=16).map(sorted), st.floats(0.001, 0.05), st.floats(0.0005, 0.03))
def test_the_first_poll_is_the_cheapest_of_all_appearances(appeared, worth_s, latency_s):
    def cost(at: float) -> float:
        total = 0.0
        for x in appeared:
            polled, step = at, max(latency_s, LEAST_STEP_S)
            while polled < x:
                polled, step, total = polled + latency_s + step, step * GROWTH, total + worth_s
            total += polled - x
        return total

    best = cheapest(appeared, latency_s, worth_s)
    assert best in appeared
    assert cost(best) <= min(map(cost, appeared)) + 1e-9


def test_dear_polls_are_made_late_and_cheap_ones_early():
    appeared = [0.1, 0.11, 0.12, 0.15]
    assert cheapest(appeared, 0.001, 10.0) == 0.15
    assert cheapest(appeared, 0.001, 0.0) == 0.1


@pytest.mark.parametrize("new_s", [1.0, 2.8])
def test_follows_a_change(new_s):
    sender = Sender()
    sender.rounds(40, 2.0, 0.002)
    sender.rounds(MEMORY, new_s, 0.002)
    polls, delay = sender.rounds(60, new_s, 0.002)
    assert delay < 0.005
    assert polls < 1.5


def test_follows_clocks_that_are_set():
    sender = Sender()
    sender.rounds(40, 2.0, 0.002)
    for sender.skew_s in (5.0, -5.0):
        sender.rounds(2 * MEMORY, 2.0, 0.002)
        polls, delay = sender.rounds(60, 2.0, 0.002)
        assert delay < 0.02
        assert polls < 0.6


@pytest.mark.parametrize("before", [0, 60])
def test_one_late_object_does_not_spoil_the_estimate(before):
    """A function that is replaced, or that starts last, keeps everybody waiting: once."""
    sender = Sender()
    for _ in range(before):
        sender.round(1.0, 0.002)
    sender.round(61.0, 0.0)
    sender.rounds(3, 1.0, 0.002)
    predicted = sender.expectation.predict("s", 0.0)
    assert predicted is not None
    assert predicted < 1.1


def test_slow_first_rounds_are_forgotten_soon():
    """Functions start one after another and allocate in their first rounds; nobody should wait for that for long."""
    sender = Sender()
    for after_s in (9.0, 3.0, 1.5):
        sender.round(after_s, 0.0)
    sender.rounds(6, 0.05, 0.002)
    predicted = sender.expectation.predict("s", 0.0)
    assert predicted is not None
    assert predicted < 0.08


def test_a_successor_expects_what_its_predecessor_did():
    sender, successor = Sender(), Sender(seed=1)
    sender.rounds(60, 1.5, 0.002)
    successor.expectation.load(json.loads(json.dumps(sender.expectation.state())))
    told = successor.expectation.predict("s", 0.0)
    assert told == pytest.approx(sender.expectation.predict("s", 0.0), abs=0.004)
    polls, delay = successor.rounds(5, 1.5, 0.002)
    assert polls < 2
    assert delay < 0.01


def test_nothing_is_told_of_what_was_never_missed():
    expectation = ArrivalPredictor()
    expectation.observe("b", 5.0, found=6.0, gap_s=0.0, age_s=0.3)
    assert expectation.state() == {}


def test_streams_are_apart():
    expectation = ArrivalPredictor()
    assert expectation.predict("a", 5.0) is None
    for _ in range(2):
        expectation.observe("a", 5.0, found=6.0, gap_s=0.2, age_s=0.3)
    expectation.observe("b", 5.0, found=6.0, gap_s=0.0, age_s=0.3)
    assert expectation.predict("a", 10.0) == pytest.approx(10.9)
    assert expectation.predict("b", 10.0) is None  # it may have been there all along


@pytest.mark.parametrize("pattern", ["k-reduce", "pipelined"])
@pytest.mark.parametrize(("world", "aggregators"), [(4, 1), (4, 4), (8, 2)])
def test_a_group_polls_little_and_loses_little(pattern, world, aggregators):
    """Whole rounds over a store that cannot wait, against the same over one that can; jitter, and wrong clocks."""
    rounds, size = 25, 250_000
    vectors = np.broadcast_to(random_vectors(1, world, size), (rounds, world, size))
    seconds = {}
    for store in (MemoryChannel(), PolledChannel()):
        trial = Rounds(world, aggregators, pattern=pattern, store=store, jitter_s=0.001, start_jitter_s=0.002, skew_s=0.5, seed=4)
        trial.reduce(vectors, [[1.0] * world] * rounds)
        seconds[type(store)] = float(np.median(trial.seconds[10:]))
        if isinstance(store, PolledChannel):
            early, late = trial.traffic[9], trial.traffic[-1]
            assert (late.polls - early.polls) / (late.gets - early.gets) < 0.2
    # a chain of two waits, and a request that comes too early costs its latency and a step
    assert seconds[PolledChannel] < seconds[MemoryChannel] + 3 * trial.latency_s
