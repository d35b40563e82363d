"""A dictionary with waiting readers: the channel of the simulator and of tests.

It is limited to one process and one event loop, so it cannot connect real functions: `traits.shared` is False.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ephemeron.communication.channels.base import Buffer, Channel, Received, Traits
from ephemeron.errors import ChannelTimeout, KeyExists


class MemoryChannel(Channel):
    """Objects in a dictionary; `get` waits on a future, so it never polls."""

    def __init__(self) -> None:
        self.traits = Traits(service="memory", waits=True, shared=False)
        self.objects: dict[str, bytes] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        if create and key in self.objects:
            raise KeyExists("the key is taken", key=key)
        first = buffers[0] if len(buffers) == 1 else None
        self.publish(key, first if isinstance(first, bytes) else b"".join(buffers))

    def publish(self, key: str, data: bytes) -> None:
        """Makes the object visible now and wakes its waiters."""
        self.objects[key] = data
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def fetch(self, key: str) -> memoryview | None:
        data = self.objects.get(key)
        return None if data is None else memoryview(data)

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while key not in self.objects:
            left = deadline - loop.time()
            if left <= 0:
                raise ChannelTimeout(f"nothing there after {loop.time() - began:.1f} s", key=key)
            waiter = loop.create_future()
            self._waiters.setdefault(key, []).append(waiter)
            timer = loop.call_later(left, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                queue = self._waiters.get(key)
                if queue is not None and waiter in queue:
                    queue.remove(waiter)
                    if not queue:
                        del self._waiters[key]
        return Received(memoryview(self.objects[key]), loop.time() - began)

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    async def exists(self, key: str) -> bool:
        return key in self.objects

    async def list(self, prefix: str) -> list[str]:
        return sorted(k for k in self.objects if k.startswith(prefix))


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
