"""Tasks: overhead per task and tasks per second, by adapter, beside other ways to run a function many times on this machine.

    python -m benchmarks.tasks [--json] [--tasks 1000] [--turns 3] [--workers 2] [--parts live,simulated]

Live: all sides have W workers that are up, and run the same n tasks, which sleep 10 ms, and n empty ones. Sides alternate. The overhead
is (W × time − time that the tasks say they took) / n: publishing, code, transport, results, and idle workers, until the client has the
last result. Tasks sleep, so that the processors' load counts as overhead only where a side causes work. ephemeron's workers are functions
of the local platform with a CPU quota (0.8 cores for two of them); the others' have none.

Simulated: 100,000 tasks of a second on 1,000 functions at AWS Lambda's latencies, started by a provisioner, in virtual
time. The bound is 100 s of computing; the rest is starts, leases, results and the end, at which some wait for others.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import ExitStack
from typing import Any

import click

from benchmarks.common import condensed, environment, write
from benchmarks.provisioner import Provisioner, ScalingLimits, executor_call
from benchmarks.task_sides import Side, sides
from ephemeron.events import Ended, Traffic
from ephemeron.functions import Call, Limits, SimulatedPlatform, Simulation
from ephemeron.functions.simulation import virtual_time
from ephemeron.functions.tasks import TaskSpec
from ephemeron.functions.tasks.executor_entry import ExecutorRequest
from ephemeron.functions.tasks.open_queue import open_queue
from ephemeron.functions.world import ComputeModel

PAUSE_S = 0.01
MEMORY_MB = 1769


def live(n: int, turns: int, workers: int, names: str) -> list[dict[str, Any]]:
    """Figures of each side: of tasks that sleep, and of empty ones."""
    rows = []
    with ExitStack() as stack:
        up: list[Side] = []
        for side in sides():
            if names and not any(name in side.name for name in names.split(",")):
                continue
            try:
                up.append(stack.enter_context(side.up(workers)))
            except ImportError as e:
                rows.append({"side": side.name, "skipped": str(e)})
        overhead_ms: dict[str, list[float]] = {side.name: [] for side in up}
        per_s: dict[str, list[float]] = {side.name: [] for side in up}
        for _ in range(turns):
            for side in up:
                count = min(n, side.at_most or n)
                took = side.run(count, PAUSE_S)
                overhead_ms[side.name].append(1000 * (workers * (side.ended - side.began) - sum(took)) / count)
                side.run(count, 0.0)
                per_s[side.name].append(count / (side.ended - side.began))
                print(f"{side.name}: {overhead_ms[side.name][-1]:.3f} ms, {per_s[side.name][-1]:.0f}/s", file=sys.stderr)
        for side in up:
            rows.append(
                {
                    "side": side.name,
                    "tasks": min(n, side.at_most or n),
                    "overhead_ms": condensed(overhead_ms[side.name]),
                    "empty_tasks_per_s": condensed(per_s[side.name]),
                }
            )
    return rows


async def _simulated(tasks: int, functions: int, per_batch: int) -> dict[str, Any]:
    loop, began = asyncio.get_running_loop(), time.perf_counter()
    world = Simulation(compute=ComputeModel(a=float(MEMORY_MB), b=0.0, m=0.0), concurrency=functions + 1)
    platform = SimulatedPlatform(world, limits=Limits(concurrency=world.concurrency))
    client = open_queue(platform.store, "q", owner="client")
    batches = [range(at, min(at + per_batch, tasks)) for at in range(0, tasks, per_batch)]
    for order, batch in enumerate(batches):
        await client.publish(
            [TaskSpec(id=f"t{i}", function="benchmarks.task_functions:pause", arguments={"n": i, "seconds": 0.0}) for i in batch],
            order=order,
        )
    executor = ExecutorRequest(queue="q", functions=("benchmarks.task_functions",), idle_s=5.0, flush_s=10.0)
    origin = Call(run="run", rank=0, attempt=0, memory_mb=MEMORY_MB, lifetime_s=900, channel="memory")

    async def executing(number: int) -> None:
        await platform.invoke(executor_call(origin, executor, number, MEMORY_MB, 900))

    start = loop.time()
    provisioning = asyncio.create_task(Provisioner(client, executing, ScalingLimits(most=functions, tasks_per_executor=per_batch)).run())
    reader, seen = client.reader(), set[str]()
    while len(seen) < tasks:
        await asyncio.sleep(5.0)
        found = await reader.read()
        assert not seen & {result.id for result in found}, "a result was seen twice"
        assert all(result.status == "ok" for result in found)
        seen |= {result.id for result in found}
    makespan_s = loop.time() - start
    await client.finish()
    await provisioning
    await asyncio.gather(*(one.wait() for one in list(platform._running.values())))
    ends = [event for event in platform._events if isinstance(event, Ended)]
    traffic = sum((event.traffic for event in ends), Traffic())
    requests = traffic.puts + traffic.gets + traffic.polls + traffic.lists + traffic.deletes
    return {
        "tasks": tasks,
        "functions": functions,
        "per_batch": per_batch,
        "invocations": len(ends),
        "virtual_s": round(makespan_s, 1),
        "bound_s": tasks / functions,
        "requests_per_task": round(requests / tasks, 3),
        "puts_and_lists_per_task": round((traffic.puts + traffic.lists) / tasks, 3),
        "wall_s": round(time.perf_counter() - began, 1),
    }


def simulated(tasks: int, functions: int, per_batch: int = 25) -> dict[str, Any]:
    """Many tasks on many functions, in virtual time."""
    return virtual_time.run(_simulated(tasks, functions, per_batch))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--tasks", default=1000, help="Live tasks of one side and turn.")
@click.option("--turns", default=3)
@click.option("--workers", default=2)
@click.option("--sides", "names", default="", help="Parts of the names of sides, separated by commas.")
@click.option("--simulated-tasks", default=100_000)
@click.option("--functions", default=1000, help="Simulated ones.")
@click.option("--parts", default="live,simulated")
def main(as_json: bool, tasks: int, turns: int, workers: int, names: str, simulated_tasks: int, functions: int, parts: str) -> None:
    """Measures the overhead of tasks."""
    result: dict[str, Any] = environment()
    if "live" in parts:
        result["live"] = {"workers": workers, "pause_s": PAUSE_S, "sides": live(tasks, turns, workers, names)}
    if "simulated" in parts:
        result["simulated"] = simulated(simulated_tasks, functions)
    if as_json:
        write(result)
        return
    for row in result.get("live", {}).get("sides", []):
        print(row)
    print(result.get("simulated", ""))


if __name__ == "__main__":
    main()
