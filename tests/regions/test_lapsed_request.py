"""A region that asks to join and never comes back: its updates are kept for a limited time, and it may still join later."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.communication.keys import Keys
from ephemeron.functions import simulation
from ephemeron.regions.communicator.members import EntranceRequest, note_absent
from ephemeron.regions.communicator.store import StoreCommunicator
from ephemeron.regions.entrance import ABSENT_S, JoiningRegion
from ephemeron.regions.leader import RegionLeader
from ephemeron.training.worker.spec import GroupMembership

NAMES = ("near", "mid", "far")
ITERATIONS, EVERY, ASKS_AT = 400, 2, 20
ABSENT = int(ABSENT_S)


def lifecycle_of(name: str) -> Any:
    """What a leader needs of an invocation; an iteration takes a second."""
    now, channel = asyncio.get_running_loop().time, MemoryParameterServer()
    invocation = SimpleNamespace(
        emit=lambda event: None,
        warn=lambda text: None,
        attempt=0,
        ctx=SimpleNamespace(deadline=1e9),
        channel=channel,
        now=now,
        keys=Keys(name),
        call=SimpleNamespace(lifetime_s=1e6),
        trace=SimpleNamespace(record=lambda *what: None),
    )
    split = SimpleNamespace(batch_at=lambda rank, iteration: 8, iterations=ITERATIONS, counts=(1,))
    spec = SimpleNamespace(iterations=ITERATIONS, split=split, configuration=SimpleNamespace(workers=1))
    return SimpleNamespace(
        rank=0,
        attempt=0,
        spec=spec,
        keys=Keys(name),
        channel=channel,
        now=now,
        run_now=now,
        wait_timeout_s=lambda: 1e6,
        on_timeout=None,
        invocation=invocation,
    )


async def train(name: str, store: Any, sync: str, *, joins: bool = False) -> np.ndarray:
    membership = GroupMembership(
        run="run",
        store="",
        index=NAMES.index(name),
        names=NAMES,
        every=EVERY,
        rounds=(ITERATIONS - 1) // EVERY,
        sync=sync,
        joins=joins,
        iterations=(ITERATIONS,) * 3,
    )
    communicator = StoreCommunicator(store, run="run", region=name, identity=name, fence=1, names=NAMES)
    lifecycle, own, first = lifecycle_of(name), np.zeros(6, dtype=np.float32), 0
    async with communicator:
        await communicator.join(enters=joins)
        if joins:
            joining = JoiningRegion(membership, lifecycle, communicator, own)
            first = await joining.enter()
            assert first < ITERATIONS, "it takes part"
            own = joining._vector
        leader = RegionLeader(membership, communicator, lifecycle, lambda: None)
        await leader.begin(first, own, exchanged=True)
        for iteration in range(first + 1, ITERATIONS + 1):
            await asyncio.sleep(1)
            own = own - np.float32(1 + NAMES.index(name))
            if leader.is_due(iteration):
                own = await leader.exchange(iteration, own, durable=0)
        await leader.close()
    return own


@pytest.mark.parametrize("sync", ["sma", "ama"])
def test_updates_are_kept_for_a_limited_time_for_a_region_that_does_not_come(sync: str) -> None:
    kept: dict[int, int] = {}
    """By time, updates in the store."""

    async def go() -> list[np.ndarray]:
        store = MemoryParameterServer()
        await note_absent(store, "run", "far")
        trained = [asyncio.create_task(train(name, store, sync)) for name in NAMES[:2]]
        await asyncio.sleep(ASKS_AT)
        communicator = StoreCommunicator(store, run="run", region="far", identity="far", fence=1, names=NAMES)
        assert await communicator.table.ask(EntranceRequest(region="far"))  # and then its functions are gone
        for _ in range(ABSENT + 60):
            await asyncio.sleep(1)
            kept[int(asyncio.get_running_loop().time())] = len(await store.list("run/groups/near/"))
        assert await communicator.table.asked() is None
        returned = await train("far", store, sync, joins=True)
        assert await communicator.table.asked() is None, "it has joined"
        return [*await asyncio.gather(*trained), returned]

    ended = simulation.run(go())
    assert kept[ASKS_AT + ABSENT - 5] > ABSENT // EVERY // 2, "its updates are kept while it may come"
    assert max(kept.values()) <= ABSENT // EVERY + 15
    assert max(n for t, n in kept.items() if t > ASKS_AT + ABSENT + 30) <= 8
    for parameters in ended:
        np.testing.assert_allclose(parameters, ended[0], rtol=1e-5)
