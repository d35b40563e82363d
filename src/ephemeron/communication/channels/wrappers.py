"""Behaviour added to any channel by wrapping it: metering, throttling, faults.

Order matters and is always `Framed(Retrying(Metered(Faulty(Throttled(channel)))))` (`run_channel`): requests that a fault
swallows, and repeated ones, are billed all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from ephemeron.communication.channels.base import Buffer, Channel, Received, Wrapper
from ephemeron.communication.channels.reduction import SupportsReduction, Vector
from ephemeron.errors import ChannelError
from ephemeron.events import Traffic
from ephemeron.units import MB


def size_of(buffers: Sequence[Buffer]) -> int:
    """Bytes in a sequence of buffers."""
    return sum(b.nbytes if isinstance(b, memoryview) else len(b) for b in buffers)


class Metered(Wrapper):
    """Counts the billed operations."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner)
        self.puts = self.gets = self.polls = self.deletes = self.lists = 0
        self.bytes_up = self.bytes_down = 0

    @property
    def traffic(self) -> Traffic:
        """Totals so far."""
        return Traffic(
            puts=self.puts,
            gets=self.gets,
            polls=self.polls,
            deletes=self.deletes,
            lists=self.lists,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
        )

    def add(self, before: Traffic, after: Traffic) -> None:
        """Counts operations that another meter has counted between two moments."""
        for name in ("puts", "gets", "polls", "deletes", "lists", "bytes_up", "bytes_down"):
            setattr(self, name, getattr(self, name) + getattr(after, name) - getattr(before, name))

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        self.puts += 1
        self.bytes_up += size_of(buffers)
        await self.inner.put(key, buffers, create=create)

    async def fetch(self, key: str) -> memoryview | None:
        try:
            data = await self.inner.fetch(key)
        except ChannelError:
            self.polls += 1  # a request all the same
            raise
        if data is None:
            self.polls += 1
        else:
            self.gets += 1
            self.bytes_down += data.nbytes
        return data

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        if not self.traits.waits:  # the polling loop calls this `fetch`, which counts
            return await super().get(key, deadline=deadline, expected_at=expected_at)
        try:
            received = await self.inner.get(key, deadline=deadline, expected_at=expected_at)
        except ChannelError:
            self.polls += 1
            raise
        self.gets += 1
        self.bytes_down += received.data.nbytes
        return received

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self.deletes += len(keys)
        await self.inner.delete(keys)

    async def list(self, prefix: str) -> list[str]:
        self.lists += 1
        return await self.inner.list(prefix)

    async def exists(self, key: str) -> bool:
        self.polls += 1  # of the price of a get
        return await self.inner.exists(key)

    def reducer(self) -> SupportsReduction | None:
        inner = self.inner.reducer()
        return None if inner is None else _MeteredReduction(self, inner)


class _MeteredReduction(SupportsReduction):
    """A push is a put; what `accumulate` answers is a get as well."""

    def __init__(self, meter: Metered, inner: SupportsReduction) -> None:
        self._meter, self._inner = meter, inner

    async def reduce(self, key: str, *, rank: int, world: int, weight: float, vector: Vector) -> None:
        self._meter.puts += 1
        self._meter.bytes_up += vector.nbytes
        await self._inner.reduce(key, rank=rank, world=world, weight=weight, vector=vector)

    async def accumulate(self, key: str, *, rank: int, iteration: int, delta: Vector) -> Vector:
        self._meter.puts += 1
        self._meter.bytes_up += delta.nbytes
        answer = await self._inner.accumulate(key, rank=rank, iteration=iteration, delta=delta)
        self._meter.gets += 1
        self._meter.bytes_down += answer.nbytes
        return answer

    async def heard(self, key: str) -> dict[int, int]:
        self._meter.gets += 1
        return await self._inner.heard(key)


class LinkModel:
    """One direction of a function's network: transfers are served one after the other."""

    __slots__ = ("free_at", "rate")

    def __init__(self, bandwidth_mb_s: float) -> None:
        self.rate = bandwidth_mb_s * MB
        self.free_at = 0.0

    def reserve(self, now: float, nbytes: int) -> float:
        """Books `nbytes` from `now` on and returns when the last one is through."""
        self.free_at = max(now, self.free_at) + nbytes / self.rate
        return self.free_at


