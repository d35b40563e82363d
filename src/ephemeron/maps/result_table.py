"""The table of results of a durable map: what was computed, for whom, and what it took. A public format, see docs/maps.md.

    index/000017.json       the state: the shards that count, whose results they are, and who works on it. The highest number is valid
    rows/DIGEST.parquet     a shard: rows in the order in which they were recorded, named by its content
    readers/NAME.json       who reads the table while it may change: until then nothing is deleted that it may read

A state replaces the one before by a create-only put of the next number, so of two clients one goes on and the other one notices. A shard that
no state names does not count, and is deleted by the next client. Small shards are merged, so their number grows with the logarithm of the rows; of
several rows of one item and one version those before the last one are dropped then. Rows of other versions and of values that an item had before stay until
`forget` drops them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ephemeron import blocking
from ephemeron.communication.channels import open_channel, public_address
from ephemeron.communication.channels.base import Buffer, Channel
from ephemeron.communication.channels.retrying import Retrying, RetryPolicy
from ephemeron.config.typed import build, plain
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import ChannelEmptied, DamagedObject, EphemeronError, JobError, KeyExists, TableTaken
from ephemeron.maps.objects import check_folder

T = TypeVar("T")
Status = Literal["ok", "failed"]
ID_BYTES = 16
FORMAT = 1
_INDEX, _ROWS, _READERS = "index/", "rows/", "readers/"
MOST_IN_SHARD, MOST_BYTES = 1 << 15, 4 << 20
"""Rows and bytes; larger shards are not merged any more."""
_MERGED, _LARGE = 8, 99
"""Shards of about the same size that are merged to one; class of those that are not merged."""
_RETRY = RetryPolicy(total_s=60.0)
BEAT_S = 15.0
"""Longest time between two states while a client works."""
SILENT_S = 4 * BEAT_S
"""Time after which a client on another machine that has not written a state counts as gone."""


class Row(NamedTuple):
    """What is recorded of one item."""

    id: bytes
    """Of the item: 16 bytes, of its key and its value."""
    key: str
    item: str
    """Digest of its value, 16 hexadecimal digits."""
    code: str
    """Version of the function and its options."""
    status: Status
    result: str | None
    """JSON; None where it failed."""
    data: bytes | None
    """The result, if the function returned bytes."""
    error: str | None
    """One line."""
    traceback: str | None
    """Of the user's code."""
    attempts: int
    function: str
    """That recorded it."""
    seconds: float
    cpu_seconds: float
    memory_mb: float | None
    """Largest of the process of the function so far, MiB; None: not known."""
    cost_usd: float
    """Of the seconds of the last attempt, at list prices."""
    recorded_at: float
    """Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A file of rows."""

    digest: str
    rows: int
    nbytes: int

    @property
    def key(self) -> str:
        """Of its object."""
        return f"{_ROWS}{self.digest}.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Who works on the table."""

    run: str = ""
    """Its run; empty: no client works on it."""
    host: str = ""
    seen_at: float = 0.0
    """Unix time."""
    code: str = ""
    """Version of the function that it computes."""
    done: int = 0
    of: int = 0
    """Items of its call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A source whose items all have a row."""

    source: str
    """Fingerprint of its content and of how items are read from it."""
    code: str
    items: int
    failed: int
    out: str = ""
    """State of the file that was written from it; empty: none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One state of a table."""

    format: int = FORMAT
    number: int = 0
    function: str = ""
    """Whose results these are, `module:function`."""
    shards: tuple[Shard, ...] = ()
    client: Client = field(default_factory=Client)
    whole: tuple[Whole, ...] = ()


_Index: TypeAlias = tuple[NDArray[Any], NDArray[np.bool_], NDArray[Any]]
"""Ids, which of them have failed, and versions of the function, of some rows."""


