"""When an invocation starts its successor and hands off."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.training.worker.recovery.handoff import HandOff


def handoff(**values):
    return HandOff(**{"lifetime_s": 100.0, "cold_start_s": 3.0, "start_s": 1.0, "attempt": 0, **values})


def test_a_hand_off_is_due_when_one_and_a_half_iterations_and_closing_do_not_fit():
    h = handoff()
    assert h.closing_s() == 0.5
    assert not h.is_due(15.6, typical_s=10.0)
    assert h.is_due(15.4, typical_s=10.0)


def test_a_slow_write_of_the_state_needs_more_time():
    h = handoff(write_s=4.0)
    assert h.closing_s() == 8.0
    assert h.is_due(22.9, typical_s=10.0)
    assert not h.is_closing(16.1)
    assert h.is_closing(15.9)


def test_the_others_are_told_an_iteration_ahead():
    h = handoff()  # leaving takes 15.5 s and a quarter of an iteration
    assert not h.is_announced(28.1, typical_s=10.0, passed_s=0.0)
    assert h.is_announced(27.9, typical_s=10.0, passed_s=0.0)
    assert not h.is_announced(27.9, typical_s=10.0, passed_s=6.0)


def test_half_of_the_time_limit():
    assert handoff().is_past_middle(49.9)
    assert not handoff().is_past_middle(50.0)


def test_no_successor_is_needed_by_an_invocation_that_finishes_the_run():
    h = handoff()
    assert not h.needs_successor(60.0, typical_s=10.0, iterations_left=1)
    assert h.needs_successor(20.0, typical_s=10.0, iterations_left=50)


def test_a_successor_that_loads_long_is_started_earlier():
    def first_needed(**values):
        h = handoff(**values)
        return max(left for left in range(100) if h.needs_successor(float(left), typical_s=2.0, iterations_left=1000))

    assert first_needed(load_s=8.0) > first_needed(load_s=0.5)
    assert first_needed(attempt=0) > first_needed(attempt=1)  # later ones find a warm environment


@given(left=st.floats(0, 100), typical=st.floats(0, 60), load=st.floats(0, 30), write=st.floats(0, 10), attempt=st.integers(0, 3))
def test_a_hand_off_that_is_due_was_prepared(left, typical, load, write, attempt):
    h = handoff(load_s=load, write_s=write, attempt=attempt)
    if h.is_due(left, typical):
        assert h.is_announced(left, typical, passed_s=typical)
        assert h.needs_successor(left, typical, iterations_left=10_000)


@pytest.mark.parametrize("left", [0.0, 0.1])
def test_an_unknown_iteration_time_does_not_divide_by_zero(left):
    assert handoff().needs_successor(left, typical_s=0.0, iterations_left=10)
