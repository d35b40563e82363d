"""A heap whose entries can be changed: old entries stay in it and are skipped when they come up (lazy deletion)."""

from __future__ import annotations

import heapq

from ephemeron.data.cache.events import Key


class LazyHeap:
    """Largest score first; among equals the smallest tie-break. At most twice as many entries as keys, and 64."""

    __slots__ = ("_entries", "_live")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Key]] = []
        self._live: dict[Key, tuple[float, int, Key]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def put(self, key: Key, score: float, tie_break: int) -> None:
        """Adds a key or moves it. Two keys never have the same tie-break, so keys need no order."""
        entry = (-score, tie_break, key)
        if self._live.get(key) == entry:
            return
        self._live[key] = entry
        heapq.heappush(self._entries, entry)
        if len(self._entries) > 2 * len(self._live) + 64:
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)

    def discard(self, key: Key) -> None:
        """Takes a key out, if it is in."""
        self._live.pop(key, None)

    def score(self, key: Key) -> float:
        """The score of a key.

        Raises:
            KeyError: it is not in the heap.
        """
        return -self._live[key][0]

    def head(self) -> tuple[Key, float]:
        """The key with the largest score, and that score.

        Raises:
            IndexError: the heap is empty.
        """
        while True:
            entry = self._entries[0]
            if self._live.get(entry[2]) is entry:
                return entry[2], -entry[0]
            heapq.heappop(self._entries)
