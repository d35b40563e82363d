"""Groups of workers that do nothing but reduce, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ephemeron.communication.channels.base import Buffer, Channel, Received, Traits, Wrapper
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.communication.channels.wrappers import Metered, Throttled
from ephemeron.communication.keys import Keys
from ephemeron.communication.object_frame import Framed
from ephemeron.events import Traffic
from ephemeron.functions.simulation import run
from ephemeron.training.collectives import Collective, Group, KReduce, NoTrace, Reduced, collective_for
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.tensors import HEADER_BYTES

F32 = np.dtype(np.float32)


class Clock(NoTrace):
    """A worker's own clock, which may be wrong."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def run_time(self) -> float:
        return asyncio.get_running_loop().time() + self.skew_s


class PolledChannel(MemoryChannel):
    """A dictionary that cannot wait, as object stores cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.traits = Traits(service="objects", waits=False, shared=False, latency_s=0.0005)

    get = Channel.get


class Jittery(Wrapper):
    """Every operation takes a random time more, before and after."""

    def __init__(self, inner: Channel, *, seed: int, mean_s: float) -> None:
        super().__init__(inner)
        self._random, self._mean_s = random.Random(seed), mean_s

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.expovariate(1 / self._mean_s) if self._mean_s else 0)

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        await self._pause()
        await self.inner.put(key, buffers, create=create)
        await self._pause()

    async def fetch(self, key: str) -> memoryview | None:
        await self._pause()
        return await self.inner.fetch(key)

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        await self._pause()
        return await super().get(key, deadline=deadline, expected_at=expected_at)


class HighWater(Wrapper):
    """Remembers how many gets were under way at most."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner)
        self.waiting = self.most_waiting = 0

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            return await self.inner.get(key, deadline=deadline, expected_at=expected_at)
        finally:
            self.waiting -= 1


@dataclass
class Rounds:
    """How to reduce, and what came of it."""

    world: int
    aggregators: int
    pattern: str = "k-reduce"
    chunk: int | None = None
    """Elements per chunk of the pipelined form; None: as the library chooses."""
    compression: str = "none"
    jitter_s: float = 0.0
    start_jitter_s: float = 0.0
    """Spread of the time that workers compute."""
    compute_s: float = 0.2
    skew_s: float = 0.0
    """Clocks are wrong by up to so much."""
    latency_s: float = 0.01
    bandwidth_mb_s: float = 70.0
    seed: int = 0
    saves: bool = False
    """Workers say that they have a checkpoint of every iteration."""
    store: MemoryChannel = field(default_factory=MemoryParameterServer)
    meters: list[Metered] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    """Virtual time at which rank 0 had each version."""
    seconds: list[float] = field(default_factory=list)
    """Of each round, from the last start to the last end."""
    traffic: list[Traffic] = field(default_factory=list)
    """Of all workers together, when rank 0 had each version."""

    def reduce(self, vectors: np.ndarray, weights: Sequence[Sequence[float]]) -> list[list[Reduced]]:
        """Reduces `vectors[round, rank]` and returns what each rank got, per round."""
        return run(self._main(vectors, weights))

    def mean(self, vectors: np.ndarray, weights: Sequence[float]) -> np.ndarray:
        """One round; all ranks have to get the same bits."""
        (merged,) = self.reduce(vectors[None], [weights])
        assert len({m.vector.tobytes() for m in merged}) == 1
        return merged[0].vector

    async def _main(self, vectors: np.ndarray, weights: Sequence[Sequence[float]]) -> list[list[Reduced]]:
        rounds, _, size = vectors.shape
        dice = random.Random(self.seed)
        barrier = asyncio.Barrier(self.world)
        starts, ends = [0.0] * rounds, [0.0] * rounds

        async def worker(rank: int) -> list[Reduced]:
            collective = self._join(rank, size, vectors.dtype, dice.uniform(-1, 1))
            got = []
            for t in range(rounds):
                await barrier.wait()
                await asyncio.sleep(self.compute_s + abs(dice.gauss(0, self.start_jitter_s)))
                starts[t] = max(starts[t], loop.time())
                if self.saves:
                    collective.g.status.applied = collective.g.status.durable = t
                collective.submit(t, vectors[t, rank], weights[t][rank])
                got.append(await exchange(collective, t))
                ends[t] = max(ends[t], loop.time())
                if rank == 0:
                    self.ended_at.append(loop.time())
                    self.traffic.append(sum((m.traffic for m in self.meters), Traffic()))
                await collective.collect_garbage()
            return got

        loop = asyncio.get_running_loop()
        by_rank = await asyncio.gather(*(worker(rank) for rank in range(self.world)))
        self.seconds = [end - start for start, end in zip(starts, ends, strict=True)]
        return [list(versions) for versions in zip(*by_rank, strict=True)]

    def _join(self, rank: int, size: int, dtype: np.dtype[Any], skew: float) -> Any:
        jittery = Jittery(self.store, seed=1000 * self.seed + rank, mean_s=self.jitter_s)
        network = Throttled(jittery, latency_s=self.latency_s, bandwidth_mb_s=self.bandwidth_mb_s)
        meter = Metered(network)
        self.meters.append(meter)
        group = Group(
            keys=Keys("r"),
            rank=rank,
            world=self.world,
            aggregators=self.aggregators,
            channel=Framed(meter, owner=f"rank {rank}"),
            policy=policy_for("bsp"),
            size=size,
            dtype=np.dtype(dtype),
            compression=self.compression,
            trace=Clock(skew * self.skew_s),
        )
        if self.chunk is not None:
            collective: Collective = KReduce(group, chunk_size=self.chunk)
        else:
            collective = collective_for(self.pattern, group)
        self.collectives.append(collective)
        return collective


async def exchange(collective: Collective, iteration: int) -> Reduced:
    """What a worker does with what it has staged."""
    if collective.overlaps:
        _, _, merged = await asyncio.gather(collective.upload(iteration), collective.reduce(iteration), collective.wait(iteration))
        return merged
    await collective.upload(iteration)
    _, merged = await asyncio.gather(collective.reduce(iteration), collective.wait(iteration))
    return merged


def random_vectors(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def in_rank_order(vectors: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """The weighted mean in the vectors' own precision, added by rank: the bits that everybody has to get."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    weight = float(sum(weights))
    return total / vectors.dtype.type(weight) if weight > 0 else total


__all__ = ["F32", "HEADER_BYTES", "Clock", "HighWater", "Jittery", "PolledChannel", "Rounds", "exchange", "in_rank_order", "random_vectors"]
