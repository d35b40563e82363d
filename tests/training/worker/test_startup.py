"""How a function that was started ahead waits for the state in which its generation begins, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from ephemeron.communication.channels.base import Channel, Traits, Wrapper
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.errors import ChannelTimeout
from ephemeron.functions.simulation import run
from ephemeron.training.worker.startup import _arrived


class Polled(Wrapper):
    """A store that cannot wait, as object stores cannot, with requests of 10 ms."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner)
        self.traits = Traits(service="objects", waits=False, shared=True, latency_s=0.01)
        self.requests = 0

    async def fetch(self, key: str) -> memoryview | None:
        self.requests += 1
        await asyncio.sleep(0.01)
        return await self.inner.fetch(key)

    get = Channel.get


def test_a_steady_pace_finds_an_object_soon_however_long_it_was_awaited() -> None:
    async def scenario() -> tuple[float, int]:
        loop, store = asyncio.get_running_loop(), Polled(MemoryChannel())
        reading = asyncio.create_task(_arrived(store, "run/begin/1", loop.time() + 60, 0.05))
        await asyncio.sleep(10.013)
        await store.put("run/begin/1", [b"x"])
        put_at = loop.time()
        assert bytes(await reading) == b"x"
        return loop.time() - put_at, store.requests

    late_s, requests = run(scenario())
    assert late_s < 0.07
    assert requests < 10.1 / 0.05 + 1


def test_a_steady_pace_ends_at_the_deadline() -> None:
    async def scenario() -> float:
        loop, store = asyncio.get_running_loop(), Polled(MemoryChannel())
        began = loop.time()
        with pytest.raises(ChannelTimeout, match="run/begin/1"):
            await _arrived(store, "run/begin/1", began + 1.0, 0.3)
        return loop.time() - began

    assert run(scenario()) == pytest.approx(1.01)
