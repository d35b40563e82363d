"""Samples on the wire: what goes in comes out, side by side, and owned by whoever keeps it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ephemeron.communication.rpc import BufferPool
from ephemeron.data.flow.collate import Stacking
from ephemeron.data.service.sample_codec import LEAST_BYTES, layout, owned, pack, samples_in, unpack
from ephemeron.data.service.shard_state import SerializedSample


def packed(*sizes: int) -> SerializedSample:
    return SerializedSample(buffers=tuple(bytes([n % 256]) * n for n in sizes), nbytes=sum(sizes))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=8))
def test_a_frame_gives_back_its_samples(sizes: list[list[int]]) -> None:
    samples = [packed(*each) for each in sizes]
    counts, parts = layout(samples)
    assert counts == [len(each) for each in sizes]
    assert samples_in(counts, parts) == [list(sample.buffers) for sample in samples]


@given(st.integers(1, 6), st.integers(1, 4))
def test_equal_levels_lie_side_by_side(samples: int, levels: int) -> None:
    names = [[f"{s}.{level}".encode() for level in range(levels)] for s in range(samples)]
    _, parts = layout([SerializedSample(buffers=tuple(each), nbytes=0) for each in names])
    assert parts == [names[s][level] for level in range(levels) for s in range(samples)]


ARRAYS = hnp.arrays(st.sampled_from([np.uint8, np.int64, np.float32, np.bool_]), hnp.array_shapes(max_dims=3, min_side=0, max_side=20))


@given(st.recursive(st.one_of(ARRAYS, st.integers(), st.text(max_size=5)), lambda x: st.tuples(x, x), max_leaves=4))
def test_anything_survives(sample: Any) -> None:
    one = pack(sample, cost_s=0.5)
    assert one.nbytes == sum(memoryview(b).nbytes for b in one.buffers)
    kept = owned(one, BufferPool())
    assert (kept.nbytes, kept.cost_s, kept.failed) == (one.nbytes, 0.5, False)
    for back in (unpack(one.buffers), unpack(kept.buffers)):
        np.testing.assert_equal(back, sample)


def test_only_what_is_worth_it_stands_out() -> None:
    small, large = np.zeros(LEAST_BYTES - 1, np.uint8), np.ones(LEAST_BYTES, np.uint8)
    assert len(pack((small, small)).buffers) == 1
    assert len(pack((small, large)).buffers) == 2


@pytest.mark.parametrize("nbytes", [LEAST_BYTES, 1 << 16, 1 << 20])
def test_what_is_owned_does_not_change_with_its_frame(nbytes: int) -> None:
    frame = np.full(nbytes, 7, np.uint8)
    kept = owned(SerializedSample(buffers=(frame.data,), nbytes=nbytes), BufferPool())
    frame[:] = 8
    assert bytes(kept.buffers[0]) == b"\7" * nbytes


def test_a_batch_from_one_frame_is_stacked_already() -> None:
    samples = [(np.full((8, 64), i, np.float32), i) for i in range(5)]
    counts, parts = layout([pack(sample) for sample in samples])
    frame = bytearray().join([bytes(part) for part in parts])
    views, at = [], 0
    for part in parts:
        size = memoryview(part).nbytes
        views.append(memoryview(frame)[at : at + size])
        at += size
    back = [unpack(each) for each in samples_in(counts, views)]
    stacking = Stacking()
    stacking._collate = lambda values: [tuple(part) for part in zip(*values, strict=True)]  # were it called at all
    whole = stacking.in_place([data for data, _ in back])
    np.testing.assert_equal(np.asarray(whole), np.stack([data for data, _ in samples]))
    assert np.shares_memory(np.asarray(whole), np.frombuffer(frame, np.uint8)), "not copied"


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises((TypeError, AttributeError)):
        pack((lambda: 1, object.__new__(type(iter([])))))
