"""The trainer's buffer: in order, once each, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.scheduler import LocalBuffer
from ephemeron.errors import JobError


def test_batches_come_in_order_and_once():
    buffer: LocalBuffer[str] = LocalBuffer(batches=3, limit_nbytes=100, in_flight=3)
    assert [buffer.request() for _ in range(4)] == [0, 1, 2, None]
    assert buffer.put(1, "one", 5)
    assert buffer.get() is None
    assert (buffer.received, buffer.outstanding) == (0, (0, 2))
    assert buffer.put(0, "zero", 5)
    assert not buffer.put(0, "again", 5)
    assert not buffer.put(7, "never asked for", 5)
    assert buffer.received == 2
    assert (buffer.get(), buffer.get(), buffer.get()) == ("zero", "one", None)
    assert not buffer.put(1, "late", 5)
    assert (buffer.taken, buffer.held_nbytes) == (2, 0)
    assert [buffer.request() for _ in range(3)] == [3, 4, None], "batch 2 is still under way"


def test_it_goes_on_after_it_was_full():
    buffer: LocalBuffer[int] = LocalBuffer(batches=1, limit_nbytes=10, first=7)
    for number in range(7, 12):
        assert (buffer.request(), buffer.request()) == (number, None)
        buffer.put(number, number, 3)
        assert buffer.request() is None
        assert buffer.get() == number


def test_bytes_bound_what_is_asked_for_but_never_the_next_batch():
    buffer: LocalBuffer[int] = LocalBuffer(batches=10, limit_nbytes=100, in_flight=10)
    buffer.request()
    buffer.put(0, 0, 40)
    assert [buffer.request(), buffer.request()] == [1, None], "two of 40 fit, three do not"
    buffer.put(1, 1, 1000)
    assert buffer.request() is None
    assert buffer.get() == 0
    assert buffer.request() is None
    assert buffer.get() == 1
    assert buffer.request() == 2


def test_a_batch_larger_than_the_limit_is_asked_for_once_nothing_else_is_held():
    buffer: LocalBuffer[int] = LocalBuffer(batches=5, limit_nbytes=10)
    assert [buffer.request(), buffer.request()] == [0, 1], "nothing is known yet"
    buffer.put(0, 0, 40)
    buffer.put(1, 1, 40)
    assert (buffer.get(), buffer.request()) == (0, None)
    assert (buffer.get(), buffer.request(), buffer.request()) == (1, 2, None)


def test_mistakes_are_named():
    with pytest.raises(JobError, match="batches = 0"):
        LocalBuffer(batches=0, limit_nbytes=1)


@given(st.randoms(), st.integers(1, 5), st.integers(1, 200), st.integers(1, 4), st.lists(st.integers(0, 300), min_size=1, max_size=25))
def test_any_order_of_answers_gives_the_same_stream_within_the_bound(rng, batches, limit, in_flight, sizes):
    buffer: LocalBuffer[int] = LocalBuffer(batches=batches, limit_nbytes=limit, in_flight=in_flight)
    answers: list[int] = []
    got: list[int] = []
    while len(got) < len(sizes):
        if (number := buffer.request()) is not None and number < len(sizes):
            answers += [number] * rng.randint(1, 2)
        if answers:
            number = answers.pop(rng.randrange(len(answers)))
            buffer.put(number, number, sizes[number])
        assert buffer.held_nbytes <= limit + in_flight * max(sizes)
        assert len(buffer.outstanding) <= in_flight
        if rng.random() < 0.5 and (batch := buffer.get()) is not None:
            got.append(batch)
    assert got == list(range(len(sizes)))
