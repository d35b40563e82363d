"""A queue by name, as calls of executors and provisioners name it, in the channel of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from ephemeron.communication.channels.base import Channel, Wrapper
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.keys import is_signed
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import JobError
from ephemeron.functions.tasks.queue import TaskQueue

Adapter: TypeAlias = Literal["objects", "redis"]


def signs(queue: str) -> Callable[[str], bool]:
    """Which objects are signed where a run has a key: the queue's own, and those that are signed anyway. Inputs and outputs
    that users name are not."""
    return lambda key: key.startswith(f"{queue}.") or is_signed(key)


def queue_channel(channel: Channel, queue: str, *, owner: str, key: str) -> RunChannel:
    """The channel through which clients and functions see a queue's objects: framed, signed, metered, with retries.

    Args:
        channel: the store.
        queue: name.
        owner: see `TaskQueue`.
        key: of the run; empty: nothing is signed.
    """
    signing = SigningKey.from_text(key) if key else None
    return RunChannel(channel, owner=owner, signing=signing, signs=signs(queue), put_again=lambda name: False)


def open_queue(
    channel: Channel, queue: str, *, owner: str, key: str = "", adapter: Adapter = "objects", lease_s: float = 30.0
) -> TaskQueue:
    """A view of the queue for one owner.

    Args:
        channel: the store; of a cache for the adapter `redis`.
        queue, owner, lease_s: see `TaskQueue`.
        key: of the run; empty: nothing is signed.
        adapter: objects in any channel, or scripts of a Redis or Valkey server.

    Raises:
        JobError: the adapter does not fit the channel.
    """
    if adapter == "objects":
        from ephemeron.functions.tasks.object_queue import ObjectQueue

        return ObjectQueue(queue_channel(channel, queue, owner=owner, key=key), queue, owner=owner, lease_s=lease_s)
    from ephemeron.communication.channels.cache import CacheChannel
    from ephemeron.functions.tasks.redis_queue import RedisQueue

    inner = channel
    while isinstance(inner, Wrapper):
        inner = inner.inner
    if not isinstance(inner, CacheChannel):
        raise JobError("a queue of the adapter 'redis' needs a cache", remedy="give a channel redis://host:port/db")
    signing = SigningKey.from_text(key) if key else None
    return RedisQueue(inner, queue, owner=owner, lease_s=lease_s, signing=signing)