class ResultTable:
    """Rows by item, in a folder or a bucket. Usually made with `open`.

    Args:
        address: of the store.
        state: its latest.
    """

    def __init__(self, address: str, state: State) -> None:
        self.address, self.state = address, state
        self.shown = public_address(address)[0]
        self._rows: list[Row] = []
        self._nbytes = 0
        self._cached: dict[str, memoryview] = {}
        self._indexes: dict[str, _Index] = {}

    @classmethod
    def open(cls, address: str) -> ResultTable:
        """The table at an address; an empty one where there is none.

        Raises:
            ChannelError: the store does not answer.
            DamagedObject: its state cannot be read.
            JobError: it was written by a later release.
            MissingExtra: pyarrow is not installed.
        """
        pyarrow("maps")
        return cls(address, latest(address))

    # -- reading ---------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Reads the latest state again."""
        self.state = latest(self.address)

    def known(self, *, code: str | None) -> Known:
        """The latest row of each item, of those that were recorded; rows that are not flushed are left out.

        Args:
            code: only rows of this version; None: of any.
        """
        ids: list[NDArray[Any]] = []
        failed: list[NDArray[np.bool_]] = []
        counts: list[NDArray[np.bool_]] = []
        for shard in self.state.shards:
            these, bad, codes = self._index_of(shard)
            ids.append(these)
            failed.append(bad)
            counts.append(np.ones(len(codes), bool) if code is None else np.asarray(codes == code))
        if not ids:
            return Known(np.empty(0, f"S{ID_BYTES}"), np.empty(0, np.int64), np.empty(0, bool))
        every, bad, right = np.concatenate(ids), np.concatenate(failed), np.concatenate(counts)
        at = np.flatnonzero(right)
        order = at[np.argsort(every[at], kind="stable")]
        ordered = every[order]
        last = np.ones(len(order), bool)
        last[:-1] = ordered[1:] != ordered[:-1]  # of several rows of an item the latest counts
        return Known(ordered[last], order[last].astype(np.int64), bad[order[last]])

    def _index_of(self, shard: Shard) -> _Index:
        """See `_Index`, of a shard."""
        found = self._indexes.get(shard.digest)
        return _index(self._read(shard, ["id", "code", "status"])) if found is None else found

    def _keep(self, shard: Shard, data: memoryview) -> None:
        """Keeps a shard in memory, in the place of others."""
        while self._cached and sum(map(len, self._cached.values())) + len(data) > _CACHED_BYTES:
            self._cached.pop(next(iter(self._cached)))
        self._cached[shard.digest] = data

    def take(self, rows: Sequence[int] | NDArray[np.int64], columns: Sequence[str]) -> Any:
        """Rows by number over all shards, in the order of the numbers, as a `pyarrow.Table`."""
        pa = pyarrow("maps")
        wanted = np.asarray(rows, np.int64)
        begins = np.cumsum([0, *(shard.rows for shard in self.state.shards)])
        of = np.searchsorted(begins, wanted, side="right") - 1
        parts, places = [], []
        for n in np.unique(of):
            here = np.flatnonzero(of == n)
            parts.append(_taken(self._read(self.state.shards[n], columns), wanted[here] - begins[n]))
            places.append(here)
        if not parts:
            return _schema().empty_table().select(columns)
        return _taken(pa.concat_tables(parts), np.argsort(np.concatenate(places), kind="stable"))

    @property
    def row_bytes(self) -> float:
        """Bytes of a row on average, as they are stored."""
        return sum(shard.nbytes for shard in self.state.shards) / max(1, sum(shard.rows for shard in self.state.shards))

    def scan(self, columns: Sequence[str]) -> Iterator[Any]:
        """All rows, a `pyarrow.Table` per shard, superseded ones included."""
        for shard in self.state.shards:
            yield self._read(shard, columns)

    def _read(self, shard: Shard, columns: Sequence[str]) -> Any:
        pa = pyarrow("maps")
        from pyarrow import parquet

        data = self._cached.get(shard.digest)
        if data is None:
            found = _call(self.address, lambda channel: channel.fetch(shard.key))
            if found is None:
                raise ChannelEmptied(f"{self.shown} has lost a shard of results; delete {self.shown} to compute all anew", key=shard.key)
            data = found
            if _digest(data) != shard.digest:
                raise DamagedObject(f"a shard of results in {self.shown} is damaged; restore it, or delete {self.shown}", key=shard.key)
            self._keep(shard, data)
        return parquet.read_table(pa.BufferReader(data), columns=list(columns))

    # -- writing ---------------------------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        """Records a row with the next `flush`."""
        self._rows.append(row)
        self._nbytes += sum(len(each) for each in (row.result, row.data, row.error, row.traceback) if each is not None) + 200

    @property
    def unflushed(self) -> tuple[int, int]:
        """Rows that are not flushed, and their bytes."""
        return len(self._rows), self._nbytes

    def flush(self, **changes: Any) -> None:
        """Stores the rows that were added, and a state that names them.

        Args:
            changes: of the state.

        Raises:
            TableTaken: another client has written a state since this one was read.
            ChannelError: the store does not answer, or has no room: the rows are kept, and can be flushed again.
        """
        shards, old = list(self.state.shards), []
        if self._rows:
            shards.append(self._store(_table(self._rows)))
        while (mergeable := _to_merge(shards)) is not None:
            pa = pyarrow("maps")
            together = pa.concat_tables([self._read(shard, _schema().names) for shard in shards[mergeable]])
            old += [shard.key for shard in shards[mergeable]]
            shards[mergeable] = [self._store(together.filter(pa.array(_counts(together))))]
        self._put_state(shards, old, **changes)

    def forget(self, kept: NDArray[np.bool_], **changes: Any) -> int:
        """Drops rows. Nothing of them is read any more, but by those who have announced it.

        Args:
            kept: of all rows, in their order, which of them stay.
            changes: of the state.

        Returns:
            Bytes of the shards that are less.

        Raises:
            TableTaken, ChannelError: see `flush`; no row is dropped.
        """
        pa = pyarrow("maps")
        shards: list[Shard] = []
        old: list[str] = []
        at = 0
        for shard in self.state.shards:
            here = kept[at : at + shard.rows]
            at += shard.rows
            if here.all():
                shards.append(shard)
                continue
            old.append(shard.key)
            if here.any():
                shards.append(self._store(self._read(shard, _schema().names).filter(pa.array(here))))
        before = sum(shard.nbytes for shard in self.state.shards)
        self._put_state(shards, old, **changes)
        return before - sum(shard.nbytes for shard in shards)

    def _put_state(self, shards: Sequence[Shard], old: Sequence[str], **changes: Any) -> None:
        state = replace(self.state, **changes, shards=tuple(shards), number=self.state.number + 1)
        data = json.dumps(plain(state)).encode()

        async def put(channel: Channel) -> None:
            await channel.put(_index_key(state.number), [data], create=True)
            valid = {shard.key for shard in shards}
            stale = [_index_key(self.state.number)] if self.state.number else []
            if old and not await _has_readers(channel):
                stale += [key for key in old if key not in valid]
            if stale:
                await channel.delete(stale)

        try:
            _call(self.address, put)
        except KeyExists:
            raise TableTaken(f"{self.shown} was taken over by another client") from None
        self.state, self._rows, self._nbytes = state, [], 0

    def _store(self, table: Any) -> Shard:
        pa = pyarrow("maps")
        from pyarrow import parquet

        file = pa.BufferOutputStream()
        parquet.write_table(table, file, compression="zstd", row_group_size=50_000)
        data = memoryview(file.getvalue())
        shard = Shard(digest=_digest(data), rows=table.num_rows, nbytes=len(data))
        _call(self.address, lambda channel: channel.put(shard.key, [data]))
        self._keep(shard, data)
        if shard.nbytes >= MOST_BYTES and shard.nbytes >= _LARGE_ROW * shard.rows:
            self._indexes[shard.digest] = _index(table)
        return shard

    def remove_strays(self) -> None:
        """Deletes shards and states that do not count: of clients that were killed while they wrote."""
        valid = {shard.key for shard in self.state.shards} | {_index_key(self.state.number)}

        async def remove(channel: Channel) -> None:
            if await _has_readers(channel):
                return
            there = [*await channel.list(_ROWS), *(key for key in await channel.list(_INDEX) if key < _index_key(self.state.number))]
            if strays := [key for key in there if key not in valid]:
                await channel.delete(strays)

        _call(self.address, remove)

    def has_readers(self) -> bool:
        """Whether another process reads the table; see `reading`."""
        return _call(self.address, _has_readers)


