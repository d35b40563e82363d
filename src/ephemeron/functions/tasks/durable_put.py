"""Puts that are read back: an object that a store acknowledged and lost is put again before anything rests on it."""

from __future__ import annotations

from collections.abc import Sequence

from ephemeron.communication.channels.base import Buffer, Channel
from ephemeron.communication.channels.wrappers import size_of
from ephemeron.errors import ChannelUnreachable, KeyExists

_PUTS = 8
READ_BACK_BYTES = 1 << 20
"""Of larger objects it is asked whether they exist instead."""


async def create_durable(channel: Channel, key: str, data: bytes) -> memoryview:
    """Puts an object unless the key is taken, and returns the object that is stored there. See `create_durable_from`."""
    there = await create_durable_from(channel, key, [data])
    return memoryview(data) if there is None else there


async def create_durable_from(channel: Channel, key: str, buffers: Sequence[Buffer]) -> memoryview | None:
    """Puts the concatenation of buffers unless the key is taken; returns what is there, None for a large object that was put now.

    Args:
        channel: where to.
        key: of the object.
        buffers: unlike what any other writer puts there, if it matters who was first.

    Raises:
        ChannelUnreachable: the store keeps losing it.
    """
    for _ in range(_PUTS):
        taken = False
        try:
            await channel.put(key, buffers, create=True)
        except KeyExists:
            taken = True
        if taken or size_of(buffers) <= READ_BACK_BYTES:
            there = await channel.fetch(key)
            if there is not None:
                return there
        elif await channel.exists(key):
            return None
    raise ChannelUnreachable(f"the store has lost an object {_PUTS} times after it acknowledged it", key=key)
