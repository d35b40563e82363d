"""Shards that are killed, frozen, replaced and handed over, with their channel in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from sparse_stores import TOKEN, on_loop

from ephemeron.communication.channels.base import Buffer, Channel
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.errors import JobError, ServiceUnreachable
from ephemeron.sparse.store import Adam, Initial, SparseStore, Sum
from ephemeron.sparse.store.journal import JournalOptions
from ephemeron.sparse.store.messages import TableSpec
from ephemeron.sparse.store.optimizers import document
from ephemeron.sparse.store.places import Directory, ShardPlace, framed
from ephemeron.sparse.store.shard import Shard, ShardOptions
from ephemeron.sparse.store.snapshot import TableCapture
from ephemeron.sparse.store.state import Table

ROWS = 2_000
LOGGED = JournalOptions(log=True, log_interval_s=0.005, snapshot_s=3600, fence_s=60)
SNAPSHOTS = JournalOptions(snapshot_s=3600, fence_s=60)


class Process:
    """A shard that can be killed: nothing of it runs afterwards."""

    def __init__(self, channel: Channel, journal: JournalOptions, *, shard: int = 0, shards: int = 1) -> None:
        options = ShardOptions(shard=shard, shards=shards, journal=journal)
        self.served = asyncio.Event()
        self.shard = Shard(options, token=TOKEN, channel=framed(channel, owner="shard"), ready=lambda host, port: self.served.set())
        self.task = asyncio.get_running_loop().create_task(self.shard.run())

    async def started(self) -> Process:
        waiting = asyncio.get_running_loop().create_task(self.served.wait())
        await asyncio.wait({self.task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not self.served.is_set():
            waiting.cancel()
            self.task.result()
        return self

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def client(channel: Channel, **options: object) -> AsyncIterator[SparseStore]:
    locate = Directory(framed(channel, owner="client"), "sparse-store").locate
    store = await SparseStore.connect(locate, TOKEN, **options)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        await store.close(flush=False)


@pytest.mark.parametrize("seed", range(3))
@on_loop
async def test_with_the_log_a_killed_shard_loses_and_repeats_nothing(seed: int) -> None:
    rng, channel = np.random.default_rng(seed), MemoryChannel()
    process = await Process(channel, LOGGED).started()
    async with client(channel) as store:
        await store.create("w", ROWS, 2, optimizer=Sum())
        total = np.zeros((ROWS, 2))
        for number in range(200):
            rows = rng.choice(ROWS, 20, replace=False)
            total[rows] += number
            await store.push("w", rows, np.full((20, 2), number))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.1:
                await store.snapshot()
            if rng.random() < 0.05:
                await process.kill()
                process = await Process(channel, LOGGED).started()
        await store.set("epoch", b"7")
        await store.flush()
        await process.kill()
        process = await Process(channel, LOGGED).started()
        np.testing.assert_array_equal(await store.read("w"), total)
        assert await store.get("epoch") == b"7"
        assert store.reconnects > 1
    await process.kill()


@on_loop
async def test_without_the_log_a_killed_shard_loses_what_came_after_the_snapshot() -> None:
    channel = MemoryChannel()
    process = await Process(channel, SNAPSHOTS).started()
    async with client(channel, client="rank-0") as store:
        await store.create("w", ROWS, optimizer=Adam(learning_rate=0.1), initial=Initial(std=0.1))
        await store.push("w", [1, 2], [1, 2])
        await store.snapshot()
        before = await store.read("w")
        await store.push("w", [1, 2], [1, 2])
        await store.flush()
        await process.kill()
        process = await Process(channel, SNAPSHOTS).started()
        np.testing.assert_array_equal(await store.read("w"), before)
        await store.push("w", [1, 2], [1, 2])
        other = await store.read("w")
        assert (other != before).sum() == 2
    await process.kill()


@on_loop
async def test_a_shard_that_hands_over_loses_nothing_with_snapshots_alone() -> None:
    channel = MemoryChannel()
    process = await Process(channel, SNAPSHOTS).started()
    rng = np.random.default_rng(1)
    async with client(channel) as store:
        await store.create("w", ROWS, optimizer=Sum())
        total = np.zeros(ROWS)

        async def push() -> None:
            for _ in range(400):
                rows = rng.choice(ROWS, 20, replace=False)
                total[rows] += 1
                await store.push("w", rows, np.ones(20))
                await asyncio.sleep(0)

        pushing = asyncio.create_task(push())
        for _ in range(3):
            await asyncio.sleep(0.01)
            process.shard.hand_over.set()
            assert await process.task == "handed-over"
            process = await Process(channel, SNAPSHOTS).started()
        await pushing
        await store.flush()
        np.testing.assert_array_equal((await store.read("w")).ravel(), total)
        assert process.shard.attempt == 4
    await process.kill()


@on_loop
async def test_a_frozen_shard_that_wakes_up_acknowledges_nothing_more() -> None:
    """The old process has its clients still. Once a successor has claimed the shard, what they push is not acknowledged by the old."""
    channel = MemoryChannel()
    old = await Process(channel, LOGGED).started()
    async with client(channel) as store:
        await store.create("w", ROWS, optimizer=Sum())
        await store.push("w", [1], [1])
        await store.flush()
        new = await Process(channel, LOGGED).started()
        await store.push("w", [1], [1])  # reaches the old process, whose connection is open
        await store.flush()
        assert await old.task == "replaced"
        assert (await store.multi_get("w", [1])).item() == 2
        assert new.shard.status.pushes == 1
    await new.kill()


@on_loop
async def test_a_process_that_was_frozen_checks_before_it_answers() -> None:
    channel = MemoryChannel()
    quick = JournalOptions(snapshot_s=3600, fence_s=0.2)
    old = await Process(channel, quick).started()
    async with client(channel, answer_s=0.5) as store:
        await store.create("w", ROWS, optimizer=Sum())
        await store.push("w", [1], [1])
        await store.snapshot()
        journal = old.shard._server.journal  # type: ignore[union-attr]
        await journal.close()  # type: ignore[union-attr]  # nothing of it runs, as in a frozen process, and its lease passes
        journal._over = False  # type: ignore[union-attr]
        await asyncio.sleep(0.3)
        new = await Process(channel, quick).started()
        await store.push("w", [1], [1])
        assert (await store.multi_get("w", [1])).item() == 2
        assert await old.task == "replaced"
        assert old.shard.status.pushes == 1
        assert new.shard.status.pushes == 1
    await new.kill()


class SlowLog(MemoryChannel):
    """A store that takes no log until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        if "/log-" in key:
            await self.open.wait()
        await super().put(key, buffers, create=create)


