"""Checkpoints of one rank in the channel: written beside the computation; at least two kept, the oldest one relied on.

A replacement starts from the newest checkpoint that it finds, and repeats the iterations since then from the merged
objects that are still stored. The versions that a rank declares durable are those that its oldest checkpoint contains, so a
checkpoint whose put was lost costs only repeated work. Where peers run ahead of each other, checkpoints are kept back to the
last iteration of which all objects have arrived: an object that is lost later can be sent again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.communication.keys import Keys
from ephemeron.config.typed import build
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.training.collectives import all_of
from ephemeron.training.collectives.group import Arrivals, CollectiveState
from ephemeron.training.job.generation import Generation
from ephemeron.training.tensors import Arrays, decode_state, encode_state
from ephemeron.training.worker.decisions import DecisionState
from ephemeron.training.worker.recovery.fencing import number_in
from ephemeron.training.worker.timeouts import IterationTimes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Position of one stored checkpoint."""

    iteration: int
    """Next iteration to compute."""
    applied: int
    """Number of versions that the parameters contain."""


BEGINNING = Saved(iteration=0, applied=0)
"""Position of a rank for which no checkpoint is early enough. Nothing has to be stored for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEpoch:
    """An epoch as rank 0 has measured it, for a decision on the functions."""

    seconds: float
    loss: float
    """Mean training loss of rank 0's batches."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Metrics of the last evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """Plain values of a checkpoint."""

    iteration: int
    """Next iteration to compute."""
    applied: int
    """Number of versions that the parameters contain."""
    spent_usd: float = 0.0
    """Cost of the rank so far."""
    times: IterationTimes = field(default_factory=IterationTimes)
    collective: CollectiveState = field(default_factory=CollectiveState)
    activations: Arrivals = field(default_factory=dict)
    """Arrival times of the messages between stages."""
    decisions: DecisionState = field(default_factory=DecisionState)
    agreed: Generation | None = None
    """The next generation, if it is agreed on."""
    exchanged: bool = True
    """Whether the exchange with other groups before the next iteration is in the state already, or none is due."""
    evaluated: bool = True
    """Whether the evaluation before the next iteration is done, or none is due."""
    ended: EndedEpoch | None = None
    """The epoch that ends with that evaluation; None: it is done."""
    trainer: Mapping[str, object] = field(default_factory=dict)
    """The trainer's own: see `Trainer.state`."""
    saved: tuple[Saved, ...] = ()
    """Checkpoints that were kept with this one, ascending, and itself."""


class Checkpoint(NamedTuple):
    """State of a rank between two iterations."""

    trainer: Arrays
    collective: Arrays
    meta: CheckpointMeta


_OF_COLLECTIVE = "c/"
"""Prefix of the collective's arrays."""


