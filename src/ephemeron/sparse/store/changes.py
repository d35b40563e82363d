"""Changes of rows by a client: numbered, compressed, and sent within a window of unacknowledged bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ephemeron.errors import JobError
from ephemeron.sparse.store import codec
from ephemeron.sparse.store.compression import Compression, Residual
from ephemeron.sparse.store.frame import Kind, pack
from ephemeron.sparse.store.link import ShardLink
from ephemeron.sparse.store.optimizers import Floats, Indices
from ephemeron.sparse.store.table_rows import TableInfo, combined

_ASK_BYTES = 1 << 20
"""Bytes of changes after which a shard is asked for an acknowledgement."""
_WINDOW_BYTES = 64 << 20
"""Bytes of changes to one shard that may be unacknowledged; `push` then waits."""


class Changes:
    """Pushes and assignments of one client. The methods are those of `SparseStore`, with tables that are known.

    Args:
        links: to all shards, in their order.
        compression: of tables without one of their own.
    """

    def __init__(self, links: Sequence[ShardLink], compression: Compression) -> None:
        self.sequence = max(link.sequence for link in links)
        """Number of the last change, also of earlier attempts of the client."""
        self._links, self._default = links, compression
        self._compressions: dict[str, Compression] = {}
        self._residuals: dict[str, Residual] = {}

    async def push(self, info: TableInfo, indices: ArrayLike, gradient: ArrayLike, sequence: int | None) -> None:
        """Sends the gradient of some rows."""
        rows, values = combined(info, indices, gradient)
        compression = self._compressions.get(info.name, self._default)
        residual: Residual | None = None
        if compression.lossy and rows.size:
            residual = self._residuals.get(info.name)
            if residual is None:
                residual = self._residuals[info.name] = Residual(info.rows, info.width, compression)
            rows, values = residual.select(rows, values)
        await self._send(Kind.PUSH, info, rows, values, sequence, compression.code, residual)

    async def assign(self, info: TableInfo, indices: ArrayLike, values: ArrayLike, sequence: int | None) -> None:
        """Replaces weights."""
        count = np.asarray(indices).size
        rows, weights = combined(info, indices, values)
        if rows.size != count:
            raise JobError(f"table {info.name!r}: assign has an index twice", remedy="give each index once")
        await self._send(Kind.ASSIGN, info, rows, weights, sequence)

    def compress(self, table: str, compression: Compression) -> None:
        """Sets the compression of later pushes to a table."""
        self._compressions[table] = compression
        if table in self._residuals:
            self._residuals[table].compression = compression

    def holds_back(self, table: str) -> bool:
        """Whether compression may hold something back for a table."""
        return table in self._residuals

    async def push_residual(self, info: TableInfo) -> None:
        """Sends all that compression held back for a table."""
        rows, values = self._residuals[info.name].drain()
        await self._send(Kind.PUSH, info, rows, values, None)

    async def _send(
        self,
        kind: Kind,
        info: TableInfo,
        rows: Indices,
        values: Floats,
        sequence: int | None,
        code: codec.ValueCode = codec.ValueCode.FLOAT32,
        residual: Residual | None = None,
    ) -> None:
        if sequence is None:
            sequence = self.sequence + 1
        elif sequence <= 0:
            raise JobError(f"sequence = {sequence}", remedy="count from 1")
        self.sequence = max(self.sequence, sequence)
        if not rows.size:
            return
        steps = rows[1:] - rows[:-1]
        waits: list[ShardLink] = []
        for shard, begin, stop in info.parts(rows):
            part = rows[begin:stop] - info.bounds[shard] if shard else rows[begin:stop]
            encoded = codec.encode_indices(part, steps[begin : stop - 1])
            data = codec.encode_values(code, values[begin:stop])
            if residual is not None and code is not codec.ValueCode.FLOAT32:
                sent = codec.decode_values(code, memoryview(data))
                residual.keep_rest(rows[begin:stop], values[begin:stop], sent)
            link = self._links[shard]
            id = link.next_id()
            frame = pack(
                kind,
                (encoded.data, data),
                code=encoded.code | code << 4,
                table=info.numbers[shard],
                width=info.width,
                count=stop - begin,
                id=id,
                sequence=sequence,
                base=encoded.base,
            )
            link.change(sequence, id, frame)
            if link.waiting_bytes > _ASK_BYTES:
                link.ask()
                if link.waiting_bytes > _WINDOW_BYTES:
                    waits.append(link)
        for link in waits:
            await link.drained()
