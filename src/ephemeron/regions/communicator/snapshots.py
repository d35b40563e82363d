"""The state of a run for regions that join, in pieces: read from any member, over a connection of its own, while that member goes on."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ephemeron.communication.rpc.client import Client
from ephemeron.config.typed import plain
from ephemeron.errors import ChannelTimeout, EphemeronError
from ephemeron.regions.communicator.base import Member
from ephemeron.regions.communicator.peer import SILENCE_S, Hello
from ephemeron.regions.communicator.pieces import PIECE_BYTES

_WINDOW = 4
"""Pieces on their way at once."""

Dial = Callable[[str, str], Awaitable[Client]]
"""Connects to the endpoint of a region."""


class Snapshots:
    """The newest state of this region, and the one before, which others may be reading."""

    def __init__(self) -> None:
        self._kept: dict[int, bytes] = {}

    @property
    def newest(self) -> tuple[int, bytes] | None:
        """With its round; None: there is none."""
        return max(self._kept.items(), default=None)

    def put(self, round: int, data: bytes) -> None:
        """Keeps the state after a round."""
        self._kept[round] = data
        for old in sorted(self._kept)[:-2]:
            del self._kept[old]

    def answer(self, params: Mapping[str, Any]) -> tuple[Mapping[str, object], Sequence[Any]]:
        """Answer to a request for a piece, or for round and size of the newest state if none is named."""
        if "r" not in params:
            newest = self.newest
            if newest is None:
                return {}, []
            return {"r": newest[0], "t": len(newest[1]), "c": zlib.crc32(newest[1])}, []
        data = self._kept.get(int(params["r"]))
        if data is None:
            raise LookupError("a newer state has replaced this one")
        at = int(params["o"])
        return {}, [memoryview(data)[at : at + PIECE_BYTES]]


async def newest_snapshot(
    members: Sequence[Member], hello: Hello, dial: Dial, *, own: tuple[int, bytes] | None, region: str
) -> tuple[int, bytes] | None:
    """The newest state that any member keeps.

    Args:
        members: of the run.
        hello: of this region, as an observer.
        dial: connects to a member.
        own: state of this region.
        region: this one.

    Raises:
        ChannelTimeout: members have states, and none could be read.
    """
    found: list[tuple[int, str]] = []
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, tuple[Client, Mapping[str, Any]]] = {}
        for member in members:
            if member.region == region or member.left is not None or not member.endpoint:
                continue
            with contextlib.suppress(OSError, EphemeronError):
                client = await stack.enter_async_context(await dial(member.endpoint, member.region))
                await client.call("hello", plain(hello), timeout_s=SILENCE_S)
                said, _ = await client.call("snapshot", timeout_s=SILENCE_S)
                if said:
                    clients[member.region] = client, said
                    found.append((int(said["r"]), member.region))
        for number, name in sorted(found, reverse=True):
            if own is not None and own[0] >= number:
                break
            with contextlib.suppress(OSError, EphemeronError):
                data = await _read(*clients[name])
                if data is not None:
                    return number, data
    if own is None and found:
        raise ChannelTimeout("no member's state could be read")
    return own


async def _read(client: Client, said: Mapping[str, Any]) -> bytes | None:
    """A state in pieces, some of them on their way at once: enough for a long link, few enough to leave most of it to updates."""
    total, window = int(said["t"]), asyncio.Semaphore(_WINDOW)

    async def piece(at: int) -> bytes:
        async with window:
            _, (data,) = await client.call("snapshot", {"r": said["r"], "o": at}, timeout_s=SILENCE_S)
            return bytes(data)

    data = b"".join(await asyncio.gather(*(piece(at) for at in range(0, total, PIECE_BYTES))))
    return data if zlib.crc32(data) == said["c"] else None
