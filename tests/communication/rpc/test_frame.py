"""The codec of frames: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.communication.rpc import FrameLimits, Receive
from ephemeron.communication.rpc.frame import (
    ALIGN,
    ENTRY_BYTES,
    HEAD_BYTES,
    Frame,
    FrameEntry,
    FrameMark,
    FrameMessage,
    Head,
    Kind,
    message,
    offsets,
    pack,
    section_bytes,
    unpack_head,
    unpack_rest,
)
from ephemeron.communication.rpc.frame_socket import FrameSocket
from ephemeron.communication.rpc.memory import BufferPool
from ephemeron.errors import ProtocolError

LIMITS = FrameLimits()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BUFFERS = st.lists(st.binary(max_size=300), max_size=12)


def through(sent: FrameMessage, *, receive: Receive, limits: FrameLimits = LIMITS) -> Frame:
    """Through a pair of sockets, which is larger than what is sent here."""
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(None)
        ends = [FrameSocket(end, limits=limits, pool=BufferPool(), clock=lambda: 0.0) for end in (near, far)]
        assert list(ends[0].sending(sent)) == []
        steps = ends[1].receiving(lambda kind, id: receive)
        try:
            while True:
                next(steps)
        except StopIteration as done:
            return done.value


@given(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.dictionaries(st.text(), JSON), BUFFERS, st.sampled_from(Receive))
def test_what_is_sent_arrives(kind: Kind, id: int, tag: dict[str, Any], buffers: list[bytes], receive: Receive) -> None:
    sent = message(kind, id, tag, buffers, limits=LIMITS)
    came = through(sent, receive=receive)
    assert (came.kind, came.id, came.tag, came.cost) == (kind, id, tag, sent.cost)
    assert [bytes(buffer) for buffer in came.buffers] == buffers
    assert {type(buffer) for buffer in came.buffers} <= {bytes if receive is Receive.COPIES else memoryview}


@given(st.lists(st.integers(0, 5_000), max_size=20))
def test_buffers_are_aligned_and_do_not_overlap(lengths: list[int]) -> None:
    at = list(offsets(lengths))
    assert all(begin % ALIGN == 0 for begin in at)
    assert all(a + n <= b < a + n + ALIGN for a, n, b in zip(at, lengths, at[1:], strict=False))
    assert section_bytes(lengths) == (at[-1] + lengths[-1] if lengths else 0)


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_random_heads_are_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_head(raw, LIMITS)


@settings(max_examples=80)
@given(st.data())
def test_a_frame_with_a_flipped_byte_is_refused_or_within_all_limits(data: st.DataObject) -> None:
    limits = FrameLimits(max_frame=10_000, max_buffers=8)
    buffers = data.draw(st.lists(st.binary(max_size=100), max_size=8))
    lengths = [len(buffer) for buffer in buffers]
    entries = [FrameEntry(n, n, FrameMark.BYTES, 0) for n in lengths]
    head = Head(Kind.REQUEST, 0, 0, 7, 9, len(entries), section_bytes(lengths), 0)
    raw = bytearray(pack(head, entries, b'{"m":"x"}'))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = unpack_head(raw[:HEAD_BYTES], limits)
        end = HEAD_BYTES + ENTRY_BYTES * found.buffers + found.tag_bytes
        read, _ = unpack_rest(memoryview(raw[HEAD_BYTES:end]), found, limits)
    except ProtocolError:
        return
    assert len(read) <= limits.max_buffers
    assert sum(entry.nbytes for entry in read) <= limits.max_frame
    assert found.data <= limits.max_frame + ALIGN * limits.max_buffers
    assert found.tag_bytes <= limits.max_tag


def test_limits_hold_for_what_is_sent_too() -> None:
    limits = FrameLimits(max_frame=100, max_buffers=2)
    assert message(Kind.REPLY, 1, {}, [bytes(50), bytes(50)], limits=limits).nbytes == 100
    for tag, buffers, what in (
        ({}, [bytes(101)], "frame of 101 exceeds 100.*raise max_frame"),
        ({}, [b""] * 3, "buffers of 3 exceeds 2"),
        ({"x": "y" * 2**20}, [], "tag of .* exceeds 1048576"),
    ):
        with pytest.raises(ProtocolError, match=what):
            message(Kind.REPLY, 1, tag, buffers, limits=limits)


def test_nothing_is_allocated_for_what_exceeds_a_limit() -> None:
    class Unwilling(BufferPool):
        def lend(self, nbytes: int) -> memoryview:
            raise AssertionError(f"{nbytes} bytes were asked for")

    near, far = socket.socketpair()
    with near, far:
        wire = FrameSocket(far, limits=FrameLimits(max_frame=1_000), pool=Unwilling(), clock=lambda: 0.0)
        near.sendall(pack(Head(Kind.REQUEST, 0, 0, 1, 0, 1, 2**40, 0), [], b""))
        with pytest.raises(ProtocolError, match="max_frame"):
            next(wire.receiving(lambda kind, id: Receive.VIEWS))


@pytest.mark.parametrize("cut", [0, 5, HEAD_BYTES, HEAD_BYTES + 3, -1])
def test_a_truncated_frame_is_a_lost_connection(cut: int) -> None:
    raw = pack(Head(Kind.REQUEST, 0, 0, 1, 2, 1, 100, 0), [FrameEntry(100, 100, FrameMark.BYTES, 0)], b"{}") + bytes(100)
    near, far = socket.socketpair()
    with near, far:
        wire = FrameSocket(far, limits=LIMITS, pool=BufferPool(), clock=lambda: 0.0)
        near.sendall(raw[:cut])
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            list(wire.receiving(lambda kind, id: Receive.VIEWS))


def test_arrays_and_slices_are_sent_as_they_lie_in_memory() -> None:
    floats = np.arange(24, dtype="f4").reshape(2, 3, 4)
    came = through(message(Kind.REPLY, 1, {}, [floats.data, floats[1].data], limits=LIMITS), receive=Receive.VIEWS)
    assert [bytes(buffer) for buffer in came.buffers] == [floats.tobytes(), floats[1].tobytes()]
    with pytest.raises(TypeError):
        message(Kind.REPLY, 1, {}, [floats[:, 1].data], limits=LIMITS)


def test_more_buffers_than_one_vector_holds() -> None:
    buffers = [bytes([n % 256]) * (n % 50) for n in range(1_200)]
    came = through(message(Kind.REPLY, 1, {}, buffers, limits=LIMITS), receive=Receive.VIEWS)
    assert [bytes(buffer) for buffer in came.buffers] == buffers
