"""The part of a region's ranks other than 0 in its exchanges: they read decisions, and end early where they would only wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from ephemeron.regions.policies import AdaptiveSchedule
from ephemeron.regions.records import RegionKeys, decode_decision
from ephemeron.regions.region_state import schedule_of
from ephemeron.training.collectives import Collective, StalledPeers, wait_for_object
from ephemeron.training.worker.group_exchange import GroupExchange, Unneeded
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.recovery import fencing
from ephemeron.training.worker.recovery.fencing import Claim
from ephemeron.training.worker.request import WorkerRequest
from ephemeron.training.worker.spec import GroupMembership

_WAITING_EVERY_S = 1.0
"""Longest interval at which rank 0 says that it lives while it waits for other regions."""
LEAST_PATIENCE_S = 1.0
"""Shortest wait after which a rank ends that is not needed until the last exchange is over."""


class RegionFollower(GroupExchange):
    """The part of the ranks other than 0: they read decisions.

    Args:
        membership: of the region.
        lifecycle: of the invocation.
        collective: of the region.
    """

    def __init__(self, membership: GroupMembership, lifecycle: InvocationLifecycle, collective: Collective) -> None:
        self._lifecycle, self._collective = lifecycle, collective
        self._keys, self._channel = RegionKeys(lifecycle.keys.run), lifecycle.channel
        self._schedule, self._joins = schedule_of(membership, lifecycle.spec.iterations), membership.joins
        self._said, self._may_end = b"", True

    def is_due(self, iteration: int) -> bool:
        return self._schedule.decides(iteration)

    async def begin(self, iteration: int, own: np.ndarray, *, exchanged: bool) -> None:
        begins = self._lifecycle.attempt == 0 and not self._joins
        if begins or not isinstance(self._schedule, AdaptiveSchedule):
            return
        stored = await self._channel.list(self._keys.decisions)
        before = [known for known in self._keys.decided(stored) if known < iteration + exchanged]
        if before:
            key = self._keys.decision(before[-1])
            deadline = self._lifecycle.now() + self._lifecycle.wait_timeout_s()
            _, meta = decode_decision((await self._channel.get(key, deadline=deadline)).data, key)
            self._schedule.learn(meta.plans)

    async def exchange(self, iteration: int, own: np.ndarray, *, durable: int) -> np.ndarray:
        key, lifecycle, began = self._keys.decision(iteration), self._lifecycle, self._lifecycle.now()

        async def stalled() -> StalledPeers:
            before, self._said = self._said, bytes(await self._channel.fetch(self._keys.waiting) or b"")
            if self._said != before and self._said.startswith(b"%d " % iteration):
                return StalledPeers(iteration, ())  # rank 0 lives, and waits for another region
            cause = await self._collective.stalled_before(iteration, 0, key)
            return cause._replace(keys=())

        waiting = wait_for_object(
            self._channel,
            key,
            timeout_s=lifecycle.wait_timeout_s,
            stalled=stalled,
            on_timeout=lifecycle.on_timeout,
            accept=lambda data: decode_decision(data, key),
        )
        try:
            async with asyncio.timeout(self._patience_s(iteration)):
                arrived = await waiting
        except TimeoutError:
            self._may_end = False
            lifecycle.invocation.trace.record("wait", began, lifecycle.now())
            raise Unneeded from None
        lifecycle.invocation.trace.record("wait", began, lifecycle.now())
        if isinstance(self._schedule, AdaptiveSchedule):
            self._schedule.learn(arrived.value[1].plans)
        return arrived.value[0]

    def _patience_s(self, iteration: int) -> float | None:
        """Time after which this rank ends, if it is not needed until the last exchange is over: as long as its next start takes.

        So it costs at most twice of what it would cost if the wait were known before. Ranks 0 and 1 stay: the leader, and the one that
        replaces it.
        """
        lifecycle = self._lifecycle
        last = iteration == self._schedule.iterations
        if not last or not self._may_end or lifecycle.rank < 2 or lifecycle.invocation.direct is not None:
            return None
        return max(lifecycle.spec.cold_start_s + lifecycle.handoff.load_s, LEAST_PATIENCE_S)

    async def release(self) -> bool:
        key = f"{self._keys.released}{self._lifecycle.rank}"
        await self._channel.put(key, [str(self._lifecycle.attempt).encode()])
        return await self._channel.fetch(self._keys.decision(self._schedule.iterations)) is not None


@asynccontextmanager
async def said_to_live(lifecycle: InvocationLifecycle, keys: RegionKeys, iteration: int) -> AsyncIterator[None]:
    """Context in which the other ranks do not take rank 0 for dead, while it waits for other regions.

    Args:
        lifecycle: of its invocation.
        keys: of the region's exchange.
        iteration: before which it waits.
    """

    async def repeat() -> None:
        number = 0
        while True:
            await asyncio.sleep(min(_WAITING_EVERY_S, lifecycle.wait_timeout_s() / 3))
            number += 1
            await lifecycle.channel.put(keys.waiting, [f"{iteration} {lifecycle.attempt} {number}".encode()])

    if lifecycle.spec.configuration.workers == 1:
        yield
        return
    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def recall(lifecycle: InvocationLifecycle, keys: RegionKeys) -> None:
    """Starts the ranks again that have ended until the last exchange is over."""
    for key in await lifecycle.channel.list(keys.released):
        rank, data = int(key.removeprefix(keys.released)), await lifecycle.channel.fetch(key)
        latest = await fencing.latest_attempt(lifecycle.channel, lifecycle.keys, rank)
        if data is None or int(bytes(data)) != latest:
            continue  # it has been started again
        if await fencing.claim(lifecycle.channel, lifecycle.keys, rank, latest + 1, Claim(at_s=lifecycle.run_now())):
            await lifecycle.invoke(rank, latest + 1, "replacement", WorkerRequest())
