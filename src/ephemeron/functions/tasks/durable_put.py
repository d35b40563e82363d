"""Puts that are read back: an object that a store acknowledged and lost is put again before anything rests on it."""

from __future__ import annotations

from ephemeron.communication.channels.base import Channel
from ephemeron.errors import ChannelUnreachable, KeyExists

_PUTS = 8
READ_BACK_BYTES = 1 << 20
"""Larger objects are looked for in a listing instead."""


async def create_durable(channel: Channel, key: str, data: bytes) -> memoryview:
    """Puts an object unless the key is taken, and returns the object that is stored there.

    Args:
        channel: where to.
        key: of the object.
        data: unlike what any other writer puts there, if it matters who was first.

    Raises:
        ChannelUnreachable: the store keeps losing it.
    """
    for _ in range(_PUTS):
        taken = False
        try:
            await channel.put(key, [data], create=True)
        except KeyExists:
            taken = True
        if taken or len(data) <= READ_BACK_BYTES:
            there = await channel.fetch(key)
            if there is not None:
                return there
        elif key in await channel.list(key):
            return memoryview(data)
    raise ChannelUnreachable(f"the store has lost an object {_PUTS} times after it acknowledged it", key=key)
