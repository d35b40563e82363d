"""Recovery of a rank from live peers, without repeating iterations.

Where all ranks apply all versions (BSP), they have the same parameters and optimiser states between two updates. What only one rank
has (random states, buffers, rounding errors) it sends to a few others ahead of each contribution. A replacement asks every
rank what it can give, takes the shared state of the most advanced one, and its own private state of the same iteration from
the rank that keeps it. A rank gives its state only while it waits, never in the middle of an update.

What remains where no rank can give a state:

- no rank trains, since all functions were lost: all go on from the newest checkpoint that all have;
- others train, but the private state is lost: all go back to that checkpoint;
- the policy lets ranks run ahead of each other, or the private state is large: newest own checkpoint, and the iterations since
  then are repeated with the versions that the others keep.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.connection import LinkFailed
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.config.typed import build, plain
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.training.collectives import all_of
from ephemeron.training.collectives.group import ReductionStatus
from ephemeron.training.tensors import Arrays, decode_state, encode_state
from ephemeron.training.worker.recovery.checkpoint import Checkpoint, CheckpointMeta, CommonCheckpoint
from ephemeron.training.worker.recovery.direct_handoff import Predecessor
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.private_copies import EXTRA_BYTES, PrivateCopies, PrivateMark, holders
from ephemeron.training.worker.trainers.trainer import Trainer

_log = logging.getLogger(__name__)

MOST_PRIVATE_BYTES = 4 << 20
"""Largest private state that is sent with every contribution."""
AGAIN_S = 0.05
"""Seconds between two rounds of questions."""
ASK_TIMEOUT_S = 5.0
STATE_TIMEOUT_S = 60.0
_SNAPSHOTS = 2
_OF_COLLECTIVE, _OF_TRAINER = "c/", "t/"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """What one rank can give a replacement."""

    training: bool = False
    """Whether it has a state of this generation; else it is starting, or recovering itself."""
    gives: tuple[int, ...] = ()
    """Iterations at whose beginning it knows the state that all ranks share."""
    after_compute: bool = True
    """Which private states fit to it: see `Trainer.shares_after_compute`."""
    private: tuple[int, ...] = ()
    """Iterations of the asking rank's private states that it keeps and that fit to states of this kind."""
    private_before_compute: tuple[int, ...] = ()
    """The same for states of the other kind."""


class Source(NamedTuple):
    """From whom a replacement gets its state."""

    iteration: int
    donor: int
    holder: int | None
    """Rank that keeps the private state; None: the own checkpoint of that iteration, or the beginning, has all."""


def choose(statuses: Mapping[int, PeerStatus], *, beginning: int, saved: Collection[int] = ()) -> Source | None:
    """The most advanced state of which both parts can be had; None: there is none.

    Args:
        statuses: by rank, of those that have answered.
        beginning: first iteration of the generation.
        saved: iterations of the own checkpoints.
    """
    for iteration in sorted({t for s in statuses.values() if s.training for t in s.gives}, reverse=True):
        for donor, status in sorted(statuses.items()):
            if not status.training or iteration not in status.gives:
                continue
            for holder, kept in sorted(statuses.items()):
                if iteration in (kept.private if status.after_compute else kept.private_before_compute):
                    return Source(iteration, donor, holder)
            if iteration == beginning or iteration in saved:
                return Source(iteration, donor, None)
    return None


def is_lost(statuses: Mapping[int, PeerStatus], *, beginning: int) -> bool:
    """Whether no rank that answers keeps a private state that those who train could still come to."""
    reached = [max(s.gives) for s in statuses.values() if s.training and s.gives]
    kept = [t for s in statuses.values() for t in (*s.private, *s.private_before_compute)]
    return bool(reached) and max(reached) > beginning and max(kept, default=-1) < max(reached)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedMeta:
    """Plain values of a state that a peer gives."""

    checkpoint: CheckpointMeta
    evaluated: bool
    exchanged: bool = True


class PeerState(NamedTuple):
    """State of this rank at the beginning of an iteration, from its peers."""

    shared: Checkpoint
    """Trainer state of another rank; the collective's part is this rank's own."""
    private: tuple[Arrays, Mapping[str, object]] | None
    """See `Trainer.private_state`; None: at the beginning of the generation."""
    evaluates: bool
    """Whether the evaluation before that iteration has to be done (again) by this rank."""
    evaluated: bool
    """Whether its result is in the shared state."""
    exchanged: bool
    """Whether the exchange with other groups before that iteration is in the shared state, or none is due."""


