"""A store that fails as real ones do, in any world: throttled, unreachable, answers lost on the way back.

    flaky = FlakyChannel(store, seeded(7, rate=0.1))
    flaky = FlakyChannel(store, lambda operation, key: "unavailable" if 5 < loop.time() < 65 else None)

A *lost answer* is the hardest case: the request was served, and the client does not know.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, TypeVar

from ephemeron.communication.channels.base import Buffer, Channel, Received, Wrapper
from ephemeron.communication.channels.reduction import SupportsReduction, Vector
from ephemeron.errors import ChannelRefused, ChannelThrottled, ChannelUnreachable

T = TypeVar("T")

Failure = Literal["throttled", "unavailable", "lost-answer", "refused"]
Decide = Callable[[str, str], Failure | None]
"""From operation (put, create, fetch, get, delete, list, reduce, accumulate) and key to the fault of the request."""

FAILURES: tuple[Failure, ...] = ("throttled", "unavailable", "lost-answer")
"""Those that pass."""


def seeded(seed: int | str, *, rate: float) -> Decide:
    """A share of all requests fails, in any of the ways that pass."""
    rng = random.Random(seed)
    return lambda operation, key: rng.choice(FAILURES) if rng.random() < rate else None


class FlakyChannel(Wrapper):
    """Fails requests before, or after, the store has served them.

    Args:
        inner: the store.
        decide: asked once for each request.
    """

    def __init__(self, inner: Channel, decide: Decide) -> None:
        super().__init__(inner)
        self._decide = decide
        self.requests = self.failed = 0

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        operation = "create" if create else "put"
        await self._request(operation, key, lambda: self.inner.put(key, buffers, create=create))

    async def fetch(self, key: str) -> memoryview | None:
        return await self._request("fetch", key, lambda: self.inner.fetch(key))

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        if not self.traits.waits:
            return await super().get(key, deadline=deadline, expected_at=expected_at)
        return await self._request("get", key, lambda: self.inner.get(key, deadline=deadline, expected_at=expected_at))

    async def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        await self._request("delete", names[0] if names else "", lambda: self.inner.delete(names))

    async def list(self, prefix: str) -> list[str]:
        return await self._request("list", prefix, lambda: self.inner.list(prefix))

    async def exists(self, key: str) -> bool:
        return await self._request("exists", key, lambda: self.inner.exists(key))

    def reducer(self) -> SupportsReduction | None:
        inner = self.inner.reducer()
        return None if inner is None else _FlakyReduction(self, inner)

    async def _request(self, operation: str, key: str, serve: Callable[[], Awaitable[T]]) -> T:
        failure = self._decide(operation, key)
        self.requests += 1
        self.failed += failure is not None
        if failure is None:
            return await serve()
        if failure == "refused":
            raise ChannelRefused("injected: permission denied", key=key)
        if failure == "throttled":
            raise ChannelThrottled("injected: 503 SlowDown", key=key)
        if failure == "lost-answer":
            await serve()
        raise ChannelUnreachable(f"injected: {failure}", key=key)


class _FlakyReduction(SupportsReduction):
    def __init__(self, outer: FlakyChannel, inner: SupportsReduction) -> None:
        self._outer, self._inner = outer, inner

    async def reduce(self, key: str, *, rank: int, world: int, weight: float, vector: Vector) -> None:
        await self._outer._request("reduce", key, lambda: self._inner.reduce(key, rank=rank, world=world, weight=weight, vector=vector))

    async def accumulate(self, key: str, *, rank: int, iteration: int, delta: Vector) -> Vector:
        return await self._outer._request(
            "accumulate", key, lambda: self._inner.accumulate(key, rank=rank, iteration=iteration, delta=delta)
        )

    async def heard(self, key: str) -> dict[int, int]:
        return await self._outer._request("heard", key, lambda: self._inner.heard(key))
