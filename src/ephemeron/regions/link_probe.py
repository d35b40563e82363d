"""The entry `regions-link-probe`: a function of each region, which measures the links to the functions of the others with the run's own communicator.

For each pair, one region sends an update and the other one answers with a small one, first some small ones and then large ones; then the other way
round. A clock measures at one end only. Half of a small exchange is the latency, what a large one takes longer gives the bandwidth. Through a store both include
the store: that is what updates take.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.functions.context import Context
from ephemeron.regions.communicator.base import Communicator, Update
from ephemeron.regions.communicator.connect import communicator_of
from ephemeron.training.worker.spec import GroupMembership, GroupNetwork

SMALL_EXCHANGES = 4
LARGE_EXCHANGES = 2
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbeRequest:
    """Arguments of the entry."""

    store: str
    """Address of the store that all regions reach."""
    names: tuple[str, ...]
    """Of all regions."""
    index: int
    """Place of this one."""
    nbytes: int
    """Size of a large update."""
    network: GroupNetwork | None = None
    """Connections of this region; None: through the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """A link from this region."""

    target: str
    latency_s: float
    bandwidth: float
    """Bytes per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbeResult:
    """Result of the entry."""

    links: tuple[MeasuredLink, ...]


async def run_link_probe(ctx: Context, request: LinkProbeRequest) -> LinkProbeResult:
    """Measures the links from this region, one pair of regions after another."""
    own, found = request.names[request.index], []
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_channel(request.store))
        key = SigningKey.from_text(ctx.call.key)
        channel = RunChannel(store, owner=ctx.invocation, signing=key, signs=lambda name: True)
        for pair in itertools.combinations(request.names, 2):
            if own not in pair:
                continue
            membership = GroupMembership(
                run=f"{ctx.call.run}-{'-'.join(pair)}",
                store=request.store,
                index=pair.index(own),
                names=pair,
                every=1,
                rounds=1,
                network=request.network,
            )
            other = pair[1 - pair.index(own)]
            made = communicator_of(membership, channel, identity=own, fence=1, key=key, simulated=False)
            async with made as communicator:
                await communicator.join()
                found.append(await _measured(communicator, other, first=own == pair[0], nbytes=request.nbytes))
    return LinkProbeResult(links=tuple(found))


async def _measured(communicator: Communicator, other: str, *, first: bool, nbytes: int) -> MeasuredLink:
    """The link to another region; both ends call it."""
    rounds, seconds = itertools.count(1), dict[int, float]()
    sizes = [1] * SMALL_EXCHANGES + [nbytes] * LARGE_EXCHANGES
    number = 0
    for asks in (first, not first):
        for size in sizes:
            number = next(rounds)
            if asks:
                took = await _asked(communicator, other, number, size)
                seconds[size] = min(took, seconds.get(size, took))
            else:
                await _received(communicator, other, number)
                await _send(communicator, number, 1)
            await communicator.acknowledge(other, 0, number)
    await communicator.leave(after=number)
    longer = max(seconds[nbytes] - seconds[1], 1e-6)
    return MeasuredLink(target=other, latency_s=seconds[1] / 2, bandwidth=nbytes / longer)


async def _asked(communicator: Communicator, other: str, number: int, size: int) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await _send(communicator, number, size)
    await _received(communicator, other, number)
    return loop.time() - began


async def _received(communicator: Communicator, other: str, number: int) -> None:
    await communicator.get(other, 0, number, deadline=asyncio.get_running_loop().time() + _LIMIT_S)


async def _send(communicator: Communicator, number: int, size: int) -> None:
    await communicator.publish(
        Update(
            region=communicator.region, fence=communicator.fence, fragment=0, round=number, samples=1, norm=0.0, payload=os.urandom(size)
        )
    )
