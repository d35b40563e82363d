"""Messages: everything comes back, and nothing damaged is ever taken for a message."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.communication.object_frame import opened, run_hash, sealed
from ephemeron.errors import CorruptMessage
from ephemeron.training.tensors import HEADER_BYTES, STOP, MessageHeader, codec_by_name, pack
from ephemeron.training.tensors import unpack as unpacked

KEY = "a-run/g0/7.m.2"

u32 = st.integers(0, 2**32 - 1)
envelopes = st.builds(
    MessageHeader,
    kind=st.sampled_from(["contribution", "merged"]),
    rank=u32,
    attempt=u32,
    iteration=st.integers(0, 2**64 - 1),
    shard=u32,
    weight=st.floats(0, 1e12),
    applied=u32,
    durable=u32,
    flags=st.sampled_from([0, STOP]),
    sent_at=st.floats(-1e9, 1e9),
    marks=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(tuple),
)


def message(envelope, vector, codec="none", key=KEY) -> bytes:
    codec = codec_by_name(codec)
    packed = pack(envelope, codec.encode(vector), codec=codec, dtype=vector.dtype, elements=vector.size)
    return b"".join(sealed(packed, key=key))


def unpack(data: memoryview, *, key: str = KEY):
    return unpacked(opened(data, key=key), key=key)


def sample(codec="none", *, marks=(3, 4), size=20) -> bytes:
    envelope = MessageHeader(kind="merged", rank=1, attempt=0, iteration=7, shard=2, weight=32.0, applied=7, durable=5, marks=marks)
    return message(envelope, np.linspace(-1, 1, size, dtype=np.float32), codec)


@given(envelopes, st.integers(0, 40), st.sampled_from(["none", "bf16", "int8"]), st.sampled_from([np.float16, np.float32, np.float64]))
@settings(deadline=None)
def test_what_is_packed_comes_back(envelope, size, codec, dtype):
    vector = (np.arange(size) % 7 - 3).astype(dtype)
    payload = b"".join(codec_by_name(codec).encode(vector))
    data = message(envelope, vector, codec)
    got, decoded = unpack(memoryview(data), key=KEY)
    assert got == envelope
    expected = codec_by_name(codec).decode(memoryview(payload), np.dtype(dtype), size)
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(decoded, expected)
    assert len(data) == HEADER_BYTES + 8 * len(envelope.marks) + len(payload)


def test_a_plain_vector_is_neither_copied_when_packed_nor_when_unpacked():
    vector = np.arange(6, dtype=np.float32)
    codec = codec_by_name("none")
    envelope = MessageHeader(kind="contribution", rank=0, attempt=0, iteration=0, shard=0, weight=1, applied=0, durable=0)
    buffers = sealed(pack(envelope, codec.encode(vector), codec=codec, dtype=vector.dtype, elements=6), key=KEY)
    assert np.shares_memory(np.frombuffer(buffers[-1], dtype=np.uint8), vector)
    data = b"".join(buffers)
    _, decoded = unpack(memoryview(data), key=KEY)
    assert np.shares_memory(decoded, np.frombuffer(data, dtype=np.uint8))
    assert not decoded.flags.writeable


def test_the_same_message_is_the_same_bytes():
    assert sample("int8") == sample("int8")


@pytest.mark.parametrize("codec", ["none", "bf16", "int8"])
def test_any_flipped_byte_is_noticed(codec):
    data = sample(codec)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        with pytest.raises(CorruptMessage, match=f"key {KEY}"):
            unpack(memoryview(damaged), key=KEY)


@given(st.data())
@settings(deadline=None)
def test_any_other_byte_anywhere_is_noticed(data):
    raw = sample()
    position = data.draw(st.integers(0, len(raw) - 1))
    damaged = bytearray(raw)
    damaged[position] = data.draw(st.integers(0, 255).filter(lambda b: b != raw[position]))
    with pytest.raises(CorruptMessage):
        unpack(memoryview(damaged), key=KEY)


def test_a_message_that_was_cut_short_or_grew_is_noticed():
    data = sample()
    for length in range(len(data)):
        with pytest.raises(CorruptMessage):
            unpack(memoryview(data[:length]), key=KEY)
    with pytest.raises(CorruptMessage, match="arrived"):
        unpack(memoryview(data + b"\0"), key=KEY)


def test_another_runs_message_is_refused():
    with pytest.raises(CorruptMessage, match="another run"):
        unpack(memoryview(sample()), key="another-run/g0/7.m.2")


def test_another_release_is_refused():
    data = bytearray(sample())
    data[4] += 1
    with pytest.raises(CorruptMessage, match="version 3"):
        unpack(memoryview(data), key=KEY)
    with pytest.raises(CorruptMessage, match="magic"):
        unpack(memoryview(b"PK\x03\x04" + bytes(data)[4:]), key=KEY)


def test_the_place_of_what_every_release_must_find():
    """Magic, version and run stand where they stood in version 1, so that a newer release can say what it met."""
    data = sample()
    assert data[:4] == b"EPHM"
    assert data[4] == 2
    assert struct.unpack_from("<Q", data, 8) == (run_hash("a-run"),)


def test_run_hashes_tell_runs_apart():
    assert run_hash("run-1") != run_hash("run-2")
    assert 0 <= run_hash("run-1") < 2**64


def test_an_object_of_another_key_is_refused_whatever_the_difference():
    """Iteration, kind, sender, shard, group: all are in the key."""
    own = "a-run/g0/7.c.1.2"
    data = b"".join(sealed([b"what it says"], key=own))
    assert bytes(opened(memoryview(data), key=own)) == b"what it says"
    for other in ("a-run/g0/6.c.1.2", "a-run/g0/7.m.1.2", "a-run/g0/7.c.0.2", "a-run/g0/7.c.1.1", "a-run/g1/7.c.1.2"):
        with pytest.raises(CorruptMessage, match=f"another key of this run.*{other}"):
            opened(memoryview(data), key=other)
