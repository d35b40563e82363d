"""Reductions that add up along a ring, by recursive halving, or up a tree, over the same connections as `DirectReduce`.

To compare with; no product path imports them. Each is driven by messages alone, in pieces, and each adds up in an order of its own that does
not depend on timing. None of them survives the loss of a message or of a rank.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import SHARED, Head
from ephemeron.training.collectives.direct_messages import PIECE_BYTES
from ephemeron.training.tensors import bounds


class Reduction(ABC):
    """Mean of one vector of each rank, in rounds.

    Args:
        mesh: connects the ranks.
        world: W, number of ranks.
        size: elements of the vectors, of float32.
        kind: of its messages.
    """

    def __init__(self, mesh: Mesh, world: int, size: int, kind: int) -> None:
        self.mesh, self.rank, self.world, self.kind = mesh, mesh.rank, world, kind
        self.work = np.empty(size, np.float32)
        step = PIECE_BYTES // 4
        self.pieces = [[(at, min(at + step, stop)) for at in (range(start, stop, step) or [start])] for start, stop in self.chunks(size)]
        """By chunk, elements of its pieces."""
        self.most = max(len(pieces) for pieces in self.pieces)
        self.number = 0
        self._early: list[tuple[Head, np.ndarray]] = []
        self._running = False
        self._left = 0
        self._done: asyncio.Future[None] | None = None
        mesh.handle(kind, self._on_message)

    @abstractmethod
    def chunks(self, size: int) -> Sequence[tuple[int, int]]:
        """Parts of the vector that are summed by different ranks."""

    @abstractmethod
    def expected(self) -> int:
        """Messages that this rank receives in each round."""

    @abstractmethod
    def begin(self) -> None:
        """Sends what needs nothing from others."""

    @abstractmethod
    def on_piece(self, step: int, chunk: int, piece: int, body: np.ndarray) -> None:
        """A piece has arrived."""

    async def round(self, vector: np.ndarray) -> np.ndarray:
        """The mean. The memory is used again in the next round."""
        np.copyto(self.work, vector)
        self._running, self._left = True, self.expected()
        self._done = asyncio.get_running_loop().create_future()
        self.begin()
        early, self._early = self._early, []
        for head, body in early:
            self._on_piece(head, body)
        if self._left:
            await self._done
        self._running = False
        self.number += 1
        await self.mesh.drained()
        return self.work

    def _on_message(self, member: int, head: Head, body: memoryview) -> None:
        part = np.frombuffer(body, np.float32)
        if head.number == self.number and self._running:
            self._on_piece(head, part)
        else:
            self._early.append((head, part.copy() if head.flags & SHARED else part))

    def _on_piece(self, head: Head, body: np.ndarray) -> None:
        if head.number != self.number:
            self._early.append((head, body.copy()))
            return
        rest, piece = divmod(head.part, self.most)
        step, chunk = divmod(rest, self.world)
        self.on_piece(step, chunk, piece, body)
        self._left -= 1
        if not self._left and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def send(self, rank: int, step: int, chunk: int, piece: int) -> None:
        """Sends a piece of the own sums."""
        part = (step * self.world + chunk) * self.most + piece
        self.mesh.send(rank, self.kind, self.number, part, b"", [self.part(chunk, piece)])

    def part(self, chunk: int, piece: int) -> np.ndarray:
        """Memory of a piece."""
        start, stop = self.pieces[chunk][piece]
        return self.work[start:stop]


class Ring(Reduction):
    """W − 1 steps to the next rank for the sums, as many for the mean. Chunk c is added up from rank c onwards, round the ring."""

    def chunks(self, size: int) -> Sequence[tuple[int, int]]:
        return bounds(size, self.world)

    def expected(self) -> int:
        """All chunks but that which begins here, and all but that which ends here."""
        ends = (self.rank + 1) % self.world
        total = sum(len(p) for p in self.pieces)
        return 2 * total - len(self.pieces[self.rank]) - len(self.pieces[ends])

    def begin(self) -> None:
        for piece in range(len(self.pieces[self.rank])):
            self.send((self.rank + 1) % self.world, 0, self.rank, piece)

    def on_piece(self, step: int, chunk: int, piece: int, body: np.ndarray) -> None:
        part, last = self.part(chunk, piece), self.world - 1
        if step < last:
            np.add(body, part, out=part)
            if step == last - 1:
                part /= np.float32(self.world)
        else:
            np.copyto(part, body)
        if step < 2 * last - 1:
            self.send((self.rank + 1) % self.world, step + 1, chunk, piece)


class Halving(Reduction):
    """Recursive halving and doubling, W a power of two: in step k with the rank that differs in bit k, neighbours first.

    Chunk c is added up by rank c; sums of 2, 4, 8, … neighbours are added.
    """

    def __init__(self, mesh: Mesh, world: int, size: int, kind: int) -> None:
        if world & (world - 1):
            raise ValueError(f"{world} ranks are not a power of two")
        self.steps = world.bit_length() - 1
        self._held: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        """By chunk and piece, by step, sums that came before those of an earlier step."""
        self._next: dict[tuple[int, int], int] = {}
        super().__init__(mesh, world, size, kind)

    def chunks(self, size: int) -> Sequence[tuple[int, int]]:
        return bounds(size, self.world)

    def expected(self) -> int:
        total = 0
        for chunk, pieces in enumerate(self.pieces):
            same = next((k for k in range(self.steps) if (chunk ^ self.rank) >> k & 1), self.steps)
            total += len(pieces) * (same + (chunk != self.rank))
        return total

    def begin(self) -> None:
        self._next.clear()
        for chunk, pieces in enumerate(self.pieces):
            for piece in range(len(pieces)):
                self._pass_on(chunk, piece, 0)

    def _pass_on(self, chunk: int, piece: int, step: int) -> None:
        """The sum over 2^step neighbours is complete."""
        self._next[chunk, piece] = step
        if step == self.steps:
            self.part(chunk, piece)[:] /= np.float32(self.world)
            self._spread(chunk, piece, self.steps)
        elif (chunk ^ self.rank) >> step & 1:
            self.send(self.rank ^ 1 << step, step, chunk, piece)
        else:
            waiting = self._held.get((chunk, piece), {})
            if step in waiting:
                self._add(chunk, piece, step, waiting.pop(step))

    def _spread(self, chunk: int, piece: int, below: int) -> None:
        for step in reversed(range(below)):
            self.send(self.rank ^ 1 << step, self.steps + step, chunk, piece)

    def _add(self, chunk: int, piece: int, step: int, body: np.ndarray) -> None:
        part, lower = self.part(chunk, piece), self.rank >> step & 1
        np.add(*((body, part) if lower else (part, body)), out=part)
        self._pass_on(chunk, piece, step + 1)

    def on_piece(self, step: int, chunk: int, piece: int, body: np.ndarray) -> None:
        if step >= self.steps:
            np.copyto(self.part(chunk, piece), body)
            self._spread(chunk, piece, step - self.steps)
        elif self._next[chunk, piece] == step:
            self._add(chunk, piece, step, body)
        else:
            self._held.setdefault((chunk, piece), {})[step] = body.copy()


class Tree(Reduction):
    """A binomial tree: sums of neighbours go up to rank 0, and the mean comes back. The whole vector in each step."""

    def __init__(self, mesh: Mesh, world: int, size: int, kind: int) -> None:
        rank = mesh.rank
        self.level = (rank & -rank).bit_length() - 1 if rank else world.bit_length()
        self.children = [rank + (1 << k) for k in range(self.level) if rank + (1 << k) < world]
        self.parent = rank & (rank - 1)
        self._held: dict[int, dict[int, np.ndarray]] = {}
        self._at: dict[int, int] = {}
        super().__init__(mesh, world, size, kind)

    def chunks(self, size: int) -> Sequence[tuple[int, int]]:
        return [(0, size)]

    def expected(self) -> int:
        return len(self.pieces[0]) * (len(self.children) + (self.rank > 0))

    def begin(self) -> None:
        self._at = dict.fromkeys(range(len(self.pieces[0])), 0)
        for piece in range(len(self.pieces[0])):
            self._go_on(piece)

    def _go_on(self, piece: int) -> None:
        held = self._held.get(piece, {})
        while self._at[piece] in held:
            part = self.part(0, piece)
            np.add(part, held.pop(self._at[piece]), out=part)
            self._at[piece] += 1
        if self._at[piece] == len(self.children):
            if self.rank:
                self.send(self.parent, self.level, 0, piece)
            else:
                self.part(0, piece)[:] /= np.float32(self.world)
                self._spread(piece)

    def _spread(self, piece: int) -> None:
        for child in reversed(self.children):
            self.send(child, self.world.bit_length(), 0, piece)

    def on_piece(self, step: int, chunk: int, piece: int, body: np.ndarray) -> None:
        if step == self.world.bit_length():
            np.copyto(self.part(0, piece), body)
            self._spread(piece)
        else:
            self._held.setdefault(piece, {})[step] = body.copy()
            self._go_on(piece)


REDUCTIONS: dict[str, type[Reduction]] = {"ring": Ring, "halving": Halving, "tree": Tree}
