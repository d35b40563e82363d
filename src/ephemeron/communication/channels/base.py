"""The port between functions: a place to put bytes and wait for bytes.

A channel knows nothing of gradients; a collective knows nothing of S3. Behaviour (metering, throttling,
faults) is added by wrapping: `Metered(Throttled(channel))`.

Keys are plain strings of `[A-Za-z0-9._-]` parts joined by `/`. On the hot path they are computed, never listed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ephemeron.errors import ChannelTimeout

if TYPE_CHECKING:
    from ephemeron.communication.channels.reduction import SupportsReduction


Buffer: TypeAlias = bytes | bytearray | memoryview

Service = Literal["memory", "objects", "cache", "server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of a channel for planner and meter."""

    service: Service
    """Price list that applies."""
    waits: bool
    """`get` blocks inside the store, so that waiting costs no polls."""
    shared: bool
    """Other processes on this machine, or beyond, can reach the same objects."""
    latency_s: float = 0.0
    """Typical seconds before the first byte, for the first poll and for bounds."""
    bandwidth_mb_s: float | None = None
    """MB (1e6 bytes) per second and direction for one function; None: not limited by the channel."""


class Received(NamedTuple):
    """Result of `get`."""

    data: memoryview
    """Read-only use is safe until the next event-loop turn of the owner; copy to keep and change."""
    waited_s: float
    """Seconds until the key was there; the rest of the call was transfer."""
    polls: int = 0
    """Requests that found nothing before."""
    poll_s: float = 0.0
    """Seconds that the first of these took; 0: there was none."""