@on_loop
async def test_a_shard_whose_log_is_slow_is_not_taken_for_a_frozen_one() -> None:
    channel = SlowLog()
    process = await Process(channel, LOGGED).started()
    async with client(channel, answer_s=0.5) as store:
        creating = asyncio.create_task(store.create("w", ROWS, optimizer=Sum()))
        await asyncio.sleep(1.0)
        assert not creating.done()
        time.sleep(1.0)  # noqa: ASYNC251 - neither the shard nor its client runs, as on a busy machine
        await asyncio.sleep(0.2)
        assert not creating.done()
        channel.open.set()
        await creating
        channel.open.clear()
        await store.push("w", [1], [1])
        flushing = asyncio.create_task(store.flush())
        await asyncio.sleep(1.0)
        assert not flushing.done()
        channel.open.set()
        await flushing
        assert store.reconnects == 0
    await process.kill()


@on_loop
async def test_of_two_processes_with_one_attempt_one_is_the_shard() -> None:
    channel = MemoryChannel()
    first = await Process(channel, LOGGED).started()
    second = Shard(ShardOptions(journal=LOGGED), token=TOKEN, channel=framed(channel, owner="second"))
    assert await second.run(attempt=1) == "duplicate"
    await first.kill()


@on_loop
async def test_another_number_of_shards_is_refused() -> None:
    channel = MemoryChannel()
    first = await Process(channel, SNAPSHOTS).started()
    with pytest.raises(JobError, match="has 1 shards, not 2; start it with the same number"):
        await Process(channel, SNAPSHOTS, shards=2).started()
    await first.kill()


@on_loop
async def test_an_occupied_port_is_one_line() -> None:
    first = await Process(MemoryChannel(), SNAPSHOTS).started()
    assert first.shard._server is not None
    port = first.shard._server.address[1]
    with pytest.raises(JobError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use; give another"):
        await Shard(ShardOptions(port=port), token=TOKEN).run()
    await first.kill()


@on_loop
async def test_a_store_that_has_not_started() -> None:
    with pytest.raises(ServiceUnreachable, match="no shard of the sparse store 'x' has started"):
        await Directory(framed(MemoryChannel(), owner="c"), "x").shards(timeout_s=0.1)
    with pytest.raises(JobError, match="name 'a b' of a sparse store"):
        ShardPlace(MemoryChannel(), "a b", 0)


@on_loop
async def test_old_objects_are_deleted() -> None:
    channel = MemoryChannel()
    process = await Process(channel, LOGGED).started()
    async with client(channel) as store:
        await store.create("w", ROWS, optimizer=Sum())
        for _ in range(5):
            await store.push("w", [1], [1])
            await store.flush()
            await store.snapshot()
        keys = await channel.list("sparse-store/shard-0000/")
        heads = [key for key in keys if "snapshot" in key and "part" not in key]
        assert len(heads) == 2
        assert len([key for key in keys if "/log-" in key]) <= 2
    await process.kill()


def test_a_capture_is_the_table_of_one_moment() -> None:
    spec = TableSpec(name="w", rows=1000, width=2, optimizer=document(Adam(learning_rate=0.1)), initial=Initial(std=1), first=0, stop=1000)
    table, rng = Table(spec), np.random.default_rng(0)

    def push() -> None:
        rows = np.sort(rng.choice(1000, 100, replace=False))
        table.apply(rows, rng.standard_normal(200).astype(np.float32))

    push()
    expected = [table.weights.copy(), *(table.slots[name].copy() for name in "mvt")]
    capture = TableCapture(table)
    parts = []
    for begin in range(0, 1000, 300):
        push()
        parts.append(capture.part(begin, min(begin + 300, 1000)))
        push()
    capture.close()
    for index, array in enumerate(expected):
        np.testing.assert_array_equal(np.concatenate([part[index] for part in parts]), array)
    assert (table.weights != expected[0]).any()
