"""State of one shard: each change is made once, whatever is sent again."""

from __future__ import annotations

import numpy as np

from ephemeron.sparse.store import Sum, codec
from ephemeron.sparse.store.frame import HEAD_BYTES, Kind, pack, unpack
from ephemeron.sparse.store.messages import OpenRequest, TableSpec
from ephemeron.sparse.store.optimizers import document
from ephemeron.sparse.store.state import ShardState, Table

ROWS = np.array([1, 5, 6])


def opened() -> tuple[ShardState, Table]:
    state = ShardState()
    table = Table(TableSpec(name="w", rows=8, width=1, optimizer=document(Sum()), first=0, stop=8))
    state.add(table)
    return state, table


def client(state: ShardState, attempt: int = 1):
    return state.open(OpenRequest(client="rank-0", attempt=attempt, shard=0, shards=1))


def change(state: ShardState, sequence: int, value: float, *, kind: Kind = Kind.PUSH, attempt: int = 1) -> bool:
    """Sends one frame of a client; returns whether anything changed."""
    indices = codec.encode_indices(ROWS, np.diff(ROWS))
    values = codec.encode_values(codec.ValueCode.FLOAT32, np.full(ROWS.size, value, np.float32))
    frame = pack(
        kind,
        (indices.data, values),
        code=indices.code + 16 * codec.ValueCode.FLOAT32,
        width=1,
        count=ROWS.size,
        sequence=sequence,
        base=indices.base,
    )
    return state.change(client(state, attempt), unpack(frame), memoryview(frame)[HEAD_BYTES:])[1]


def test_a_push_that_is_sent_again_is_made_once() -> None:
    state, table = opened()
    assert change(state, 1, 2.0)
    assert not change(state, 1, 2.0)
    assert change(state, 2, 3.0)
    assert not change(state, 1, 2.0), "a frame that was under way for long"
    np.testing.assert_array_equal(table.take(np.arange(8)), [0, 5, 0, 0, 0, 5, 5, 0])
    assert (state.pushes, state.repeated) == (2, 2)


def test_what_a_client_has_sent_is_made_once_whichever_of_its_attempts_sends_it_again() -> None:
    state, table = opened()
    assert change(state, 7, 1.0)
    assert not change(state, 7, 1.0, attempt=2)
    assert change(state, 8, 4.0, kind=Kind.ASSIGN, attempt=2)
    assert change(state, 9, 1.0, attempt=2)
    assert not change(state, 8, 4.0, kind=Kind.ASSIGN, attempt=2), "an older value would undo the push"
    np.testing.assert_array_equal(table.take(ROWS), [5, 5, 5])
