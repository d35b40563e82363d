"""Arguments of tasks as pickles, with large values apart: what many tasks are given is pickled, stored and fetched once.

Arrays, bytes and text above `INLINE_BYTES`, wherever they are in the arguments, and any argument that several tasks of a `map` are given, become
objects of their own, named by their content. In their place the pickle has a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from ephemeron.functions.shipped_code import PLAIN, Apart, digest_of, dumps

INLINE_BYTES = 32_768
"""Larger arguments are objects of their own."""


Shared: TypeAlias = WeakValueDictionary[str, memoryview]
"""Contents of objects by key, which tasks that wait to be published share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of one task."""

    payload: bytes
    """Empty if it is the first of the inputs."""
    inputs: tuple[str, ...]
    """Keys of the objects, in the order of their numbers."""
    objects: dict[str, memoryview]


class ArgumentPickler:
    """Pickles the arguments of the tasks of one call of the user's.

    Args:
        prefix: of keys.
        shared: objects that wait to be published, by key.
        items: arguments of all the tasks. They are not changed while this exists.
        what: for errors.
    """

    def __init__(self, prefix: str, shared: Shared, items: Sequence[tuple[Any, ...]] = (), *, what: str) -> None:
        self._prefix, self._shared, self._items, self._what = prefix, shared, items, what
        self.modules: set[str] = set()
        """Names of the modules whose classes and functions the arguments until now name."""
        counts = Counter(id(value) for item in items for value in item if type(value) not in PLAIN or _is_long(value))
        self._sent: dict[int, tuple[str, memoryview] | None] = {}
        """Of arguments of several tasks, what they are sent as; None: in their places."""
        self._several = {value for value, count in counts.items() if count > 1}

    def pickled(self, arguments: object) -> Arguments:
        """Arguments of one task.

        Raises:
            JobError: they cannot be pickled.
        """
        if not self._several:
            payload = self._dumps(arguments)
            if len(payload) <= INLINE_BYTES:
                return Arguments(payload=payload, inputs=(), objects={})
        found: dict[str, memoryview] = {}
        held: dict[int, tuple[Any, tuple[int, int]]] = {}  # values of this task, which keep their ids meanwhile

        def apart(value: object) -> tuple[int, int] | None:
            if id(value) in held:
                return held[id(value)][1]
            at = self._apart(value)
            if at is None:
                return None
            found[at[0]] = at[1]
            number = list(found).index(at[0]), len(held)
            held[id(value)] = value, number
            return number

        payload = self._dumps(arguments, apart)
        if len(payload) > INLINE_BYTES:
            key, data = self._stored(payload)
            return Arguments(payload=b"", inputs=(key, *found), objects={key: data, **found})
        return Arguments(payload=payload, inputs=tuple(found), objects={**found})

    def _dumps(self, value: object, apart: Apart | None = None) -> bytes:
        return dumps(value, what=self._what, apart=apart, modules=self.modules)

    def _apart(self, value: object) -> tuple[str, memoryview] | None:
        if id(value) in self._several:
            if id(value) not in self._sent:
                data = self._dumps(value)
                self._sent[id(value)] = self._stored(data) if len(data) > INLINE_BYTES else None
            return self._sent[id(value)]
        return self._stored(self._dumps(value)) if _is_long(value) else None

    def _stored(self, data: bytes) -> tuple[str, memoryview]:
        key = f"{self._prefix}{digest_of(data)}"
        known = self._shared.get(key)
        if known is None:
            known = self._shared[key] = memoryview(data)
        return key, known


def _is_long(value: Any) -> bool:
    kind = type(value)
    if kind is str or kind is bytes or kind is bytearray:
        return len(value) > INLINE_BYTES
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return bool(value.nbytes > INLINE_BYTES and not value.dtype.hasobject)
    return False
