"""Stores that keys name, and the cache of their objects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ephemeron.communication.channels import MemoryChannel
from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.durable_put import READ_BACK_BYTES, create_durable_from
from ephemeron.functions.tasks.object_places import ObjectPlaces, placed


class Losing(MemoryChannel):
    """Acknowledges some puts and loses them; counts reads."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self.losses, self.reads = losses, 0

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        self.losses -= 1
        if self.losses < 0:
            await super().put(key, buffers, create=create)

    async def fetch(self, key: str) -> memoryview | None:
        self.reads += 1
        return await super().fetch(key)


def test_what_was_put_is_read_back_from_its_store_and_then_from_memory() -> None:
    async def main() -> None:
        store = Losing(2)
        places = ObjectPlaces(MemoryChannel(), owner="me", open_channel=lambda _: store, cache_bytes=1000)
        key = placed("far:", "a/0.0")
        await create_durable_from(places, key, [b"x" * 100])
        assert "a/0.0" in store.objects, "the cache does not stand for the store"
        assert store.reads == 3
        assert bytes(await places.fetch(key) or b"") == b"x" * 100
        assert store.reads == 3
        await places.delete([key])
        assert await places.fetch(key) is None

    asyncio.run(main())


def test_a_large_object_is_in_memory_once_its_store_has_said_that_it_exists() -> None:
    async def main() -> None:
        store, data = Losing(1), b"x" * (READ_BACK_BYTES + 1)
        places = ObjectPlaces(MemoryChannel(), owner="me", open_channel=lambda _: store, cache_bytes=2 * len(data))
        key = placed("far:", "a/0.0")
        await create_durable_from(places, key, [data])
        assert "a/0.0" in store.objects, "it was lost once"
        assert bytes(await places.fetch(key) or b"") == data
        assert store.reads == 0

    asyncio.run(main())


def test_the_cache_forgets_what_was_not_read_for_longest() -> None:
    async def main() -> None:
        store = Losing(0)
        places = ObjectPlaces(MemoryChannel(), owner="me", open_channel=lambda _: store, cache_bytes=250)
        keys = [placed("far:", f"a/{n}") for n in range(3)]
        for key in keys[:2]:
            await create_durable_from(places, key, [b"x" * 100])
        await places.fetch(keys[0])
        await create_durable_from(places, keys[2], [b"x" * 100])
        store.reads = 0
        for key, reads in zip((keys[0], keys[2], keys[1]), (0, 0, 1), strict=True):
            await places.fetch(key)
            assert store.reads == reads, key

    asyncio.run(main())
