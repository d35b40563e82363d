"""Named arrays as bytes, and the digest that says whether two runs ended alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ephemeron.errors import CorruptMessage
from ephemeron.training.tensors import decode_state, digest, encode_state

dtypes = st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"])
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
states = st.dictionaries(st.text("abc./_ü", min_size=1, max_size=8), arrays, max_size=5)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(states, st.dictionaries(st.text(max_size=5), plain, max_size=4))
@settings(deadline=None)
def test_arrays_and_notes_come_back(state, meta):
    got, notes = decode_state(encode_state(state, meta))
    assert notes == meta
    assert set(got) == set(state)
    for name, array in state.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes()


def test_what_is_decoded_may_be_changed():
    data = encode_state({"a": np.zeros(3)}, {})
    first, _ = decode_state(memoryview(data))
    first["a"][0] = 5
    assert decode_state(data)[0]["a"][0] == 0


def test_views_with_gaps_and_in_the_other_order_are_encoded_by_value():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    got, _ = decode_state(encode_state({"t": base.T, "s": base[:, ::2]}, {}))
    np.testing.assert_array_equal(got["t"], base.T)
    np.testing.assert_array_equal(got["s"], base[:, ::2])


def test_the_same_state_is_the_same_bytes():
    assert encode_state({"a": np.ones(2), "b": np.ones(1)}, {"x": 1}) == encode_state({"b": np.ones(1), "a": np.ones(2)}, {"x": 1})


def test_a_state_that_was_cut_short_is_corrupt():
    data = encode_state({"a": np.arange(10.0)}, {"iteration": 3})
    for length in range(len(data)):
        with pytest.raises(CorruptMessage, match="key some/key"):
            decode_state(data[:length], key="some/key")


def test_a_damaged_header_is_corrupt_or_harmless_but_never_another_error():
    data = encode_state({"a": np.arange(10.0)}, {"iteration": 3})
    for position in range(len(data) - 80):
        for flip in (0x01, 0x10, 0x80):
            damaged = bytearray(data)
            damaged[position] ^= flip
            try:
                decode_state(bytes(damaged))
            except CorruptMessage:
                continue


def test_rubbish_is_corrupt():
    with pytest.raises(CorruptMessage):
        decode_state(b"\x02\0\0\0\0\0\0\0{]" + b"rubbish")


# -- digest -----------------------------------------------------------------------------------------------

WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, dtype=np.float32)}


def test_the_digest_does_not_depend_on_order_or_memory_layout():
    again = {"b": WEIGHTS["b"].copy(), "w": np.asfortranarray(WEIGHTS["w"])}
    assert digest(again) == digest(WEIGHTS)


@pytest.mark.parametrize(
    "change",
    [
        {"w": WEIGHTS["w"] + np.float32(1e-6)},
        {"w": WEIGHTS["w"].reshape(3, 2)},
        {"w": WEIGHTS["w"].view(np.int32)},
        {"w": WEIGHTS["w"].astype(np.float64)},
        {"b": -WEIGHTS["b"]},  # minus zero: equal, but not the same bits
        {"c": np.zeros(0, dtype=np.float32)},
    ],
    ids=["value", "shape", "dtype of the same width", "wider dtype", "sign of zero", "one more"],
)
def test_the_digest_sees_every_difference(change):
    assert digest({**WEIGHTS, **change}) != digest(WEIGHTS)


def test_the_digest_sees_names():
    assert digest({"v": WEIGHTS["w"], "b": WEIGHTS["b"]}) != digest(WEIGHTS)
    assert digest({"w": WEIGHTS["b"], "b": WEIGHTS["w"]}) != digest(WEIGHTS)


def test_a_single_value_is_not_a_vector_of_one():
    assert digest({"n": np.array(3)}) != digest({"n": np.array([3])})


@given(states)
@settings(deadline=None)
def test_the_digest_survives_storage(state):
    assert digest(decode_state(encode_state(state, {}))[0]) == digest(state)
