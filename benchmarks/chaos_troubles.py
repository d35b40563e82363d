"""Faulty stores and processors of simulated functions: requests that fail, are late or are cut short, and slow arithmetic."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from benchmarks.chaos_schedules import Schedule
from ephemeron.communication.channels.base import Buffer, Channel, Received, Wrapper
from ephemeron.communication.channels.retrying import RetryPolicy
from ephemeron.communication.object_frame import FIRST_AGAIN_S
from ephemeron.functions.context import Compute, Context
from ephemeron.testing.flaky import FAILURES, Failure, FlakyChannel

T = TypeVar("T")


class Troubles:
    """Faults of one run's requests and arithmetic, and the time that each costs each rank.

    Args:
        s: the schedule.
    """

    def __init__(self, s: Schedule) -> None:
        self.s, self.rng = s, random.Random(s.seed)
        self.damaged = 0
        self.slowest_s: dict[int, float] = {}
        """By rank, its longest computation, before an injected delay multiplies it."""
        self._failed: dict[tuple[int, str, str], int] = {}
        self._lost: dict[int, list[tuple[float, float]]] = {}
        """By rank: times at which so many seconds were lost."""

    def lose(self, rank: int, seconds: float) -> None:
        """Records a delay of a rank."""
        if seconds > 0:
            self._lost.setdefault(rank, []).append((asyncio.get_running_loop().time(), seconds))

    def decide(self, rank: int, operation: str, key: str) -> Failure | None:
        """Error of a request; `Retrying` pauses longer with every failure in a row."""
        if self.rng.random() >= self.s.failing:
            self._failed.pop((rank, operation, key), None)
            return None
        failure, row = self.rng.choice(FAILURES), self._failed.get((rank, operation, key), 0)
        self._failed[rank, operation, key] = row + 1
        policy = RetryPolicy()
        backoff = policy.throttled if failure == "throttled" else policy.unavailable
        self.lose(rank, min(backoff.most_s, backoff.first_s * backoff.growth**row))
        return failure

    def faults(self) -> int:
        """How often a rank was later than half of the least peer timeout, within that time."""
        found = 0
        for lost in self._lost.values():
            recent: list[tuple[float, float]] = []
            for now, seconds in lost:
                recent = [(t, x) for t, x in recent if now - t < self.s.peer_timeout_s] + [(now, seconds)]
                if sum(x for _, x in recent) > 0.5 * self.s.peer_timeout_s:
                    found, recent = found + 1, []
        return found

    def around(self, ctx: Context) -> Context:
        """Store and processor of a function in this run."""
        rank = ctx.call.rank
        store = _Store(ctx.channel, self, rank)
        flaky = FlakyChannel(store, lambda operation, key: self.decide(rank, operation, key))
        return dataclasses.replace(ctx, channel=flaky, compute=_Compute(ctx.compute, self, rank))


class _Store(Wrapper):
    """Puts that take longer and become visible only then; objects that are read or stored truncated."""

    def __init__(self, inner: Channel, troubles: Troubles, rank: int) -> None:
        super().__init__(inner)
        self._troubles, self._rank, s = troubles, rank, troubles.s
        self._target = None if s.damaged is None or s.damaged[0] != rank else f"/{s.damaged[1]}."

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        t = self._troubles
        if t.rng.random() < t.s.late_puts:
            late_s = t.rng.uniform(0, t.s.late_s)
            t.lose(self._rank, late_s)
            await asyncio.sleep(late_s)
        if self._target is not None and f"/g0{self._target}" in key and not t.damaged:
            t.damaged = 1
            buffers = [b"".join(bytes(b) for b in buffers)[:-1]]
        await self.inner.put(key, buffers, create=create)

    async def fetch(self, key: str) -> memoryview | None:
        data = await self.inner.fetch(key)
        return None if data is None else self._torn(data)

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        received = await self.inner.get(key, deadline=deadline, expected_at=expected_at)
        return received._replace(data=self._torn(received.data))

    def _torn(self, data: memoryview) -> memoryview:
        t = self._troubles
        if t.rng.random() >= t.s.torn:
            return data
        t.lose(self._rank, FIRST_AGAIN_S)
        return data[: t.rng.randrange(len(data))]


class _Compute:
    """Reports by how much arithmetic takes longer than usual."""

    def __init__(self, inner: Compute, troubles: Troubles, rank: int) -> None:
        self._inner, self._troubles, self._rank = inner, troubles, rank

    async def __call__(self, work: Callable[[], T], *, samples: float, batches: int = 1) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        result = await self._inner(work, samples=samples, batches=batches)
        took_s = loop.time() - began
        self._troubles.lose(self._rank, took_s - self._troubles.s.step_s)
        self._troubles.slowest_s[self._rank] = max(took_s, self._troubles.slowest_s.get(self._rank, 0.0))
        return result
