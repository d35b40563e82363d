"""Puts that are read back: an object that a store acknowledged and lost is put again before anything rests on it."""

from __future__ import annotations

from collections.abc import Sequence

from ephemeron.communication.channels.base import Buffer, Channel
from ephemeron.communication.channels.wrappers import size_of
from ephemeron.errors import ChannelUnreachable, DamagedObject, KeyExists

_PUTS = 8
READ_BACK_BYTES = 1 << 20
"""Of larger objects it is asked whether they exist instead."""


async def create_durable(channel: Channel, key: str, data: bytes, *, alike: bool = False, successor: str | None = None) -> memoryview:
    """Puts an object unless the key is taken, and returns the object that is stored there. See `create_durable_from`."""
    there = await create_durable_from(channel, key, [data], alike=alike, successor=successor)
    return memoryview(data) if there is None else there


async def create_durable_from(
    channel: Channel, key: str, buffers: Sequence[Buffer], *, alike: bool = False, successor: str | None = None
) -> memoryview | None:
    """Puts the concatenation of buffers unless the key is taken; returns what is there, None for an object that was put now and is large or
    used up.

    Args:
        channel: where to.
        key: of the object.
        buffers: unlike what any other writer puts there, if it matters who was first.
        alike: all writers put what means the same, so that any may replace a damaged object.
        successor: key of an object that is there before readers remove this one. They may be quicker than the writer, who then finds nothing.

    Raises:
        DamagedObject: what is there is damaged, and must not be replaced.
        ChannelUnreachable: the store keeps losing it.
    """
    for _ in range(_PUTS):
        taken = False
        try:
            await channel.put(key, buffers, create=True)
        except KeyExists:
            taken = True
        if taken or size_of(buffers) <= READ_BACK_BYTES:
            try:
                there = await channel.fetch(key)
            except DamagedObject:
                if not alike:
                    raise
                await put_durable(channel, key, buffers)
                continue
            if there is not None:
                return there
            if successor is not None and await channel.exists(successor):
                return None
        elif await channel.exists(key):
            return None
    raise ChannelUnreachable(f"the store has lost an object {_PUTS} times after it acknowledged it", key=key)


async def put_durable(channel: Channel, key: str, buffers: Sequence[Buffer]) -> None:
    """Puts the concatenation of buffers, and again until it is there, and whole if it is small.

    Raises:
        DamagedObject: what is there is damaged each time.
        ChannelUnreachable: the store keeps losing it.
    """
    damage: DamagedObject | None = None
    for _ in range(_PUTS):
        await channel.put(key, buffers)
        if size_of(buffers) > READ_BACK_BYTES:
            if await channel.exists(key):
                return
            continue
        try:
            if await channel.fetch(key) is not None:
                return
        except DamagedObject as e:
            damage = e
    raise damage or ChannelUnreachable(f"the store has lost an object {_PUTS} times after it acknowledged it", key=key)
