"""Reads of damaged objects: how often they are repeated, in virtual time."""

from __future__ import annotations

import asyncio

from ephemeron.communication.channels.base import Received, Wrapper
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.object_frame import FIRST_AGAIN_S, MOST_AGAIN_S, Framed, sealed
from ephemeron.errors import CorruptMessage
from ephemeron.functions.simulation import run

KEY = "run/g0/0.c.3.0.0"


class TornOnce(Wrapper):
    """Truncates one read of an object that is whole in the store."""

    reads = 0
    torn = False

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        self.reads += 1
        received = await self.inner.get(key, deadline=deadline, expected_at=expected_at)
        if bytes(received.data[-1:]) == b"x" and not self.torn:
            self.torn = True
            return received._replace(data=received.data[:10])
        return received


def test_a_read_that_differs_from_the_damaged_one_before_is_repeated_at_once():
    """The object was put again; that its first read is truncated must not cost as much as the wait for it."""

    async def scenario() -> tuple[float, int]:
        loop, store = asyncio.get_running_loop(), TornOnce(MemoryChannel())
        damages: list[CorruptMessage] = []
        whole = b"".join(bytes(part) for part in sealed([b"x"], key=KEY))
        await store.put(KEY, [whole[:-1]])
        channel = Framed(store, owner="a", damaged=damages.append)
        reading = asyncio.create_task(channel.get(KEY, deadline=loop.time() + 60))
        await asyncio.sleep(10)
        before, again_at = store.reads, loop.time()
        await store.put(KEY, [whole])
        assert bytes((await reading).data) == b"x"
        assert store.torn
        assert [str(e.problem) for e in damages].count("10 bytes are too few for a frame") == 1
        return loop.time() - again_at, before

    took_s, before = run(scenario())
    assert before < 10 / MOST_AGAIN_S + 6, "pauses grow while the same damaged object is read"
    assert took_s <= MOST_AGAIN_S + FIRST_AGAIN_S + 0.01
