"""Reads of damaged objects: how often they are repeated, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from ephemeron.communication.channels.base import Received, Wrapper
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import is_put_again
from ephemeron.communication.object_frame import FIRST_AGAIN_S, LASTING_S, MOST_AGAIN_S, Framed, sealed
from ephemeron.errors import ChannelTimeout, CorruptMessage, DamagedObject
from ephemeron.functions.simulation import run
from ephemeron.testing.damage import another, flipped, truncated

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


@pytest.mark.parametrize("damage", [flipped, truncated, another])
@pytest.mark.parametrize("key", ["run/begin/1", "q.work/batch-2", "run/state/0/3", "run/g0/0.c.3.0.0"])
def test_a_read_has_three_outcomes(key: str, damage) -> None:
    async def scenario() -> None:
        loop, store = asyncio.get_running_loop(), MemoryChannel()
        told: list[CorruptMessage] = []
        channel = Framed(store, owner="a", damaged=told.append)
        assert await channel.fetch(key) is None
        with pytest.raises(ChannelTimeout):
            await channel.get(key, deadline=loop.time())
        await channel.put(f"{key}0", [b"other"])
        await channel.put(key, [b"whole"])
        assert bytes(await channel.fetch(key) or b"") == b"whole"
        found = damage(key, store.objects[key], store.objects)
        assert found is not None
        store.publish(key, found)
        began = loop.time()
        if is_put_again(key):
            assert await channel.fetch(key) is None
            with pytest.raises(ChannelTimeout, match="only a damaged object") as raised:
                await channel.get(key, deadline=loop.time() + 60)
            assert isinstance(raised.value.__cause__, CorruptMessage)
        else:
            with pytest.raises(DamagedObject, match=key):
                await channel.fetch(key)
            assert loop.time() - began < 1
            with pytest.raises(DamagedObject, match=key):
                await channel.get(key, deadline=loop.time() + 60)
            assert loop.time() - began < LASTING_S + 2 * MOST_AGAIN_S
        assert len(told) == 1, "the same damage is told once"
        store.publish(key, b"".join(bytes(part) for part in sealed([b"again"], key=key)))
        assert bytes(await channel.fetch(key) or b"") == b"again"

    run(scenario())


def test_damage_lasts_over_the_calls_of_a_reader_that_polls() -> None:
    """A member that polls every 10 ms for the begin of a generation, which nobody puts again."""

    async def scenario() -> None:
        loop, store = asyncio.get_running_loop(), MemoryChannel()
        told: list[CorruptMessage] = []
        channel = Framed(store, owner="a", damaged=told.append)
        store.publish("run/begin/1", b"damaged")

        async def poll() -> None:
            while loop.time() < 100:
                with contextlib.suppress(ChannelTimeout):
                    await channel.get("run/begin/1", deadline=loop.time())
                await asyncio.sleep(0.01)

        with pytest.raises(DamagedObject, match="run/begin/1"):
            await poll()
        assert LASTING_S <= loop.time() < 2 * LASTING_S
        assert len(told) == 1

    run(scenario())
