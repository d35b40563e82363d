"""Tasks that report values while they run, and end when they are cancelled."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_executor import Coded, ModelledCompute, ThreadCompute, World, threads, virtual

from ephemeron.communication.channels import MemoryChannel
from ephemeron.errors import ChannelUnreachable
from ephemeron.events import Event, TaskBegan, TaskReported, from_json, to_json
from ephemeron.functions.shipped_code import dumps
from ephemeron.functions.shipped_tasks import WITHIN, ShippedResolver
from ephemeron.functions.tasks import TaskSpec
from ephemeron.functions.tasks.resolver import ResolverContext
from ephemeron.functions.tasks.running_task import Reporting, RunningTask, cancel_key
from ephemeron.user_code import unpickled

KEY = "00" * 32


def doubled(task: RunningTask, function: Callable[..., Any], *args: Any, **more: Any) -> object:
    """A wrapper: reports what the function gives, three times."""
    value = function(*args, **more)
    task.report(1, value)
    task.report(2, value)
    task._send_at = 0.0  # as a while later
    task.report(5, math.nan)
    return {"value": value, "task": task.id, "cancelled": task.is_cancelled()}


def until_interrupted(task: RunningTask, function: Callable[..., Any]) -> None:
    while True:
        time.sleep(0.01)


def until_cancelled(task: RunningTask, function: Callable[..., Any]) -> int:
    looks = 0
    while not task.is_cancelled():
        looks += 1
        time.sleep(0.01)
    return looks


def within(id: str, wrapper: Callable[..., Any], function: str, *args: Any) -> TaskSpec:
    return TaskSpec(id=id, function=f"{WITHIN} {wrapper.__module__}:{wrapper.__qualname__} {function}", payload=dumps((args, {}), what="x"))


def shipped(world: World, told: list[Event]) -> ShippedResolver:
    reporting = Reporting(emit=told.append, now=lambda: 7.5, rank=3, attempt=1)
    return ShippedResolver(ResolverContext(channel=world.channel, run="run", key=KEY, functions=(), reporting=reporting))


def test_a_task_says_that_it_begins_and_what_it_reports() -> None:
    async def scenario(world: World) -> None:
        told: list[Event] = []
        world.resolver = shipped(world, told)
        _, results = await world.finish(within("a", doubled, "math:sqrt", 16))
        assert unpickled(results["a"].data or b"") == {"value": 4.0, "task": "a", "cancelled": False}
        common: dict[str, Any] = {"t": 7.5, "rank": 3, "attempt": 1, "task": "a"}
        reports = [TaskReported(**common, number=1, step=1, value=4.0), TaskReported(**common, number=3, step=5, value=None)]
        assert told == [TaskBegan(**common), *reports], "the second comes too soon to be sent"
        assert [from_json(to_json(event)) for event in told] == told

    virtual(scenario)


def test_a_task_learns_that_it_was_cancelled() -> None:
    async def scenario(world: World, compute: ThreadCompute) -> None:
        world.resolver = shipped(world, [])
        running = asyncio.create_task(world.finish(within("a", until_cancelled, "math:sqrt"), compute=compute))
        await asyncio.sleep(0.3)
        assert not running.done()
        await world.channel.put(cancel_key("run", "a"), [b"."])
        _, results = await running
        assert unpickled(results["a"].data or b"") > 1

    threads(scenario)


def test_a_store_that_does_not_answer_cancels_nothing() -> None:
    class Silent(MemoryChannel):
        async def fetch(self, key: str) -> memoryview | None:
            raise ChannelUnreachable("no answer")

    async def main() -> bool:
        task = RunningTask("a", run="run", channel=Silent(), reporting=Reporting(), loop=asyncio.get_running_loop())
        return await asyncio.to_thread(task.is_cancelled)

    assert not asyncio.run(main())


def test_a_cancelled_task_that_never_asks_is_interrupted_when_leases_are_renewed() -> None:
    """Its executor goes on with the next task, and records nothing of it."""

    async def scenario(world: World, compute: ThreadCompute) -> None:
        world.resolver = shipped(world, [])
        batch = await world.client.publish([within("a", until_interrupted, "math:sqrt")])
        await world.client.publish([within("b", doubled, "math:sqrt", 9)], order=1)
        executor = world.executor(compute=compute, lease_s=0.6, idle_s=0.0)
        running = asyncio.create_task(executor.run())
        await asyncio.sleep(0.5)
        assert await world.client.cancel(batch, ["a"]) == ["a"]
        await world.channel.put(cancel_key("run", "a"), [b"."])
        totals = await running
        assert (totals.recorded, totals.failed, totals.dropped) == (1, 0, 1)
        results = {result.id: result for result in await world.reader.read()}
        assert (results["a"].status, results["b"].status) == ("cancelled", "ok")
        assert threading.active_count() < 20

    threads(scenario)


@pytest.mark.parametrize("alone", [False, True])
def test_one_task_at_a_time_leaves_the_next_to_another_executor(alone: bool) -> None:
    """Two tasks of 100 s: none is taken ahead, or what was taken ahead of the long one is given back."""

    async def scenario(world: World) -> None:
        world.resolver = Coded(f=lambda task, inputs: 1)
        for n in range(2):
            await world.client.publish([TaskSpec(id=f"t{n}", function="f")], order=n)
        await world.client.finish()
        compute = ModelledCompute(100.0)
        first = asyncio.create_task(world.executor("e1", compute=compute, one_at_a_time=alone, idle_s=1).run())
        await asyncio.sleep(5)
        second = asyncio.create_task(world.executor("e2", compute=compute, one_at_a_time=alone, idle_s=1).run())
        done = [(await each).recorded for each in (first, second)]
        assert done == [1, 1]

    virtual(scenario)