class Throttled(Wrapper):
    """A function's network: latency per request, and a bandwidth for each direction at once.

    Works on real channels too: the inner operation's own time counts towards the modelled one, so a round
    takes the time of the model, unless the machine is slower.
    """

    def __init__(self, inner: Channel, *, latency_s: float, bandwidth_mb_s: float) -> None:
        super().__init__(inner)
        self.latency_s = latency_s
        self.up, self.down = LinkModel(bandwidth_mb_s), LinkModel(bandwidth_mb_s)
        self._put_s_per_byte = 0.0

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        loop = asyncio.get_running_loop()
        nbytes = size_of(buffers)
        finish = self.up.reserve(loop.time() + self.latency_s, nbytes)
        await _sleep_until(finish - self._put_s_per_byte * nbytes)
        began = loop.time()
        await self.inner.put(key, buffers, create=create)
        if nbytes >= 65536:
            self._put_s_per_byte += 0.3 * ((loop.time() - began) / nbytes - self._put_s_per_byte)
        await _sleep_until(finish)

    async def fetch(self, key: str) -> memoryview | None:
        asked = await self._latency()
        data = await self.inner.fetch(key)
        if data is not None:
            await _sleep_until(self.down.reserve(asked, data.nbytes))
        return data

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        if not self.traits.waits:
            return await super().get(key, deadline=deadline, expected_at=expected_at)
        asked = await self._latency()
        received = await self.inner.get(key, deadline=deadline)
        await _sleep_until(self.down.reserve(asked + received.waited_s, received.data.nbytes))
        return received

    async def delete(self, keys: Iterable[str]) -> None:
        await self._latency()
        await self.inner.delete(keys)

    async def list(self, prefix: str) -> list[str]:
        await self._latency()
        return await self.inner.list(prefix)

    async def exists(self, key: str) -> bool:
        await self._latency()
        return await self.inner.exists(key)

    async def _latency(self) -> float:
        """Waits until a request has arrived; returns the time of its arrival."""
        loop = asyncio.get_running_loop()
        await _sleep_until(loop.time() + self.latency_s)
        return loop.time()

    def reducer(self) -> SupportsReduction | None:
        inner = self.inner.reducer()
        return None if inner is None else _ThrottledReduction(self, inner)


class _ThrottledReduction(SupportsReduction):
    """Pushes wait for the uplink, answers for the downlink."""

    def __init__(self, network: Throttled, inner: SupportsReduction) -> None:
        self._network, self._inner = network, inner

    async def _send(self, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        await _sleep_until(self._network.up.reserve(now + self._network.latency_s, nbytes))

    async def reduce(self, key: str, *, rank: int, world: int, weight: float, vector: Vector) -> None:
        await self._send(vector.nbytes)
        await self._inner.reduce(key, rank=rank, world=world, weight=weight, vector=vector)

    async def accumulate(self, key: str, *, rank: int, iteration: int, delta: Vector) -> Vector:
        await self._send(delta.nbytes)
        answer = await self._inner.accumulate(key, rank=rank, iteration=iteration, delta=delta)
        await _sleep_until(self._network.down.reserve(asyncio.get_running_loop().time(), answer.nbytes))
        return answer

    async def heard(self, key: str) -> dict[int, int]:
        await self._send(0)
        return await self._inner.heard(key)


class Faulty(Wrapper):
    """Loses the puts that `drops` points at: acknowledged, paid for, and gone."""

    def __init__(self, inner: Channel, *, drops: Callable[[str], bool]) -> None:
        super().__init__(inner)
        self._drops = drops

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        if self._drops(key):
            return
        await self.inner.put(key, buffers, create=create)


async def _sleep_until(when: float) -> None:
    # asyncio.sleep costs twice as much, and a simulation does little else.
    loop = asyncio.get_running_loop()
    if when <= loop.time():
        return
    wake = loop.create_future()
    timer = loop.call_at(when, _wake, wake)
    try:
        await wake
    except BaseException:
        timer.cancel()
        raise


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
