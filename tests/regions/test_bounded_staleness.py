"""Asynchronous policies, at whatever pace the regions compute: none is further ahead than the limit, all end, with the same parameters."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.communication.channels.wrappers import Throttled
from ephemeron.communication.keys import Keys
from ephemeron.events import RegionExchanged
from ephemeron.functions import simulation
from ephemeron.regions.communicator.store import StoreCommunicator
from ephemeron.regions.leader import RegionLeader
from ephemeron.training.worker.spec import GroupMembership

ELEMENTS = 6
ITERATIONS = 12


def lifecycle_of(name: str, events: list[Any]) -> Any:
    """What a leader needs of an invocation."""
    now = asyncio.get_running_loop().time
    context = SimpleNamespace(deadline=1e9)
    invocation = SimpleNamespace(
        emit=events.append, warn=lambda text: None, attempt=0, ctx=context, trace=SimpleNamespace(record=lambda *what: None)
    )
    split = SimpleNamespace(batch_at=lambda rank, iteration: 8, iterations=ITERATIONS, counts=(1,))
    spec = SimpleNamespace(iterations=ITERATIONS, split=split, configuration=SimpleNamespace(workers=1))
    return SimpleNamespace(
        rank=0,
        attempt=0,
        spec=spec,
        keys=Keys(name),
        channel=MemoryParameterServer(),
        now=now,
        run_now=now,
        wait_timeout_s=lambda: 1e6,
        on_timeout=None,
        invocation=invocation,
    )


async def train(name: str, names: tuple[str, ...], store: Any, sync: str, every: int, steps: list[float], latency_s: float) -> Any:
    """One region, whose iterations take given seconds; returns its parameters and the staleness of its exchanges."""
    events: list[Any] = []
    membership = GroupMembership(
        run="run", store="", index=names.index(name), names=names, every=every, rounds=(ITERATIONS - 1) // every, sync=sync
    )
    channel = Throttled(store, latency_s=latency_s, bandwidth_mb_s=1.0)
    communicator = StoreCommunicator(channel, run="run", region=name, identity=name, fence=1, names=names)
    async with communicator:
        await communicator.join()
        leader = RegionLeader(membership, communicator, lifecycle_of(name, events), lambda: None)
        own = np.zeros(ELEMENTS, dtype=np.float32)
        await leader.begin(0, own, exchanged=True)
        for iteration in range(1, ITERATIONS + 1):
            await asyncio.sleep(steps[iteration - 1])
            own = own - np.float32(1 + names.index(name))
            if leader.is_due(iteration):
                own = await leader.exchange(iteration, own, durable=0)
        await leader.close()
    return own, [event.staleness for event in events if isinstance(event, RegionExchanged)]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(["asgd", "asgd-ga", "ama"]), st.integers(1, 4), st.integers(2, 3), st.floats(0, 5))
def test_no_region_is_further_ahead_than_the_limit_whatever_the_pace(
    data: st.DataObject, policy: str, limit: int, regions: int, latency_s: float
) -> None:
    names = tuple(f"r{i}" for i in range(regions))
    every = 1 if policy == "asgd" else data.draw(st.integers(1, 4))
    paces = [data.draw(st.lists(st.floats(0.001, 20), min_size=ITERATIONS, max_size=ITERATIONS)) for _ in range(regions)]

    async def go() -> list[Any]:
        store, sync = MemoryParameterServer(), f"{policy}:staleness={limit}"
        return await asyncio.gather(*(train(n, names, store, sync, every, steps, latency_s) for n, steps in zip(names, paces, strict=True)))

    ended = simulation.run(go())
    for parameters, staleness in ended:
        assert max(staleness) <= limit
        np.testing.assert_allclose(parameters, ended[0][0], rtol=1e-5)
    if policy != "ama":  # no step is lost, and none counts twice; those after the last round are averaged
        exchanged = (ITERATIONS - 1) // every * every
        steps = sum(range(1, regions + 1))
        total = exchanged * steps + (ITERATIONS - exchanged) * steps / regions
        np.testing.assert_allclose(ended[0][0], np.full(ELEMENTS, -total), rtol=1e-5)
