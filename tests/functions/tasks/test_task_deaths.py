"""Executors that are real processes of the local platform, and die: nothing is lost, and nothing is repeated that anybody sees."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.provisioner import Provisioner, ScalingLimits, executor_call

from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.signing import SigningKey
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.local import LocalPlatform
from ephemeron.functions.tasks import TaskEdge, TaskResult, TaskSpec
from ephemeron.functions.tasks.executor_entry import ExecutorRequest
from ephemeron.functions.tasks.open_queue import open_queue

HERE = Path(__file__).parent
ENV = {"EPHEMERON_PRELOAD": "ephemeron.functions.tasks.executor_entry", "PYTHONPATH": str(HERE)}
KEY = SigningKey.new().text


class Deployment:
    """Local executors, a provisioner that replaces them, and a client."""

    def __init__(self, platform: LocalPlatform, channel: Channel, address: str, *, adapter: Any, lease_s: float) -> None:
        self.platform, self.address = platform, address
        self.queue = open_queue(channel, "a-run", owner="client", key=KEY, adapter=adapter, lease_s=lease_s)
        self.reader = self.queue.reader()
        self.request = ExecutorRequest(
            queue="a-run", adapter=adapter, functions=("task_jobs",), lease_s=lease_s, idle_s=1.0, flush_s=0.1, poll_s=0.1, margin_s=0.5
        )
        limits = ScalingLimits(most=3, tasks_per_executor=5, burst=3, starts_per_s=20, start_s=5)
        self.provisioner = Provisioner(self.queue, self.start, limits, poll_s=0.1)

    async def start(self, number: int) -> None:
        origin = Call(run="a-run", rank=0, attempt=0, memory_mb=256, lifetime_s=60, channel=self.address, origin=time.time(), key=KEY)
        await self.platform.invoke(executor_call(origin, self.request, number, 256, 60))

    async def results(self, n: int) -> list[TaskResult]:
        """Results until there are so many."""
        found: list[TaskResult] = []
        while len(found) < n:
            found += await self.reader.read()
            await asyncio.sleep(0.05)
        return found


def deployed(folder: Path, address: str, scenario: Callable[[Deployment], Any], **how: Any) -> None:
    async def main() -> None:
        platform = await LocalPlatform.start(folder / "run", limits=Limits(memory_max_mb=4096), env=ENV)
        try:
            async with asyncio.timeout(240), open_channel(address, base=folder / "run" / "channel") as channel:
                one = Deployment(platform, channel, address, **how)
                provisioning = asyncio.create_task(one.provisioner.run())
                await scenario(one)
                await one.queue.finish()
                await provisioning
                await one.queue.clear()  # a cache is shared with other tests
        finally:
            await platform.shutdown()

    asyncio.run(main())


async def killed_while_it_works(runs: Path, kills: int) -> None:
    """Kills the process that ran the latest task, each time some more have run."""
    killed = 0
    while killed < kills:
        await asyncio.sleep(0.01)
        lines = runs.read_text().splitlines() if runs.exists() else []
        if len(lines) >= 15 * (killed + 1):
            with contextlib.suppress(ProcessLookupError):  # on a busy machine it may have ended meanwhile
                os.kill(int(lines[-1].split()[1]), signal.SIGKILL)
                killed += 1


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["objects", "redis"])
def test_killed_executors_lose_and_repeat_nothing_visible(tmp_path: Path, adapter: str, valkey_server: Any) -> None:
    runs = tmp_path / "runs"
    tasks = [
        TaskSpec(
            id=f"t{n}",
            function="task_jobs:slow",
            arguments={"n": n, "seconds": 0.05, "runs": str(runs)},
            output=f"a-run/out/{n}",
            then=("sum",),
            max_tries=50,
        )
        for n in range(120)
    ]
    outputs = tuple(task.output for task in tasks)
    add = TaskSpec(id="sum", function="task_jobs:join", inputs=outputs, arguments={"sep": "+"}, max_tries=50)

    async def scenario(one: Deployment) -> None:
        await one.queue.connect(TaskEdge(name="sum", inputs=len(tasks), tasks=(add,)))
        await one.queue.publish_all(tasks, per_batch=8)
        killing = asyncio.create_task(killed_while_it_works(runs, 6))
        results = await one.results(len(tasks) + 1)
        await killing
        assert Counter(result.id for result in results) == Counter([*(task.id for task in tasks), "sum"])
        assert {result.status for result in results} == {"ok"}
        (total,) = [result for result in results if result.id == "sum"]
        assert bytes(total.data or b"") == b"+".join(str(n * n).encode() for n in range(len(tasks)))
        assert sorted(await one.queue.reader().read(), key=lambda r: r.id) == sorted(results, key=lambda r: r.id)

    address = valkey_server.address if adapter == "redis" else "folder"
    deployed(tmp_path, address, scenario, adapter=adapter, lease_s=1.0)
    again = Counter(int(line.split()[0]) for line in runs.read_text().splitlines())
    assert set(again) == set(range(len(tasks)))
    assert sum(again.values()) > len(tasks), "executors died with unrecorded tasks"


@pytest.mark.slow
def test_a_task_that_kills_its_executor_is_dead_and_its_batch_is_done(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    async def scenario(one: Deployment) -> None:
        await one.queue.publish(
            [
                TaskSpec(id="a", function="task_jobs:square", arguments={"n": 2}),
                TaskSpec(id="once", function="task_jobs:die_once", arguments={"marker": str(marker)}),
                TaskSpec(id="killer", function="task_jobs:kill", max_tries=1),
                TaskSpec(id="z", function="task_jobs:square", arguments={"n": 3}),
                TaskSpec(id="bad", function="task_jobs:fail", max_tries=2),
            ]
        )
        results = {result.id: result for result in await one.results(5)}
        status = {id: result.status for id, result in results.items()}
        assert status == {"a": "ok", "once": "ok", "killer": "dead", "z": "ok", "bad": "dead"}
        assert "without a word" in results["killer"].error
        assert "in fail" in results["bad"].traceback

    deployed(tmp_path, "folder", scenario, adapter="objects", lease_s=0.6)


@pytest.mark.slow
def test_tasks_that_the_run_has_not_signed_are_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    async def scenario(one: Deployment) -> None:
        async with open_channel("folder", base=tmp_path / "run" / "channel") as channel:
            forger = open_queue(channel, "a-run", owner="forger", key=SigningKey.new().text)
            forged = await forger.publish(
                [TaskSpec(id="evil", function="task_jobs:slow", arguments={"n": 1, "seconds": 0.0, "runs": str(marker)})]
            )
            await one.queue.publish([TaskSpec(id="good", function="task_jobs:square", arguments={"n": 3})], order=1)
            (result,) = await one.results(1)
            assert (result.id, result.value) == ("good", 9)
            assert not marker.exists()
            await channel.delete([key for key in await channel.list("a-run.work") if forged in key])

    deployed(tmp_path, "folder", scenario, adapter="objects", lease_s=0.6)
