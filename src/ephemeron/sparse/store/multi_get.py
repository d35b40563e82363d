"""Reads of rows: one request for each shard that has some of them, whose replies are written into one array as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ephemeron.sparse.store import codec
from ephemeron.sparse.store.frame import Head, Kind, pack
from ephemeron.sparse.store.link import ShardLink
from ephemeron.sparse.store.optimizers import Floats, Indices
from ephemeron.sparse.store.table_rows import TableInfo, as_indices, check_range


async def multi_get(links: Sequence[ShardLink], info: TableInfo, indices: ArrayLike, code: codec.ValueCode) -> Floats:
    """Reads rows; see `SparseStore.multi_get`.

    Args:
        links: to all shards, in their order.
        info: of the table.
        indices: int[n], in any order.
        code: encoding in which shards send values.
    """
    rows = as_indices(indices)
    out = np.empty((rows.size, info.width), np.float32)
    if not rows.size:
        return out
    steps: Indices | None = rows[1:] - rows[:-1]
    order: NDArray[np.int64] | None = None
    if steps is not None and steps.size and steps.min() < 0:
        check_range(info, int(rows.min()), int(rows.max()))
        if len(links) == 1:
            steps = None
        else:
            order = np.argsort(rows, kind="stable")
            rows = rows[order]
            steps = rows[1:] - rows[:-1]
    else:
        check_range(info, int(rows[0]), int(rows[-1]))
    gather = _Gather()
    for shard, begin, stop in info.parts(rows):
        sink = _Values(gather, out, order, begin, stop)
        part = rows[begin:stop] - info.bounds[shard] if shard else rows[begin:stop]
        encoded = codec.encode_indices(part, None if steps is None else steps[begin : stop - 1])
        link = links[shard]
        id = link.next_id()
        frame = pack(
            Kind.GET,
            (encoded.data,),
            code=encoded.code,
            table=info.numbers[shard],
            width=info.width,
            count=stop - begin,
            id=id,
            more=code,
            base=encoded.base,
        )
        link.request(id, frame, sink)
    await gather.future
    return out


class _Gather:
    """A future of several parts."""

    __slots__ = ("future", "left")

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.left = 0

    def done(self) -> None:
        self.left -= 1
        if not self.left and not self.future.done():
            self.future.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Values:
    """A sink that puts the values of one shard into their place."""

    __slots__ = ("_begin", "_gather", "_order", "_out", "_stop")

    def __init__(self, gather: _Gather, out: Floats, order: Indices | None, begin: int, stop: int) -> None:
        self._gather, self._out, self._order, self._begin, self._stop = gather, out, order, begin, stop
        gather.left += 1

    def take(self, head: Head, body: memoryview) -> None:
        width = self._out.shape[1]
        code, count = head.code >> 4, (self._stop - self._begin) * width
        values = codec.decode_values(code, body[: codec.value_bytes(code, count)]).reshape(-1, width)
        if self._order is None:
            self._out[self._begin : self._stop] = values
        else:
            self._out[self._order[self._begin : self._stop]] = values
        self._gather.done()

    def fail(self, error: Exception) -> None:
        self._gather.fail(error)
