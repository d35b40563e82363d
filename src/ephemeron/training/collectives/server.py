"""Parameter-server forms (λDNN): a long-lived process sums, workers push and pull.

Synchronous: shard j of version v is reduced by the server that its key is mapped to, in rank order, so the
weights are those of K-REDUCE. Asynchronous: workers push the change that their own optimiser made and get the
current parameters back, with all other changes that have arrived meanwhile.

This takes one round trip fewer than storage, but the servers' links carry every byte of every worker, and the servers are
billed while workers compute.
"""

from __future__ import annotations

import asyncio

import numpy as np

from ephemeron.communication.channels.reduction import SupportsReduction
from ephemeron.errors import ChannelTimeout, CorruptMessage, DamagedObject, KeyExists
from ephemeron.training.collectives._tasks import all_of
from ephemeron.training.collectives.group import Collective, Group, Reduced, StalledPeers
from ephemeron.training.collectives.object_receiver import handle_timeout
from ephemeron.training.tensors import STOP, bounds


class ServerReduce(Collective):
    """Synchronous push and pull.

    The vector gets a tail of 2 + 3W elements that is summed with it: whether a rank wants to stop; a one from rank 0, to undo
    the division; and, at the places of each rank, its durable version, its iteration time and its cost.
    """

    def __init__(self, group: Group, server: SupportsReduction) -> None:
        self.g = group
        self.server = server
        self.bounds = bounds(group.size + 2 + 3 * group.world, group.aggregators)
        self._submitted: dict[int, tuple[np.ndarray, float]] = {}
        self._deleted = self._durable = 0

    def submit(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        tail = np.zeros(2 + 3 * self.g.world, dtype=self.g.dtype)
        tail[0] = 1 if flags & STOP else 0
        tail[1] = 1 if self.g.rank == 0 else 0
        tail[2 + self.g.rank] = self.g.status.durable
        tail[2 + self.g.world + self.g.rank] = self.g.status.busy_s
        tail[2 + 2 * self.g.world + self.g.rank] = self.g.status.spent_usd
        self._submitted[iteration] = (np.concatenate([vector, tail]), weight)

    async def upload(self, iteration: int) -> None:
        vector, weight = self._submitted.pop(iteration)
        began = asyncio.get_running_loop().time()
        await all_of(self._push(iteration, shard, vector[a:b], weight) for shard, (a, b) in enumerate(self.bounds))
        self.g.trace.record("upload", began, asyncio.get_running_loop().time())

    async def _push(self, iteration: int, shard: int, part: np.ndarray, weight: float) -> None:
        key = self.g.keys.merged(iteration, shard)
        await self.server.reduce(key, rank=self.g.rank, world=self.g.world, weight=weight, vector=part)

    async def reduce(self, iteration: int) -> None:
        """Does nothing: the server reduces."""

    async def wait(self, version: int) -> Reduced:
        parts = await all_of(self._pull(version, shard) for shard in range(len(self.bounds)))
        whole = np.concatenate(parts)
        vector, tail = whole[: self.g.size], whole[self.g.size :].astype(np.float64)
        said = tail[2:] / tail[1] if tail[1] > 0 else np.zeros(3 * self.g.world)
        durable, busy_s, spent_usd = said.reshape(3, self.g.world)
        for rank in range(self.g.world):
            if rank != self.g.rank:
                self.g.on_message(rank, float(busy_s[rank]), float(spent_usd[rank]))
        self._durable = max(self._durable, int(np.rint(durable.min())))
        return Reduced(vector, STOP if tail[0] > 0 else 0)

    async def _pull(self, version: int, shard: int) -> np.ndarray:
        key = self.g.keys.merged(version, shard)
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                received = await self.g.channel.get(key, deadline=began + self.g.wait_timeout_s(1))
                break
            except ChannelTimeout as e:
                if isinstance(e.__cause__, CorruptMessage):  # the server adds up a key once: it cannot be made again
                    raise DamagedObject(e.problem, key=key) from e
                await handle_timeout(self.g.on_timeout, await self._stalled(version, key), e)
        if received.waited_s > 0:
            self.g.trace.record("wait", began, began + received.waited_s)
        self.g.trace.record("download", began + received.waited_s, loop.time())
        return np.frombuffer(received.data, dtype=self.g.dtype)

    async def _stalled(self, version: int, key: str) -> StalledPeers:
        """Ranks whose contribution has not reached the server; all, where it has none."""
        heard = await self.server.heard(key)
        missing = [r for r in range(self.g.world) if r != self.g.rank and r not in heard]
        return StalledPeers(version, missing, [key] * len(missing))

    async def poll(self, version: int) -> bool:
        keys = [self.g.keys.merged(version, shard) for shard in range(len(self.bounds))]
        return all([await self.g.channel.fetch(key) is not None for key in keys])

    async def collect_garbage(self) -> None:
        if self.g.rank == 0 and self._deleted < self._durable:
            shards = range(len(self.bounds))
            await self.g.channel.delete([self.g.keys.merged(v, s) for v in range(self._deleted, self._durable) for s in shards])
            self._deleted = self._durable


class ServerAccumulate(Collective):
    """Asynchronous push: the server adds every worker's change to the one set of parameters when it arrives.

    A worker's version t is the server's answer to its own t-th push, so workers never wait for each other.
    """

    self_paced = True

    def __init__(self, group: Group, server: SupportsReduction) -> None:
        self.g = group
        self.server = server
        self.bounds = bounds(group.size, group.aggregators)
        self._submitted: dict[int, np.ndarray] = {}
        self._answers: dict[int, np.ndarray] = {}

    def _key(self, shard: int) -> str:
        return f"{self.g.keys.run}/master/{shard}"

    async def setup(self, initial: np.ndarray) -> None:
        for shard, (a, b) in enumerate(self.bounds):
            try:
                part = np.ascontiguousarray(initial[a:b])
                await self.g.channel.put(self._key(shard), [memoryview(part.data).cast("B")] if part.size else [b""], create=True)
            except KeyExists:
                pass

    def submit(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        self._submitted[iteration] = vector

    async def upload(self, iteration: int) -> None:
        delta = self._submitted.pop(iteration)
        began = asyncio.get_running_loop().time()
        parts = await all_of(
            self.server.accumulate(self._key(shard), rank=self.g.rank, iteration=iteration, delta=delta[a:b])
            for shard, (a, b) in enumerate(self.bounds)
        )
        self.g.trace.record("upload", began, asyncio.get_running_loop().time())
        self._answers[iteration] = np.concatenate(parts)

    async def reduce(self, iteration: int) -> None:
        """Does nothing: the server reduces."""

    async def wait(self, version: int) -> Reduced:
        return Reduced(self._answers.pop(version), 0)

    async def latest_iteration(self, rank: int) -> int | None:
        return (await self.server.heard(self._key(0))).get(rank, -1)

    async def final_parameters(self) -> np.ndarray | None:
        parts = []
        for shard in range(len(self.bounds)):
            deadline = asyncio.get_running_loop().time() + self.g.wait_timeout_s(1)
            parts.append(np.frombuffer((await self.g.channel.get(self._key(shard), deadline=deadline)).data, dtype=self.g.dtype))
        return np.concatenate(parts)
