"""State of one shard: tables, keys, and what each client has sent. Frames in, arrays out; no I/O, no clock.

Every change comes with a client and a sequence number, and is made once: a number that is not higher than the client's last one
has been seen, whatever was resent or restarted in between. The same changes in the same order give the same state to the bit, so a
log of frames is a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.config.typed import build, near, plain
from ephemeron.errors import JobError, ProtocolError
from ephemeron.sparse.store import codec
from ephemeron.sparse.store.frame import Head, Kind, unpack_json
from ephemeron.sparse.store.messages import FoundReply, Initial, NameRequest, OpenRequest, TableReply, TableSpec
from ephemeron.sparse.store.optimizers import Floats, Indices, Optimizer, optimizer

_BLOCK = 4096
"""Rows whose initial noise is drawn together."""


@dataclass(slots=True)
class ClientState:
    """A client, as a shard knows it."""

    name: str
    attempt: int = 0
    sequence: int = 0
    """Of its last PUSH or ASSIGN."""
    calls: int = 0
    """Of its last CALL that changed something: these are counted apart, so that clients may number their pushes."""
    durable: int = 0
    """Of its last PUSH or ASSIGN that a restart does not lose."""


class ClientReplaced(Exception):
    """Another client has taken over the name."""


class Table:
    """Rows of one table.

    Args:
        spec: its settings.
        weights: float32[stop - first, width]; None: initial ones.
        slots: arrays of the optimiser, as wide as the weights; None: zeros.
    """

    def __init__(self, spec: TableSpec, *, weights: Floats | None = None, slots: Mapping[str, Floats] | None = None) -> None:
        self.spec = spec
        self.optimizer: Optimizer = optimizer(spec.optimizer, where=f"optimizer of table {spec.name!r}")
        shape = (spec.stop - spec.first, spec.width)
        self.weights = initial_weights(spec.initial, spec.first, *shape) if weights is None else weights
        self.slots = {name: np.zeros(shape, np.float32) for name in self.optimizer.slots} if slots is None else slots
        self.before_change: Callable[[Indices], None] | None = None
        """Told which rows are about to change."""
        # Rows of one value as flat arrays: NumPy takes and puts those faster.
        one = spec.width == 1
        self._weights = self.weights[:, 0] if one else self.weights
        self._slots = {name: slot[:, 0] if one else slot for name, slot in self.slots.items()}

    @property
    def nbytes(self) -> int:
        """Memory of weights and slots."""
        return self.weights.nbytes * (1 + len(self.slots))

    def take(self, rows: Indices, out: Floats | None = None) -> Floats:
        """Values of rows: float32[n * width]."""
        if out is None:
            out = np.empty(rows.size * self.spec.width, np.float32)
        shaped = out if self._weights.ndim == 1 else out.reshape(-1, self.spec.width)
        self._weights.take(rows, axis=0, out=shaped, mode="clip")  # "raise", the default, would write to a copy first
        return out

    def apply(self, rows: Indices, gradient: Floats) -> None:
        """Applies the gradient of distinct rows: float32[n * width]."""
        if self.before_change is not None:
            self.before_change(rows)
        if self._weights.ndim == 2:
            gradient = gradient.reshape(-1, self.spec.width)
        self.optimizer.apply(self._weights, self._slots, rows, gradient)

    def assign(self, rows: Indices, values: Floats) -> None:
        """Replaces weights; the slots stay."""
        if self.before_change is not None:
            self.before_change(rows)
        self._weights[rows] = values if self._weights.ndim == 1 else values.reshape(-1, self.spec.width)


class ShardState:
    """Tables, keys and clients of one shard.

    Args:
        shard: its index.
        shards: how many there are.
    """

    def __init__(self, shard: int = 0, shards: int = 1) -> None:
        self.shard, self.shards = shard, shards
        self.tables: list[Table] = []
        self.keys: dict[str, bytes] = {}
        self.clients: dict[str, ClientState] = {}
        self.gets = self.pushes = self.repeated = 0
        self._numbers: dict[str, int] = {}

    def open(self, request: OpenRequest) -> ClientState:
        """Registers a client.

        Raises:
            ClientReplaced: its name belongs to a later attempt.
            JobError: it means another shard.
        """
        if (request.shard, request.shards) != (self.shard, self.shards):
            raise JobError(
                f"this is shard {self.shard} of {self.shards}, not {request.shard} of {request.shards}",
                remedy="give the addresses of all shards, in their order",
            )
        client = self.clients.setdefault(request.client, ClientState(request.client))
        self.check(client, request.attempt)
        client.attempt = request.attempt
        return client

    def check(self, client: ClientState, attempt: int) -> None:
        """Refuses a client whose name belongs to a later attempt."""
        if attempt < client.attempt:
            raise ClientReplaced(f"client {client.name!r}, attempt {attempt}, has been replaced by attempt {client.attempt}")

    def leave(self, client: ClientState) -> None:
        """Forgets a client that will not send or resend anything."""
        self.clients.pop(client.name, None)

    def values(self, head: Head, body: memoryview) -> tuple[Table, Indices]:
        """The table and rows that a GET names; the rows are within the table.

        Raises:
            JobError: no such table, wrong width, or a row out of range.
            ProtocolError: the frame is damaged.
        """
        table = self._table(head)
        rows, _ = self._rows(head, body, table, distinct=False)
        self.gets += 1
        return table, rows

    def change(self, client: ClientState, head: Head, body: memoryview) -> tuple[dict[str, Any], bool]:
        """Makes a change, if it has not been made before.

        Returns:
            The reply to a CALL, and whether anything changed.

        Raises:
            JobError: the change is refused; its number counts as seen.
            ProtocolError: the frame is damaged.
        """
        if head.kind == Kind.CALL:
            fresh = head.sequence > client.calls
            client.calls = max(client.calls, head.sequence)
            return self._call_once(head, body, fresh)
        if head.sequence <= client.sequence:
            self.repeated += 1
            return {}, False
        client.sequence = head.sequence
        table = self._table(head)
        rows, rest = self._rows(head, body, table, distinct=True)
        code, width = head.code >> 4, table.spec.width
        nbytes = codec.value_bytes(code, head.length * width)
        if nbytes > rest.nbytes:
            raise ProtocolError("a frame is too short for its values")
        values = codec.decode_values(code, rest[:nbytes])
        if head.kind == Kind.PUSH:
            table.apply(rows, values)
        else:
            table.assign(rows, values)
        self.pushes += 1
        return {}, True

    def find(self, name: str) -> FoundReply:
        """Settings of a table, if it exists."""
        number = self._numbers.get(name)
        if number is None:
            return FoundReply(found=False)
        return FoundReply(found=True, table=TableReply(number=number, spec=self.tables[number].spec))

    def add(self, table: Table) -> int:
        """Adds a table under the next number."""
        self._numbers[table.spec.name] = len(self.tables)
        self.tables.append(table)
        return len(self.tables) - 1

    def _call_once(self, head: Head, body: memoryview, fresh: bool) -> tuple[dict[str, Any], bool]:
        request, data = unpack_json(head, body)
        method, params = request.get("m"), request.get("p", {})
        if method == "create":  # the same twice is harmless, and answers with the number
            spec = build(TableSpec, params, where="table")
            return plain(self._create(spec)), fresh
        if method == "set":
            if fresh:
                self.keys[build(NameRequest, params, where="key").name] = data
            return {}, fresh
        raise ProtocolError(f"a sparse store has no method {method!r} that changes anything")

    def _create(self, spec: TableSpec) -> TableReply:
        number = self._numbers.get(spec.name)
        if number is None:
            if not 0 <= spec.first <= spec.stop <= spec.rows:
                raise JobError(f"table {spec.name!r}: rows {spec.first} to {spec.stop} of {spec.rows}")
            return TableReply(number=self.add(Table(spec)), spec=spec)
        known = self.tables[number].spec
        if known != spec:
            ours, theirs = plain(known), plain(spec)
            names = [name for name in ours if ours[name] != theirs[name]]
            raise JobError(
                f"table {spec.name!r} exists with " + ", ".join(f"{n} = {ours[n]}, not {theirs[n]}" for n in names),
                remedy="use the same settings and shards, or another name",
            )
        return TableReply(number=number, spec=known)

    def _table(self, head: Head) -> Table:
        if head.table >= len(self.tables):
            raise JobError(f"no table of number {head.table}", remedy=near("", self._numbers, what="tables of this shard"))
        table = self.tables[head.table]
        if head.width != table.spec.width:
            raise JobError(f"table {table.spec.name!r} has rows of {table.spec.width} values, not {head.width}")
        return table

    def _rows(self, head: Head, body: memoryview, table: Table, *, distinct: bool) -> tuple[Indices, memoryview]:
        """Rows, checked, and what follows them in the body."""
        count, code, size = head.length, head.code & 15, table.weights.shape[0]
        nbytes = codec.index_bytes(code, count) if count else -1
        if not 0 <= nbytes <= body.nbytes:
            raise ProtocolError("a frame is too short for its indices")
        rows = codec.decode_indices(code, head.base, count, body[:nbytes])
        ascending = code >= codec.IndexCode.DELTA8
        least, most = (rows[0], rows[-1]) if ascending else (rows.min(), rows.max())
        if least < 0 or most >= size:
            wrong = table.spec.first + int(least if least < 0 else most)
            raise JobError(
                f"index {wrong} is not in table {table.spec.name!r} of this shard, rows {table.spec.first} to {table.spec.stop - 1}"
            )
        if distinct and count > 1 and (rows[1:] <= rows[:-1]).any():
            raise ProtocolError("the indices of a push are not ascending and distinct")
        return rows, body[nbytes + -nbytes % 8 :]


def initial_weights(initial: Initial, first: int, rows: int, width: int) -> Floats:
    """Initial weights of some rows: float32[rows, width].

    Args:
        first: index of the first row in the whole table.
    """
    weights = np.full((rows, width), initial.value, np.float32)
    if initial.std:
        for block in range(first // _BLOCK, -(-(first + rows) // _BLOCK)):
            noise = np.random.default_rng([initial.seed, block]).standard_normal((_BLOCK, width), np.float32)
            begin, stop = max(first, block * _BLOCK), min(first + rows, (block + 1) * _BLOCK)
            weights[begin - first : stop - first] += np.float32(initial.std) * noise[begin - block * _BLOCK : stop - block * _BLOCK]
    return weights
