"""The reduction over a mesh of direct connections: every rank sends, no rank polls, and a function may die at any point.

Each rank sends every owner its piece of the vector. The owner adds the pieces up in rank order, each as soon as those of the
lower ranks are added, and sends the mean to all: a reduce-scatter and an all-gather, whose bytes are the least possible where
all ranks own a shard. A small vector goes whole from every rank to every other one, and all add up by themselves, which takes one
message delay instead of two. Arithmetic, order of summation and compression are those of `KReduce`, and so are the bits.

Nothing is stored, so every rank keeps what another one may still need:

- its contribution, until it has the version: then it can give what came of it;
- the version, until all ranks have applied it or, where replacements repeat iterations, until it is durable at all.

A rank that connects again, or in a new attempt, is sent what it may lack; a rank that misses something asks every other one,
and each rank that has it answers. What arrives twice is ignored. A replacement first asks what its predecessor has sent, so that
all ranks add up the same numbers and learn the same flags. A rank that waits for too long asks those that it waits for
whom they wait for themselves, and so finds the one that does not answer, or does not go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.connection import LinkFailed
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.training.collectives._tasks import all_of
from ephemeron.training.collectives.direct_exchange import EVERY, PieceExchange
from ephemeron.training.collectives.direct_messages import (
    NOT_HELD,
    ContributionHeader,
    Division,
    MissingAnswer,
    Piece,
    Version,
    pack_indices,
    unpack_indices,
)
from ephemeron.training.collectives.group import GRACE_SHARE, CollectiveState, GarbageState, Group, Reduced, StalledPeers
from ephemeron.training.tensors import Arrays

RECHECK_S = 0.1
"""Seconds between two questions to a rank to which there is no route."""
_MERGED = "merged."
"""Prefix of the arrays of own merged pieces: version, piece and flags follow."""
_SENT = "sent."
"""Prefix of the arrays of own contributions: version, and piece or `header` follow."""


class DirectReduce(PieceExchange):
    """See `Collective`. For policies under which a version holds the contributions of all ranks.

    Args:
        group: the ranks that reduce together; the first K own a shard each.
        mesh: connects them.
        replays: replacements repeat iterations from a checkpoint, and need the versions since then.
        division: how vectors are divided.
    """

    def __init__(
        self,
        group: Group,
        mesh: Mesh,
        *,
        replays: bool = True,
        division: Division = Division(),  # noqa: B008
    ) -> None:
        super().__init__(group, mesh, replays=replays, division=division)
        self._asks: tuple[int, list[int]] = 0, []
        """Iteration of which this rank asks what its predecessor has sent, and the ranks that have not answered."""
        mesh.handle(Kind.MISSING, self._on_missing)
        mesh.answer(Kind.MISSING, self._answer_missing)
        mesh.on_connect.append(self._on_connect)
        mesh.on_lost.append(self._on_lost)
        mesh.on_gone.append(self._on_gone)

    # -- waiting ------------------------------------------------------------------------------------------

    async def reduce(self, iteration: int) -> None:
        version = self._version(iteration)
        await self._until(version, lambda: version.complete or not version.mine_left)
        await self.mesh.drained()

    async def wait(self, version: int) -> Reduced:
        loop, state = asyncio.get_running_loop(), self._version(version)
        began = loop.time()
        if not state.complete and state.header is None:  # others may have had it before this invocation began
            self._ask(state, self.others)
        late = await self._until(state, lambda: state.complete)
        end = loop.time()
        arrived = end if late else min(max(state.first_merged or end, began), end)
        self.g.trace.record("wait", began, arrived)
        self.g.trace.record("download", arrived, end)
        self._tidy()
        return Reduced(state.vector, state.flags)

    async def poll(self, version: int) -> bool:
        state = self._version(version)
        if not state.complete and state.header is None:
            await self._ask_all(version, state.missing())
        return state.complete

    async def _until(self, version: Version, done: Callable[[], bool]) -> bool:
        """Waits for a version, or a share of it. Returns whether that took longer than the timeout."""
        late, version.awaited = False, version.awaited + 1
        known: set[tuple[int, int]] = set()
        try:
            while not done():
                gone = self._gone(known)
                if not gone and await self._changes(version, self.g.wait_timeout_s(1)):
                    continue
                gone |= self._gone(known)
                late, stalled = True, await self._stalled(version.number, lambda: self._awaited(version))
                if done() or (stalled.grace_s > 0 and await self._changes(version, stalled.grace_s)):
                    continue
                if not gone or gone & set(stalled.ranks):
                    await self.g.on_timeout(stalled)
        finally:
            version.awaited -= 1
        return late

    def _gone(self, known: set[tuple[int, int]]) -> set[int]:
        """Ranks that seem to be dead since the last call. Which they are is added to `known`."""
        found = {(r, self.mesh.attempt_of(self._members[r])) for r in self.others}
        new = {(r, attempt) for r, attempt in found - known if self.mesh.is_gone(self._members[r], attempt)}
        known |= new
        return {rank for rank, _ in new}

    def _on_gone(self, member: int) -> None:
        """Who waits for a rank that seems to be dead need not wait for the timeout."""
        for version in self._versions.values():
            for waiter in version.waiters:
                _expire(waiter)

    async def _changes(self, version: Version, within_s: float) -> bool:
        """Whether the version, or this rank's share of it, is merged within some seconds."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        version.waiters.append(waiter)
        timer = loop.call_later(within_s, _expire, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            if waiter in version.waiters:
                version.waiters.remove(waiter)

    def _awaited(self, version: Version) -> list[int]:
        """Ranks whose contributions to own pieces, or whose merged pieces, are missing."""
        found = {self._giver(self.pieces[i]) for i in version.missing()} - {EVERY}
        return sorted((found | self._absent(version)) - {self.g.rank})

    def _giver(self, piece: Piece) -> int:
        """Rank from which this one gets a merged piece."""
        return piece.owner

    def _absent(self, version: Version) -> set[int]:
        """Ranks whose contributions to sums of this one are missing."""
        return {rank for sums in version.sums.values() for rank in sums.missing()}

    # -- losses and replacements --------------------------------------------------------------------------

    def _on_connect(self, member: int, attempt: int) -> None:
        rank = self._rank_of.get(member)
        if rank is None or rank == self.g.rank:
            return
        for version in sorted(self._versions.values(), key=lambda v: v.number):
            self._send_again(version, rank)
            if version.awaited:
                self._ask(version, [rank])

    def _send_again(self, version: Version, rank: int) -> None:
        """Sends a rank what it may lack of a version that it is not known to have applied."""
        if version.number < self.applied[rank]:
            return
        for piece in self.pieces:
            self._send_held(version, piece, rank)
            if version.done[piece.number] is not None and (piece.owner == EVERY or rank in self._readers(piece)):
                self._send_merged(version, piece, [rank])

    def _send_held(self, version: Version, piece: Piece, rank: int) -> None:
        """Sends a rank what it adds up of this one's."""
        sent = piece.number in version.sent and rank in self._targets(piece)
        if sent and version.payloads is not None and version.header is not None:
            extra, payload = version.header.pack(), version.payloads[piece.number]
            self._send(rank, Kind.CONTRIBUTION, version.number, piece.number, extra, payload)

    def _on_lost(self, member: int) -> None:
        """What a lost rank has merged may have reached another one."""
        rank = self._rank_of.get(member)
        for version in self._versions.values():
            if rank is not None and version.sent and not version.complete:
                self._ask(version, [r for r in self.others if r != rank])

    def _ask(self, version: Version, ranks: Iterable[int]) -> None:
        extra = pack_indices(version.missing(), len(self.pieces))
        for rank in ranks:
            self._send(rank, Kind.MISSING, version.number, 0, extra, ())

    def _on_missing(self, member: int, head: Head, body: memoryview) -> None:
        rank, version = self._rank_of.get(member), self._versions.get(head.number)
        if rank is None or version is None:
            return
        for index in unpack_indices(head.extra):
            piece = self.pieces[index]
            if version.done[index] is not None:
                self._send_merged(version, piece, [rank])
            else:
                self._send_held(version, piece, rank)

    async def _answer_missing(self, member: int, head: Head, body: memoryview) -> Sequence[Buffer]:
        self._on_missing(member, head, body)
        rank, version = self._rank_of.get(member), self._versions.get(head.number)
        held = NOT_HELD if version is None or rank is None else version.heard.get(rank, NOT_HELD)
        waits = next(((v.number, self._awaited(v)) for v in self._by_number() if v.awaited), None)
        number, ranks = waits or self._asks
        members = [(number, self._members[r]) for r in ranks]
        return [MissingAnswer(held, self.g.status.applied, members, waits is None).pack()]

    def _by_number(self) -> list[Version]:
        return sorted(self._versions.values(), key=lambda v: v.number)

    async def _request(self, rank: int, number: int, missing: Iterable[int]) -> MissingAnswer | None:
        """Asks a rank for a version; what it holds of it arrives before its answer. None: it does not answer."""
        try:
            data = await self.mesh.request(
                self._members[rank],
                Kind.MISSING,
                pack_indices(missing, len(self.pieces)),
                number=number,
                timeout_s=GRACE_SHARE * self.g.wait_timeout_s(1),
            )
        except LinkFailed:
            return None
        return MissingAnswer.of(data)

    async def _ask_all(self, number: int, missing: Sequence[int]) -> dict[int, MissingAnswer]:
        """Answers of the ranks that answer."""
        answers = await all_of(self._request(rank, number, missing) for rank in self.others)
        return {rank: answer for rank, answer in zip(self.others, answers, strict=True) if answer is not None}

    async def _stalled(self, number: int, ranks: Callable[[], Iterable[int]]) -> StalledPeers:
        """Ranks that are awaited, or that those wait for themselves, which do not answer or do not go on.

        Args:
            number: of the awaited iteration or version.
            ranks: those that are awaited; asked once the others have sent what they hold.
        """
        version = self._versions.get(number)
        answers = await self._ask_all(number, [] if version is None else version.missing())
        edges = [(number, rank) for rank in ranks()]
        past = self._past(number, answers)
        seen, found = {self.g.rank, *past}, dict.fromkeys(past, number)
        while edges:
            iteration, rank = edges.pop()
            if rank in seen:
                continue
            seen.add(rank)
            answer = answers.get(rank)
            waits = [] if answer is None else [(t, self._rank_of[m]) for t, m in answer.waits if m in self._rank_of]
            if not waits:
                found[rank] = iteration
            edges += waits
        first = min(found.values(), default=number)
        stalled = sorted(rank for rank, iteration in found.items() if iteration == first)
        # What they waited for may have arrived just now.
        grace_s = GRACE_SHARE * self.g.wait_timeout_s(1) if all(rank in answers for rank in stalled) else 0.0
        return StalledPeers(first, stalled, (), grace_s)

    def _past(self, number: int, answers: Mapping[int, MissingAnswer]) -> set[int]:
        """Ranks that wait for a version already, or for a later one, and have no contribution to it any more."""
        version = self._versions.get(number)
        missing = self._absent(version) if version is not None else set()
        found = {rank: answers[rank] for rank in missing & answers.keys() if not answers[rank].asks}
        return {rank for rank, answer in found.items() if any(t >= number for t, _ in answer.waits)}

    async def stalled_before(self, iteration: int, rank: int, key: str) -> StalledPeers:
        found = await self._stalled(iteration, lambda: [rank])
        return found._replace(keys=[key]) if list(found.ranks) == [rank] and found.iteration == iteration else found

    async def pending(self, iteration: int) -> tuple[bool, bool]:
        # All have to answer: a contribution of the predecessor that has reached one of them counts, with its flags.
        version, loop = self._version(iteration), asyncio.get_running_loop()
        left, ends, known = set(self.others), loop.time() + self.g.wait_timeout_s(1), set[tuple[int, int]]()
        while not version.complete:
            answers = await self._ask_all(iteration, version.missing())
            held = {answer.held for answer in answers.values()} - {NOT_HELD}
            if held:
                self._flags[iteration] = max(held)
            left -= answers.keys()
            if version.complete or not left:
                break
            self._asks = iteration, sorted(left)
            if self._gone(known) & left or loop.time() >= ends:
                await self.g.on_timeout(StalledPeers(iteration, sorted(left)))
                ends = loop.time() + self.g.wait_timeout_s(1)
            await asyncio.sleep(RECHECK_S)
        self._asks = 0, []
        return not version.complete, not version.complete

    def take_over(self, iteration: int, *, uploaded: bool) -> None:
        self._version(iteration).payloads = None

    # -- state --------------------------------------------------------------------------------------------

    def private_arrays(self) -> Arrays:
        return {"residual": self.upward.residual.copy()}

    def state(self) -> tuple[Arrays, CollectiveState]:
        arrays: Arrays = {"residual": self.upward.residual.copy()}
        applied, _ = self._least()
        for version in self._by_number():
            for piece in self.mine if version.number >= applied else ():
                flags = version.done[piece.number]
                if flags is not None:
                    arrays[f"{_MERGED}{version.number}.{piece.number}.{flags}"] = version.vector[piece.start : piece.stop]
            if version.uploaded and version.payloads is not None and version.header is not None:
                arrays[f"{_SENT}{version.number}.header"] = np.frombuffer(version.header.pack(), dtype=np.uint8)
                for index, payload in version.payloads.items():
                    arrays[f"{_SENT}{version.number}.{index}"] = np.frombuffer(b"".join(payload), dtype=np.uint8)
        applied_at = {self.g.rank: self.g.status.applied, **self.applied}
        durable_at = {self.g.rank: self.g.status.durable, **self.durable_at}
        return arrays, CollectiveState(garbage=GarbageState(applied=applied_at, durable=durable_at))

    def load(self, arrays: Arrays, state: CollectiveState) -> None:
        self.upward.residual = arrays["residual"]
        for rank in self.others:
            self._heard(rank, state.garbage.applied.get(rank, 0), state.garbage.durable.get(rank, 0))
        for name, part in arrays.items():
            if name.startswith(_MERGED):
                number, index, flags = map(int, name.removeprefix(_MERGED).split("."))
                version, piece = self._version(number), self.pieces[index]
                version.vector[piece.start : piece.stop] = part
                version.finish(piece, flags)
            elif name.startswith(_SENT) and name.endswith(".header"):
                self._load_sent(int(name.removeprefix(_SENT).removesuffix(".header")), arrays)

    def _load_sent(self, number: int, arrays: Arrays) -> None:
        """Restores an own contribution, which others may have lost."""
        version = self._version(number)
        version.header = header = ContributionHeader.of(arrays[f"{_SENT}{number}.header"].tobytes())
        payloads: dict[int, list[Buffer]] = {p.number: [arrays[f"{_SENT}{number}.{p.number}"].tobytes()] for p in self.pieces}
        version.payloads = payloads
        version.sent, version.uploaded = set(payloads), True
        for piece in self.summing:
            if version.done[piece.number] is None:
                self._add(version, piece, self.g.rank, self._decoded(self.upward, payloads[piece.number], piece), header, None)
        for rank in self.others:
            self._send_again(version, rank)


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
