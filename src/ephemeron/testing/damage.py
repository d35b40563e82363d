"""Damage to the objects of a store, one kind of key at a time: whoever reads them ends right, or with an error that names the key.

for damage in DAMAGES:
    store = MemoryChannel()
    happened = damage_first(store, "work/", damage)
    ...run something...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from ephemeron.communication.channels.base import Received
from ephemeron.communication.channels.memory import MemoryChannel

Damage: TypeAlias = Callable[[str, bytes, Mapping[str, bytes]], bytes | None]
"""What is found instead of an object, from its key, its bytes, and every object that was put so far; None: nothing."""


def flipped(key: str, data: bytes, seen: Mapping[str, bytes]) -> bytes | None:
    """The last bit is another one."""
    return data[:-1] + bytes([data[-1] ^ 1]) if data else b"\0"


def truncated(key: str, data: bytes, seen: Mapping[str, bytes]) -> bytes | None:
    """The last fifth is missing, five bytes at least."""
    return data[: -max(5, len(data) // 5)]


def removed(key: str, data: bytes, seen: Mapping[str, bytes]) -> bytes | None:
    """The put was acknowledged, and nothing is there."""
    return None


def another(key: str, data: bytes, seen: Mapping[str, bytes]) -> bytes | None:
    """A whole object that was put under another key of the same kind, or of any other."""
    others = [name for name in seen if seen[name] != data]
    alike = [name for name in others if kind_of(name) == kind_of(key)]
    return seen[(alike or others)[0]] if others else flipped(key, data, seen)


DAMAGES: tuple[Damage, ...] = (flipped, truncated, removed, another)


def kind_of(key: str) -> str:
    """A key without what tells objects of one kind apart: numbers, and digests and other long names."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", key)


def damage_first(store: MemoryChannel, wanted: Callable[[str], bool], damage: Damage, happened: list[str], *, late: bool = False) -> None:
    """Damages the first object of a store whose key is wanted.

    Args:
        happened: receives its key.
        late: not when it is put, but once it has been read whole: a writer that reads it back does not notice.
    """
    seen: dict[str, bytes] = {}
    publish, fetch, get, exists = store.publish, store.fetch, store.get, store.exists

    def published(key: str, data: bytes) -> None:
        seen[key] = bytes(data)
        if late or happened or not wanted(key):
            return publish(key, data)
        happened.append(key)
        found = damage(key, bytes(data), seen)
        if found is not None:
            publish(key, found)
        return None

    def was_read(key: str) -> None:
        if late and not happened and key in store.objects and wanted(key):
            happened.append(key)
            found = damage(key, bytes(store.objects.pop(key)), seen)
            if found is not None:
                store.objects[key] = found

    async def fetched(key: str) -> memoryview | None:
        data = await fetch(key)
        was_read(key)
        return data

    async def got(key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        received = await get(key, deadline=deadline, expected_at=expected_at)
        was_read(key)
        return received

    async def existed(key: str) -> bool:
        found = await exists(key)
        was_read(key)
        return found

    store.publish, store.fetch, store.get, store.exists = published, fetched, got, existed  # type: ignore[method-assign]
