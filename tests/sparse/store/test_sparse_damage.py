"""Every object of a shard damaged, cut short, replaced or removed once: all that was acknowledged, or an error that names the key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ephemeron.communication import object_frame
from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.errors import ChannelError, ServiceUnreachable
from ephemeron.functions import simulation
from ephemeron.sparse.store import Sum
from ephemeron.sparse.store.journal import JournalOptions
from ephemeron.sparse.store.places import ShardPlace, framed
from ephemeron.sparse.store.snapshot import recover
from ephemeron.testing.damage import DAMAGES, Damage, removed

PUSHES, ROWS = 12, 50


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_frame, "FIRST_AGAIN_S", 0.0005)  # shards have sockets, so time is real


def _pushed(snapshots: Sequence[int] = (), log: bool = True) -> tuple[MemoryChannel, dict[str, bytes]]:
    """The channel of a store that was killed after `PUSHES` acknowledged pushes, and all objects that it has ever put."""
    from test_sparse_shard import Process, client

    options = JournalOptions(log=log, log_interval_s=0.001, snapshot_s=3600, fence_s=60)

    async def go() -> tuple[MemoryChannel, dict[str, bytes]]:
        channel = MemoryChannel()
        seen: dict[str, bytes] = {}
        publish = channel.publish

        def published(key: str, data: bytes) -> None:
            seen[key] = data
            publish(key, data)

        channel.publish = published  # type: ignore[method-assign]
        process = await Process(channel, options).started()
        async with client(channel) as store:
            await store.create("w", ROWS, optimizer=Sum())
            for number in range(PUSHES):
                await store.push("w", np.arange(ROWS), np.ones(ROWS))
                await store.flush()
                if number in snapshots:
                    await store.snapshot()
        await process.kill()
        return channel, seen

    return asyncio.run(go())


def _recovered(objects: dict[str, bytes]) -> tuple[float, str]:
    """Sum of the weights after a restart, and why there is none."""

    async def go() -> tuple[float, str]:
        channel = MemoryChannel()
        channel.objects.update(objects)
        try:
            state = await recover(ShardPlace(framed(channel, owner="shard"), "sparse-store", 0), 0, 1)
        except ChannelError as e:
            return 0.0, str(e)
        finally:
            assert channel.objects == objects
        return float(sum(table.weights.sum() for table in state.tables)), ""

    return simulation.run(go())


def _damaged(objects: dict[str, bytes], seen: dict[str, bytes], kind: str) -> Iterator[tuple[str, Damage, dict[str, bytes]]]:
    for key in sorted(objects):
        if f"/{kind}-" in key:
            for damage in DAMAGES:
                found = damage(key, objects[key], seen)
                changed = {name: data for name, data in objects.items() if name != key}
                if found is not None:
                    changed[key] = found
                yield key, damage, changed


@pytest.mark.parametrize("snapshots", [(), (4,)])
def test_a_damaged_object_of_the_log_is_named_and_what_comes_after_it_stays(snapshots: tuple[int, ...]) -> None:
    channel, seen = _pushed(snapshots)
    assert _recovered(channel.objects)[0] == PUSHES * ROWS
    kept = [key for key in sorted(channel.objects) if "/log-" in key]
    assert len(kept) >= PUSHES - 5
    for key, damage, changed in _damaged(channel.objects, seen, "log"):
        if damage is removed and key == kept[-1]:
            continue  # nothing in the channel tells; the clients do: see below
        total, error = _recovered(changed)
        if error:
            assert key in error, (key, damage.__name__, error)
            assert "nothing of this one is deleted" in error
        else:
            assert total == PUSHES * ROWS, (key, damage.__name__)  # from the snapshot after it


def test_a_damaged_snapshot_is_named_or_survived() -> None:
    channel, seen = _pushed((4, 8))
    for key, damage, changed in _damaged(channel.objects, seen, "snapshot"):
        total, error = _recovered(changed)
        if error:
            assert key.partition("-part-")[0] in error or "/log-" in error, (key, damage.__name__, error)
        else:
            assert total == PUSHES * ROWS, (key, damage.__name__)


def test_a_log_without_its_snapshot_is_no_empty_store() -> None:
    channel, _ = _pushed()
    left = {key: data for key, data in channel.objects.items() if "/snapshot-" not in key}
    assert "the snapshot before it is lost" in _recovered(left)[1]


def test_a_damaged_claim_is_survived() -> None:
    from test_sparse_shard import LOGGED, Process, client

    channel, seen = _pushed()

    async def go(objects: dict[str, bytes]) -> float:
        there = MemoryChannel()
        there.objects.update(objects)
        process = await Process(there, LOGGED).started()
        async with client(there) as store:
            total = float((await store.read("w")).sum())
        await process.kill()
        return total

    for key, damage, changed in _damaged(channel.objects, seen, "attempt"):
        assert asyncio.run(go(changed)) == PUSHES * ROWS, (key, damage.__name__)


def test_a_client_notices_that_acknowledged_changes_are_lost() -> None:
    """The last object of the log is gone: only a client that has its acknowledgement knows that it was there."""
    from test_sparse_shard import LOGGED, Process, client

    async def go() -> None:
        channel = MemoryChannel()
        process = await Process(channel, LOGGED).started()
        async with client(channel) as store:
            await store.create("w", ROWS, optimizer=Sum())
            for _ in range(3):
                await store.push("w", [1], [1])
                await store.flush()
            await process.kill()
            del channel.objects[max(key for key in channel.objects if "/log-" in key)]
            process = await Process(channel, LOGGED).started()
            with pytest.raises(ServiceUnreachable, match="lost acknowledged changes"):
                await store.read("w")
        await process.kill()

    asyncio.run(go())


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_the_store_damages_or_loses_while_it_is_written_is_written_again(damage: Damage) -> None:
    """Each object of log and snapshots is read back before anything is acknowledged or deleted because of it."""
    from test_sparse_shard import LOGGED, Process, client

    class FirstPutFails(MemoryChannel):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, bytes] = {}
            self.hit = 0

        async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
            first = key not in self.seen and "/attempt-" not in key
            await super().put(key, buffers, create=create)
            self.seen[key] = self.objects[key]
            if first:
                self.hit += 1
                found = damage(key, self.objects[key], self.seen)
                self.objects.pop(key)
                if found is not None:
                    self.objects[key] = found

    async def go() -> None:
        channel = FirstPutFails()
        process = await Process(channel, LOGGED).started()
        async with client(channel) as store:
            await store.create("w", ROWS, optimizer=Sum())
            await store.push("w", [1], [1])
            await store.flush()
            await store.snapshot()
            await store.push("w", [1], [1])
            await store.flush()
            await process.kill()
            process = await Process(channel, LOGGED).started()
            assert (await store.read("w")).sum() == 2
        await process.kill()
        assert channel.hit >= 5

    asyncio.run(go())
