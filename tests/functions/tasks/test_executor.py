"""One executor at a queue in memory: what it runs, records, retries, and gives back. Time is virtual unless a test needs threads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ephemeron.communication.channels import MemoryChannel
from ephemeron.functions.context import ThreadCompute
from ephemeron.functions.simulation import virtual_time
from ephemeron.functions.tasks import ObjectQueue, TaskEdge, TaskResult, TaskSpec
from ephemeron.functions.tasks.executor import TaskExecutor
from ephemeron.functions.tasks.executor_options import ExecutorOptions, ExecutorTotals
from ephemeron.functions.tasks.resolver import ModuleResolver, Resolver, ResolverContext, TaskFunction

T = TypeVar("T")
JOBS = "task_jobs"


class ModelledCompute:
    """Each task takes so many seconds of virtual time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def __call__(self, work: Callable[[], T], *, samples: float) -> T:
        result = work()
        await asyncio.sleep(self.seconds * samples)
        return result


class Coded(Resolver):
    """Tasks of functions of this test."""

    def __init__(self, **functions: TaskFunction) -> None:
        self.functions = functions

    async def resolve(self, function: str) -> TaskFunction:
        return self.functions[function]


class World:
    def __init__(self) -> None:
        self.channel = MemoryChannel()
        self.client = ObjectQueue(self.channel, "q", owner="client", lease_s=30)
        self.reader = self.client.reader()
        self.resolver: Resolver = ModuleResolver(ResolverContext(channel=self.channel, run="run", key="", functions=(JOBS,)))

    def executor(
        self, name: str = "e1", *, compute: Any = None, life_s: float = 900.0, lease_s: float = 30, **options: Any
    ) -> TaskExecutor:
        return TaskExecutor(
            ObjectQueue(self.channel, "q", owner=name, lease_s=lease_s),
            self.channel,
            self.resolver,
            compute or ModelledCompute(1.0),
            name=name,
            deadline=asyncio.get_running_loop().time() + life_s,
            data_prefix="q.data/",
            options=ExecutorOptions(**options),
        )

    async def finish(self, *tasks: TaskSpec, **how: Any) -> tuple[ExecutorTotals, dict[str, TaskResult]]:
        """Publishes a batch, runs one executor until the queue is empty, and reads the results."""
        await self.client.publish(tasks)
        await self.client.finish()
        totals = await self.executor(**how).run()
        return totals, {result.id: result for result in await self.reader.read()}


