"""Objects that tasks read and write in stores of their own, beside the objects of the run, and a cache of them.

A key `ADDRESS#KEY` names an object of the store at an address; other keys are the run's. Objects of an address are created once and
never replaced, so what an executor has read or written lately need not be read again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ephemeron.communication.channels.base import Buffer, Channel, Wrapper
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.channels.wrappers import size_of
from ephemeron.events import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

_SEPARATOR = "#"


def placed(address: str, key: str) -> str:
    """The key of an object of the store at an address."""
    return f"{address}{_SEPARATOR}{key}"


def is_placed(key: str) -> bool:
    """Whether a key is of another store than the run's."""
    return _SEPARATOR in key


def digest_of_key(key: str) -> str:
    """A key as a part of another one."""
    return hashlib.blake2b(key.encode(), digest_size=10).hexdigest()


class ObjectPlaces(Wrapper):
    """The run's channel, and stores that keys name.

    Args:
        inner: of the run.
        owner: name of this writer.
        open_channel: opens the store at an address.
        cache_bytes: of objects that are kept in memory.
    """

    def __init__(self, inner: Channel, *, owner: str, open_channel: Callable[[str], Channel], cache_bytes: int = 0) -> None:
        super().__init__(inner)
        self._owner, self._open, self._cache_bytes = owner, open_channel, cache_bytes
        self._stores: dict[str, RunChannel] = {}
        self._cached: OrderedDict[str, Sequence[Buffer]] = OrderedDict()
        """In the order of use. What was written here is joined when it is first read."""
        self._unconfirmed: set[str] = set()
        """Of these: written here, and not seen in their store since then. A store may acknowledge an object and lose it."""
        self._held = 0

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        store, name = self._of(key)
        await store.put(name, buffers, create=create)
        if store is not self.inner and size_of(buffers) and self._keep(key, buffers):
            self._unconfirmed.add(key)

    async def fetch(self, key: str) -> memoryview | None:
        if key in self._cached and key not in self._unconfirmed:
            self._cached.move_to_end(key)
            if len(self._cached[key]) > 1:
                self._cached[key] = [b"".join(self._cached[key])]
            return memoryview(self._cached[key][0])
        store, name = self._of(key)
        data = await store.fetch(name)
        if data is None:
            self._forget(key)
        elif store is not self.inner:
            self._unconfirmed.discard(key)
            self._keep(key, [data])
        return data

    async def delete(self, keys: Iterable[str]) -> None:
        of: dict[str, tuple[Channel, list[str]]] = {}
        for key in keys:
            store, name = self._of(key)
            of.setdefault(key.rpartition(_SEPARATOR)[0], (store, []))[1].append(name)
            self._forget(key)
        for store, names in of.values():
            await store.delete(names)

    async def list(self, prefix: str) -> list[str]:
        store, name = self._of(prefix)
        address = prefix[: len(prefix) - len(name)]
        found = [f"{address}{key}" for key in await store.list(name)]
        self._unconfirmed.difference_update(found)
        return found

    async def exists(self, key: str) -> bool:
        store, name = self._of(key)
        found = await store.exists(name)
        if found:
            self._unconfirmed.discard(key)
        return found

    async def close_stores(self) -> None:
        """Lets go of connections to stores; the run's channel is another's."""
        for store in self._stores.values():
            await store.close()

    @property
    def traffic(self) -> Traffic:
        """Requests to the stores so far, without those of the run's channel."""
        return sum((store.traffic for store in self._stores.values()), Traffic())

    def _of(self, key: str) -> tuple[Channel, str]:
        address, separator, name = key.rpartition(_SEPARATOR)
        if not separator:
            return self.inner, key
        if address not in self._stores:
            opened = self._open(address)
            self._stores[address] = RunChannel(opened, owner=self._owner, put_again=lambda name: False)
        return self._stores[address], name

    def _keep(self, key: str, buffers: Sequence[Buffer]) -> bool:
        """Keeps an object, if it fits and is not kept already."""
        nbytes = size_of(buffers)
        if nbytes > self._cache_bytes or key in self._cached:
            return False
        self._cached[key] = buffers
        self._held += nbytes
        while self._held > self._cache_bytes:
            self._forget(next(iter(self._cached)))
        return True

    def _forget(self, key: str) -> None:
        self._unconfirmed.discard(key)
        if key in self._cached:
            self._held -= size_of(self._cached.pop(key))
