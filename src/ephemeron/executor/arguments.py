"""Arguments of tasks as pickles, with large values apart: what many tasks are given is pickled, stored and fetched once.

Arrays, bytes and text above `INLINE_BYTES`, wherever they are in the arguments, any argument that several tasks of a `map` are given, and any
large argument of a `submit`, become objects of their own, named by their content. In their place the pickle has a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import xxhash

from ephemeron.functions.shipped_code import PLAIN, Apart, digest_of, dumps

INLINE_BYTES = 32_768
"""Larger arguments are objects of their own."""
_REPEATED_BYTES = 4_096
"""So are arrays, bytes and text that are larger than this, where they are repeated, and the arguments are too large with them."""


class SharedArguments:
    """What the pickles of all arguments of an executor have in common."""

    def __init__(self) -> None:
        self.contents: WeakValueDictionary[str, memoryview] = WeakValueDictionary()
        """Of objects by key, which tasks that wait to be published share."""
        self.large: set[int] = set()
        """Ids of arguments that were large. One that was freed costs a look at the value that has its id now."""
        self._keys: dict[bytes, str] = {}
        self._seen: set[bytes] = set()

    def is_repeated(self, data: bytes) -> bool:
        """Whether it was asked for such a content before."""
        quick = xxhash.xxh3_128_digest(data)
        seen = quick in self._seen
        self._seen.add(quick)
        return seen

    def stored(self, prefix: str, data: bytes) -> tuple[str, memoryview]:
        """Key and content of an object. That of a content which was seen before takes a tenth of the time."""
        quick = xxhash.xxh3_128_digest(data)
        key = self._keys.get(quick)
        if key is None:
            key = self._keys[quick] = f"{prefix}{digest_of(data)}"
        known = self.contents.get(key)
        if known is None:
            known = self.contents[key] = memoryview(data)
        return key, known


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
        shared: of the executor.
        items: arguments of all the tasks of a `map`. They are not changed while this exists.
        what: for errors.
    """

    def __init__(self, prefix: str, shared: SharedArguments, items: Sequence[tuple[Any, ...]] = (), *, what: str) -> None:
        self._prefix, self._shared, self._items, self._what = prefix, shared, items, what
        self.modules: set[str] = set()
        """Names of the modules whose classes and functions the arguments until now name."""
        counts = Counter(id(value) for item in items for value in item if type(value) not in PLAIN or _is_long(value))
        self._sent: dict[int, tuple[str, memoryview] | None] = {}
        """Of arguments of several tasks, what they are sent as; None: in their places."""
        self._several = {value for value, count in counts.items() if count > 1}

    def pickled(self, arguments: tuple[tuple[Any, ...], Mapping[str, Any]] | Sequence[tuple[Any, ...]]) -> Arguments:
        """Arguments of one task.

        Args:
            arguments: positional ones and those by name, or positional ones of several calls.

        Raises:
            JobError: they cannot be pickled.
        """
        values = _values(arguments)
        if not self._several and not any(_is_long(value) or id(value) in self._shared.large for value in values):
            payload = self._dumps(arguments)
            if len(payload) <= INLINE_BYTES:
                return Arguments(payload=payload, inputs=(), objects={})
        found: dict[str, memoryview] = {}
        closely = False
        held: dict[int, tuple[Any, tuple[int, int]]] = {}  # values of this task, which keep their ids meanwhile

        def apart(value: object) -> tuple[int, int] | None:
            if id(value) in held:
                return held[id(value)][1]
            at = self._apart(value, closely)
            if at is None:
                return None
            found[at[0]] = at[1]
            number = list(found).index(at[0]), len(held)
            held[id(value)] = value, number
            return number

        payload = self._dumps(arguments, apart)
        if len(payload) > INLINE_BYTES and not self._items:
            self._note_large(values)
            found.clear()
            held.clear()
            closely = True
            payload = self._dumps(arguments, apart)
        if len(payload) > INLINE_BYTES:
            key, data = self._stored(payload)
            return Arguments(payload=b"", inputs=(key, *found), objects={key: data, **found})
        return Arguments(payload=payload, inputs=tuple(found), objects={**found})

    def _dumps(self, value: object, apart: Apart | None = None) -> bytes:
        return dumps(value, what=self._what, apart=apart, modules=self.modules)

    def _apart(self, value: object, closely: bool) -> tuple[str, memoryview] | None:
        if id(value) in self._several:
            if id(value) not in self._sent:
                data = self._dumps(value)
                self._sent[id(value)] = self._stored(data) if len(data) > INLINE_BYTES else None
            return self._sent[id(value)]
        if _is_long(value) or id(value) in self._shared.large:
            data = self._dumps(value)
            return self._stored(data) if len(data) > INLINE_BYTES else None
        if closely and _is_long(value, _REPEATED_BYTES):
            data = self._dumps(value)
            return self._stored(data) if self._shared.is_repeated(data) else None
        return None

    def _note_large(self, values: Sequence[Any]) -> None:
        """Notes arguments of a `submit` that are large beside their arrays and texts: the next ones may have them, too."""
        there = {id(value): value for value in values if type(value) not in PLAIN and not _is_long(value, _REPEATED_BYTES)}
        self._shared.large.update(at for at, value in there.items() if len(self._dumps(value, _left_out)) > INLINE_BYTES)

    def _stored(self, data: bytes) -> tuple[str, memoryview]:
        return self._shared.stored(self._prefix, data)


def _values(arguments: Any) -> list[Any]:
    if type(arguments) is tuple:
        positional, named = arguments
        return [*positional, *named.values()]
    return [value for each in arguments for value in each]


def _left_out(value: object) -> tuple[int, int] | None:
    return (0, 0) if _is_long(value, _REPEATED_BYTES) else None


def _is_long(value: Any, limit: int = INLINE_BYTES) -> bool:
    kind = type(value)
    if kind is str or kind is bytes or kind is bytearray:
        return len(value) > limit
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return bool(value.nbytes > limit and not value.dtype.hasobject)
    return False
