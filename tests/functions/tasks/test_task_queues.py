"""The contract of `TaskQueue`, for each of its implementations."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from ephemeron.communication.channels import MemoryChannel, open_channel
from ephemeron.communication.channels.cache import CacheChannel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.functions.simulation import virtual_time
from ephemeron.functions.tasks import ObjectQueue, RedisQueue, TaskEdge, TaskResult, TaskSpec
from ephemeron.functions.tasks.queue import TaskQueue
from ephemeron.testing.task_queue_contract import Open, TaskQueueConnectionContract, TaskQueueContract

numbers = itertools.count()


class InVirtualTime:
    lease_s = 30.0
    test_timeout_s = 100_000.0

    def loop(self, main: Coroutine[Any, Any, None]) -> None:
        virtual_time.run(main)


class TestInMemory(InVirtualTime, TaskQueueContract):
    @asynccontextmanager
    async def world(self) -> AsyncIterator[Open]:
        channel = MemoryChannel()
        yield lambda owner: ObjectQueue(channel, "q", owner=owner, lease_s=self.lease_s)
        assert not channel.objects


class TestInMemoryFramed(InVirtualTime, TaskQueueConnectionContract):
    @asynccontextmanager
    async def world(self) -> AsyncIterator[Open]:
        channel = MemoryChannel()
        yield lambda owner: ObjectQueue(RunChannel(channel, owner=owner), "q", owner=owner, lease_s=self.lease_s)
        assert not channel.objects


class TestInAFolder(TaskQueueContract):
    @pytest.fixture(autouse=True)
    def _where(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @asynccontextmanager
    async def world(self) -> AsyncIterator[Open]:
        async with open_channel("folder", base=self.folder) as channel:
            yield lambda owner: ObjectQueue(channel, "q", owner=owner, lease_s=self.lease_s)


class TestInACache(TaskQueueConnectionContract):
    @pytest.fixture(autouse=True)
    def _where(self, valkey_server: Any) -> None:
        self.address = valkey_server.address

    @asynccontextmanager
    async def world(self) -> AsyncIterator[Open]:
        name = f"q{next(numbers)}"
        async with open_channel(self.address) as channel:
            yield lambda owner: ObjectQueue(channel, name, owner=owner, lease_s=self.lease_s)
            assert await channel.list(f"{name}.") == []


class InRedis:
    lease_s: float
    signing: SigningKey | None = None

    @pytest.fixture(autouse=True)
    def _where(self, valkey_server: Any) -> None:
        self.address = valkey_server.address

    @asynccontextmanager
    async def world(self) -> AsyncIterator[Open]:
        name = f"r{next(numbers)}"
        async with CacheChannel(self.address) as channel:
            yield lambda owner: RedisQueue(channel, name, owner=owner, lease_s=self.lease_s, signing=self.signing)
            assert await channel.list(f"{name}.") == []


class TestInRedis(InRedis, TaskQueueContract):
    def test_each_executor_takes_its_share_and_leaves_one_to_an_idle_one(self) -> None:
        async def scenario(view: Open) -> None:
            for n in range(6):
                await view("client").publish([TaskSpec(id=f"t{n}", function="f")], order=n)
            for owner in ("one", "two"):
                await view(owner).announce(owner)
            taken = [lease.tasks[0].id for lease in await view("one").take(6)]
            assert taken == ["t0", "t1", "t2"], "half of them, in order"
            assert [lease.tasks[0].id for lease in await view("one").take(6, is_busy=True)] == ["t3", "t4"]
            assert await view("one").take(1, is_busy=True) == []
            assert [lease.tasks[0].id for lease in await view("two").take(1)] == ["t5"]

        self.run(scenario)


class TestInRedisSigned(InRedis, TaskQueueConnectionContract):
    signing = SigningKey.new()


def test_an_owner_takes_first_what_its_own_results_have_released() -> None:
    """Its inputs are in this owner's memory; others find it in the listing."""

    async def scenario() -> None:
        channel = MemoryChannel()
        mine, other = (ObjectQueue(channel, "q", owner=owner) for owner in ("mine", "other"))
        await mine.connect(TaskEdge(name="e", inputs=1, tasks=(TaskSpec(id="child", function="f"),), order=1))
        await mine.publish([TaskSpec(id="parent", function="f", then=("e",))])
        [lease] = await mine.take(1)
        for n in range(20):
            await mine.publish([TaskSpec(id=f"t{n}", function="f")], order=1)
        await mine.complete(lease, [TaskResult(id="parent")])
        [taken] = await mine.take(1)
        assert taken.tasks[0].id == "child"
        await mine.release(taken)
        assert "child" in {task.id for lease in await other.take(30) for task in lease.tasks}

    virtual_time.run(scenario())


def test_a_batch_that_is_done_before_its_publisher_looks_is_published_once() -> None:
    """The publisher's process is busy: each time that it has put the batch, others have done and removed it before it reads it back."""

    async def main() -> None:
        channel = MemoryChannel()
        other = ObjectQueue(channel, "q", owner="other")
        taken = []

        class Late(MemoryChannel):
            async def fetch(self, key: str) -> Any:
                for lease in await other.take(1):
                    taken.extend(lease.tasks)
                    await other.complete(lease, [TaskResult(id="a", data=b"x")])
                return await channel.fetch(key)

        late = Late()
        late.objects = channel.objects
        queue = ObjectQueue(late, "q", owner="publisher")
        await queue.publish([TaskSpec(id="a", function="f")])
        assert [task.id for task in taken] == ["a"]
        assert [result.data for result in await queue.reader().read()] == [b"x"]
        assert not await other.take(1)

    virtual_time.run(main())


async def counted_to_the_end(queue: TaskQueue) -> None:
    assert await queue.count("c", "m0", 2, last=5) == 2
    assert await queue.count("other", "m0", 2) == 2
    assert await queue.count("c", "m0", 2, last=5) == 2
    assert await queue.count("c", "m1", 3, last=5) == 5


def test_objects_of_a_counter_are_removed_at_its_last_sum():
    async def main() -> None:
        channel = MemoryChannel()
        await counted_to_the_end(ObjectQueue(channel, "q", owner="a"))
        (left,) = channel.objects
        assert "other" in left

    asyncio.run(main())


def test_a_counter_of_the_server_expires_after_its_last_sum(valkey_server):
    async def main() -> None:
        name = f"r{next(numbers)}"
        async with CacheChannel(valkey_server.address) as channel:
            queue = RedisQueue(channel, name, owner="a")
            await counted_to_the_end(queue)
            async with Redis.from_url(valkey_server.address) as client:
                kept = {key.decode().rpartition("/")[2]: await client.pttl(key) async for key in client.scan_iter(f"*{name}*count/*")}
            assert await queue.count("c", "m1", 3, last=5) == 5, "an answer was lost, and the request is sent again"
            await queue.clear()
        assert kept["other"] == -1
        assert 0 < kept["c"] <= 120_000

    asyncio.run(main())
