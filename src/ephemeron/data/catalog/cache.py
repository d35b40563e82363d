"""Least-recently-used cache bounded by bytes. Not thread-safe: used on one event loop.

Least recently used is the wrong policy for the samples of an epoch, each of which is used once; it serves metadata
shards, whose samples are read by the hundred when reading is sequential, and unpacked files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A cache of at most `limit` bytes.

    Args:
        limit: bytes; a single larger value is not kept.
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
        """The value of a key, or None; counts as use."""
        found = self._entries.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Keeps a value and evicts the least recently used ones beyond the limit."""
        if key in self._entries:
            self.nbytes -= self._entries.pop(key)[1]
        if nbytes > self.limit:
            return
        self._entries[key] = (value, nbytes)
        self.nbytes += nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self._entries.popitem(last=False)[1][1]
