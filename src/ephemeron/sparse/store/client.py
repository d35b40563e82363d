"""`SparseStore`: tables of parameters on any number of shards, read by multi-get and changed by sparse gradients."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ephemeron.communication.rpc.auth import Token
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.sparse.store import codec
from ephemeron.sparse.store.codec import Compression, Residual
from ephemeron.sparse.store.frame import Head, Kind, pack, pack_json
from ephemeron.sparse.store.link import Locate, Reply, ShardLink, open_links
from ephemeron.sparse.store.messages import FoundReply, Initial, ShardStatus, TableReply, TableSpec
from ephemeron.sparse.store.optimizers import Floats, Indices, Optimizer, document
from ephemeron.sparse.store.table_rows import TableInfo, as_indices, check_range, combined


class SparseStore:
    """A client of a sparse store. Make one with `connect`. For one event loop.

        async with await SparseStore.connect(["127.0.0.1:7090"], token) as store:
            await store.create("weights", rows=1 << 20, optimizer=AdaGrad(learning_rate=0.1))
            w = await store.multi_get("weights", indices)              # float32[n, 1]
            await store.push("weights", indices, gradient[:, None])    # returns at once
            await store.flush()                                        # all pushes have been applied

    A row is read and written whole on its shard; rows of different shards may be of different moments. Reads see this client's own
    earlier pushes. Indices may come in any order; ascending ones cost least (no sort, two bytes or less each on the connection).
    """

    def __init__(self, links: Sequence[ShardLink], *, values: str, compression: Compression, anonymous: bool = False) -> None:
        self.links = tuple(links)
        self._anonymous = anonymous
        self._reply_code = codec.VALUE_CODES[values]
        self._changes = Changes(self.links, compression)
        self._tables: dict[str, TableInfo] = {}
        self._calls = max(link.calls for link in links)

    @classmethod
    async def connect(
        cls,
        addresses: Sequence[str] | Locate,
        token: Token,
        *,
        shards: int | None = None,
        client: str = "",
        attempt: int = 0,
        values: str = "float32",
        compression: Compression | None = None,
        connect_s: float = 60.0,
        answer_s: float = 10.0,
    ) -> Self:
        """Connects to all shards.

        Args:
            addresses: `HOST:PORT` of each shard, in their order; or a function that finds the address of a shard.
            token: the store's secret.
            shards: how many there are; only with a function.
            client: name under which shards remember which pushes they have, unlike every other client's. By default a new one,
                which they forget on `close`.
            attempt: of a client that takes over the name of an earlier one; the earlier one is then refused everywhere, and
                `sequence` says how far it came.
            values: type of the values that `client` receives, `float32` or `float16` (half the bytes, 3 digits).
            compression: of gradients; see `compress`.
            connect_s: seconds for which a lost shard is looked for before operations fail.
            answer_s: seconds without an answer after which a shard counts as frozen and is connected to anew.

        Raises:
            JobError: an address or the token has another form, or the address belongs to another shard.
            TokenRefused: the store has another token.
            ServiceUnreachable: no answer in time.
            ServiceRefused: a later attempt has taken over the client's name.
        """
        if values not in ("float32", "float16"):
            raise JobError(f"values = {values!r} is not known", remedy="use float32 or float16")
        links = await open_links(addresses, token, shards=shards, client=client, attempt=attempt, connect_s=connect_s, answer_s=answer_s)
        return cls(links, values=values, compression=compression or Compression(), anonymous=not client)

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.links)

    @property
    def sequence(self) -> int:
        """Number of this client's last push or assignment, also of its earlier attempts."""
        return self._changes.sequence

    @property
    def bytes_up(self) -> int:
        """Bytes sent so far."""
        return sum(link.bytes_up for link in self.links)

    @property
    def bytes_down(self) -> int:
        """Bytes received so far."""
        return sum(link.bytes_down for link in self.links)

    @property
    def reconnects(self) -> int:
        """Connections that were lost so far."""
        return sum(link.reconnects for link in self.links)

    async def create(self, table: str, rows: int, width: int = 1, *, optimizer: Optimizer, initial: float | Initial = 0.0) -> TableInfo:
        """Creates a table, or finds one with the same settings.

        Args:
            table: its name.
            rows: its number of keys, 0 to rows - 1, divided into equal ranges.
            width: values of a row.
            optimizer: how gradients change rows; see `optimizers`.
            initial: initial value of all weights, or an `Initial` with noise.

        Raises:
            JobError: it exists with other settings, or these cannot be.
        """
        noise = initial if isinstance(initial, Initial) else Initial(value=float(initial))
        bounds = [shard * rows // self.shards for shard in range(self.shards + 1)]
        self._calls += 1
        requests = []
        for shard, (first, stop) in enumerate(itertools.pairwise(bounds)):
            spec = build(
                TableSpec,
                {
                    "name": table,
                    "rows": rows,
                    "width": width,
                    "optimizer": document(optimizer),
                    "initial": noise,
                    "first": first,
                    "stop": stop,
                },
                where="table",
            )
            requests.append(self._call(shard, "create", plain(spec), number=self._calls))
        replies = await asyncio.gather(*requests)
        return self._learn([build(TableReply, reply, where="table") for reply, _ in replies])

    async def table(self, name: str) -> TableInfo:
        """Settings of a table.

        Raises:
            JobError: there is none of this name.
        """
        known = self._tables.get(name)
        if known is not None:
            return known
        replies = await asyncio.gather(*(self._call(shard, "find", {"name": name}) for shard in range(self.shards)))
        found = [build(FoundReply, reply, where="table") for reply, _ in replies]
        tables = [f.table for f in found if f.table is not None]
        if len(tables) < len(found):
            raise JobError(f"the sparse store has no table {name!r}", remedy="create it first")
        return self._learn(tables)

    async def multi_get(self, table: str, indices: ArrayLike) -> Floats:
        """Reads rows.

        Args:
            table: its name.
            indices: int[n], in any order; the same index may come several times.

        Returns:
            float32[n, width], the caller's own.

        Raises:
            JobError: no such table, or an index out of range.
            ServiceUnreachable: a shard does not come back in time.
        """
        info = self._tables.get(table) or await self.table(table)
        return await multi_get(self.links, info, indices, self._reply_code)

    async def read(self, table: str, *, rows_at_once: int = 1 << 20) -> Floats:
        """Reads a whole table: float32[rows, width]. Pushes of others go on meanwhile."""
        info = self._tables.get(table) or await self.table(table)
        parts = [
            await self.multi_get(table, np.arange(begin, min(begin + rows_at_once, info.rows)))
            for begin in range(0, info.rows, rows_at_once)
        ]
        return np.concatenate(parts)

    async def push(self, table: str, indices: ArrayLike, gradient: ArrayLike, *, sequence: int | None = None) -> None:
        """Sends the gradient of some rows, which their optimiser applies once.

        Returns at once, unless 64 MB are unacknowledged; what is lost on the way is sent again in the background. An error
        is raised by a later operation. The arrays may be changed afterwards.

        Args:
            table: its name.
            indices: int[n], in any order; gradients of the same index are summed.
            gradient: float[n, width]; float[n] if the width is 1.
            sequence: number of this push of this client, from 1 on and above all earlier ones, also to other tables; numbers
                that a shard has are ignored. For clients that repeat work after a restart. By default the next one.

        Raises:
            JobError: no such table, an index out of range, a wrong shape, or a number that is not finite.
            ServiceUnreachable, ServiceRefused: the connection is lost for good.
        """
        info = self._tables.get(table) or await self.table(table)
        await self._changes.push(info, indices, gradient, sequence)

    async def assign(self, table: str, indices: ArrayLike, values: ArrayLike, *, sequence: int | None = None) -> None:
        """Replaces weights; the optimiser's slots stay. Like `push`, for values: float[n, width]; indices must differ.

        Raises:
            JobError: see `push`; also if an index comes twice.
        """
        info = self._tables.get(table) or await self.table(table)
        await self._changes.assign(info, indices, values, sequence)

    def compress(self, table: str, compression: Compression) -> None:
        """Sets the compression of later pushes to a table. What an earlier setting held back is sent with them."""
        self._changes.compress(table, compression)

    async def push_residual(self, table: str) -> None:
        """Sends, uncompressed, all that compression held back for a table so far."""
        if self._changes.holds_back(table):
            await self._changes.push_residual(await self.table(table))

    async def flush(self) -> None:
        """Waits until all changes so far are acknowledged: applied and, where the store has a log, in it.

        Raises:
            JobError: a shard refused one.
            ServiceUnreachable: a shard does not come back in time.
        """
        await asyncio.gather(*[link.drained() for link in self.links])

    async def get(self, key: str) -> bytes | None:
        """Value of a key; None: it has none."""
        reply, data = await self._call(self._shard_of(key), "get", {"name": key})
        return data if reply["found"] else None

    async def set(self, key: str, value: bytes) -> None:
        """Sets the value of a key, whole, at most 1 GB. Returns when it is acknowledged."""
        self._calls += 1
        await self._call(self._shard_of(key), "set", {"name": key}, bytes(value), number=self._calls)

    async def snapshot(self) -> None:
        """Makes all shards store their state now.

        Raises:
            JobError: the store keeps no snapshots.
        """
        await asyncio.gather(*(self._call(shard, "snapshot", {}) for shard in range(self.shards)))

    async def status(self) -> list[ShardStatus]:
        """State of each shard."""
        replies = await asyncio.gather(*(self._call(shard, "status", {}) for shard in range(self.shards)))
        return [build(ShardStatus, reply, where="status of a shard") for reply, _ in replies]

    async def stop(self) -> None:
        """Ends all shards, which store their state first, where they have a place for it. Later operations fail."""
        await asyncio.gather(*(self._call(shard, "stop", {}) for shard in range(self.shards)))
        self._anonymous = False  # nothing is left that would have to forget this client

    async def close(self, *, flush: bool = True) -> None:
        """Ends the connections, by default after `flush`."""
        try:
            if flush and any(link.failure is None or link.unacknowledged for link in self.links):
                await self.flush()
                if self._anonymous:
                    await asyncio.gather(*(self._call(shard, "leave", {}) for shard in range(self.shards)))
        finally:
            await asyncio.gather(*(link.close() for link in self.links))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close(flush=error is None)

    def _learn(self, replies: Sequence[TableReply]) -> TableInfo:
        info = self._tables[replies[0].spec.name] = TableInfo.of(replies)
        return info

    def _shard_of(self, key: str) -> int:
        return zlib.crc32(key.encode()) % self.shards

    async def _call(
        self, shard: int, method: str, params: dict[str, Any], data: bytes = b"", *, number: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        link = self.links[shard]
        id, sink = link.next_id(), Reply()
        link.request(id, pack_json(Kind.CALL, {"m": method, "p": params}, data, id=id, sequence=number), sink)
        return await sink.future


# -- changes of rows by a client ----------------------------------------------------------------------------------


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


# -- reads of rows ------------------------------------------------------------------------------------------------


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
