from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.training.tensors import bounds, chunk_bounds


def assert_consecutive(pieces, start, stop):
    at = start
    for a, b in pieces:
        assert a == at
        assert b >= a
        at = b
    assert at == stop


@given(st.integers(0, 10_000), st.integers(1, 300))
@settings(deadline=None)
def test_shards_cover_the_vector_exactly_and_evenly(size, parts):
    pieces = bounds(size, parts)
    assert len(pieces) == parts
    assert_consecutive(pieces, 0, size)
    lengths = [b - a for a, b in pieces]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_more_parts_than_elements():
    assert bounds(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="parts = 0"):
        bounds(5, 0)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 700))
@settings(deadline=None)
def test_chunks_cover_a_shard_exactly_and_none_is_longer(start, length, chunk):
    pieces = chunk_bounds(start, start + length, chunk)
    assert_consecutive(pieces, start, start + length)
    assert all(b - a <= max(1, chunk) for a, b in pieces)
    assert len(pieces) == max(1, -(-length // max(1, chunk)))


def test_an_empty_shard_is_one_empty_chunk():
    assert chunk_bounds(7, 7, 100) == [(7, 7)]
