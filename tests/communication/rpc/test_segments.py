"""Shared memory between two ends, without processes; with them: `test_death`."""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
from collections.abc import Iterator

import pytest

from ephemeron.communication.rpc import memory as module
from ephemeron.communication.rpc.memory import Mappings, Segments, available
from ephemeron.errors import ProtocolError

pytestmark = pytest.mark.skipif(not available(), reason="this system has no memory without names to share")
SIZE = 100_000


def shared_files() -> int:
    """Open files of this process that are memory; others come and go with whatever runs besides the test."""
    found = 0
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            found += "memfd:" in os.readlink(f"/proc/self/fd/{fd}")
    return found


@pytest.fixture
def ends() -> Iterator[tuple[Segments, Mappings]]:
    before = shared_files()
    sender, receiver = Segments(), Mappings()
    yield sender, receiver
    receiver.close()
    sender._maps.clear()
    receiver._maps.clear()
    assert shared_files() <= before


def carry(ends: tuple[Segments, Mappings], *parts: bytes) -> tuple[int, memoryview]:
    sender, receiver = ends
    begins = [sum(map(len, parts[:n])) for n in range(len(parts))]
    number, handle = sender.put([memoryview(part) for part in parts], begins, sum(map(len, parts)))
    assert number
    if handle is not None:
        give(receiver, handle)
        receiver.admit(number, most_bytes=1 << 30)
    return number, receiver.lend(number, sum(map(len, parts)))


def give(receiver: Mappings, *handles: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))])
        for handle in handles:
            os.close(handle)
        assert receiver.read(far, memoryview(bytearray(1)), 0) == 1


def test_a_segment_is_used_again_once_its_views_are_gone(ends: tuple[Segments, Mappings]) -> None:
    number, view = carry(ends, b"a" * SIZE, b"b" * SIZE)
    assert bytes(view) == b"a" * SIZE + b"b" * SIZE
    kept = view[5:10]
    del view
    other, second = carry(ends, b"c" * 2 * SIZE)
    assert other != number
    assert bytes(kept) == b"aaaaa"
    del kept
    again, third = carry(ends, b"d" * 2 * SIZE)
    assert again == number
    assert bytes(second) + bytes(third) == b"c" * 2 * SIZE + b"d" * 2 * SIZE


def test_views_outlive_both_ends(ends: tuple[Segments, Mappings]) -> None:
    _, view = carry(ends, b"x" * SIZE)
    ends[0]._maps.clear()
    ends[1]._maps.clear()
    assert bytes(view) == b"x" * SIZE


def test_when_all_is_in_use_the_socket_must_do(ends: tuple[Segments, Mappings]) -> None:
    ends[0]._limit = 5 * SIZE
    kept = [carry(ends, bytes([n]) * SIZE)[1] for n in range(4)]
    assert ends[0].put([memoryview(bytes(SIZE))], [0], SIZE) == (0, None)
    del kept[1:]
    assert carry(ends, b"z" * 3 * SIZE)[0]  # in place of three small ones
    assert bytes(kept[0]) == bytes(SIZE)


def test_where_there_is_no_memory_the_socket_must_do(ends: tuple[Segments, Mappings], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, at: int, size: int) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "posix_fallocate", none)
    assert ends[0].put([memoryview(bytes(SIZE))], [0], SIZE) == (0, None)


def test_what_is_no_segment_is_refused(ends: tuple[Segments, Mappings]) -> None:
    receiver = ends[1]
    with pytest.raises(ProtocolError, match="without its handle"):
        receiver.admit(1, most_bytes=1 << 30)
    unsealed = os.memfd_create("x")
    os.ftruncate(unsealed, SIZE)
    give(receiver, unsealed)
    with pytest.raises(ProtocolError, match="not one of ours"):
        receiver.admit(1, most_bytes=1 << 30)
    give(receiver, os.open(os.devnull, os.O_RDONLY))
    with pytest.raises(ProtocolError):
        receiver.admit(1, most_bytes=1 << 30)
    give(receiver, module._create(mmap.PAGESIZE))
    with pytest.raises(ProtocolError, match="not one of ours"):
        receiver.admit(1, most_bytes=mmap.PAGESIZE - 1)
    for number, nbytes in ((1, 10), (2, 10)):
        with pytest.raises(ProtocolError, match="names segment"):
            receiver.lend(number, nbytes)


def test_a_frame_cannot_name_more_than_its_segment_or_an_unmarked_one(ends: tuple[Segments, Mappings]) -> None:
    number, view = carry(ends, b"x" * SIZE)
    with pytest.raises(ProtocolError, match="does not hold"):
        ends[1].lend(number, 2 * SIZE)
    del view
    with pytest.raises(ProtocolError):
        ends[1].lend(number, SIZE)


def test_handles_that_nobody_announced_are_closed(ends: tuple[Segments, Mappings]) -> None:
    with pytest.raises(ProtocolError, match="more handles"):
        give(ends[1], *(os.open(os.devnull, os.O_RDONLY) for _ in range(3)))


def test_a_segment_cannot_be_cut_short_under_its_reader() -> None:
    handle = module._create(mmap.PAGESIZE)
    try:
        for size in (0, 2 * mmap.PAGESIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(handle, size)
    finally:
        os.close(handle)
