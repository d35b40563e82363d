"""Exchange among the groups of a run: each group of functions trains by itself, and at agreed iterations all take over one average.

`GroupExchange` is the port that the training loop calls; `StoreAverage` averages parameters over a store that all groups reach.
Groups exchange before iterations H, 2H, … and at the end of the run. Rank 0 of each group puts the group's parameters, with the number
of samples since the exchange before; every rank reads the parameters of all groups and averages them in the order of the groups. So the
average is the same everywhere, and a replacement that repeats the iterations repeats it.

Objects of a round are deleted once no rank of any group would read them again: each group says in its object what is durable
at all its ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import build, plain
from ephemeron.errors import ChannelTimeout, CorruptMessage, JobError, KeyExists
from ephemeron.training.collectives import Collective, StalledPeers, all_of, wait_for_object
from ephemeron.training.collectives.object_wait import handle_timeout
from ephemeron.training.tensors import decode_state, encode_state
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.spec import GroupMembership

_VECTOR = "parameters"


class GroupExchange(ABC):
    """How the groups of a run agree on parameters. Every rank of every group calls it at the same rounds.

    What it returns depends on the configuration and the vectors alone: ranks that repeat a round get the same vector.
    """

    @abstractmethod
    def is_due(self, iteration: int) -> bool:
        """Whether the groups exchange before this iteration, with all versions before it applied."""

    @abstractmethod
    async def exchange(self, iteration: int, own: np.ndarray, *, durable: int) -> np.ndarray:
        """The vector that all groups go on with.

        Args:
            iteration: a due one.
            own: this group's parameters, 1-D, alike on all its ranks.
            durable: number of iterations that no rank of this group would repeat; for rank 0.

        Raises:
            InvocationExit: this invocation ends before the exchange does.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Plain values of a group's object."""

    samples: int
    """Since the exchange before."""
    durable: int


class StoreAverage(GroupExchange):
    """Mean of the groups' parameters, weighted by samples, over a store that all groups reach.

    Args:
        membership: of this group.
        store: the store, by a connection of this invocation.
        lifecycle: of the invocation.
        collective: of this group.
    """

    def __init__(
        self, membership: GroupMembership, store: RunChannel, lifecycle: InvocationLifecycle, collective: Collective
    ) -> None:
        self._m, self._store, self._lifecycle, self._collective = membership, store, lifecycle, collective
        self._deleted = 0

    def is_due(self, iteration: int) -> bool:
        return self._round_of(iteration) is not None

    async def exchange(self, iteration: int, own: np.ndarray, *, durable: int) -> np.ndarray:
        number = self._round_of(iteration)
        assert number is not None
        trace, now = self._lifecycle.invocation.trace, self._lifecycle.now
        began, before = now(), self._store.traffic
        try:
            mine: bytes | None = None
            if self._lifecycle.rank == 0:
                mine = self._encoded(number, own, iteration, durable)
                await self._put(number, mine)
                trace.record("upload", began, now())
            began = now()
            groups = await all_of(self._get(number, group, iteration, mine) for group in range(len(self._m.names)))
            trace.record("wait", began, now())
            merged = _average([(vector, meta.samples) for vector, meta in groups], dtype=own.dtype)
            if self._lifecycle.rank == 0:
                await self._delete(min(meta.durable for _, meta in groups))
        finally:
            self._lifecycle.channel.meter.add(before, self._store.traffic)
        return merged

    def _round_of(self, iteration: int) -> int | None:
        """Number of the exchange before an iteration, from 1; None: there is none."""
        if iteration == self._lifecycle.spec.iterations:
            return self._m.rounds + 1
        number, rest = divmod(iteration, self._m.every)
        return number if rest == 0 and 1 <= number <= self._m.rounds else None

    def _encoded(self, number: int, own: np.ndarray, iteration: int, durable: int) -> bytes:
        split, first = self._lifecycle.spec.split, (number - 1) * self._m.every
        samples = sum(
            split.batch_at(rank, i % split.iterations)
            for i in range(first, iteration)
            for rank in range(len(split.counts))
        )
        return encode_state({_VECTOR: own}, plain(_Round(samples=samples, durable=durable)))

    async def _put(self, number: int, data: bytes) -> None:
        try:
            await self._store.put(self._m.key(number, self._m.index), [data], create=True)
        except KeyExists:
            pass  # an earlier attempt has put the same parameters

    async def _get(self, number: int, group: int, iteration: int, mine: bytes | None) -> tuple[np.ndarray, _Round]:
        key = self._m.key(number, group)
        if group == self._m.index and self._lifecycle.rank != 0:

            async def stalled() -> StalledPeers:
                cause = await self._collective.stalled_before(iteration, 0, key)
                return cause._replace(keys=())  # they are not in the channel of the group

            arrived = await wait_for_object(
                self._store, key, timeout_s=self._lifecycle.wait_timeout_s, stalled=stalled,
                on_timeout=self._lifecycle.on_timeout, accept=lambda data: _decode(data, key),
            )  # fmt: skip
            return arrived.value
        while True:  # its own functions and clients see to it that another group goes on
            try:
                deadline = self._lifecycle.now() + self._lifecycle.wait_timeout_s()
                return _decode((await self._store.get(key, deadline=deadline)).data, key)
            except ChannelTimeout as e:
                if mine is not None and group == self._m.index:
                    await self._put(number, mine)  # the store has lost it
                await handle_timeout(self._lifecycle.on_timeout, StalledPeers(iteration, ()), e)

    async def _delete(self, durable: int) -> None:
        """Deletes this group's objects of the rounds that no rank of any group would repeat."""
        last = min(durable // self._m.every, self._m.rounds)
        if last > self._deleted:
            await self._store.delete([self._m.key(n, self._m.index) for n in range(self._deleted + 1, last + 1)])
            self._deleted = last


@asynccontextmanager
async def group_exchange(lifecycle: InvocationLifecycle, collective: Collective) -> AsyncIterator[GroupExchange | None]:
    """The exchange with other groups, as the run's specification says; None: there are none.

    Args:
        lifecycle: of the invocation.
        collective: of its group.
    """
    invocation, membership = lifecycle.invocation, lifecycle.spec.group
    if membership is None:
        yield None
        return
    ctx, key = invocation.ctx, SigningKey.from_text(invocation.call.key)
    async with AsyncExitStack() as stack:
        store = ctx.shared
        if store is None:
            store = await stack.enter_async_context(open_channel(membership.store))
        yield StoreAverage(
            membership,
            RunChannel(
                store, owner=f"{ctx.invocation}-groups", retry=invocation.retry, told=invocation.outage, damaged=invocation.damaged,
                latest=ctx.deadline - 0.05 * ctx.call.lifetime_s, signing=key, signs=lambda key: True,
            ),
            lifecycle, collective,
        )  # fmt: skip


def _average(groups: list[tuple[np.ndarray, int]], *, dtype: np.dtype[np.generic]) -> np.ndarray:
    """Mean of vectors, weighted, in their order and in float64."""
    total = np.zeros(groups[0][0].shape, dtype=np.float64)
    for vector, samples in groups:
        total += vector.astype(np.float64) * samples
    total /= sum(samples for _, samples in groups)
    return total.astype(dtype)


def _decode(data: memoryview | bytes, key: str) -> tuple[np.ndarray, _Round]:
    arrays, meta = decode_state(data, key=key)
    try:
        return arrays[_VECTOR], build(_Round, meta, where=key)
    except (JobError, KeyError) as e:
        raise CorruptMessage(f"not the parameters of a group: {e}", key=key) from None
