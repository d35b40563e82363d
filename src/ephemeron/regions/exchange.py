"""A region's part in the synchronisation of a run: the exchange that its functions call.

Rank 0 of a region sends and receives for all of its ranks, so every byte crosses between two regions once. What it sends it first stores in the
channel of the region; what the region goes on with is a decision, a create-only object there that every rank reads. So a
replacement of any rank repeats what was decided, bit for bit, also under policies that take whatever has arrived; and a replacement of
rank 0 goes on from the state stored with the latest decision, and sends again what other regions may lack.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext

import numpy as np

from ephemeron.regions.communicator.connect import open_communicator
from ephemeron.regions.entrance import JoiningRegion, entry_of, entry_vector, wait_for_entry
from ephemeron.regions.follower import RegionFollower
from ephemeron.regions.leader import RegionLeader
from ephemeron.training.collectives import Collective
from ephemeron.training.worker.group_exchange import GroupEntry, GroupExchange
from ephemeron.training.worker.lifecycle import InvocationLifecycle


@asynccontextmanager
async def open_exchange(
    lifecycle: InvocationLifecycle, collective: Collective, entry: GroupEntry | None = None
) -> AsyncIterator[GroupExchange]:
    """The exchange of this rank's region with the others.

    Args:
        lifecycle: of the invocation, whose run is one region.
        collective: of the region.
        entry: what `enter` has returned.
    """
    membership = lifecycle.spec.group
    assert membership is not None
    if lifecycle.rank != 0:
        yield RegionFollower(membership, lifecycle, collective)
        return
    opened = None if entry is None else entry.connection
    async with open_communicator(membership, lifecycle) if opened is None else nullcontext(opened) as (communicator, count):
        leader = RegionLeader(membership, communicator, lifecycle, count)
        try:
            yield leader
        finally:
            await leader.close()


async def enter(lifecycle: InvocationLifecycle, stack: AsyncExitStack, own: np.ndarray) -> GroupEntry:
    """Joins a run that has begun, or reads how this region has joined it.

    Args:
        lifecycle: of the invocation.
        stack: closes the connection with other regions.
        own: parameters of the right size, 1-D.
    """
    membership, begins, opened = lifecycle.spec.group, await entry_of(lifecycle), None
    assert membership is not None
    if begins is None and lifecycle.rank == 0:
        opened = await stack.enter_async_context(open_communicator(membership, lifecycle))
        try:
            begins = await JoiningRegion(membership, lifecycle, opened[0], own).enter()
        finally:
            opened[1]()
    elif begins is None:
        begins = await wait_for_entry(lifecycle)
    return GroupEntry(begins, await entry_vector(lifecycle, begins), opened)


async def entered_at(lifecycle: InvocationLifecycle) -> int | None:
    """The iteration with which this region has begun; None: it has not joined yet."""
    return await entry_of(lifecycle)
