"""The scaling policy, a pure function, and provisioners that follow it in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.provisioner import Provisioner, ScalingLimits, ScalingState, decide, executor_call, refused

from ephemeron.config.typed import build, plain
from ephemeron.errors import InvocationRefused, JobError
from ephemeron.events import Ended, Invoked
from ephemeron.functions import Call, Limits, SimulatedPlatform, Simulation
from ephemeron.functions.simulation import virtual_time
from ephemeron.functions.tasks import QueueDepth, TaskSpec
from ephemeron.functions.tasks.executor_entry import ExecutorRequest
from ephemeron.functions.tasks.open_queue import open_queue
from ephemeron.functions.world import ComputeModel

LIMITS = ScalingLimits(most=100, hold_s=60, burst=40, starts_per_s=10, start_s=30)


def depth(ready: int, there: int = 0, *, closed: bool = False, first: int = 1) -> QueueDepth:
    names = frozenset(f"{number}-i{number}" for number in range(first, first + there))
    return QueueDepth(ready=ready, leased=0, executors=names, closed=closed)


def test_it_scales_out_at_once_within_burst_and_concurrency() -> None:
    first = decide(LIMITS, ScalingState(), depth(1000), now=0.0)
    assert first.start == tuple(range(1, 41))
    again = decide(LIMITS, first.state, depth(1000), now=0.0)
    assert again.start == ()
    after = decide(LIMITS, again.state, depth(1000, 40), now=3.0)
    assert after.start == tuple(range(41, 71))
    rest = decide(LIMITS, after.state, depth(1000, 70), now=30.0)
    assert rest.start == tuple(range(71, 101))
    assert decide(LIMITS, rest.state, depth(1000, 100), now=60.0).start == ()


def test_starts_that_have_not_arrived_count_until_they_are_overdue() -> None:
    state = decide(LIMITS, ScalingState(), depth(5), now=0.0).state
    assert decide(LIMITS, state, depth(5, 3), now=10.0).start == ()
    late = decide(LIMITS, decide(LIMITS, state, depth(5, 3), now=10.0).state, depth(5, 3), now=31.0)
    assert late.start == (6, 7)


def test_it_scales_in_slowly() -> None:
    state = decide(LIMITS, ScalingState(), depth(32), now=0.0).state
    targets = []
    for now in range(10, 400, 10):
        decision = decide(LIMITS, state, depth(2, 32), now=float(now))
        assert decision.start == ()
        state = decision.state
        targets.append(state.target)
    assert targets == sorted(targets, reverse=True)
    assert targets[:6] == [32] * 6
    assert sorted(set(targets), reverse=True) == [32, 16, 8, 4, 2]
    # Demand between: the target holds, so executors that ended meanwhile are replaced up to it.
    back = decide(LIMITS, replace(state, target=16, lower_since=None), depth(4, 1), now=500.0)
    assert len(back.start) == 15


def test_a_refusal_waits_for_new_tokens() -> None:
    first = decide(LIMITS, ScalingState(), depth(5), now=0.0)
    state = refused(first.state, first.start[2:])
    assert decide(LIMITS, state, depth(5, 2), now=0.05).start == ()
    assert len(decide(LIMITS, state, depth(5, 2), now=0.25).start) == 2


def test_an_empty_queue_keeps_the_least_until_it_is_closed() -> None:
    limits = replace(LIMITS, least=3)
    assert len(decide(limits, ScalingState(), depth(0), now=0.0).start) == 3
    assert decide(limits, ScalingState(), depth(0, closed=True), now=0.0).start == ()


@pytest.mark.parametrize("seed", range(20))
def test_no_history_exceeds_the_limits(seed: int) -> None:
    rng = random.Random(seed)
    limits = replace(LIMITS, most=rng.randint(1, 60), burst=rng.randint(1, 30), tasks_per_executor=rng.choice([1, 7.5]))
    state, now, there, started = ScalingState(), 0.0, Counter[int](), 0
    for _ in range(200):
        now += rng.choice([0.1, 1.0, 20.0])
        names = frozenset(f"{number}-x" for number in there)
        seen = QueueDepth(ready=rng.choice([0, 1, 30, 5000]), leased=rng.choice([0, 9]), executors=names)
        decision = decide(limits, state, seen, now=now)
        state = build(ScalingState, plain(decision.state), where="handed over")
        assert state == decision.state
        started += len(decision.start)
        assert started <= limits.burst + now * limits.starts_per_s
        assert len(there) + len(decision.start) <= limits.most
        assert len(set(decision.start)) == len(decision.start)
        for number in decision.start:
            if rng.random() < 0.9:
                there[number] = 1
        for number in [number for number in there if rng.random() < 0.1]:
            del there[number]


def test_limits_that_contradict_are_refused() -> None:
    with pytest.raises(JobError, match="range"):
        ScalingLimits(most=2, least=3)


def provisioned(
    world: Simulation, *, tasks: int, per_batch: int, lifetime_s: float, **limits: Any
) -> tuple[list[Any], dict[str, object], int]:
    """Runs tasks by a provisioner. Returns events, values by task, and the most executors at once."""

    async def main() -> tuple[list[Any], dict[str, object], int]:
        platform = SimulatedPlatform(world, limits=Limits(concurrency=world.concurrency))
        client = open_queue(platform.store, "q", owner="client")
        for n in range(0, tasks, per_batch):
            some = range(n, min(n + per_batch, tasks))
            await client.publish([TaskSpec(id=f"t{i}", function="task_jobs:square", arguments={"n": i}) for i in some], order=n)
        executor = ExecutorRequest(queue="q", functions=("task_jobs",), idle_s=5.0)
        origin = Call(run="run", rank=0, attempt=0, memory_mb=256, lifetime_s=lifetime_s, channel="memory")

        async def start(number: int) -> None:
            await platform.invoke(executor_call(origin, executor, number, 1024, lifetime_s))

        provisioner = Provisioner(client, start, ScalingLimits(most=world.concurrency - 2, **limits))
        provisioning = asyncio.create_task(provisioner.run())
        reader, values = client.reader(), dict[str, object]()
        while len(values) < tasks:
            await asyncio.sleep(1.0)
            for result in await reader.read():
                assert result.id not in values
                assert result.status == "ok"
                values[result.id] = result.value
        await client.finish()
        await provisioning
        await asyncio.gather(*(invocation.wait() for invocation in list(platform._running.values())))
        at_once = most = 0
        for event in platform._events:
            if isinstance(event, (Invoked, Ended)):
                at_once += 1 if isinstance(event, Invoked) else -1
                most = max(most, at_once)
        return platform._events, values, most

    return virtual_time.run(main())


def ended(events: list[Any]) -> Mapping[str, int]:
    return Counter(event.outcome or event.status for event in events if isinstance(event, Ended))


SECOND = ComputeModel(a=1024.0, b=0.0, m=0.0)
"""A task takes a second with 1,024 MB."""


def test_a_provisioner_replaces_executors_whose_lifetime_ends_until_all_is_done() -> None:
    events, values, most = provisioned(Simulation(compute=SECOND, concurrency=12), tasks=1000, per_batch=5, lifetime_s=60)
    assert values == {f"t{n}": n * n for n in range(1000)}
    assert ended(events)["deadline"] >= 10
    assert most <= 12


def test_concurrency_that_others_use_is_no_error() -> None:
    async def main() -> None:
        starts = 0

        async def start(number: int) -> None:
            nonlocal starts
            starts += 1
            if starts % 3:
                raise InvocationRefused("no place")

        from ephemeron.communication.channels import MemoryChannel
        from ephemeron.functions.tasks import ObjectQueue

        queue = ObjectQueue(MemoryChannel(), "q", owner="p")
        await queue.publish([TaskSpec(id=f"t{n}", function="f") for n in range(50)])
        provisioner = Provisioner(queue, start, replace(LIMITS, start_s=1000))
        await provisioner.run(until=100.0)
        assert provisioner.started == 50
        assert provisioner.refused > 0

    virtual_time.run(main())
