"""Messages between stages are read back unchanged, or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import CorruptMessage
from ephemeron.training.worker.pipeline.activation_codec import ALIGNED, ActivationHeader, opened, sealed

HEADER = ActivationHeader(flags=3, sent_at=1.25, busy_s=0.5, loss=2.0)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


def joined(buffers):
    return memoryview(b"".join(bytes(b) for b in buffers))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), max_size=4),
    number=st.one_of(st.integers(), st.floats(allow_nan=False), st.none(), st.text(max_size=5)),
)
def test_values_come_back(shapes, number):
    values = {f"v{i}": torch.randint(0, 2, shape).to(dtype) for i, (shape, dtype) in enumerate(shapes)}
    said, back = opened(joined(sealed({**values, "n": number}, HEADER)), key="k")
    assert said == HEADER
    assert back.pop("n") == number
    assert back.keys() == values.keys()
    for name, value in values.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value)


def test_what_was_read_is_the_readers_own():
    data = bytearray(joined(sealed({"x": torch.ones(5)}, HEADER)))
    _, back = opened(memoryview(data), key="k")
    data[-ALIGNED:] = bytes(ALIGNED)
    assert torch.equal(back["x"], torch.ones(5))
    back["x"][0] = 2  # and may be written into


@pytest.mark.parametrize("spoil", [lambda d: d[:-70], lambda d: d[:9], lambda d: b"x" + d[1:], lambda d: b""])
def test_a_damaged_message_is_refused(spoil):
    data = bytes(joined(sealed({"x": torch.arange(40.0)}, HEADER)))
    with pytest.raises(CorruptMessage, match="not a message between stages"):
        opened(memoryview(spoil(data)), key="k")


def test_a_flipped_bit_is_seen():
    data = bytearray(joined(sealed({"x": torch.arange(16.0)}, HEADER)))
    data[-5] ^= 1
    with pytest.raises(CorruptMessage, match="checksum differs"):
        opened(memoryview(data), key="k")
