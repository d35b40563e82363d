"""The newest checkpoint that all ranks have: where a run goes on that has lost all its functions at once.

On a direct channel merged versions are in the memory of the functions only. So checkpoints have to fit together: each rank
tells the others which iterations it has stored, and deletes none that the newest common one could still be.
"""

from __future__ import annotations

import struct

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.communication.keys import Keys
from ephemeron.training.collectives import all_of
from ephemeron.training.worker.recovery.fencing import number_in


class CommonCheckpoint:
    """One rank's knowledge of which checkpoints all ranks have stored.

    Args:
        mesh: connects the ranks.
        beginning: first iteration of the generation, from which every rank can begin.
    """

    def __init__(self, mesh: Mesh, *, beginning: int) -> None:
        self._mesh, self._beginning = mesh, beginning
        self._stored: dict[int, set[int]] = {rank: set() for rank in range(mesh.ranks)}
        mesh.handle(Kind.CHECKPOINTS, self._received)
        mesh.on_connect.append(lambda rank, _: self._tell([rank]))

    @property
    def iteration(self) -> int:
        """The newest one that all ranks are known to have."""
        return max(set.intersection(*self._stored.values()), default=self._beginning)

    def stored(self, iterations: list[int]) -> None:
        """This rank's checkpoints are now those of these iterations."""
        self._stored[self._mesh.rank] = set(iterations) - {self._beginning}
        self._tell([rank for rank in range(self._mesh.ranks) if rank != self._mesh.rank])

    def _tell(self, ranks: list[int]) -> None:
        own = sorted(self._stored[self._mesh.rank])
        packed = struct.pack(f"<{len(own)}q", *own)
        for rank in ranks:
            self._mesh.send(rank, Kind.CHECKPOINTS, extra=packed)

    def _received(self, rank: int, head: Head, body: memoryview) -> None:
        self._stored[rank] = {number for (number,) in struct.iter_unpack("<q", head.extra)}


async def newest_common(channel: Channel, keys: Keys, *, ranks: int, beginning: int) -> int:
    """Iteration of the newest checkpoint that all ranks have in the store, or the beginning. Lists: for recovery only."""
    listed = await all_of(channel.list(keys.states(rank)) for rank in range(ranks))
    found = [{number_in(key) for key in of_rank} for of_rank in listed]
    return max((t for t in set.intersection(*found) if t > beginning), default=beginning)