class OwnCheckpoint(NamedTuple):
    """The own checkpoint of an iteration, or the beginning, has the state that the others have."""

    iteration: int


class GoBack(NamedTuple):
    """All ranks go on from their checkpoints of one iteration."""

    tells: bool
    """Whether the others train, and have to be told."""


def recovers_live(spec: RunSpec, trainer: Trainer) -> bool:
    """Whether replacements take the state of live peers: alike on all ranks of a run."""
    c = spec.configuration
    return (
        c.direct
        and c.sync == "bsp"
        and c.pattern != "parameter-server"
        and spec.stages is None
        and c.workers > 1
        and private_bytes(trainer, c.exchange.compression) <= MOST_PRIVATE_BYTES
    )


def private_bytes(trainer: Trainer, compression: str) -> int:
    """About the most bytes of a rank's private state."""
    residual = trainer.size * np.dtype(trainer.dtype).itemsize if compression == "int8" else 0
    return trainer.private_nbytes + residual


class PeerRecovery:
    """One rank's part: it keeps private states of others, gives its own state, and recovers from others.

    Args:
        mesh: connects the ranks.
        owners: ranks below it sum a part of the vectors.
        beginning: first iteration of the generation.
        copies: what the predecessor has kept for others.
    """

    def __init__(self, mesh: Mesh, *, owners: int, beginning: int, copies: PrivateCopies | None = None) -> None:
        self._mesh, self._beginning = mesh, beginning
        self.common = CommonCheckpoint(mesh, beginning=beginning)
        self._predecessor = Predecessor(mesh)
        self._copies = copies or PrivateCopies()
        self._holders = holders(mesh.rank, mesh.ranks, owners)
        self._current: tuple[PrivateMark, bytes] | None = None
        self._last: tuple[Arrays, Mapping[str, object]] | None = None
        self._trainer: Trainer | None = None
        self._status = ReductionStatus()
        self._describe: Callable[[], CheckpointMeta] = lambda: CheckpointMeta(iteration=0, applied=0)
        self._compute: Callable[[Callable[[], tuple[Arrays, Mapping[str, object]]]], Awaitable[tuple[Arrays, Mapping[str, object]]]]
        self._snapshots: dict[int, tuple[Arrays, _SharedMeta]] = {}
        self._evaluated: Callable[[], bool] = lambda: True
        self._exchanged: Callable[[], bool] = lambda: True
        self._busy = asyncio.Lock()
        self._back: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        mesh.handle(Kind.PRIVATE, self._received)
        mesh.handle(Kind.BACK, self._told_back)
        mesh.answer(Kind.STATUS, self._answer_status)
        mesh.answer(Kind.STATE, self._answer_state)
        mesh.on_connect.append(self._on_connect)

    # -- as a rank that trains ----------------------------------------------------------------------------

    async def serve(
        self,
        trainer: Trainer,
        status: ReductionStatus,
        *,
        describe: Callable[[], CheckpointMeta],
        evaluated: Callable[[], bool],
        exchanged: Callable[[], bool],
        compute: Callable[[Callable[[], tuple[Arrays, Mapping[str, object]]]], Awaitable[tuple[Arrays, Mapping[str, object]]]],
    ) -> None:
        """From now on this rank can give its state, inside of `idle` only.

        Args:
            trainer, status: of this rank.
            describe: plain values of its state, without the trainer's.
            evaluated: whether the evaluation before the next iteration is done, or none is due.
            exchanged: the same of the exchange with other groups.
            compute: runs a function where the trainer computes.
        """
        await self._busy.acquire()
        self._status, self._describe, self._compute = status, describe, compute
        self._evaluated, self._exchanged = evaluated, exchanged
        self._trainer = trainer

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Context in which the trainer is not used: its state may be given away."""
        self._busy.release()
        try:
            yield
        finally:
            await self._busy.acquire()

    def keep(self, arrays: Arrays, meta: CheckpointMeta) -> None:
        """Keeps the state at the beginning of an iteration, for a trainer that cannot give it after it has computed."""
        self._snapshots[meta.iteration] = arrays, _SharedMeta(checkpoint=meta, evaluated=True)
        self._snapshots = {t: kept for t, kept in self._snapshots.items() if 0 <= meta.iteration - t < _SNAPSHOTS}

    def publish(
        self, iteration: int, collective: Mapping[str, np.ndarray], *, after_compute: bool, evaluated: bool, spent_usd: float
    ) -> None:
        """Sends the private state at the beginning of an iteration to those that keep it; at once, before what is sent later.

        Args:
            iteration: whose beginning it is.
            collective: the collective's own arrays.
            after_compute, evaluated, spent_usd: see `PrivateMark`.
        """
        assert self._trainer is not None
        own, meta = self._trainer.private_state()
        arrays = {_OF_TRAINER + n: a for n, a in own.items()} | {_OF_COLLECTIVE + n: a for n, a in collective.items()}
        changed = self._current is None or self._last is None or not _same(self._last, (arrays, meta))
        body = iteration if changed or self._current is None else self._current[0].body
        mark = PrivateMark(iteration, body, after_compute, evaluated, spent_usd)
        data = encode_state(arrays, dict(meta)) if changed or self._current is None else self._current[1]
        self._current, self._last = (mark, data), (arrays, meta)
        for rank in self._holders:
            self._mesh.send(rank, Kind.PRIVATE, iteration, extra=mark.pack(), buffers=[data] if changed else ())

    async def hand_over(self, attempt: int, data: bytes) -> bool:
        """Hands this rank's state over to its next attempt, with what it keeps for others; whether that has it.

        Args:
            attempt: the next one.
            data: a checkpoint as it is stored.
        """
        return await self._predecessor.hand_over(attempt, data, self._copies)

    def _on_connect(self, rank: int, attempt: int) -> None:
        if self._current is not None and rank in self._holders:
            mark, data = self._current
            self._mesh.send(rank, Kind.PRIVATE, mark.iteration, extra=mark.pack(), buffers=[data])

    def _received(self, rank: int, head: Head, body: memoryview) -> None:
        self._copies.record(rank, PrivateMark.of(head.number, head.extra), body)

    # -- as a rank that is asked --------------------------------------------------------------------------

    async def _answer_status(self, rank: int, head: Head, body: memoryview) -> Sequence[Buffer]:
        marks = self._copies.marks(rank)
        status = PeerStatus(
            training=self._trainer is not None,
            gives=self._gives(),
            after_compute=self._shares(),
            private=tuple(m.iteration for m in marks if m.after_compute),
            private_before_compute=tuple(m.iteration for m in marks if not m.after_compute),
        )
        return [json.dumps(plain(status)).encode()]

    def _shares(self) -> bool:
        return self._trainer is not None and self._trainer.shares_after_compute

    def _gives(self) -> tuple[int, ...]:
        if self._trainer is None:
            return ()
        return (self._status.applied,) if self._shares() else tuple(self._snapshots)

    async def _answer_state(self, rank: int, head: Head, body: memoryview) -> Sequence[Buffer]:
        if head.extra == b"private":
            kept = self._copies.find(rank, head.number)
            if kept is None:
                raise LinkFailed("the private state is not here")
            return [kept[0].pack(), kept[1]]
        arrays, meta = await self._shared(head.number)
        return [encode_state(arrays, dataclasses.asdict(meta))]

    async def _shared(self, iteration: int) -> tuple[Arrays, _SharedMeta]:
        if self._trainer is None:
            raise LinkFailed("this rank has no state yet")
        if not self._shares():
            if iteration not in self._snapshots:
                raise LinkFailed("the state of that iteration is gone")
            return self._snapshots[iteration]
        async with self._busy:
            if self._status.applied != iteration or not self._shares():
                raise LinkFailed("this rank has gone on")
            arrays, meta = await self._compute(self._trainer.state)
            described = dataclasses.replace(self._describe(), iteration=iteration, applied=iteration, trainer=meta)
            return arrays, _SharedMeta(checkpoint=described, evaluated=self._evaluated(), exchanged=self._exchanged())

    # -- as a replacement ---------------------------------------------------------------------------------

    async def recover(
        self, *, live: bool, saved: Collection[int], timeout_s: Callable[[], float], check: Callable[[], Awaitable[None]]
    ) -> PeerState | OwnCheckpoint | GoBack | None:
        """State to go on from.

        Args:
            live: whether peers give states; else they only say whether they train.
            saved: iterations of the own checkpoints.
            timeout_s: seconds after which a rank that does not answer counts as lost.
            check: called again and again; raises if the run or the generation is over.

        Returns:
            A state, or where it is; or that all ranks go back to a common checkpoint; or None: the own newest checkpoint, from which
            iterations are repeated.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            statuses = await self._ask_all()
            all_heard = len(statuses) == self._mesh.ranks - 1 or loop.time() - began >= timeout_s()
            training = any(s.training for s in statuses.values())
            if training and not live:
                return None
            source = choose(statuses, beginning=self._beginning, saved=saved) if live else None
            if source is not None and source.holder is None:
                return OwnCheckpoint(source.iteration)
            if source is not None and (state := await self._fetch(source)) is not None:
                return state
            if source is None and all_heard:
                if not training:
                    return GoBack(tells=False)
                if is_lost(statuses, beginning=self._beginning) or loop.time() - began >= timeout_s():
                    return GoBack(tells=True)
            await check()
            await asyncio.sleep(AGAIN_S)

    async def is_left_behind(self, applied: int) -> bool:
        """Whether a rank that trains has applied more versions than this one, which cannot get them any more."""
        statuses = await self._ask_all()
        return any(s.training and min(s.gives, default=0) > applied for s in statuses.values())

    def tell_back(self, iteration: int) -> None:
        """Tells all ranks to go back to their checkpoints of an iteration."""
        for rank in range(self._mesh.ranks):
            if rank != self._mesh.rank:
                self._mesh.send(rank, Kind.BACK, iteration)

    async def told_back(self) -> int:
        """Waits until another rank tells this one to go back; returns the iteration."""
        return await asyncio.shield(self._back)

    def _told_back(self, rank: int, head: Head, body: memoryview) -> None:
        if self._trainer is not None and not self._back.done():
            _log.warning("rank %d tells all to go back to the checkpoint of iteration %d", rank, head.number)
            self._back.set_result(head.number)

    async def _ask_all(self) -> dict[int, PeerStatus]:
        others = [rank for rank in range(self._mesh.ranks) if rank != self._mesh.rank and self._mesh.connected(rank)]
        found = await all_of(self._ask(rank) for rank in others)
        return {rank: status for rank, status in zip(others, found, strict=True) if status is not None}

    async def _ask(self, rank: int) -> PeerStatus | None:
        try:
            data = await self._mesh.request(rank, Kind.STATUS, timeout_s=ASK_TIMEOUT_S)
            return build(PeerStatus, json.loads(bytes(data)), where=f"status of rank {rank}")
        except (LinkFailed, ValueError, JobError) as e:
            _log.debug("no status of rank %d: %s", rank, e)
            return None

    async def _fetch(self, source: Source) -> PeerState | None:
        t = source.iteration
        assert source.holder is not None
        try:
            shared, own = await all_of(
                (
                    self._mesh.request(source.donor, Kind.STATE, b"shared", number=t, timeout_s=STATE_TIMEOUT_S),
                    self._mesh.request(source.holder, Kind.STATE, b"private", number=t, timeout_s=ASK_TIMEOUT_S),
                )
            )
            arrays, raw = decode_state(shared, key=f"state of rank {source.donor}")
            meta = build(_SharedMeta, raw, where=f"state of rank {source.donor}")
            mark = PrivateMark.of(t, own[:EXTRA_BYTES])
            private, notes = decode_state(own[EXTRA_BYTES:], key=f"private state at rank {source.holder}")
        except (LinkFailed, CorruptMessage, JobError) as e:
            _log.info("rank %d does not get its state: %s", self._mesh.rank, e)
            return None
        _log.info("state of iteration %d from rank %d, the own part from rank %d", t, source.donor, source.holder)
        collective = _with(private, _OF_COLLECTIVE)
        checkpoint = dataclasses.replace(meta.checkpoint, spent_usd=mark.spent_usd)
        return PeerState(
            Checkpoint(arrays, collective, checkpoint),
            (_with(private, _OF_TRAINER), notes),
            evaluates=not mark.evaluated,
            evaluated=meta.evaluated,
            exchanged=meta.exchanged,
        )


def _with(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _same(a: tuple[Arrays, Mapping[str, object]], b: tuple[Arrays, Mapping[str, object]]) -> bool:
    """Whether two states have the same bits."""
    (ours, notes), (theirs, others) = a, b
    same = notes == others and ours.keys() == theirs.keys()
    return same and all(ours[n].tobytes() == theirs[n].tobytes() for n in ours)
