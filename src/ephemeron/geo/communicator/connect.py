"""The communicator of a region's rank 0, as the run's specification says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.geo.communicator.base import Communicator
from ephemeron.geo.communicator.store import StoreCommunicator
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
            store, owner=f"{ctx.invocation}-groups", retry=invocation.retry, told=invocation.outage, damaged=invocation.damaged,
            latest=ctx.deadline - 0.05 * ctx.call.lifetime_s, signing=key, signs=lambda key: True,
        )  # fmt: skip
        counted = channel.traffic

        def count() -> None:
            nonlocal counted
            before, counted = counted, channel.traffic
            lifecycle.channel.meter.add(before, counted)

        async with StoreCommunicator(
            channel, run=membership.run, region=membership.names[membership.index], identity=lifecycle.keys.run,
            fence=lifecycle.attempt + 1, names=membership.names,
        ) as communicator:  # fmt: skip
            await communicator.join()
            yield communicator, count
