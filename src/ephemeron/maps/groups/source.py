"""Groups of a table as items of a durable map: the key is the group's, the value the digest of its rows, and large groups come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.maps.groups.calls import GroupCall, GroupItem
from ephemeron.maps.groups.grouping import Grouping
from ephemeron.maps.result_table import ID_BYTES, id_of
from ephemeron.maps.sources import BLOCK_ROWS, Block, ItemColumns, Source

_MODELS_AT_ONCE = 64


class GroupSource(Source):
    """Groups, the most expensive ones first; those that share a row group follow each other.

    Args:
        grouping: of the table.
        call: how the function is called.
        fingerprint: see `Source.fingerprint`.
    """

    def __init__(self, grouping: Grouping, call: GroupCall, *, name: str, fingerprint: str) -> None:
        super().__init__(name, ItemColumns(cost="rows"))
        self.grouping, self.call, self._fingerprint = grouping, call, fingerprint
        costs = grouping.index.column("cost").to_numpy()
        self.order: NDArray[np.int64] = np.argsort(-costs, kind="stable")
        """Rows of the index, in the order of the items."""

    def fingerprint(self) -> str:
        return self._fingerprint

    def told(self, number: int) -> str:
        return f"group {self.grouping.index.column('key')[int(self.order[number])].as_py()}"

    def blocks(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[Block]:
        for first in range(0, len(self.order), BLOCK_ROWS):
            yield self._block_of(first, self.order[first : first + BLOCK_ROWS])

    def _block_of(self, first: int, rows: NDArray[np.int64]) -> Block:
        index = self.grouping.index.take(rows)
        keys, digests = index.column("key").to_pylist(), index.column("digest").to_pylist()
        contents = [digest + more for digest, more in zip(digests, self._more(first, len(rows)), strict=True)]
        ids = b"".join(id_of(key.encode(), content) for key, content in zip(keys, contents, strict=True))
        files, firsts, counts = (index.column(name).to_pylist() for name in ("file", "first", "rows"))
        places = {n: self.grouping.objects.place(self.grouping.manifest.file(n)) for n in set(files)}
        call = tuple(self.call)

        def value(n: int) -> tuple[Any, ...]:
            item = GroupItem(keys[n], places[files[n]], firsts[n], counts[n], digests[n], call)
            return tuple(self._with_more(first + n, item))

        items = [digest[:8].hex() for digest in digests]
        return Block(first, keys, np.frombuffer(ids, f"S{ID_BYTES}"), items, index.column("cost").to_pylist(), value)

    def _more(self, first: int, count: int) -> Sequence[bytes]:
        """What a result depends on beside the rows, for each of some items."""
        return [b""] * count

    def _with_more(self, number: int, item: GroupItem) -> GroupItem:
        return item


def ids_of(grouping: Grouping) -> NDArray[Any]:
    """Ids of all groups as items of `GroupSource`, in the order of the index."""
    index = grouping.index
    keys, digests = index.column("key").to_pylist(), index.column("digest").to_pylist()
    return np.frombuffer(b"".join(id_of(key.encode(), digest) for key, digest in zip(keys, digests, strict=True)), f"S{ID_BYTES}")


_Fetch = Callable[[Sequence[int]], Sequence[bytes | str]]


class ModelledGroupSource(GroupSource):
    """Groups that have a model, with it.

    Args:
        grouping, call, name, fingerprint: see `GroupSource`.
        models: of each group of the index: the digest of its model, hexadecimal; "" where it has none.
        fetch: gives models, pickled or as their places, by rows of the index.
    """

    def __init__(self, grouping: Grouping, call: GroupCall, *, name: str, fingerprint: str, models: Sequence[str], fetch: _Fetch) -> None:
        super().__init__(grouping, call, name=name, fingerprint=fingerprint)
        self._models, self._fetch = models, fetch
        self.order = self.order[[bool(models[row]) for row in self.order.tolist()]]
        self._held: tuple[int, Sequence[bytes | str]] = (-1, ())

    def _more(self, first: int, count: int) -> Sequence[bytes]:
        return [bytes.fromhex(self._models[row]) for row in self.order[first : first + count].tolist()]

    def _with_more(self, number: int, item: GroupItem) -> GroupItem:
        chunk = number // _MODELS_AT_ONCE
        if self._held[0] != chunk:
            rows = self.order[chunk * _MODELS_AT_ONCE : (chunk + 1) * _MODELS_AT_ONCE].tolist()
            self._held = chunk, self._fetch(rows)
        row = int(self.order[number])
        return item._replace(model=self._held[1][number % _MODELS_AT_ONCE], model_digest=self._models[row])
