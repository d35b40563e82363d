"""Bodies in shared memory: whole and in order whatever their size, and never overwritten while they are read."""

import asyncio
import mmap
import os
import socket
from array import array
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from ephemeron.communication.direct import Head
from ephemeron.communication.direct.message import IN_PLACE, SHARED, Kind
from ephemeron.communication.direct.transport import LEAST_BYTES, SLOT_BYTES, SLOTS, SharedConnection, SharedTransport, available
from ephemeron.errors import ProtocolError
from ephemeron.testing.direct_world import until

pytestmark = pytest.mark.skipif(not available(), reason="this system has no anonymous files to share")


class Inbox:
    """Handler of one connection."""

    def __init__(self, *, in_place: bool = False) -> None:
        self.got: list[tuple[int, bytes]] = []
        self.flags: list[int] = []
        self.place = IN_PLACE if in_place else None
        self.closed = ""

    def allocate(self, connection: object, head: Head, nbytes: int) -> memoryview | None:
        return self.place if head.flags & SHARED else None

    def on_message(self, connection: object, head: Head, body: memoryview) -> None:
        self.got.append((head.number, bytes(body)))
        self.flags.append(head.flags)

    def on_closed(self, connection: object, why: str) -> None:
        self.closed = why


async def pair(token: str = "t") -> tuple[SharedConnection, SharedConnection, SharedTransport]:
    accepted: asyncio.Future[SharedConnection] = asyncio.get_running_loop().create_future()
    transport = SharedTransport()
    address = await transport.listen(token, accepted.set_result)  # type: ignore[arg-type]
    assert address is not None
    dialled = await SharedTransport().dial(address, token, timeout_s=10)
    assert isinstance(dialled, SharedConnection)
    return dialled, await accepted, transport


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(240):
            await scenario()

    asyncio.run(main())


def body(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.mark.parametrize("in_place", [False, True])
def test_bodies_of_every_size_arrive_in_order(in_place: bool) -> None:
    sizes = [0, 1, LEAST_BYTES - 1, LEAST_BYTES, 100_000, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES] * 8

    async def scenario() -> None:
        a, b, transport = await pair()
        inboxes = Inbox(in_place=in_place), Inbox(in_place=in_place)
        a.start(inboxes[0])
        b.start(inboxes[1])
        sent = [(n, body(size, n)) for n, size in enumerate(sizes)]
        for n, data in sent:  # more than there are slots, in both directions
            for connection in (a, b):
                connection.send(Head(Kind.MERGED, 0, 1, n), [data[:10], data[10:]])
        await until(lambda: all(len(inbox.got) == len(sent) for inbox in inboxes))
        assert inboxes[0].got == inboxes[1].got == sent
        assert a.sent_bytes == b.received_bytes
        assert any(flags & SHARED for flags in inboxes[0].flags) == in_place
        assert not any(a._used)
        assert not any(b._used)
        a.close()
        await transport.close()

    run(scenario)


def test_without_a_free_slot_the_socket_is_used() -> None:
    async def scenario() -> None:
        a, b, transport = await pair()
        a.start(Inbox())
        data = [body(100_000, n) for n in range(SLOTS + 3)]
        for n, each in enumerate(data):  # the other end does not read yet
            a.send(Head(Kind.MERGED, 0, 1, n), [each])
        assert all(a._used)
        inbox = Inbox()
        b.start(inbox)
        await until(lambda: len(inbox.got) == len(data))
        assert inbox.got == list(enumerate(data))
        await a.drained()
        a.close()
        await transport.close()

    run(scenario)


def test_a_slot_that_does_not_exist_ends_the_connection() -> None:
    async def scenario() -> None:
        a, b, transport = await pair()
        inbox = Inbox()
        b.start(inbox)
        a._free_slot = lambda: SLOTS  # type: ignore[method-assign]
        a._mine = np.zeros(mmap.PAGESIZE + (SLOTS + 1) * SLOT_BYTES, dtype=np.uint8)
        a._used = memoryview(bytearray(SLOTS + 1))
        a.send(Head(Kind.MERGED, 0, 1), [body(LEAST_BYTES, 1)])
        await until(lambda: bool(inbox.closed))
        assert "slot" in inbox.closed
        await transport.close()

    run(scenario)


@pytest.mark.parametrize("fault", ["size", "seals", "nothing"])
def test_memory_that_its_owner_may_change_is_refused(fault: str) -> None:
    from ephemeron.communication.direct.transport import _FILE_BYTES, _received

    async def scenario() -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX)
        theirs.setblocking(False)
        handle = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(handle, 4096 if fault == "size" else _FILE_BYTES)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [handle]))] if fault != "nothing" else []
        mine.sendmsg([b"\0"], rights)
        with pytest.raises(ProtocolError):
            await _received(theirs)
        os.close(handle)
        mine.close()
        theirs.close()

    run(scenario)
