"""The communicator of a region's rank 0, as the run's specification says."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.regions.communicator.base import Communicator
from ephemeron.regions.communicator.network import RegionNetwork
from ephemeron.regions.communicator.store import StoreCommunicator
from ephemeron.regions.communicator.tcp import TcpCommunicator
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.spec import GroupMembership


@asynccontextmanager
async def open_communicator(
    membership: GroupMembership, lifecycle: InvocationLifecycle
) -> AsyncIterator[tuple[Communicator, Callable[[], None]]]:
    """Opens the communicator with the other regions.

    Args:
        membership: of the region.
        lifecycle: of the invocation.

    Yields:
        It, and a function that counts its requests since the last call as requests to the region's channel, at whose prices they are.
    """
    invocation = lifecycle.invocation
    ctx, key = invocation.ctx, SigningKey.from_text(invocation.call.key)
    async with AsyncExitStack() as stack:
        store = ctx.shared
        if store is None:
            store = await stack.enter_async_context(open_channel(membership.store))
        channel = RunChannel(
            store,
            owner=f"{ctx.invocation}-groups",
            retry=invocation.retry,
            told=invocation.outage,
            damaged=invocation.damaged,
            latest=ctx.deadline - 0.05 * ctx.call.lifetime_s,
            signing=key,
            signs=lambda key: True,
        )
        counted = channel.traffic

        def count() -> None:
            nonlocal counted
            before, counted = counted, channel.traffic
            lifecycle.channel.meter.add(before, counted)

        made = communicator_of(
            membership, channel, identity=lifecycle.keys.run, fence=lifecycle.attempt + 1, key=key, simulated=ctx.shared is not None
        )
        async with made as communicator:
            await communicator.join(enters=membership.joins)
            yield communicator, count


def communicator_of(
    membership: GroupMembership, channel: Channel, *, identity: str, fence: int, key: SigningKey, simulated: bool
) -> Communicator:
    """The communicator that a specification names.

    Args:
        membership: of the region.
        channel: the store that all regions reach.
        identity, fence: see `Communicator`.
        key: of the run.
        simulated: whether there is no network: then regions exchange through the store.

    Raises:
        JobError: the region's network cannot be used.
    """
    region = membership.names[membership.index]
    if membership.network is None or simulated:
        return StoreCommunicator(channel, run=membership.run, region=region, identity=identity, fence=fence, names=membership.names)
    token = token_of(key, membership.run)
    return TcpCommunicator(
        channel,
        RegionNetwork(membership.network, token=token),
        run=membership.run,
        token=token,
        region=region,
        identity=identity,
        fence=fence,
        names=membership.names,
    )


def token_of(key: SigningKey, run: str) -> str:
    """Token that communicators of a run prove to each other; derived from the run's key, and never sent."""
    return hmac.digest(key.secret, f"regions/{run}".encode(), hashlib.sha256).hex()
