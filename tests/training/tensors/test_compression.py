"""Codecs: what they may lose, what they must not, and that error feedback loses nothing for good."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ephemeron.errors import JobError
from ephemeron.training.tensors import Compressor, codec_by_name
from ephemeron.training.tensors.compression import INT8_BLOCK

F32 = np.dtype(np.float32)
LARGE = float(np.float32(1e38))
MODERATE = 1e6
NEGLIGIBLE = 127 * float(np.finfo(np.float32).tiny)
"""Blocks whose largest magnitude is below it become zeros: their grid's steps would be denormal."""


def vectors_up_to(top):
    return hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(-top, top, width=32))


def raw(buffers) -> bytes:
    return b"".join(bytes(b) for b in buffers)


def round_trip(name, vector, dtype=F32):
    codec = codec_by_name(name)
    return codec.decode(memoryview(raw(codec.encode(vector))), np.dtype(dtype), vector.size)


def of_bits(*bits: int) -> np.ndarray:
    return np.array(bits, dtype=np.uint32).view(np.float32)


def test_names():
    assert [codec_by_name(n).name for n in ("none", "bf16", "int8", "sparse")] == ["none", "bf16", "int8", "sparse"]
    with pytest.raises(JobError, match="compression = 'zip' is not known; use one of none, bf16, int8, sparse"):
        codec_by_name("zip")


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "sparse"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, INT8_BLOCK - 1, INT8_BLOCK, INT8_BLOCK + 1, 3 * INT8_BLOCK])
def test_every_size_and_dtype_comes_back_in_shape(name, dtype, size):
    vector = np.random.default_rng(size).normal(size=size).astype(dtype)
    got = round_trip(name, vector, dtype)
    assert got.dtype == dtype
    assert got.shape == vector.shape
    np.testing.assert_allclose(got, vector, rtol=2**-8 if name == "bf16" else 0, atol=0.03 if name == "int8" else 0)


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "sparse"])
def test_a_slice_with_gaps_is_encoded_like_its_copy(name):
    base = np.arange(40, dtype=np.float32)
    assert raw(codec_by_name(name).encode(base[::3])) == raw(codec_by_name(name).encode(base[::3].copy()))


def test_sizes_on_the_wire():
    vector = np.ones(10 * INT8_BLOCK, dtype=np.float32)
    assert len(raw(codec_by_name("none").encode(vector))) == vector.nbytes
    assert len(raw(codec_by_name("bf16").encode(vector))) == vector.nbytes // 2
    assert len(raw(codec_by_name("int8").encode(vector))) == vector.size + 10 * 4


def test_plain_bytes_are_not_copied():
    vector = np.zeros(8, dtype=np.float32)
    (buffer,) = codec_by_name("none").encode(vector)
    vector[3] = 1
    assert bytes(buffer) == vector.tobytes()


# -- bf16 -------------------------------------------------------------------------------------------------


def torch_bf16(vector: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(vector.copy()).to(torch.bfloat16).to(torch.float32).numpy()


@given(hnp.arrays(np.uint32, st.integers(0, 60)))
@example(np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF], dtype=np.uint32))  # NaN, some of low bits only
@example(np.array([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF], dtype=np.uint32))  # around infinity
@example(np.array([0, 0x80000000, 1, 0x007FFFFF, 0x80000001, 0x00008000, 0x00018000], dtype=np.uint32))  # denormals
@example(np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=np.uint32))  # halfway: to even
@settings(deadline=None)
def test_bf16_rounds_any_bits_as_pytorch_does(bits):
    vector = bits.view(np.float32)
    ours, theirs = round_trip("bf16", vector), torch_bf16(vector)
    nan = np.isnan(vector)
    assert np.isnan(ours[nan]).all()
    assert (ours[~nan].view(np.uint32) == theirs[~nan].view(np.uint32)).all()


@given(vectors_up_to(LARGE))
@settings(deadline=None)
def test_bf16_twice_is_bf16_once(vector):
    once = round_trip("bf16", vector)
    assert (round_trip("bf16", once).view(np.uint32) == once.view(np.uint32)).all()


# -- int8 -------------------------------------------------------------------------------------------------


@given(vectors_up_to(LARGE))
@example(of_bits(150, 7))  # denormals, for which a grid of 255 steps is too fine
@example(np.array([1e38, -1e38, 1e-38], dtype=np.float32))
@example(np.zeros(5, dtype=np.float32))
@settings(deadline=None)
def test_int8_errs_by_half_a_step_of_its_block_at_most(vector):
    error = np.abs(round_trip("int8", vector).astype(np.float64) - vector.astype(np.float64))
    top = np.abs(vector).max(initial=0).astype(np.float64)
    assert (error <= top / 254 * (1 + 1e-4) + NEGLIGIBLE).all()


