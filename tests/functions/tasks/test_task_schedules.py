"""Random schedules with faults: executors die, calls are delivered twice, puts are lost, leases expire under slow owners.

Whatever happens, every task has one visible result, all readers see the same one, edges release what waits for them when all inputs
are there, and nothing is leased again once it has a result. Virtual time for objects; a real server, and short leases, for Redis.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest
from benchmarks.provisioner import Provisioner, ScalingLimits, executor_call

from ephemeron.communication.channels.base import Buffer, Channel, Wrapper
from ephemeron.communication.channels.cache import CacheChannel
from ephemeron.functions import Call, Limits, SimulatedPlatform, Simulation
from ephemeron.functions.simulation import virtual_time
from ephemeron.functions.tasks import ObjectQueue, RedisQueue, TaskEdge, TaskLease, TaskQueue, TaskResult, TaskSpec
from ephemeron.functions.tasks.executor import TaskExecutor
from ephemeron.functions.tasks.executor_entry import ExecutorRequest
from ephemeron.functions.tasks.executor_options import ExecutorOptions
from ephemeron.functions.tasks.open_queue import queue_channel
from ephemeron.functions.tasks.resolver import ModuleResolver, ResolverContext
from ephemeron.functions.world import ComputeModel
from random_schedules import seeds

T = TypeVar("T")
FINAL = ("ok", "dead", "cancelled")


class Unreliable(Wrapper):
    """A store that is slow now and then, and loses puts that it has acknowledged."""

    def __init__(self, inner: Channel, rng: random.Random, *, lost: float, slow: float) -> None:
        super().__init__(inner)
        self._rng, self._lost, self._slow = rng, lost, slow
        self.losses = 0

    async def _delay(self) -> None:
        if self._rng.random() < self._slow:
            await asyncio.sleep(self._rng.expovariate(1 / 3.0))

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        await self._delay()
        if self._rng.random() < self._lost:
            self.losses += 1
            return
        await self.inner.put(key, buffers, create=create)

    async def fetch(self, key: str) -> memoryview | None:
        await self._delay()
        return await self.inner.fetch(key)

    async def list(self, prefix: str) -> list[str]:
        found = await self.inner.list(prefix)
        await self._delay()  # what is returned may be old
        return found

    async def exists(self, key: str) -> bool:
        await self._delay()
        return await self.inner.exists(key)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._delay()
        await self.inner.delete(keys)


def program(rng: random.Random) -> tuple[list[list[TaskSpec]], list[TaskEdge], dict[str, Any]]:
    """Batches, edges over them (a tree of sums), and the right result of each task: bytes, or `dead`."""
    batches, edges, right = [], [], dict[str, Any]()
    groups, n = [], 0
    for group in range(rng.randint(1, 4)):
        members = []
        for _ in range(rng.randint(1, 12)):
            is_bad = rng.random() < 0.02
            members.append(
                TaskSpec(
                    id=f"t{n}",
                    function=f"task_jobs:{'fail' if is_bad else 'square'}",
                    arguments={} if is_bad else {"n": n},
                    output=f"out/t{n}",
                    then=(f"g{group}",),
                    max_tries=20,
                )
            )
            right[f"t{n}"] = "dead" if is_bad else str(n * n).encode()
            n += 1
        groups.append(members)
        size = rng.randint(1, 5)
        batches += [members[at : at + size] for at in range(0, len(members), size)]
        keys = tuple(member.output for member in members)
        add = TaskSpec(
            id=f"sum{group}",
            function="task_jobs:join",
            inputs=keys,
            arguments={"sep": "+"},
            output=f"out/sum{group}",
            then=("all",),
            max_tries=20,
        )
        edges.append(TaskEdge(name=f"g{group}", inputs=len(members), tasks=(add,), order=1))
        parts = [right[member.id] for member in members]
        right[add.id] = "dead" if "dead" in parts else b"+".join(parts)
    sums = [f"sum{group}" for group in range(len(groups))]
    last = [
        TaskSpec(id=f"last{i}", function="task_jobs:join", inputs=tuple(f"out/{s}" for s in sums), arguments={"sep": str(i)}, max_tries=20)
        for i in range(3)
    ]
    edges.append(TaskEdge(name="all", inputs=len(sums), tasks=tuple(last), order=2))
    for i, task in enumerate(last):
        right[task.id] = "dead" if "dead" in [right[s] for s in sums] else str(i).encode().join(right[s] for s in sums)
    rng.shuffle(batches)
    rng.shuffle(edges)
    return batches, edges, right


def check(results: list[TaskResult], again: list[TaskResult], right: dict[str, Any], stored: Callable[[str], bytes]) -> None:
    assert sorted(r.id for r in results) == sorted(right), "each task once"
    assert sorted(again, key=lambda r: r.id) == sorted(results, key=lambda r: r.id), "the same for a later reader"
    for result in results:
        if right[result.id] == "dead":
            assert result.status == "dead", result
        else:
            assert result.status == "ok", result
            assert (result.data if result.data is not None else stored(result.ref)) == right[result.id]


async def publish(queue: TaskQueue, rng: random.Random, batches: list[list[TaskSpec]], edges: list[TaskEdge]) -> None:
    """In any order, and some of it twice, as a client does that was restarted."""
    steps: list[Any] = [*batches, *edges, *rng.sample(batches, len(batches) // 3), *rng.sample(edges, len(edges) // 2)]
    rng.shuffle(steps)
    for step in steps:
        if isinstance(step, TaskEdge):
            await queue.connect(step)
        else:
            await queue.publish(step)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 5)


def simulate(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    world = Simulation(
        compute=ComputeModel(a=1024.0 * rng.choice([0.1, 1, 4]), b=0.0, m=0.0), straggler_sigma=rng.choice([0, 0.5]), concurrency=40
    )
    batches, edges, right = program(rng)
    lease_s = rng.choice([3.0, 10.0, 30.0])
    request = ExecutorRequest(
        queue="q", functions=("task_jobs",), lease_s=lease_s, idle_s=rng.choice([1, 20]), flush_s=rng.choice([0.0, 1.0, 5.0])
    )
    lost, slow, deaths = rng.choice([0, 0.02, 0.1]), rng.choice([0, 0.1]), rng.choice([0, 8, 25])

    async def main() -> None:
        platform = SimulatedPlatform(world, limits=Limits(concurrency=40), seed=seed)
        store = platform.store
        platform.store = Unreliable(store, rng, lost=lost, slow=slow)
        finals = ObjectQueue(queue_channel(store, "q", owner="checker", key=""), "q", owner="checker").reader()
        final: set[str] = set()
        take = ObjectQueue.take

        async def checked(queue: ObjectQueue, n: int, *, is_busy: bool = False) -> list[TaskLease]:
            final.update(result.id for result in await finals.read())
            before = set(final)
            leases = await take(queue, n, is_busy=is_busy)
            assert not before & {task.id for lease in leases for task in lease.tasks}, "leased with a result"
            return leases

        monkeypatch.setattr(ObjectQueue, "take", checked)
        client = ObjectQueue(queue_channel(platform.store, "q", owner="client", key=""), "q", owner="client", lease_s=lease_s)
        origin = Call(run="run", rank=0, attempt=0, memory_mb=1024, lifetime_s=60, channel="memory")

        async def start(number: int) -> None:
            call = executor_call(origin, request, number, 1024, rng.choice([15.0, 60.0, 600.0]))
            await platform.invoke(Call.from_payload({**call.to_payload(), "duplicate": rng.random() < 0.2}))

        provisioner = Provisioner(client, start, ScalingLimits(most=8, start_s=10, burst=8, starts_per_s=2))
        provisioning = asyncio.create_task(provisioner.run())

        async def kill() -> None:
            for _ in range(deaths):
                await asyncio.sleep(rng.expovariate(1 / 4))
                if platform._running:
                    await rng.choice(list(platform._running.values())).cancel()

        killing = asyncio.create_task(kill())
        await publish(client, rng, batches, edges)
        reader, results = client.reader(), list[TaskResult]()
        async with asyncio.timeout(5_000):
            while len(results) < len(right):
                await asyncio.sleep(1.0)
                results += await reader.read()
                if provisioning.done():
                    provisioning.result()
            await killing
            await client.finish()
            await provisioning
        failed = [e for e in platform._events if getattr(e, "status", "") == "error"]
        assert not failed, failed
        await asyncio.gather(*(one.wait() for one in list(platform._running.values())))
        later = ObjectQueue(queue_channel(store, "q", owner="later", key=""), "q", owner="later")
        channel = queue_channel(store, "q", owner="check", key="")
        objects = {r.ref: bytes(await channel.fetch(r.ref) or b"") for r in results if r.ref}
        check(results, await later.reader().read(), right, objects.__getitem__)
        # An executor whose time ended while it published the tasks of an edge, which have results by now, leaves them: the next one
        # that looks removes them, and runs none.
        async with asyncio.timeout(100 * lease_s):
            while (await later.depth()).tasks:
                assert await later.take(len(right)) == []
                await asyncio.sleep(1.0)

    virtual_time.run(main())


@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_gives_each_task_one_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(3, 13))
def test_more_schedules_give_each_task_one_result(tens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds(range(10 * tens, 10 * tens + 10), 3):
        with monkeypatch.context() as patched:
            simulate(seed, patched)


class Paused:
    """Computing that takes a moment of real time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def __call__(self, work: Callable[[], T], *, samples: float) -> T:
        await asyncio.sleep(self._rng.choice([0, 0.001, 0.03]))
        return work()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_cache_with_dying_executors_gives_each_task_one_result(seed: int, valkey_server: Any) -> None:
    rng = random.Random(seed)
    batches, edges, right = program(rng)
    name = f"schedule{seed}"

    async def main() -> None:
        async with CacheChannel(valkey_server.address) as channel, asyncio.timeout(240):

            def queue(owner: str) -> RedisQueue:
                return RedisQueue(channel, name, owner=owner, lease_s=0.3)

            def executor(number: int) -> asyncio.Task[Any]:
                resolver = ModuleResolver(ResolverContext(channel=channel, run="r", key="", functions=("task_jobs",)))
                one = TaskExecutor(
                    queue(f"e{number}"),
                    channel,
                    resolver,
                    Paused(rng),
                    name=f"{number}-e",
                    data_prefix=f"{name}.data/",
                    deadline=asyncio.get_running_loop().time() + 1000,
                    options=ExecutorOptions(idle_s=1000, flush_s=0.02),
                )
                return asyncio.create_task(one.run())

            client = queue("client")
            running = [executor(number) for number in range(4)]
            publishing = asyncio.create_task(publish_soon(client, rng, batches, edges))
            reader, results, number = client.reader(), list[TaskResult](), 4
            while len(results) < len(right):
                await asyncio.sleep(0.02)
                results += await reader.read()
                if rng.random() < 0.3 and number < 20:
                    running.pop(rng.randrange(len(running))).cancel()
                    running.append(executor(number))
                    number += 1
            await publishing
            await client.finish()
            await asyncio.gather(*running)
            objects = {r.ref: bytes(await channel.fetch(r.ref) or b"") for r in results if r.ref}
            check(results, await queue("later").reader().read(), right, objects.__getitem__)
            assert (await client.depth()).tasks == 0
            await client.clear()
            await channel.delete(await channel.list("out/"))

    asyncio.run(main())


async def publish_soon(queue: TaskQueue, rng: random.Random, batches: list[list[TaskSpec]], edges: list[TaskEdge]) -> None:
    for step in [*batches, *edges, *batches[:2]]:
        await (queue.connect(step) if isinstance(step, TaskEdge) else queue.publish(step))
        await asyncio.sleep(rng.random() * 0.02)