@contextmanager
def reading(address: str) -> Iterator[None]:
    """Inside, no client deletes what the table at an address had at the beginning. Where nothing can be written there, it may be deleted.

    Args:
        address: of a table, which is opened inside.
    """
    key = f"{_READERS}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.json"
    ends = threading.Event()

    def announce() -> None:
        with contextlib.suppress(EphemeronError):
            _call(address, lambda channel: channel.put(key, [json.dumps({"seen_at": time.time()}).encode()]))

    def beat() -> None:
        while not ends.wait(BEAT_S):
            announce()

    announce()
    thread = threading.Thread(target=beat, name="ephemeron-reading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        with contextlib.suppress(EphemeronError):
            _call(address, lambda channel: channel.delete([key]))


async def _has_readers(channel: Channel) -> bool:
    """Whether a reader has been seen lately. Those of processes that were killed are forgotten."""
    gone, has_some = [], False
    for key in await channel.list(_READERS):
        seen_at = 0.0
        data = await channel.fetch(key)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            seen_at = 0.0 if data is None else float(json.loads(bytes(data))["seen_at"])
        if time.time() - seen_at < SILENT_S:
            has_some = True
        else:
            gone.append(key)
    if gone:
        await channel.delete(gone)
    return has_some


def _counts(table: Any) -> NDArray[np.bool_]:
    """Which of some rows are the last ones of their items and versions."""
    ids, codes = _as_ids(table.column("id")), table.column("code").combine_chunks().dictionary_encode().indices.to_numpy()
    order = np.lexsort((ids, codes))
    counts = np.ones(len(ids), bool)
    counts[order[:-1]] = (ids[order[1:]] != ids[order[:-1]]) | (codes[order[1:]] != codes[order[:-1]])
    return counts


_CACHED_BYTES = 64 << 20
_LARGE_ROW = 10_000
"""Bytes, of rows on average of which there are so few in a shard that their ids are kept."""


@dataclass(frozen=True, slots=True)
class Known:
    """Items that have a row: sorted ids, the number of each one's row, and whether it failed."""

    ids: NDArray[Any]
    rows: NDArray[np.int64]
    failed: NDArray[np.bool_]

    def find(self, ids: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Number of the row of each id, -1 where it has none; and whether that row is of a failure."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64), np.zeros(len(ids), bool)
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        there = self.ids[at] == ids
        return np.where(there, self.rows[at], -1), np.where(there, self.failed[at], False)


def latest(address: str) -> State:
    """The valid state at an address; that of an empty table where there is none. Nothing is made there."""
    shown = public_address(address)[0]
    if not check_folder(address):
        return State()

    async def read(channel: Channel) -> tuple[str, bytes] | None:
        for _ in range(8):  # a client may replace it between the two requests
            keys = await channel.list(_INDEX)
            if not keys:
                return None
            if (found := await channel.fetch(keys[-1])) is not None:
                return keys[-1], bytes(found)
        return None

    found = _call(address, read)
    if found is None:
        return State()
    key, data = found
    try:
        raw = json.loads(data)
    except ValueError:
        raise DamagedObject(f"the state of the results in {shown} is damaged; delete {shown} to compute all anew", key=key) from None
    if isinstance(raw, dict) and raw.get("format", 0) > FORMAT:
        raise JobError(f"the results in {shown} are of a later release", remedy="update ephemeron")
    return build(State, raw, where=f"{shown}/{key}")


def present_client(run: str, *, done: int = 0, of: int = 0) -> Client:
    """This process, as the client of a table."""
    return Client(run=run, host=socket.gethostname(), seen_at=time.time(), done=done, of=of)


def id_of(key: bytes, value: bytes) -> bytes:
    """The id of an item.

    Args:
        key: empty: its value is its key.
        value: in a form that is equal for equal values.
    """
    digest = hashlib.blake2b(len(key).to_bytes(8, "big"), digest_size=ID_BYTES)
    digest.update(key)
    digest.update(value)
    found = digest.digest()
    return found if found[-1] else found[:-1] + b"\x01"  # NumPy's byte strings lose zeros at their ends


def _index_key(number: int) -> str:
    return f"{_INDEX}{number:09d}.json"


def _digest(data: Buffer) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _call(address: str, operation: Callable[[Channel], Awaitable[T]]) -> T:
    async def run() -> T:
        async with Retrying(open_channel(address), policy=_RETRY, rng=random.Random()) as channel:
            return await operation(channel)

    return blocking.run(lambda _: run())


def _taken(table: Any, rows: NDArray[np.int64]) -> Any:
    """Rows of a table by number; a view where they follow one another."""
    if len(rows) and (np.diff(rows) == 1).all():
        return table.slice(int(rows[0]), len(rows))
    return table.take(pyarrow("maps").array(rows))


def _index(table: Any) -> _Index:
    failed = np.asarray(table.column("status").to_numpy(zero_copy_only=False) == "failed")
    return _as_ids(table.column("id")), failed, table.column("code").to_numpy(zero_copy_only=False)


def _as_ids(column: Any) -> NDArray[Any]:
    """A column of ids as an array of byte strings."""
    joined = column.combine_chunks()
    data = np.frombuffer(joined.buffers()[1], np.uint8)
    at = joined.offset * ID_BYTES
    return data[at : at + len(joined) * ID_BYTES].view(f"S{ID_BYTES}")


def _to_merge(shards: Sequence[Shard]) -> slice | None:
    """Shards at the end that are to be one; None: there are none. They are in classes by the number of octal digits of their rows."""
    classes = [len(f"{s.rows:o}") if s.rows < MOST_IN_SHARD and s.nbytes < MOST_BYTES else _LARGE for s in shards]
    for most in sorted(set(classes) - {_LARGE}):
        count = next((n for n, each in enumerate(reversed(classes)) if each > most), len(classes))
        if count >= _MERGED:
            return slice(len(shards) - count, len(shards))
    return None


def _schema() -> Any:
    pa = pyarrow("maps")
    text = pa.string()
    return pa.schema(
        [
            pa.field("id", pa.binary(ID_BYTES), nullable=False),
            pa.field("key", text, nullable=False),
            pa.field("item", text, nullable=False),
            pa.field("code", text, nullable=False),
            pa.field("status", text, nullable=False),
            ("result", text),
            ("data", pa.binary()),
            ("error", text),
            ("traceback", text),
            ("attempts", pa.int32()),
            ("function", text),
            ("seconds", pa.float64()),
            ("cpu_seconds", pa.float64()),
            ("memory_mb", pa.float64()),
            ("cost_usd", pa.float64()),
            ("recorded_at", pa.timestamp("us", tz="UTC")),
        ]
    )


def _table(rows: Sequence[Row]) -> Any:
    pa = pyarrow("maps")
    schema = _schema()
    columns = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
    columns["recorded_at"] = tuple(round(t * 1e6) for t in columns["recorded_at"])
    return pa.table({name: pa.array(columns[name], schema.field(name).type) for name in Row._fields}, schema=schema)
