"""Inputs that an executor keeps because several of its tasks had them: tasks that are submitted one after the other have a table or a model
in common, of which the queue knows nothing. Pure."""

from __future__ import annotations

from collections import OrderedDict

_MOST_SEEN = 10_000


class RepeatedInputs:
    """The latest inputs that two tasks had.

    Args:
        limit: bytes of them together. The latest one is kept in any case.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()
        """Keys of inputs that one task had."""
        self._kept: OrderedDict[str, memoryview] = OrderedDict()

    def get(self, key: str) -> memoryview | None:
        """An input that is kept."""
        return self._kept.get(key)

    def used(self, key: str, data: memoryview) -> None:
        """A task has this input."""
        if key not in self._seen:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
            return
        self._kept[key] = data
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)
