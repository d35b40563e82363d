"""A cache bounded by bytes that forgets what was used longest ago. Not thread-safe: it lives on one event loop.

Least recently used is the wrong policy for the samples of an epoch, of which each is used once; it serves metadata
shards, whose samples are read by the hundred when reading is sequential, and unpacked files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """At most `limit` bytes.

    Args:
        limit: bytes; what is larger by itself is not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        """Bytes held now."""
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """What was put under this key, or None; counts as use."""
        found = self._entries.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Keeps a value, at the cost of the least recently used."""
        if key in self._entries:
            self.nbytes -= self._entries.pop(key)[1]
        if nbytes > self.limit:
            return
        self._entries[key] = (value, nbytes)
        self.nbytes += nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self._entries.popitem(last=False)[1][1]