class Channel(ABC):
    """Moves bytes between functions.

    Contract, held by `ephemeron.testing.ChannelContract` for every implementation:

    - `put` is whole or absent: no reader ever sees half an object. The same put twice is harmless, a
      different one replaces the object. With `create=True` exactly one of many concurrent puts succeeds and
      the others raise `KeyExists`; leases rest on this alone.
    - a `fetch` that starts after a `put` returned sees that put, or a later one, or a delete.
    - a read has three outcomes: the object, its absence (None, or `ChannelTimeout` from `get`), or `DamagedObject`, where the channel
      checks what it reads (`object_frame.Framed`): the object is not whole, so it is neither present nor absent. Readers of
      sequences look for higher numbers (`list`) before they take an absence for the end.
    - `delete` of an absent key is harmless.
    - the channel neither keeps nor changes the caller's buffers after `put` has returned.
    - all methods raise `ChannelUnreachable` when the store does not answer; nothing waits without end.
    """

    traits: Traits

    @abstractmethod
    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        """Stores the concatenation of `buffers` under `key`.

        Raises:
            KeyExists: `create` was asked for and the key is taken.
            ChannelUnreachable: the store does not answer.
        """

    @abstractmethod
    async def fetch(self, key: str) -> memoryview | None:
        """The object, or None if it is not there now. Never waits for it to appear.

        Raises:
            DamagedObject: what is there is damaged, and stays so; see `Framed`.
        """

    @abstractmethod
    async def delete(self, keys: Iterable[str]) -> None:
        """Removes the keys that are there."""

    @abstractmethod
    async def list(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted. For recovery and cleaning only, never on the hot path."""

    async def exists(self, key: str) -> bool:
        """Whether an object is there now: one request that moves none of its bytes, where the store has such a request; else a listing."""
        return key in await self.list(key)

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        """Waits until `key` is there and returns it.

        This default polls. A store that can wait itself overrides it and sets `traits.waits`.

        Args:
            key: the object.
            deadline: loop time (`asyncio.get_running_loop().time()`) after which to give up; a deadline
                in the past still makes one attempt.
            expected_at: loop time at which the object should be there, if the caller has an idea: the first
                poll is made then.

        Raises:
            ChannelTimeout: not there at the deadline.
            DamagedObject: what is there is damaged, and stays so; see `Framed`.
            ChannelUnreachable: the store does not answer.
        """
        return await poll(self.fetch, key, deadline=deadline, expected_at=expected_at, first_s=self.traits.latency_s)

    def reducer(self) -> SupportsReduction | None:
        """This channel's power to add, if it has it. Wrappers hand on their inner channel's, wrapped likewise."""
        from ephemeron.communication.channels.reduction import (
            SupportsReduction,  # needs NumPy, which not every channel does
        )

        return self if isinstance(self, SupportsReduction) else None

    def discard_staged(self, prefix: str) -> None:
        """Removes what writers of keys with a prefix had begun to write when they were killed: no object, and never listed.

        Nobody may be writing these keys. Most stores keep nothing of the kind.
        """

    async def close(self) -> None:
        """Lets go of connections. Objects stay."""

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


LEAST_STEP_S, GROWTH = 0.001, 1.5
"""Between polls."""


async def poll(
    fetch: Callable[[str], Awaitable[memoryview | None]],
    key: str,
    *,
    deadline: float,
    expected_at: float | None = None,
    first_s: float = 0.0,
    max_s: float = 0.25,
) -> Received:
    """Tries at the predicted time, then with back-off: steps grow by half, up to `max_s`.

    The first step is what the first request took, at least 1 ms and at most `first_s`: a store that answers quickly is
    asked again soon.

    Raises:
        ChannelTimeout: not there at the deadline.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    if expected_at is not None and expected_at > began:
        await asyncio.sleep(min(expected_at, max(deadline, began)) - began)
    step = poll_s = 0.0
    polls = 0
    while True:
        asked = loop.time()
        data = await fetch(key)
        if data is not None:
            return Received(data, asked - began, polls, poll_s)
        polls += 1
        now = loop.time()
        if not step:
            poll_s = now - asked
            step = max(min(first_s, poll_s), LEAST_STEP_S)
        if now >= deadline:
            raise ChannelTimeout(f"nothing there after {now - began:.1f} s", key=key)
        await asyncio.sleep(min(step, deadline - now))
        step = min(step * GROWTH, max(max_s, first_s))


class Wrapper(Channel):
    """Base of channels that add behaviour to another one. Forwards everything."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        self.traits = inner.traits

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        await self.inner.put(key, buffers, create=create)

    async def fetch(self, key: str) -> memoryview | None:
        return await self.inner.fetch(key)

    async def delete(self, keys: Iterable[str]) -> None:
        await self.inner.delete(keys)

    async def list(self, prefix: str) -> list[str]:
        return await self.inner.list(prefix)

    async def exists(self, key: str) -> bool:
        return await self.inner.exists(key)

    def discard_staged(self, prefix: str) -> None:
        self.inner.discard_staged(prefix)

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        # A store that cannot wait is polled here, through this wrapper's own `fetch`, so that every poll is
        # seen by every wrapper on the way.
        if not self.inner.traits.waits:
            return await super().get(key, deadline=deadline, expected_at=expected_at)
        return await self.inner.get(key, deadline=deadline, expected_at=expected_at)

    def reducer(self) -> SupportsReduction | None:
        return self.inner.reducer()

    async def close(self) -> None:
        await self.inner.close()


# -- A caller's buffers as flat views -----------------------------------------------------------------------------


def joined(buffers: Sequence[Buffer]) -> bytes | memoryview:
    """A single buffer as it is (as flat bytes), several joined into one."""
    if len(buffers) != 1:
        return b"".join(buffers)
    return next(flat(buffers), b"")


def flat(buffers: Iterable[Buffer]) -> Iterator[memoryview]:
    """Each buffer as bytes, without a copy and without those that are empty."""
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes:
            yield view if view.ndim == 1 and view.format == "B" else view.cast("B")


class SupportsSizes(ABC):
    """Declared by type, as an optional power; found with `isinstance`."""

    @abstractmethod
    async def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object whose key begins with `prefix`, by key in order.

        A cache counts the server's memory for an object, which is a little more than its size.

        Raises:
            ChannelUnreachable: the store does not answer.
        """
