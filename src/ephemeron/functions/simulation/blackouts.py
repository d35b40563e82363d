"""A channel that is not reached for some time, in virtual time: requests and their answers wait until it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ephemeron.communication.channels.base import Buffer, Channel, Received, Wrapper


class Blackouts(Wrapper):
    """See the module.

    Args:
        inner: the channel.
        times: beginning and end of each blackout, loop time.
    """

    def __init__(self, inner: Channel, times: Sequence[tuple[float, float]]) -> None:
        super().__init__(inner)
        self._times = times

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        await self._over()
        await self.inner.put(key, buffers, create=create)
        await self._over()

    async def fetch(self, key: str) -> memoryview | None:
        await self._over()
        data = await self.inner.fetch(key)
        await self._over()
        return data

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        await self._over()
        received = await self.inner.get(key, deadline=deadline, expected_at=expected_at)
        waited_s = await self._over()
        return received._replace(waited_s=received.waited_s + waited_s)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._over()
        await self.inner.delete(keys)
        await self._over()

    async def list(self, prefix: str) -> list[str]:
        await self._over()
        found = await self.inner.list(prefix)
        await self._over()
        return found

    async def exists(self, key: str) -> bool:
        await self._over()
        found = await self.inner.exists(key)
        await self._over()
        return found

    async def _over(self) -> float:
        """Waits for the end of a blackout; returns how long."""
        now = asyncio.get_running_loop().time()
        waits = max((end - now for begin, end in self._times if begin <= now < end), default=0.0)
        await asyncio.sleep(waits)
        return waits