def _encoded(state: Checkpoint, saved: Sequence[Saved]) -> bytes:
    meta = dataclasses.asdict(dataclasses.replace(state.meta, saved=tuple(saved)))
    arrays = state.trainer | {_OF_COLLECTIVE + name: array for name, array in state.collective.items()}
    return encode_state(arrays, meta)


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one rank."""

    channel: Channel
    keys: Keys
    rank: int
    beginning: Saved = BEGINNING
    """Where the generation begins."""
    saved: list[Saved] = field(default_factory=list)
    """Kept ones, ascending; the beginning is one of them until two later ones suffice."""
    intact: int = 0
    """No version from this one on can have been deleted before the state was read."""
    last_write_s: float = 0.0
    superseded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.saved = [self.beginning]
        self.intact = self.beginning.applied

    @property
    def durable(self) -> int:
        """Number of versions that no replacement would need again."""
        return self.saved[0].applied if len(self.saved) > 1 else self.beginning.applied

    async def write(
        self, state: Checkpoint, *, acknowledged: int, before: Callable[[bytes], Awaitable[bool]] | None = None
    ) -> tuple[int, bool]:
        """Stores a checkpoint. `delete_superseded` deletes those that it replaces.

        Args:
            state: its `meta.saved` is filled in here.
            acknowledged: number of iterations of which all objects sent by this rank have arrived. What is lost of a
                later one can only be sent again from a checkpoint before it.
            before: called with its bytes before they are stored.

        Returns:
            Its bytes, and what `before` has returned.
        """
        began = asyncio.get_running_loop().time()
        iteration = state.meta.iteration
        earlier = [s for s in self.saved if s.iteration < iteration]
        first = max(0, min(len(earlier) - 1, sum(s.iteration <= acknowledged for s in earlier) - 1))
        kept = [*earlier[first:], Saved(iteration=iteration, applied=state.meta.applied)]
        self.superseded += [self.keys.state(self.rank, s.iteration) for s in earlier[:first] if s != self.beginning]
        data = _encoded(state, kept)
        done = before is not None and await before(data)
        await self.channel.put(self.keys.state(self.rank, iteration), [data])
        self.saved = kept
        self.last_write_s = asyncio.get_running_loop().time() - began
        return len(data), done

    def taken(self, data: memoryview) -> Checkpoint:
        """A checkpoint as the predecessor has sent it, with its bookkeeping.

        Raises:
            CorruptMessage: it is damaged.
        """
        found = self._decode(data, "state of the predecessor")
        self.intact = self.durable
        return found

    async def delete_superseded(self) -> None:
        """Deletes the checkpoints that later ones have superseded."""
        gone, self.superseded = self.superseded, []
        if gone:
            await self.channel.delete(gone)

    async def read(self, iteration: int, deadline: float) -> Checkpoint:
        """A checkpoint that is known to be stored, or about to be.

        Raises:
            ChannelTimeout: it is missing at the deadline.
            CorruptMessage: it is damaged.
        """
        key = self.keys.state(self.rank, iteration)
        received = await self.channel.get(key, deadline=deadline)
        found = self._decode(received.data, key)
        self.intact = self.durable
        return found

    async def newest(self, not_after: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that can be read, of an iteration up to `not_after`, or None. Lists: for recovery only."""
        for later, key in enumerate(reversed(await self.channel.list(self.keys.states(self.rank)))):
            data = await self.channel.fetch(key)
            if data is not None:
                try:
                    found = self._decode(data, key)
                except CorruptMessage as e:
                    _log.warning("skips a checkpoint: %s", e)
                    continue
                if not_after is None or found.meta.iteration <= not_after:
                    self.intact = self.saved[-1].applied if later else self.durable
                    return found
        self.saved = [self.beginning]
        return None

    async def stored(self) -> list[int]:
        """Iterations whose checkpoints are stored, ascending. Lists: for recovery only."""
        return [number_in(key) for key in await self.channel.list(self.keys.states(self.rank))]

    def take_over(self, iterations: list[int]) -> None:
        """Takes over the bookkeeping of a predecessor of which only these are known to be stored."""
        self.saved = [self.beginning, *(Saved(iteration=t, applied=t) for t in iterations if t > self.beginning.iteration)]

    def _decode(self, data: memoryview, key: str) -> Checkpoint:
        arrays, raw = decode_state(data, key=key)
        try:
            meta = build(CheckpointMeta, raw, where=key)
        except JobError as e:
            raise CorruptMessage(f"not a checkpoint of this release: {e}", key=key) from None
        if not meta.saved:
            raise CorruptMessage("not a checkpoint of this release: it does not name itself", key=key)
        self.saved = list(meta.saved)
        collective = {n.removeprefix(_OF_COLLECTIVE): a for n, a in arrays.items() if n.startswith(_OF_COLLECTIVE)}
        trainer = {n: a for n, a in arrays.items() if not n.startswith(_OF_COLLECTIVE)}
        return Checkpoint(trainer, collective, meta)


class CommonCheckpoint:
    """One rank's knowledge of which checkpoints all ranks have stored.

    On a direct channel merged versions are in the memory of the functions only, and a run that loses all of them at once goes
    on from the newest checkpoint that all ranks have. So checkpoints have to fit together: each rank tells the others which
    iterations it has stored, and deletes none that the newest common one could still be.

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
