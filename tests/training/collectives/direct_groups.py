"""Groups of workers that reduce over a mesh, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from groups import exchange

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.direct.memory_transport import MemoryNetwork
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.keys import Keys
from ephemeron.testing.direct_world import DirectWorld, all_connected
from ephemeron.training.collectives import Group, Reduced, StalledPeers
from ephemeron.training.collectives.direct import DirectReduce
from ephemeron.training.collectives.direct_messages import ONE_PHASE_BYTES, PIECE_BYTES, Division
from ephemeron.training.collectives.direct_two_level import TwoLevelReduce
from ephemeron.training.collectives.sync_policy import policy_for


class Late(Exception):
    """A wait has timed out."""

    def __init__(self, stalled: StalledPeers) -> None:
        super().__init__(str(stalled))
        self.stalled = stalled


async def raise_late(stalled: StalledPeers) -> None:
    raise Late(stalled)


async def go_on(stalled: StalledPeers) -> None:
    pass


class Members:
    """Members of one group.

    Args:
        world, aggregators: numbers of ranks and of owners.
        size, dtype, compression, sync: of the exchange.
        latency_s: of every connection.
        timeout_s: of waits.
        patient: waits go on when they have timed out.
        ranks_per_machine: of `TwoLevelReduce`; None: `DirectReduce`.
        replays, piece_bytes, one_phase_bytes, shard_bytes: of the collective.
    """

    def __init__(
        self,
        world: int,
        aggregators: int | None = None,
        *,
        size: int = 5000,
        dtype: Any = np.float32,
        compression: str = "none",
        sync: str = "bsp",
        latency_s: float = 0.001,
        timeout_s: float = 5.0,
        patient: bool = False,
        ranks_per_machine: int | None = None,
        replays: bool = True,
        piece_bytes: int = PIECE_BYTES,
        one_phase_bytes: int = ONE_PHASE_BYTES,
        shard_bytes: int = 0,
    ) -> None:
        self.ranks_per_machine = ranks_per_machine
        self.world, self.aggregators = world, aggregators or world
        self.size, self.dtype, self.compression, self.sync = size, np.dtype(dtype), compression, sync
        self.timeout_s, self.patient = timeout_s, patient
        self.options: dict[str, Any] = {"replays": replays, "division": Division(one_phase_bytes, shard_bytes, piece_bytes)}
        self.network = MemoryNetwork(latency_s=latency_s)
        self.net = DirectWorld(world, network=self.network)
        self.by_rank: dict[int, DirectReduce] = {}
        self.store = MemoryChannel()

    async def join(self, rank: int, attempt: int = 0) -> DirectReduce:
        """A member, connected to those that are there."""
        mesh = await self.net.join(rank, attempt)
        group = Group(
            keys=Keys("run"),
            rank=rank,
            world=self.world,
            aggregators=self.aggregators,
            channel=self.store,
            policy=policy_for(self.sync),
            size=self.size,
            dtype=self.dtype,
            compression=self.compression,
            mesh=mesh,
            attempt=attempt,
            on_timeout=go_on if self.patient else raise_late,
            wait_timeout_s=lambda times: times * self.timeout_s,
        )
        collective = (
            DirectReduce(group, mesh, **self.options)
            if self.ranks_per_machine is None
            else TwoLevelReduce(group, mesh, ranks_per_machine=self.ranks_per_machine, **self.options)
        )
        self.by_rank[rank] = collective
        return collective

    async def all(self) -> list[DirectReduce]:
        """All members, connected."""
        found = [await self.join(rank) for rank in range(self.world)]
        await all_connected(*(c.mesh for c in found))
        return found

    def die(self, rank: int) -> DirectReduce:
        """Ends a member without a word."""
        gone = self.by_rank.pop(rank)
        mesh: Mesh = gone.mesh
        for transport in mesh._transports.values():
            transport.abandon()  # type: ignore[attr-defined]
        return gone


@asynccontextmanager
async def members(world: int, aggregators: int | None = None, *, cut: Sequence[tuple[int, int]] = (), **options: Any):
    """Members of a group, connected but for the pairs in `cut`, and closed at the end."""
    group = Members(world, aggregators, **options)
    for a, b in cut:
        group.network.partition(a, b)
    try:
        if cut:
            for rank in range(world):
                await group.join(rank)
        else:
            await group.all()
        yield group
    finally:
        for mesh in group.net.meshes:
            await mesh.close()


async def rounds(
    group: Members, vectors: np.ndarray, weights: Sequence[Sequence[float]], *, jitter_s: float = 0.0, seed: int = 0
) -> list[list[Reduced]]:
    """Reduces `vectors[round, rank]`; what each rank got, per round."""
    dice = np.random.default_rng(seed)

    async def worker(rank: int) -> list[Reduced]:
        collective, got = group.by_rank[rank], []
        for t in range(len(vectors)):
            if jitter_s:
                await asyncio.sleep(dice.exponential(jitter_s))
            collective.g.status.applied = collective.g.status.durable = t
            collective.submit(t, vectors[t, rank], weights[t][rank])
            got.append(await exchange(collective, t))
            await collective.collect_garbage()
        return got

    by_rank = await asyncio.gather(*(worker(rank) for rank in range(group.world)))
    return [list(versions) for versions in zip(*by_rank, strict=True)]
