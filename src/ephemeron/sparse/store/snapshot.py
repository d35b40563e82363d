"""Snapshots and logs of a shard: their form, how they are written, and how a state is restored from them.

Copy of a table at one moment, taken in parts while pushes go on.

Rows that a push is about to change, and that have not been copied, are saved first (copy on write by rows). So a snapshot never stops
the shard for longer than one part takes.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.communication.durable_put import put_durable
from ephemeron.config.typed import build, plain
from ephemeron.errors import CorruptMessage, DamagedObject, JobError, ProtocolError
from ephemeron.sparse.store.frame import HEAD_BYTES, Kind, unpack, unpack_json
from ephemeron.sparse.store.messages import OpenRequest, TableSpec, Whole
from ephemeron.sparse.store.optimizers import Floats, Indices
from ephemeron.sparse.store.places import ShardPlace
from ephemeron.sparse.store.state import ClientReplaced, ClientState, ShardState, Table

_log = logging.getLogger(__name__)

_VERSION = 1
_PART_BYTES = 4 << 20
"""Bytes that are copied in one turn of the event loop, about."""
_NAME = struct.Struct("<H")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotClient:
    """A client of a snapshot."""

    name: str
    attempt: Whole
    sequence: Whole
    calls: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHead:
    """A snapshot. Parts follow the tables in order, then the values of the keys in one part."""

    version: Whole
    shard: Whole
    shards: Whole
    tables: tuple[TableSpec, ...]
    rows_per_part: tuple[Whole, ...]
    """Of each table."""
    clients: tuple[SnapshotClient, ...]
    keys: Mapping[str, Whole]
    """Length of each value."""
    log: Whole
    """First object of the log that is not in the snapshot."""


class Capture:
    """State of a shard at the moment when this is made."""

    def __init__(self, state: ShardState, *, log: int) -> None:
        self._tables = [TableCapture(table) for table in state.tables]
        self._keys = dict(state.keys)
        self.head = SnapshotHead(
            version=_VERSION,
            shard=state.shard,
            shards=state.shards,
            tables=tuple(t.spec for t in self._tables),
            rows_per_part=tuple(
                max(1, _PART_BYTES // (4 * t.spec.width * (1 + len(table.optimizer.slots))))
                for t, table in zip(self._tables, state.tables, strict=True)
            ),
            clients=tuple(
                SnapshotClient(name=c.name, attempt=c.attempt, sequence=c.sequence, calls=c.calls) for c in state.clients.values()
            ),
            keys={name: len(value) for name, value in self._keys.items()},
            log=log,
        )

    async def write(self, place: ShardPlace, attempt: int, number: int) -> None:
        """Stores it, its head last. All is read back: what precedes it is deleted afterwards."""
        key, part = place.snapshot(attempt, number), 0
        try:
            for table, rows in zip(self._tables, self.head.rows_per_part, strict=True):
                for begin in range(0, table.rows, rows):
                    arrays = table.part(begin, min(begin + rows, table.rows))
                    buffers = [memoryview(a.data).cast("B") for a in arrays]
                    await put_durable(place.channel, f"{key}-part-{part:06d}", buffers)
                    part += 1
            await put_durable(place.channel, f"{key}-part-{part:06d}", [b"".join(self._keys.values())])
            await put_durable(place.channel, key, [json.dumps(plain(self.head)).encode()])
        finally:
            self.close()

    def close(self) -> None:
        """Ends it."""
        for table in self._tables:
            table.close()


async def load(place: ShardPlace, attempt: int, number: int) -> tuple[ShardState, int]:
    """The state of a snapshot, and the first object of the log to apply to it.

    Raises:
        CorruptMessage: a part is absent or damaged.
        JobError: it has another version.
    """
    key = place.snapshot(attempt, number)
    head = build(SnapshotHead, json.loads(bytes(await _fetch(place, key))), where=key)
    if head.version != _VERSION:
        raise JobError(f"{key} has version {head.version}", remedy="read it with the release that wrote it")
    state, part = ShardState(head.shard, head.shards), 0
    for spec, rows in zip(head.tables, head.rows_per_part, strict=True):
        table = Table(spec)
        arrays = [table.weights, *(table.slots[name] for name in table.optimizer.slots)]
        for begin in range(0, len(table.weights), rows):
            data = np.frombuffer(await _fetch(place, f"{key}-part-{part:06d}"), np.float32)
            stop = min(begin + rows, len(table.weights))
            for array, values in zip(arrays, data.reshape(len(arrays), stop - begin, spec.width), strict=True):
                array[begin:stop] = values
            part += 1
        state.add(table)
    stored, at = await _fetch(place, f"{key}-part-{part:06d}"), 0
    for name, length in head.keys.items():
        state.keys[name] = bytes(stored[at : at + length])
        at += length
    for c in head.clients:
        state.clients[c.name] = ClientState(c.name, c.attempt, c.sequence, c.calls, c.sequence)
    return state, head.log


async def recover(place: ShardPlace, shard: int, shards: int) -> ShardState:
    """The shard's state as it was stored: the newest whole snapshot, and the log after it. Nothing acknowledged is missing in it.

    Raises:
        JobError: the store was started with another number of shards.
        CorruptMessage: no snapshot can be read, or an object of the log is damaged or lost; what comes after it stays in the channel.
    """
    found, logged = await place.snapshots(), await place.logged()
    if not found:
        if logged:
            raise CorruptMessage(_incomplete("the snapshot before it is lost"), key=place.log(*logged[0]))
        return ShardState(shard, shards)
    for attempt, number in reversed(found):
        try:
            state, at = await load(place, attempt, number)
        except CorruptMessage as e:
            _log.warning("snapshot %d of attempt %d cannot be read: %s", number, attempt, e)
            continue
        break
    else:
        raise CorruptMessage("no snapshot of the shard can be read", key=place.snapshot(*found[-1]))
    if (state.shard, state.shards) != (shard, shards):
        raise JobError(
            f"{place.name} holds shard {state.shard} of {state.shards}, not {shard} of {shards}",
            remedy="start it with the same number of shards, or under another name",
        )
    if any(later > attempt for later, _ in logged):
        raise CorruptMessage(_incomplete("no snapshot that the log begins with can be read"), key=place.snapshot(*found[-1]))
    last = max((number for of, number in logged if of == attempt), default=-1)
    for number in range(at, last + 1):
        key = place.log(attempt, number)
        try:
            data = await place.channel.fetch(key)
        except DamagedObject as e:
            raise DamagedObject(_incomplete(e.problem), key=key) from e
        if data is None:
            raise CorruptMessage(_incomplete(f"lost, and {last - number} objects of the log come after it"), key=key)
        replay(state, data)
    for client in state.clients.values():
        client.durable = client.sequence
    state.pushes = state.repeated = 0  # those of this process count
    return state


def _incomplete(problem: str) -> str:
    return (
        f"acknowledged changes cannot be restored: {problem}; put the object back from a copy, or start the store under another name: "
        "nothing of this one is deleted"
    )


def record(client: str, frame: bytes) -> bytes:
    """A change as the log holds it."""
    name = client.encode()
    return b"".join([_NAME.pack(len(name)), name, frame])


def replay(state: ShardState, data: memoryview) -> None:
    """Makes the changes of an object of the log."""
    for name, frame in _records(data):
        head, body = unpack(frame), frame[HEAD_BYTES:]
        try:
            if head.kind == Kind.OPEN:
                state.open(build(OpenRequest, unpack_json(head, body)[0], where="client"))
            else:
                state.change(state.clients.setdefault(name, ClientState(name)), head, body)
        except (JobError, ProtocolError, ClientReplaced):
            continue  # it was refused then, too


def _records(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    at = 0
    while at < len(data):
        (length,) = _NAME.unpack_from(data, at)
        begin = at + _NAME.size + length
        at = begin + HEAD_BYTES + unpack(data, begin).body
        yield bytes(data[begin - length : begin]).decode(), data[begin:at]


async def _fetch(place: ShardPlace, key: str) -> memoryview:
    data = await place.channel.fetch(key)
    if data is None:
        raise CorruptMessage("a part of a snapshot is absent", key=key)
    return data


def superseded(keys: Sequence[str], first: str) -> list[str]:
    """Keys that come before another one of their kind."""
    return [key for key in keys if key < first]


# -- copy of a table at one moment, taken in parts while pushes go on ---------------------------------------------


class TableCapture:
    """A table as it is now. One at a time for each table; `close` ends it."""

    def __init__(self, table: Table) -> None:
        self.spec = table.spec
        self._table = table
        self._arrays = [table.weights, *(table.slots[name] for name in table.optimizer.slots)]
        self._taken = np.zeros(len(table.weights), bool)
        self._saved: list[tuple[Indices, list[Floats]]] = []
        table.before_change = self._before

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return len(self._taken)

    def part(self, begin: int, stop: int) -> list[Floats]:
        """Copies of some rows: of the weights and then of each slot, float32[stop - begin, width]."""
        copies = [array[begin:stop].copy() for array in self._arrays]
        for rows, values in self._saved:
            inside = (rows >= begin) & (rows < stop)
            for copy, value in zip(copies, values, strict=True):
                copy[rows[inside] - begin] = value[inside]
        self._taken[begin:stop] = True
        return copies

    def close(self) -> None:
        """Ends it."""
        self._table.before_change = None

    def _before(self, rows: Indices) -> None:
        fresh = rows[~self._taken[rows]]
        if fresh.size:
            self._taken[fresh] = True
            self._saved.append((fresh, [array[fresh] for array in self._arrays]))
