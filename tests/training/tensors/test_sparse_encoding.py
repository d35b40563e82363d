"""The sparse codec: every bit comes back whatever the pattern, and it is never much longer than the vector."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import CorruptMessage
from ephemeron.training.tensors import MessageHeader, codec_by_name, pack, unpack

CODEC = codec_by_name("sparse")
HEAD = 16
DTYPES = [np.float16, np.float32, np.float64]


def raw(buffers) -> bytes:
    return b"".join(bytes(b) for b in buffers)


def round_trip(vector: np.ndarray) -> np.ndarray:
    return CODEC.decode(memoryview(raw(CODEC.encode(vector))), vector.dtype, vector.size)


@st.composite
def patterns(draw):
    """Vectors of spans: zeros, minus zeros, and values of any bits, NaN and infinities among them."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    spans = draw(st.lists(st.tuples(st.sampled_from(["zero", "minus", "any"]), st.integers(0, 400)), max_size=12))
    dice = np.random.default_rng(draw(st.integers(0, 999)))
    parts = [np.zeros(0, dtype)]
    for kind, count in spans:
        if kind == "any":
            parts.append(dice.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype))
        else:
            parts.append(np.full(count, 0.0 if kind == "zero" else -0.0, dtype))
    return np.concatenate(parts)


@settings(max_examples=60, deadline=None)
@given(patterns())
def test_every_bit_comes_back(vector):
    got = round_trip(vector)
    assert got.dtype == vector.dtype
    assert got.tobytes() == vector.tobytes()
    assert len(raw(CODEC.encode(vector))) <= HEAD + vector.nbytes


@pytest.mark.parametrize(
    ("count", "most"), [(0, 0), (1, 4 + 4 + 1), (1_000, 1_000 * (4 + 2 + 1)), (100_000, 100_000 * 4 + 125_000), (1_000_000, 4_000_000)]
)
def test_bytes_by_number_of_values(count, most):
    vector = np.zeros(1_000_000, np.float32)
    vector[np.random.default_rng(0).choice(vector.size, count, replace=False)] = 1
    assert len(raw(CODEC.encode(vector))) <= HEAD + most


def test_rows_of_an_embedding_take_hardly_more_than_their_values():
    rows = np.zeros((20_000, 64), np.float32)
    rows[::97] = 1
    assert len(raw(CODEC.encode(rows.reshape(-1)))) < 1.02 * rows[::97].nbytes


def test_a_parameter_without_gradient_takes_no_bytes():
    vector = np.full(100_000, -0.0, np.float32)
    vector[7] = 3
    assert len(raw(CODEC.encode(vector))) < 32
    assert round_trip(vector).tobytes() == vector.tobytes()


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_message_that_is_cut_is_refused(cut):
    vector = np.zeros(50_000, np.float32)
    vector[[3, 4, 900, 40_000]] = 1
    header = MessageHeader(kind="merged", rank=0, attempt=0, iteration=1, shard=0, weight=1.0, applied=0, durable=0)
    data = raw(pack(header, CODEC.encode(vector), codec=CODEC, dtype=vector.dtype, elements=vector.size))
    assert unpack(memoryview(data), key="k")[1].tobytes() == vector.tobytes()
    with pytest.raises(CorruptMessage):
        unpack(memoryview(data[:-cut]), key="k")
