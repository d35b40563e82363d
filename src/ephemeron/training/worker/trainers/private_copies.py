"""Copies of a rank's private state at other ranks: what only the rank itself has, and its replacement needs. Pure.

A rank sends its private state ahead of each contribution, to a few others; only the number of the iteration where nothing has
changed. The receivers keep what has arrived for the last two iterations, since a rank may die while the others finish one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

COPIES = 3
"""Ranks that keep a rank's private state: as many may be lost together with it."""
_KEPT = 2
_EXTRA = struct.Struct("<qdBB")


class PrivateMark(NamedTuple):
    """Position to which a private state belongs, and what goes with it."""

    iteration: int
    """Iteration at whose beginning the rank has this private state."""
    body: int
    """Number of the body that holds it, the iteration of the last change."""
    after_compute: bool
    """Whether it fits to other ranks' states until they apply the next update: see `Trainer.shares_after_compute`."""
    evaluated: bool
    """Whether an evaluation before that iteration has been done."""
    spent_usd: float = 0.0
    """Cost of the rank so far."""

    def pack(self) -> bytes:
        """All but the iteration."""
        return _EXTRA.pack(self.body, self.spent_usd, self.after_compute, self.evaluated)

    @classmethod
    def of(cls, iteration: int, extra: bytes | memoryview) -> PrivateMark:
        """The inverse of `pack`."""
        body, spent_usd, after_compute, evaluated = _EXTRA.unpack_from(extra)
        return cls(iteration, body, bool(after_compute), bool(evaluated), spent_usd)


EXTRA_BYTES = _EXTRA.size


@dataclass(slots=True)
class _OfRank:
    marks: list[PrivateMark] = field(default_factory=list)
    """In the order of their arrival."""
    bodies: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class PrivateCopies:
    """What one rank keeps for others."""

    _ranks: dict[int, _OfRank] = field(default_factory=dict)

    def record(self, rank: int, mark: PrivateMark, body: memoryview) -> None:
        """Takes in what a rank has sent; an empty body: that of an earlier message."""
        of = self._ranks.setdefault(rank, _OfRank())
        if body.nbytes:
            of.bodies[mark.body] = bytes(body)
        of.marks = [*(m for m in of.marks if m.iteration != mark.iteration), mark][-_KEPT:]
        needed = {m.body for m in of.marks}
        of.bodies = {number: data for number, data in of.bodies.items() if number in needed}

    def marks(self, rank: int) -> tuple[PrivateMark, ...]:
        """Positions of which this rank can give the private state of another one."""
        of = self._ranks.get(rank, _OfRank())
        return tuple(mark for mark in of.marks if mark.body in of.bodies)

    def all(self) -> list[tuple[int, PrivateMark, bytes]]:
        """All copies: rank, mark and body."""
        return [(rank, mark, of.bodies[mark.body]) for rank, of in self._ranks.items() for mark in of.marks if mark.body in of.bodies]

    def find(self, rank: int, iteration: int) -> tuple[PrivateMark, bytes] | None:
        """The private state of a rank at the beginning of an iteration; None: it is not here."""
        mark = next((m for m in self.marks(rank) if m.iteration == iteration), None)
        return None if mark is None else (mark, self._ranks[rank].bodies[mark.body])


def holders(rank: int, ranks: int, owners: int) -> Sequence[int]:
    """Ranks that keep the private state of one: owners first, which a contribution cannot reach before it does.

    Args:
        rank: whose state it is.
        ranks: members.
        owners: ranks below it sum a part of the vectors.
    """
    others = [(rank + i) % ranks for i in range(1, ranks)]
    return sorted(others, key=lambda r: r >= owners)[:COPIES]
