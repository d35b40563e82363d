"""Objects: the pickle, what stands out of it, and the types that come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.communication.rpc import FrameLimits, Receive
from ephemeron.communication.rpc.frame import Frame, FrameMark, Kind, message
from ephemeron.communication.rpc.objects import dumps, loads, object_of

BIG, SMALL = 5_000, 100
LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=5),
    st.integers(0, 2 * BIG).map(lambda n: b"b" * n),
    st.integers(0, 2 * BIG).map(lambda n: bytearray(b"a" * n)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


def through(value: Any, receive: Receive, *, max_buffers: int = 4096) -> Any:
    buffers, marks = dumps(value, max_buffers=max_buffers)
    if receive is Receive.COPIES:
        came = [bytearray(b) if m is FrameMark.ARRAY else bytes(b) for b, m in zip(buffers, marks, strict=True)]
    else:
        came = [memoryview(bytearray(b)) for b in buffers]
    return loads(came, marks, receive)


def types(value: Any) -> Any:
    match value:
        case list() | tuple():
            return type(value), [types(inner) for inner in value]
        case dict():
            return {key: types(inner) for key, inner in value.items()}
    return type(value)


@given(VALUES, st.integers(1, 4))
def test_copies_are_equal_and_of_the_same_types(value: Any, max_buffers: int) -> None:
    back = through(value, Receive.COPIES, max_buffers=max_buffers)
    assert back == value
    assert types(back) == types(value)


@given(VALUES)
def test_views_are_equal(value: Any) -> None:
    assert through(value, Receive.VIEWS) == value


def test_which_types_views_have() -> None:
    sent = [b"x" * BIG, b"x" * SMALL, bytearray(BIG), memoryview(b"y" * SMALL), np.arange(BIG), np.arange(3)]
    back = through(sent, Receive.VIEWS)
    assert [type(part) for part in back] == [memoryview, bytes, bytearray, memoryview, np.ndarray, np.ndarray]
    assert back[0].readonly
    assert back[4].flags.writeable
    back = through(sent, Receive.COPIES)
    assert [type(part) for part in back] == [bytes, bytes, bytearray, bytes, np.ndarray, np.ndarray]


def test_large_memory_stands_out_of_the_pickle_and_is_not_copied() -> None:
    blob, array = b"z" * 1_000_000, np.arange(200_000.0)
    buffers, marks = dumps([blob, array, {"again": blob}], max_buffers=100)
    assert marks == [FrameMark.BYTES, FrameMark.BYTES, FrameMark.ARRAY]
    assert len(buffers[0]) < 500
    assert buffers[1] is blob
    assert np.shares_memory(np.frombuffer(buffers[2]), array)
    back = loads([bytes(buffers[0]), bytes(blob), memoryview(bytearray(array))], marks, Receive.COPIES)
    assert back[0] is back[2]["again"]


def test_arrays_that_are_not_contiguous_travel_too() -> None:
    array = np.arange(100_000).reshape(100, 1000)
    for part in (array[:, ::3], array.T, np.asfortranarray(array), array[::2]):
        back = through(part, Receive.VIEWS)
        assert np.array_equal(back, part)


class Insists:
    def __init__(self, state: bytes) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return Insists._again, (self.state,)

    @staticmethod
    def _again(state: bytes) -> Insists:
        assert type(state) is bytes
        return Insists(state)


@pytest.mark.parametrize("receive", Receive)
def test_bytes_within_other_objects_stay_bytes(receive: Receive) -> None:
    loop: list[Any] = [b"p" * BIG, Insists(b"q" * BIG)]
    loop.append(loop)
    back = through(loop, receive)
    assert type(back[0]) is (memoryview if receive is Receive.VIEWS else bytes)
    assert back[1].state == b"q" * BIG
    assert back[2] is back


def test_a_readonly_array_stays_so() -> None:
    array = np.arange(BIG)
    array.flags.writeable = False
    assert not through(array, Receive.VIEWS).flags.writeable


def test_a_message_without_an_object_is_not_unpickled() -> None:
    plain = Frame(Kind.REPLY, 1, {}, [b"cos\nsystem\n(S'true'\ntR."], [FrameMark.BYTES], 0, 0)
    with pytest.raises(TypeError, match="no object"):
        object_of(plain, Receive.VIEWS)
    assert message(Kind.REPLY, 1, {}, [b"x"], limits=FrameLimits()).flags == 0
