"""What a cache's server holds of a queue, damaged or removed: an error that names the key, at once; nothing is left alone in silence."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from ephemeron.communication.channels.cache import CacheChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import ChannelEmptied, SignatureRefused
from ephemeron.functions.tasks import RedisQueue, TaskEdge, TaskResult, TaskSpec

numbers = itertools.count()
Change = Callable[[bytes], bytes | None]


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


CHANGES: list[Change] = [flipped, lambda data: data[:-5], lambda data: b"another"]


def with_queue(valkey_server: Any, scenario: Callable[[Callable[..., RedisQueue], Redis, str], Any]) -> None:
    async def main() -> None:
        name, key = f"d{next(numbers)}", SigningKey.new()
        async with CacheChannel(valkey_server.address) as channel, Redis.from_url(valkey_server.address) as client:
            view = lambda owner, lease_s=30.0: RedisQueue(channel, name, owner=owner, lease_s=lease_s, signing=key)  # noqa: E731
            await scenario(view, client, f"{name}.queue/")
            await view("end").clear()

    asyncio.run(main())


@pytest.mark.parametrize("change", CHANGES)
def test_damaged_tasks_are_an_error_with_their_key(change: Change, valkey_server) -> None:
    async def scenario(view, client, prefix) -> None:
        batch = await view("client").publish([TaskSpec(id="a", function="f")])
        key = f"{prefix}batch/{batch}"
        await client.hset(key, "tasks", change(await client.hget(key, "tasks")))
        for owner in ("one", "two"):  # the lease of the first one ends: each that is started for it says why it ends
            with pytest.raises(SignatureRefused, match=batch):
                await view(owner, 0.2).take(1)
            await asyncio.sleep(0.25)

    with_queue(valkey_server, scenario)


@pytest.mark.parametrize("what", ["batch", "tasks"])
def test_lost_tasks_are_an_error_with_their_key(what: str, valkey_server) -> None:
    async def scenario(view, client, prefix) -> None:
        batch = await view("client").publish([TaskSpec(id="a", function="f")])
        key = f"{prefix}batch/{batch}"
        await (client.delete(key) if what == "batch" else client.hdel(key, "tasks"))
        with pytest.raises(ChannelEmptied, match=key):
            await view("one").take(1)

    with_queue(valkey_server, scenario)


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_result_is_an_error_with_its_key(change: Change, valkey_server) -> None:
    async def scenario(view, client, prefix) -> None:
        await view("client").publish([TaskSpec(id="a", function="f")])
        one = view("one")
        [lease] = await one.take(1)
        await one.complete(lease, [TaskResult(id="a", data=b"x")])
        await client.lset(f"{prefix}results", 0, change(await client.lindex(f"{prefix}results", 0)))
        with pytest.raises(SignatureRefused, match=f"{prefix}results"):
            await view("client").reader().read()

    with_queue(valkey_server, scenario)


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_edge_is_an_error_with_its_key(change: Change, valkey_server) -> None:
    async def scenario(view, client, prefix) -> None:
        await view("client").connect(TaskEdge(name="e", inputs=1, tasks=(TaskSpec(id="b", function="f"),), order=1))
        await view("client").publish([TaskSpec(id="a", function="f", then=("e",), max_tries=1)])
        key = f"{prefix}edge/e"
        for field in ("document", "tasks"):
            data = await client.hget(key, field)
            if data is not None:
                await client.hset(key, field, change(data))
        one = view("one")
        [lease] = await one.take(1)
        with pytest.raises(SignatureRefused, match="edge/e"):
            await one.complete(lease, [TaskResult(id="a", status="failed", error="no")])

    with_queue(valkey_server, scenario)
