"""The safetensors package is the judge of our bytes, and we read what it writes."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ephemeron.data import Samples, decode, encode
from ephemeron.errors import CorruptMessage, JobError

DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", ">f4", ">i8"]
dtypes = st.sampled_from(DTYPES).map(np.dtype)


def joined(samples: Samples) -> bytes:
    return b"".join(encode(samples))


@st.composite
def any_samples(draw: st.DrawFn) -> Samples:
    count = draw(st.integers(0, 5))
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    inputs, targets = (draw(hnp.arrays(draw(dtypes), (count, *draw(shapes)))) for _ in range(2))
    return Samples(inputs, targets)


@given(any_samples())
def test_round_trip(samples: Samples) -> None:
    back = decode(joined(samples))
    for a, b in ((samples.inputs, back.inputs), (samples.targets, back.targets)):
        assert a.shape == b.shape
        assert b.dtype == a.dtype.newbyteorder("=")
        assert a.astype(b.dtype).tobytes() == b.tobytes()


@given(any_samples())
def test_the_safetensors_package_reads_ours(samples: Samples) -> None:
    loaded = safetensors.numpy.load(joined(samples))
    assert loaded["inputs"].tobytes() == samples.inputs.astype(samples.inputs.dtype.newbyteorder("<")).tobytes()
    assert loaded["targets"].shape == samples.targets.shape


def test_we_read_what_the_safetensors_package_writes() -> None:
    arrays = {"inputs": np.arange(12, dtype=np.float32).reshape(3, 4), "targets": np.array([2, 0, 1])}
    back = decode(safetensors.numpy.save(arrays))
    np.testing.assert_array_equal(back.inputs, arrays["inputs"])
    np.testing.assert_array_equal(back.targets, arrays["targets"])


def test_no_copy_on_either_side() -> None:
    samples = Samples(np.ones((3, 5), np.float32), np.arange(3))
    assert any(np.shares_memory(np.frombuffer(b, np.uint8), samples.inputs) for b in encode(samples)[1:])
    buffer = bytearray(joined(samples))
    back = decode(buffer)
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), back.inputs)
    assert back.inputs.flags.aligned
    assert back.targets.flags.aligned
    assert not decode(bytes(buffer)).inputs.flags.writeable


def test_views_that_are_not_contiguous_are_written_in_order() -> None:
    whole = np.arange(24).reshape(4, 6)
    back = decode(joined(Samples(whole[::2, ::3], whole[1::2, 0])))
    np.testing.assert_array_equal(back.inputs, whole[::2, ::3])


def test_take_len_and_nbytes() -> None:
    samples = Samples(np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(5))
    part = samples.take([4, 0, 4])
    assert part.targets.tolist() == [4, 0, 4]
    assert part.inputs[1].tolist() == [0, 1]
    assert len(samples) == 5
    assert samples.nbytes == 5 * 2 * 4 + 5 * 8
    assert len(samples.take([])) == 0


def test_unequal_lengths_name_both() -> None:
    with pytest.raises(JobError, match="3 inputs but 2 targets"):
        Samples(np.zeros((3, 1)), np.zeros(2))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.zeros(()), "inputs are a single value of dtype float64"),
        (np.array(["a", "b"]), "inputs have dtype <U1"),
        (np.array([None, 1]), "inputs have dtype object"),
    ],
)
def test_what_is_no_samples(inputs: np.ndarray, message: str) -> None:
    with pytest.raises(JobError, match=message):
        Samples(inputs, np.zeros(2))


@given(any_samples(), st.data())
def test_truncation_is_noticed(samples: Samples, data: st.DataObject) -> None:
    whole = joined(samples)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CorruptMessage):
        decode(whole[:cut])


def headed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc", "3 bytes are too few"),
        ((10**12).to_bytes(8, "little"), "header of 1000000000000 bytes"),
        (headed(b"{"), "is not JSON"),
        (headed(b"[]"), "is not a table"),
        (headed(b"{}"), "has no 'inputs'"),
        (headed(b'{"inputs":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}}'), "'inputs' is malformed"),
        (headed(b'{"inputs":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}'), "'inputs' is malformed"),
        (headed(b'{"inputs":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}'), "of 9 bytes is not at 0:9 of 8"),
        (headed(b'{"inputs":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}'), "of 2 bytes is not at 0:1"),
        (
            headed(b'{"inputs":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"targets":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}'),
            "2 inputs but 1 targets",
        ),
    ],
)
def test_damage_is_named(data: bytes, message: str) -> None:
    with pytest.raises(CorruptMessage, match=message):
        decode(data)


def test_inputs_of_several_columns_keep_their_fields() -> None:
    inputs = np.zeros(3, [("city", "<i8"), ("größe ü", "<f4"), ("plan", "<f4", (2,))])
    inputs["city"], inputs["plan"] = [2, 0, 1], [[1, 0], [0, 1], [0, 0]]
    data = b"".join(encode(Samples(inputs, np.arange(3))))
    found = decode(data)
    assert found.inputs.dtype == inputs.dtype
    assert np.array_equal(found.inputs, inputs)
    assert found.take([2]).inputs["city"].tolist() == [1]
    assert not np.shares_memory(found.inputs, inputs)
    assert len(decode(b"".join(encode(Samples(inputs[:0], np.arange(0))))).inputs) == 0
    with pytest.raises(CorruptMessage, match="the fields"):
        decode(data.replace(b"<i8", b"<i2"))