def virtual(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(1e6):
            await scenario(World())

    virtual_time.run(main())


def threads(scenario: Callable[[World, ThreadCompute], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        compute = ThreadCompute(1)
        try:
            async with asyncio.timeout(240):
                await scenario(World(), compute)
        finally:
            compute.close()

    asyncio.run(main())


def job(id: str, function: str, **more: Any) -> TaskSpec:
    fields = {name: more.pop(name) for name in list(more) if name in TaskSpec.__dataclass_fields__}
    return TaskSpec(id=id, function=f"{JOBS}:{function}", arguments=more, **fields)


def test_a_batch_runs_and_its_results_are_read() -> None:
    async def scenario(world: World) -> None:
        tasks = [job(f"t{n}", "square", n=n) for n in range(100)]
        totals, results = await world.finish(*tasks)
        assert {id: result.value for id, result in results.items()} == {f"t{n}": n * n for n in range(100)}
        assert (totals.recorded, totals.failed, totals.dropped, totals.ended_by) == (100, 0, 0, "closed")
        assert {result.executor for result in results.values()} == {"e1"}
        depth = await world.client.depth()
        assert (depth.tasks, depth.executors) == (0, frozenset())

    virtual(scenario)


def test_inputs_outputs_and_payloads() -> None:
    async def scenario(world: World) -> None:
        await world.channel.put("in/a", [b"A"])
        await world.channel.put("in/b", [b"B"])
        _, results = await world.finish(
            job("joined", "join", inputs=("in/a", "in/b"), payload=b"p", sep="-"),
            job("named", "join", inputs=("in/b",), output="out/named"),
            job("json", "square", n=3, output="out/json"),
            job("none", "nothing"),
            job("large", "large", n=1),
        )
        assert results["joined"].data == b"p-A-B"
        assert (results["named"].ref, results["named"].data) == ("out/named", None)
        assert world.channel.objects["out/named"] == b"B"
        assert (results["json"].ref, results["json"].ref_is_json) == ("out/json", True)
        assert json.loads(world.channel.objects["out/json"]) == 9
        assert results["none"].value is None
        assert results["large"].ref == "q.data/large.e1"
        assert len(world.channel.objects["q.data/large.e1"]) == 32 * 8192
        await world.client.clear()
        assert sorted(world.channel.objects) == ["in/a", "in/b", "out/json", "out/named"]

    virtual(scenario)


def test_a_failing_task_is_tried_again_and_then_dead_with_its_own_traceback(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        totals, results = await world.finish(
            job("flaky", "flaky", counter=str(tmp_path / "runs"), until=3),
            job("bad", "fail", max_tries=2),
            job("odd", "odd", max_tries=1),
            job("absent", "no_such_function", max_tries=1),
            job("input", "join", inputs=("no/such",), max_tries=1),
            TaskSpec(id="foreign", function="os:getcwd", max_tries=1),
            job("good", "square", n=2),
        )
        assert (results["flaky"].value, results["flaky"].tries) == (3, 3)
        bad = results["bad"]
        assert (bad.status, bad.error, bad.tries) == ("dead", "ValueError: seven is no colour", 2)
        assert "in fail" in bad.traceback
        assert "compute_slice" not in bad.traceback
        assert "bytes or JSON" in results["odd"].error
        assert "no_such_function" in results["absent"].error
        assert "no/such" in results["input"].error
        assert "may not run 'os:getcwd'" in results["foreign"].error
        assert {id for id in results if results[id].status == "ok"} == {"flaky", "good"}
        assert totals.failed == 2 + 2 + 4

    virtual(scenario)


def test_results_of_one_feed_the_tasks_of_an_edge() -> None:
    async def scenario(world: World) -> None:
        keys = tuple(f"out/{n}" for n in range(4))
        await world.client.connect(TaskEdge(name="all", inputs=4, tasks=(job("sum", "join", inputs=keys, sep="+", output="out/sum"),)))
        await world.client.publish([job(f"t{n}", "square", n=n, output=keys[n], then=("all",)) for n in range(4)])
        await world.executor(idle_s=5).run()
        assert world.channel.objects["out/sum"] == b"0+1+4+9"
        assert sorted(r.id for r in await world.reader.read()) == ["sum", "t0", "t1", "t2", "t3"]

    virtual(scenario)


def test_it_stops_before_its_deadline_and_gives_back_the_rest() -> None:
    async def scenario(world: World) -> None:
        await world.client.publish([job(f"t{n}", "square", n=n) for n in range(100)])
        began = asyncio.get_running_loop().time()
        totals = await world.executor(life_s=30).run()
        assert totals.ended_by == "deadline"
        assert asyncio.get_running_loop().time() - began < 30
        assert 20 <= totals.recorded < 30
        (lease,) = await world.client.take(1)  # at once
        assert (len(lease.tasks), lease.attempt) == (100 - totals.recorded, 1)

    virtual(scenario)


def test_a_task_beyond_its_timeout_fails_and_others_go_on() -> None:
    async def scenario(world: World) -> None:
        totals, results = await world.finish(
            job("long", "square", n=1, timeout_s=0.5, max_tries=2), job("short", "square", n=2), compute=ModelledCompute(1.0)
        )
        assert results["long"].error == "TimeoutError: not done after its timeout of 0.5 s"
        assert (results["long"].tries, results["short"].value, totals.failed) == (2, 4, 2)

    virtual(scenario)


def test_a_task_longer_than_a_lifetime_is_dead_in_the_end() -> None:
    async def scenario(world: World) -> None:
        await world.client.publish([job("endless", "square", n=1, max_tries=2), job("next", "square", n=2, max_tries=2)])
        for number in range(4):
            await world.executor(f"e{number}", life_s=60, idle_s=1, compute=ModelledCompute(100)).run()
        results = {result.id: result for result in await world.reader.read()}
        assert "at the end of its executor's lifetime" in results["endless"].error
        assert set(results) == {"endless", "next"}

    virtual(scenario)


def test_an_endless_task_is_interrupted_in_its_thread() -> None:
    async def scenario(world: World, compute: ThreadCompute) -> None:
        totals, results = await world.finish(
            job("endless", "forever", timeout_s=0.2, max_tries=1), job("next", "square", n=3), compute=compute
        )
        assert (results["endless"].status, results["next"].value) == ("dead", 9)
        assert "in forever" in results["endless"].traceback
        assert totals.ended_by == "closed"

    threads(scenario)


def test_a_task_that_cannot_be_interrupted_ends_its_executor_alone() -> None:
    async def scenario(world: World, compute: ThreadCompute) -> None:
        await world.client.publish([job("stuck", "blocked", seconds=4, timeout_s=0.1, max_tries=1), job("next", "square", n=3)])
        totals = await world.executor("e1", compute=compute).run()
        assert totals.ended_by == "stuck"
        other = ThreadCompute(1)
        await world.executor("e2", compute=other, idle_s=0).run()
        other.close()
        results = {result.id: result for result in await world.reader.read()}
        assert (results["stuck"].status, results["next"].value) == ("dead", 9)

    threads(scenario)


def test_inputs_are_fetched_and_results_written_while_it_computes() -> None:
    async def scenario(world: World) -> None:
        class Slow(MemoryChannel):
            """A second for each input and each output."""

            async def fetch(self, key: str) -> memoryview | None:
                await asyncio.sleep(1.0 if key.startswith("in/") else 0.0)
                return await super().fetch(key)

            async def put(self, key: str, buffers: Sequence[Any], *, create: bool = False) -> None:
                await asyncio.sleep(1.0 if key.startswith("out/") else 0.0)
                await super().put(key, buffers, create=create)

        world.channel = Slow()
        world.client = ObjectQueue(world.channel, "q", owner="client")
        world.reader = world.client.reader()
        for n in range(20):
            world.channel.objects[f"in/{n}"] = b"x"
        began = asyncio.get_running_loop().time()
        _, results = await world.finish(*(job(f"t{n}", "join", inputs=(f"in/{n}",), output=f"out/{n}") for n in range(20)), idle_s=0)
        assert len(results) == 20
        # One after the other, 60 s. 20 s of computing, the first input, the last output.
        assert asyncio.get_running_loop().time() - began < 24

    virtual(scenario)


def test_executors_share_the_work_and_a_vanished_one_is_made_up_for() -> None:
    async def scenario(world: World) -> None:
        await world.client.publish_all([job(f"t{n}", "square", n=n) for n in range(60)], per_batch=5)
        executors = [asyncio.create_task(world.executor(f"e{n}", idle_s=100).run()) for n in range(4)]
        await asyncio.sleep(3.5)
        executors[0].cancel()
        await asyncio.wait([executors[0]])
        totals = [await executor for executor in executors[1:]]
        results = await world.reader.read()
        assert sorted(int(r.value) for r in results) == [n * n for n in range(60)]  # type: ignore[call-overload]
        assert all(one.recorded >= 10 for one in totals)

    virtual(scenario)


def test_long_tasks_of_an_unknown_function_are_not_taken_many_at_once() -> None:
    async def scenario(world: World) -> None:
        compute = ModelledCompute(0.01)
        await world.client.publish_all([job(f"s{n}", "square", n=n) for n in range(40)], per_batch=1)
        running = [asyncio.create_task(world.executor(f"e{k}", compute=compute, idle_s=30).run()) for k in range(2)]
        results: list[TaskResult] = []
        while len(results) < 40:
            results += await world.reader.read()
            await asyncio.sleep(0.01)
        compute.seconds = 20.0
        await world.client.publish_all([job(f"l{n}", "nothing") for n in range(8)], per_batch=1)
        await world.client.finish()
        await asyncio.gather(*running)
        by = [r.executor for r in await world.reader.read()]
        assert sorted(by.count(f"e{k}") for k in range(2)) == [4, 4]

    virtual(scenario)


def test_an_executor_stays_for_tasks_of_one_that_vanished_and_no_longer() -> None:
    async def scenario(world: World) -> None:
        await world.client.publish([job("t0", "square", n=3)])
        assert await ObjectQueue(world.channel, "q", owner="vanished").take(1)
        totals = await world.executor(idle_s=5.0).run()  # a lease lasts 30 s
        assert (totals.recorded, totals.ended_by) == (1, "idle")
        [result] = await world.reader.read()
        assert result.value == 9
        began = asyncio.get_running_loop().time()
        assert (await world.executor(idle_s=5.0).run()).ended_by == "idle"
        assert asyncio.get_running_loop().time() - began < 10.0

    virtual(scenario)


def test_a_lease_that_is_lost_is_no_longer_worked_on() -> None:
    async def scenario(world: World) -> None:
        await world.client.publish([job(f"t{n}", "square", n=n) for n in range(50)])
        slow = asyncio.create_task(world.executor("slow", idle_s=1).run())
        await asyncio.sleep(5)
        # Another one holds the lease from now on, as if the first had been silent.
        batch = (await world.client.depth()).leased
        assert batch == 50
        (key,) = [key for key in world.channel.objects if ".l1" in key]
        await world.channel.put(key.replace(".l1", ".l2"), [b"thief"], create=True)
        await asyncio.sleep(25)  # the other one counts as gone after 30 s, and its tasks may be taken then
        assert len(await world.client.reader().read()) < 20
        slow.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await slow

    virtual(scenario)


@pytest.mark.parametrize("lease_s", [0.9, 3.0])
def test_a_long_task_keeps_its_lease(lease_s: float) -> None:
    async def scenario(world: World) -> None:
        queue = ObjectQueue(world.channel, "q", owner="watcher", lease_s=lease_s)
        await world.client.publish([job("t", "square", n=1)])
        running = asyncio.create_task(world.executor(compute=ModelledCompute(50), idle_s=1, lease_s=lease_s).run())
        await asyncio.sleep(0.1)
        while not running.done():
            assert await queue.take(1) == []
            await asyncio.sleep(0.3)
        assert (await running).recorded == 1

    virtual(scenario)