def test_a_large_value_spoils_its_own_block_only():
    vector = np.full(2 * INT8_BLOCK + 10, 0.01, dtype=np.float32)
    vector[3] = 1000.0
    got = round_trip("int8", vector)
    assert got[3] == pytest.approx(1000)
    assert (got[4:INT8_BLOCK] == 0).all()
    np.testing.assert_allclose(got[INT8_BLOCK:], 0.01, rtol=1e-6)


# -- error feedback ---------------------------------------------------------------------------------------


@given(vectors_up_to(MODERATE), st.integers(1, 30))
@settings(deadline=None)
def test_with_feedback_what_arrives_in_total_is_what_was_sent_but_for_one_message(vector, rounds):
    compressor = Compressor(codec_by_name("int8"), vector.size, np.dtype(np.float64))
    exact = vector.astype(np.float64)
    received = np.zeros(vector.size)
    for _ in range(rounds):
        payload = compressor.encode(exact, 0, vector.size)
        received += compressor.round_trip(payload, exact)
    np.testing.assert_allclose(received + compressor.residual, rounds * exact, rtol=1e-12, atol=1e-6)
    # a residual of half a step each time would be a bound of top/254; what was carried over widens the grid a little
    assert (np.abs(compressor.residual) <= np.abs(exact).max(initial=0) / 250 + NEGLIGIBLE).all()


def test_without_feedback_small_values_never_arrive_and_with_it_they_do():
    vector = np.array([1000.0, 1.0], dtype=np.float32)
    assert round_trip("int8", vector)[1] == 0
    compressor = Compressor(codec_by_name("int8"), 2, F32)
    received = sum(compressor.round_trip(compressor.encode(vector, 0, 2), vector) for _ in range(80))
    assert received[1] == pytest.approx(80, abs=8)


def test_the_residual_of_a_shard_touches_no_other():
    vector = np.random.default_rng(0).normal(size=30).astype(np.float32)
    whole = Compressor(codec_by_name("int8"), 30, F32)
    whole.encode(vector[10:20], 10, 20)
    assert not whole.residual[:10].any()
    assert whole.residual[10:20].any()
    assert not whole.residual[20:].any()


@pytest.mark.parametrize("name", ["none", "bf16", "sparse"])
def test_codecs_without_feedback_keep_nothing(name):
    compressor = Compressor(codec_by_name(name), 30, F32)
    vector = np.linspace(0, 1, 30, dtype=np.float32)
    payload = compressor.encode(vector, 0, 30)
    assert compressor.residual.size == 0
    np.testing.assert_array_equal(compressor.round_trip(payload, vector), round_trip(name, vector))


def test_a_compressor_that_is_restored_goes_on_with_the_same_bytes():
    rng = np.random.default_rng(1)
    steps = [rng.normal(size=50).astype(np.float32) for _ in range(6)]
    straight = Compressor(codec_by_name("int8"), 50, F32)
    expected = [raw(straight.encode(v, 0, 50)) for v in steps]
    first = Compressor(codec_by_name("int8"), 50, F32)
    got = [raw(first.encode(v, 0, 50)) for v in steps[:3]]
    second = Compressor(codec_by_name("int8"), 50, F32)
    second.residual = first.residual.copy()
    got += [raw(second.encode(v, 0, 50)) for v in steps[3:]]
    assert got == expected


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "sparse"])
def test_minus_zero_stays_minus_zero_and_nothing_else_becomes_it(name):
    vector = np.array([1.0, -0.0, 0.0, -3.0, -0.0], dtype=np.float32)
    assert np.signbit(round_trip(name, vector)).tolist() == [False, True, False, True, True]
    assert np.signbit(round_trip(name, vector[1:2])).all()


def test_error_feedback_keeps_what_is_absent_and_delivers_what_is_still_due():
    sender = Compressor(codec_by_name("int8"), 3, F32)

    def sent(*values):
        return sender.codec.decode(memoryview(raw(sender.encode(np.array(values, dtype=np.float32), 0, 3))), F32, 3)

    assert np.signbit(sent(-0.0, 1.0, 127.0)).tolist() == [True, False, False]
    assert not np.signbit(sent(-0.0, 0.3, 127.0))[1]
    assert np.signbit(sent(-0.0, -0.0, 127.0)).tolist() == [True, False, False], "0.3 of the second is still due"
