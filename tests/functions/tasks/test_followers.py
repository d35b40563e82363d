"""Followers: a task begins while the outputs of the one before it are stored, and counts only if it rests on what is stored and recorded."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from ephemeron.communication.channels import MemoryChannel
from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.channels.cache import CacheChannel
from ephemeron.functions.context import ThreadCompute
from ephemeron.functions.tasks import RedisQueue, TaskEdge, TaskLease, TaskResult, TaskSpec
from ephemeron.functions.tasks.executor import TaskExecutor
from ephemeron.functions.tasks.executor_options import ExecutorOptions, ExecutorTotals
from ephemeron.functions.tasks.followers import Followers
from ephemeron.functions.tasks.model import WaitingEdges
from ephemeron.functions.tasks.packing import batch_name
from ephemeron.functions.tasks.resolver import Resolver, TaskFunction
from ephemeron.functions.tasks.result_store import TaskOutputs
from running import until_async

numbers = itertools.count()
LENGTH = 4


class Chain(Resolver):
    """Task n reads object n - 1 and makes object n. `ran` has each run, with what it read."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, bytes]] = []
        self.during: Callable[[str], None] = lambda task: None
        """Called in the compute thread."""

    async def resolve(self, function: str) -> TaskFunction:
        return self.run

    def run(self, task: TaskSpec, inputs: Sequence[memoryview]) -> object:
        read = b"".join(inputs)
        self.ran.append((task.id, bytes(read)))
        self.during(task.id)
        n = int(task.id[1:])
        return TaskOutputs(objects={f"o/{n}": [bytes(read), str(n).encode()]}, value=n)

    def edges(self, task: TaskSpec) -> Sequence[TaskEdge]:
        n = int(task.id[1:]) + 1
        return [TaskEdge(name=f"e{n}", inputs=1, tasks=(node(n),), order=n)] if n < LENGTH else []


def node(n: int) -> TaskSpec:
    then = (f"e{n + 1}",) if n + 1 < LENGTH else ()
    return TaskSpec(id=f"t{n}", function="chain", inputs=(f"o/{n - 1}",) if n else (), then=then)


class World:
    lease_s = 30.0

    def __init__(self, server: CacheChannel) -> None:
        self.server, self.name, self.channel, self.chain = server, f"f{next(numbers)}", MemoryChannel(), Chain()
        self.compute = ThreadCompute(1)

    def queue(self, owner: str) -> RedisQueue:
        return RedisQueue(self.server, self.name, owner=owner, lease_s=self.lease_s)

    async def run(self, name: str = "e1") -> ExecutorTotals:
        executor = TaskExecutor(
            self.queue(name),
            self.channel,
            self.chain,
            self.compute,
            name=name,
            deadline=asyncio.get_running_loop().time() + 900,
            data_prefix="data/",
            options=ExecutorOptions(poll_s=0.05),
        )
        return await executor.run()

    async def finished(self) -> dict[str, TaskResult]:
        """Publishes the first task, runs one executor to the end, and reads the results."""
        client = self.queue("client")
        await client.publish([node(0)])
        running = asyncio.create_task(self.run())
        reader, results = client.reader(), dict[str, TaskResult]()
        while len(results) < LENGTH:
            assert not running.done() or running.result()
            results |= {result.id: result for result in await reader.read()}
            await asyncio.sleep(0.01)
        await client.finish()
        self.totals = await running
        return results


def world(address: str, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with CacheChannel(address) as server, asyncio.timeout(240):
            one = World(server)
            try:
                await scenario(one)
                await one.queue("client").clear()
            finally:
                one.compute.close()

    asyncio.run(main())


def whole(n: int) -> bytes:
    return b"".join(str(k).encode() for k in range(n + 1))


def test_a_task_begins_before_the_outputs_that_it_reads_are_stored(valkey_server: Any) -> None:
    async def scenario(w: World) -> None:
        has_begun = {f"o/{n}": threading.Event() for n in range(LENGTH)}
        has_begun[f"o/{LENGTH - 1}"].set()
        w.chain.during = lambda task: has_begun[f"o/{int(task[1:]) - 1}"].set() if task != "t0" else None
        put = w.channel.put

        async def late(key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
            await asyncio.to_thread(has_begun[key].wait)  # an output is stored when the task that reads it has begun
            await put(key, buffers, create=create)

        w.channel.put = late  # type: ignore[method-assign]
        results = await w.finished()
        assert {r.status for r in results.values()} == {"ok"}
        assert [task for task, _ in w.chain.ran] == ["t0", "t1", "t2", "t3"]
        assert w.channel.objects[f"o/{LENGTH - 1}"] == whole(LENGTH - 1)
        assert (w.totals.recorded, w.totals.dropped, w.totals.taken) == (LENGTH, 0, LENGTH)

    world(valkey_server.address, scenario)


def test_what_rests_on_an_output_that_another_one_has_stored_is_computed_again(valkey_server: Any) -> None:
    async def scenario(w: World) -> None:
        await w.channel.put("o/1", [b"another's"])  # of an owner that died before it recorded its result
        results = await w.finished()
        assert {r.status for r in results.values()} == {"ok"}
        assert [read for task, read in w.chain.ran if task == "t2"] == [whole(1), b"another's"]
        assert w.channel.objects["o/3"] == b"another's23"
        assert w.totals.dropped == 1

    world(valkey_server.address, scenario)


def test_a_result_that_another_owner_has_recorded_first_has_no_follower_here(valkey_server: Any) -> None:
    async def scenario(w: World) -> None:
        late = w.queue("late")
        stored, put = asyncio.Event(), w.channel.put

        async def slow(key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
            await put(key, buffers, create=create)
            if key == "o/1":
                stored.set()
                await recorded.wait()

        async def other() -> None:
            """Records task 1, without a lease, while this executor stores it."""
            await stored.wait()
            await until_async(lambda: any(task == "t2" for task, _ in w.chain.ran))  # the follower has begun
            await late.complete(lease, [TaskResult(id="t1", value=1)])
            recorded.set()

        recorded = asyncio.Event()
        w.channel.put = slow  # type: ignore[method-assign]
        lease = TaskLease(batch=batch_name([node(1)], 1)[0], attempt=1, tasks=(node(1),))
        helping = asyncio.create_task(other())
        results = await w.finished()
        await helping
        assert {r.status for r in results.values()} == {"ok"}
        assert w.channel.objects["o/3"] == whole(3)
        assert [task for task, _ in w.chain.ran].count("t2") == 2, "the follower is dropped, the task is taken from the queue"

    world(valkey_server.address, scenario)


def test_a_follower_that_fails_is_tried_again(valkey_server: Any) -> None:
    async def scenario(w: World) -> None:
        failures = iter([True])

        def during(task: str) -> None:
            if task == "t2" and next(failures, False):
                raise ValueError("once")

        w.chain.during = during
        results = await w.finished()
        assert (results["t2"].status, results["t2"].tries) == ("ok", 2)
        assert w.channel.objects["o/3"] == whole(3)

    world(valkey_server.address, scenario)


@pytest.mark.parametrize("step", range(LENGTH))
def test_an_executor_that_ends_anywhere_leaves_the_rest_to_the_next(valkey_server: Any, step: int) -> None:
    async def scenario(w: World) -> None:
        w.lease_s = 0.5
        await w.queue("client").publish([node(0)])
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def during(task: str) -> None:
            if task == f"t{step}":
                loop.call_soon_threadsafe(begun.set)

        w.chain.during = during
        first = asyncio.create_task(w.run("dying"))
        await begun.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        results = await w.finished()
        assert {r.status for r in results.values()} == {"ok"}
        assert w.channel.objects["o/3"] == whole(3)

    world(valkey_server.address, scenario)


class Waiting(RedisQueue):
    """A queue that only says what waits for one more result."""

    def __init__(self, edges: Sequence[str], ready_order: int | None) -> None:
        self.edges, self.ready_order = edges, ready_order

    async def waiting_for_one(self, edges: Sequence[str]) -> WaitingEdges:
        return WaitingEdges(edges=tuple(e for e in edges if e in self.edges), ready_order=self.ready_order)


@pytest.mark.parametrize(
    ("ready_order", "follows"),
    [(None, "e1"), (1, "e1"), (0, None), (2, "e1")],
    ids=["nothing else", "as urgent", "more urgent", "less urgent"],
)
def test_a_task_follows_unless_one_that_is_ready_is_more_urgent(ready_order: int | None, follows: str | None) -> None:
    async def go() -> None:
        task, chain = node(0), Chain()
        edges = [*chain.edges(task), TaskEdge(name="e2", inputs=1, tasks=(node(2),), order=2)]

        async def added() -> Sequence[TaskEdge]:
            return edges

        followers = Followers(Waiting(["e2", "e1"], ready_order))
        found = await followers.look(task, TaskOutputs(objects={"o/0": [b"0"]}, value=0), asyncio.create_task(added()))
        assert (found and found.edge) == follows
        if found is not None:  # as the queue will lease it: a first attempt, so that it may have followers itself
            assert found.lease == TaskLease(batch=batch_name((node(1),), 1)[0], attempt=1, tasks=(node(1),))
            assert (found.after, found.task) == ("t0", node(1))
            assert {key: bytes(value) for key, value in found.own.items()} == {"o/0": b"0"}

    asyncio.run(go())
